"""HOST:PORT, as settings have it."""

from __future__ import annotations

from dataclasses import dataclass

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where somebody listens."""

    #: a name or an address, without brackets; empty: all addresses of this machine
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> str:
        """The host, for a client on this machine."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)


def parse_address(text: str, *, any_host: bool = False, any_port: bool = False) -> Address:
    """Of HOST:PORT; an IPv6 address may be in brackets. Raises ValueError.

    Args:
        any_host: for who listens: there may be no host.
        any_port: for who listens: 0 is a port that is free.
    """
    host, _, port = text.rpartition(":")
    # isdecimal() alone takes other scripts' digits, too.
    number = int(port) if port.isascii() and port.isdecimal() else -1
    if not (host or (any_host and text.startswith(":"))) or not (not any_port) <= number < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Address(bare(host), number)


def bare(host: str) -> str:
    """Without the brackets that an IPv6 address may have."""
    return host.removeprefix("[").removesuffix("]")

"""HOST:PORT, as settings have it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"

#: only what is in brackets has colons
_ADDRESS = re.compile(r"(\[[^][/\s]+\]|[^][:/\s]*):([0-9]{1,5})")


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

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


def parse_address(text: str, *, any_host: bool = False, any_port: bool = False) -> Address:
    """Of HOST:PORT; an IPv6 address is in brackets. Raises ValueError.

    Args:
        any_host: for who listens: there may be no host.
        any_port: for who listens: 0 is a port that is free.
    """
    found = _ADDRESS.fullmatch(text)
    host, port = ("", -1) if found is None else (found[1], int(found[2]))
    if not (host or any_host) or not (not any_port) <= port < 65536:
        hint = ", with an IPv6 address in brackets" if text.count(":") > 1 and "/" not in text else ""
        raise ValueError(f"{text!r} is not HOST:PORT{hint}")
    return Address(bare(host), port)


def bare(host: str) -> str:
    """Without the brackets that an IPv6 address may have."""
    return host.removeprefix("[").removesuffix("]")

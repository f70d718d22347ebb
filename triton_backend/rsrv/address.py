"""Addresses HOST:PORT in settings."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

LOOPBACK = "127.0.0.1"

#: HOST:PORT. A host with colons is in brackets.
_ADDRESS = re.compile(r"(\[[^][/\s]+\]|[^][:/\s]*):([0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server."""

    #: Host name or IP address, without brackets. Empty: all addresses of this machine.
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local(self) -> str:
        """The host for a client on this machine."""
        return {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)

    @property
    def is_loopback(self) -> bool:
        """True if only this machine reaches the address."""
        with suppress(ValueError):
            return ip_address(self.host).is_loopback
        return self.host == "localhost"


def parse_address(text: str, *, any_host: bool = False, any_port: bool = False) -> Address:
    """Parse HOST:PORT, with an IPv6 address in brackets. Raises ValueError.

    Args:
        text: The address.
        any_host: True to allow an empty host, for a server that listens on all addresses.
        any_port: True to allow port 0, for a server that listens on any free port.
    """
    match = _ADDRESS.fullmatch(text)
    host, port = ("", -1) if match is None else (match[1], int(match[2]))
    if not (host or any_host) or not (not any_port) <= port < 65536:
        hint = ", with an IPv6 address in brackets" if text.count(":") > 1 and "/" not in text else ""
        raise ValueError(f"{text!r} is not HOST:PORT{hint}")
    return Address(bare(host), port)


def bare(host: str) -> str:
    """Return a host without the brackets of an IPv6 address."""
    return host.removeprefix("[").removesuffix("]")

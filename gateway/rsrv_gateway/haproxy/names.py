"""The addresses behind workers' names: on its admin socket HAProxy takes no names."""

import asyncio
import ipaddress
import logging
from collections.abc import Iterable

from rsrv.address import parse_address
from rsrv_gateway.members import Resolve, addresses_of

log = logging.getLogger("rsrv.gateway")


class Names:
    """What the DNS said last. Whom it does not know just now keeps the address, and only who is new waits for it.

    Whoever is to be reached is HOST:PORT or unix:PATH.
    """

    def __init__(self, patience: float, resolve: Resolve = addresses_of) -> None:
        """`patience`: seconds that the DNS may take."""
        self._patience = patience
        self._resolve = resolve
        #: by name; None: no address was found yet
        self._found: dict[str, str | None] = {}

    async def meet(self, targets: Iterable[str]) -> None:
        """Ask for the names among these that were never asked for."""
        await self._ask({name for target in targets if (name := name_in(target)) not in self._found})

    async def look(self, targets: Iterable[str]) -> None:
        """Ask for all names among these, again."""
        await self._ask({name_in(target) for target in targets})

    def address(self, target: str) -> tuple[str, int] | None:
        """Host, as an IP address, and port; None: there is no address, or it is a Unix socket, which slots cannot be."""
        if target.startswith("unix:"):
            return None
        address = parse_address(target)
        found = self._found.get(address.host) if name_in(target) else address.host
        return None if found is None else (found, address.port)

    async def _ask(self, names: Iterable[str | None]) -> None:
        """At the same time, so that a DNS that says nothing is waited for once."""
        await asyncio.gather(*(self._ask_for(name) for name in names if name is not None))

    async def _ask_for(self, name: str) -> None:
        known = self._found.setdefault(name, None)
        try:
            async with asyncio.timeout(self._patience):
                found = list(await self._resolve(name))
        except (OSError, UnicodeError) as error:  # a timeout is an OSError, too
            log.debug("worker %s: %s", name, error or "the DNS does not answer")
            return
        if known not in found:
            self._found[name] = found[0]


def name_in(target: str) -> str | None:
    """The host, where that is a name; None: it is an address."""
    if target.startswith("unix:"):
        return None
    host = parse_address(target).host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host
    return None

"""Listens for HTTP on IPv4 and IPv6, and refuses requests whose header Host names another machine."""

import asyncio
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from aiohttp import web
from aiohttp.typedefs import Handler

from rsrv.address import Address, bare

#: Hosts that mean all addresses of this machine. For each of them, gRPC's servers listen on IPv4 and IPv6.
_ANY = ("", "0.0.0.0", "::")
#: Ends of names that no public name server resolves, from RFC 6761, RFC 6762 and RFC 8375, ICANN's .internal, and names of
#: services in Kubernetes.
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".svc")

#: A host and an optional port. An IPv6 address is in brackets.
_HOST = re.compile(r"\s*(\[[^]]*\]|[^:\s]*)(?::[0-9]*)?\s*")


async def listen(
    factory: Callable[[], asyncio.BaseProtocol],
    where: Address,
    tls: ssl.SSLContext | None = None,
    backlog: int = 128,
) -> asyncio.Server:
    """Listen for TCP connections. If the host means all addresses, listen on IPv4 and IPv6, as gRPC does. Raises OSError."""
    loop = asyncio.get_running_loop()
    if where.host not in _ANY:
        return await loop.create_server(
            factory, where.host, where.port, ssl=tls, backlog=backlog, reuse_address=True
        )
    # Make the socket here, because asyncio would listen only on IPv6 for `::`.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("::" if both else "0.0.0.0", where.port),
        family=socket.AF_INET6 if both else socket.AF_INET,
        dualstack_ipv6=both,
        backlog=backlog,
    )
    return await loop.create_server(factory, sock=listener, ssl=tls, backlog=backlog)


class KnownHosts:
    """Refuses requests whose Host is a public name that is not this machine's.

    A web page of another site can make its own name resolve to this machine (DNS rebinding). The page can then read everything
    that the browser of its visitor can reach here. Such a request has the page's name in its header Host. The page's name cannot
    be an address, a name without dots, or a name that only private networks resolve, so these hosts are admitted.
    """

    def __init__(self, listens: str, *open_paths: str) -> None:
        """`listens` is HOST:PORT of the server. Its host is admitted. `open_paths` are paths that answer any Host."""
        self._known = {host_of(listens), socket.gethostname().lower()}
        self._open_paths = open_paths
        #: The machine's full name. It is a future, because a name server may have to resolve the name.
        self._full: asyncio.Future[str] | None = None

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host = host_of(request.headers.get("Host", ""))
        known = request.path in self._open_paths or is_private(host) or host in self._known
        if not known and host != await self._full_name():
            raise web.HTTPMisdirectedRequest(
                text=f"the Host {host[:256]!r} is not a name of this machine, so a page of another site may have sent this request. Use "
                "the machine's address or host name; a proxy must send one of them as Host\n"
            )
        return await handler(request)

    async def _full_name(self) -> str:
        if self._full is None:
            self._full = asyncio.get_running_loop().run_in_executor(None, socket.getfqdn)
        return (await asyncio.shield(self._full)).lower()


def host_of(header: str) -> str:
    """Return the host in a header Host, in lower case, without port and brackets. Empty if there is none."""
    match = _HOST.fullmatch(header)
    return bare(match[1]).rstrip(".").lower() if match else header


def is_private(host: str) -> bool:
    """Return True if no public name server resolves the host: it is an address, has no dots, or is in a private zone."""
    with suppress(ValueError):
        ip_address(host)
        return True
    return "." not in host or host.endswith(_PRIVATE)

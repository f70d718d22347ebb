"""Connections to workers over HTTP."""

import asyncio
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from math import inf
from time import monotonic

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver, ResolveResult
from grpc import StatusCode
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from rsrv.address import Address, parse_address
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import PROBE_TIMEOUT_S, RENEW_MIN_S
from rsrv_gateway.http_protocol import http_refusal
from rsrv_gateway.members import addresses_of
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.upload import SMALL_BODY_BYTES, Upload

#: Headers that aiohttp would add to a client's headers.
_SKIPPED_HEADERS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
#: Headers that belong to a connection, so that they are not forwarded.
_CONNECTION_HEADERS = frozenset(
    [
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ]
)
#: Seconds until an idle connection is closed.
_IDLE_S = 60.0
#: Seconds between two checks of a worker. A check finds out whether the worker is stopping.
_STOP_CHECK_S = 1.0
#: Seconds within which such a check must be answered.
_STOP_ANSWER_S = 0.3


@dataclass(frozen=True, slots=True)
class HttpQuery:
    """A request to a worker."""

    method: str
    #: Path and query exactly as the client wrote them.
    path: str
    headers: CIMultiDict[str]
    upload: Upload | None = None
    #: True to wait for the whole answer, even a large one.
    whole: bool = True
    #: True if the operation answers every error of a model with the status 400.
    generated: bool = False


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer with a status below 400."""

    status: int
    headers: CIMultiDict[str]
    body: bytes = b""
    #: Rest of the body, or None if it was read completely.
    rest: "UnreadBody | None" = None
    size: int | None = None


def end_to_end(headers: CIMultiDictProxy[str], but: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """Return the headers that do not belong to the connection, except the names in `but` (lower case)."""
    dropped = _CONNECTION_HEADERS | but
    if "Connection" in headers:
        dropped |= {name.strip().lower() for name in headers["Connection"].split(",")}
    return CIMultiDict([pair for pair in headers.items() if pair[0].lower() not in dropped])


class _Connections:
    """Connections opened since the last renewal."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Count a request in flight. The caller must call `end` later."""
        self._users += 1
        self._idle.clear()

    def end(self) -> None:
        self._users -= 1
        if not self._users:
            self._idle.set()

    async def close_late(self) -> None:
        """Close when no request is in flight."""
        await self._idle.wait()
        await self.session.close()


class _Resolver(AbstractResolver):
    """Resolver of workers' names. Unlike aiohttp's resolver, it does not use the event loop's threads: see `addresses_of`."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = [(each, ip_address(each).version) for each in await addresses_of(host)]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET if version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address, version in addresses
        ]

    async def close(self) -> None: ...


class UnreadBody:
    """Body of an answer that was not read yet. Call `close` at the end."""

    def __init__(self, response: ClientResponse, connections: _Connections) -> None:
        self._response = response
        self._connections = connections
        connections.begin()

    async def read(self) -> bytes:
        """Return the next part, which is empty at the end. Raises ClientError, OSError."""
        return await self._response.content.readany()

    def close(self) -> None:
        self._response.close()
        self._connections.end()


class Pool:
    """Connections to one worker. There are as many connections as requests in flight. One event loop owns the pool."""

    def __init__(self, address: str, settings: GatewaySection, tls: ssl.SSLContext | None) -> None:
        self._base = f"{'http' if tls is None else 'https'}://{address}"
        self._address = parse_address(address)
        self._settings = settings
        self._tls = tls
        self._connections = self._open()
        self._retiring: dict[asyncio.Task[None], _Connections] = {}
        self._renewed_at = self._used_at = -inf
        #: Number of answers that have begun.
        self.answers = 0
        #: True if the worker closes new connections, because it is stopping.
        self._stops = False
        self._watching = asyncio.get_running_loop().create_task(self._watch_for_stop())

    async def ask(self, query: HttpQuery) -> HttpReply | Refusal:
        """Send a request. Raises TimeoutError."""
        if self._stops:
            return Refusal(StatusCode.UNAVAILABLE, "the worker is stopping")
        upload, headers, connections = query.upload, query.headers, self._connections
        self._used_at = monotonic()
        if upload is not None and upload.size is not None:
            headers = CIMultiDict(headers)
            headers["Content-Length"] = str(upload.size)
        connections.begin()
        try:
            response = await connections.session.request(
                query.method,
                URL(self._base + query.path, encoded=True),
                headers=headers,
                data=None if upload is None else upload.data(),
                allow_redirects=False,
            )
            self.answers += 1
            return await self._read(response, query, connections)
        except ConnectionTimeoutError:
            return Refusal(StatusCode.UNAVAILABLE, "the worker cannot be reached in time")
        except ClientConnectorError:
            return Refusal(StatusCode.UNAVAILABLE, "the worker cannot be reached")
        except TimeoutError:
            raise
        except (ClientError, OSError):
            if upload is not None and upload.failed is not None:
                return upload.failed.refusal
            return Refusal(StatusCode.UNAVAILABLE, "the connection to the worker broke", lost=True)
        finally:
            connections.end()

    def unanswered(self, answers: int, now: float) -> bool:
        """Report a request that timed out. Return True if the connections are replaced now.

        `answers` is the count when the request began, and `now` is in seconds of a monotonic clock. If no answer has arrived since
        then, all connections may be half open. The next requests then use new connections, and requests in flight continue.
        """
        if self.answers != answers or now - self._renewed_at < RENEW_MIN_S:
            return False
        self._renewed_at = now
        self._renew()
        return True

    def retire(self) -> None:
        """Accept no new requests. Requests in flight continue, because the worker may be absent for only one probe."""
        self._watching.cancel()
        self._close_late()

    def _renew(self) -> None:
        """Use new connections for new requests."""
        self._close_late()
        self._connections = self._open()

    def _close_late(self) -> None:
        """Close the connections when their requests in flight have ended."""
        task = asyncio.get_running_loop().create_task(self._connections.close_late())
        self._retiring[task] = self._connections
        task.add_done_callback(self._retiring.pop)

    @property
    def closed(self) -> bool:
        return not self._retiring and self._connections.session.closed

    async def close(self) -> None:
        """Abort all requests."""
        self._watching.cancel()
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        for connections in (self._connections, *retiring.values()):
            await connections.session.close()

    async def _watch_for_stop(self) -> None:
        """Close the idle connections while the worker stops.

        A stopping tritonserver waits up to --exit-timeout-secs for its HTTP connections, even for idle ones. During this time, it
        still reports that it is ready, but closes new connections at once.
        """
        while True:
            await asyncio.sleep(_STOP_CHECK_S)
            if not self._stops and monotonic() - self._used_at > _IDLE_S + _STOP_CHECK_S:
                continue  # All connections are idle for so long that they are closed.
            stops = await _closes_new_connections(self._address)
            if stops and not self._stops:
                self._renew()
            self._stops = stops

    def _open(self) -> _Connections:
        session = ClientSession(
            connector=TCPConnector(
                limit=0, ssl=self._tls or True, keepalive_timeout=_IDLE_S, resolver=_Resolver()
            ),
            # The caller limits the time of the whole request. A worker that is slow to accept a connection counts as dead.
            timeout=ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_SKIPPED_HEADERS,
            trust_env=False,
        )
        return _Connections(session)

    async def _read(
        self, response: ClientResponse, query: HttpQuery, connections: _Connections
    ) -> HttpReply | Refusal:
        """Read an answer. A small answer is read completely, so that a failover is possible if the connection breaks.

        Raises ClientError, TimeoutError.
        """
        status, headers, size = response.status, end_to_end(response.headers), response.content_length
        if status >= 400:
            body = await response.read()
            # Close the connection, because the rest of a refused body must not be sent.
            response.close()
            return http_refusal(status, headers, body, query.generated)
        most = self._settings.max_message_bytes
        if size is not None and size > most:
            response.close()
            message = f"the worker's answer has {size} bytes, but gateway.max_message_bytes is {most}"
            return Refusal(StatusCode.INTERNAL, message)
        if query.whole or (size is not None and size <= SMALL_BODY_BYTES):
            return HttpReply(status, headers, await response.read())
        return HttpReply(status, headers, rest=UnreadBody(response, connections), size=size)


async def _closes_new_connections(address: Address) -> bool:
    """Return True if the server accepts a connection and closes it at once."""
    try:
        async with asyncio.timeout(_STOP_ANSWER_S):
            reader, writer = await asyncio.open_connection(await _ip_of(address.host), address.port)
    except (TimeoutError, OSError, UnicodeError):
        return False  # The probes notice that nothing listens.
    try:
        async with asyncio.timeout(_STOP_ANSWER_S):
            return await reader.read(1) == b""
    except ConnectionError:
        return True
    except OSError:  # There was no answer in time, or an error of the network.
        return False
    finally:
        writer.close()


async def _ip_of(host: str) -> str:
    """Return an address of a host. Raises OSError, UnicodeError."""
    with suppress(ValueError):
        return str(ip_address(host))
    return next(iter(await addresses_of(host)))

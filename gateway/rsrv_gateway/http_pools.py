"""Connections to workers over HTTP."""

import asyncio
import ssl
from dataclasses import dataclass

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
from grpc import StatusCode
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.http_protocol import http_refusal
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.upload import SMALL, Upload

#: what aiohttp would add to a client's headers
_NOT_OURS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
#: of one connection, not of what is asked and answered on it
_HOP = frozenset(
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
#: seconds for which a connection that nobody uses is kept
_IDLE_S = 60.0
#: seconds for which connections that were suspected once are believed in
_RENEWAL_S = 5.0


@dataclass(frozen=True, slots=True)
class HttpQuery:
    """What is asked of a worker."""

    method: str
    #: as the client wrote it, with its query
    path: str
    headers: CIMultiDict[str]
    upload: Upload | None = None
    #: whether the whole answer is waited for, also a large one
    whole: bool = True
    #: whether all errors of a model have status 400
    generated: bool = False


@dataclass(frozen=True, slots=True)
class HttpReply:
    """An answer with a status below 400."""

    status: int
    headers: CIMultiDict[str]
    body: bytes = b""
    #: where the body is still to be read from, and its size if that is known
    rest: "UnreadBody | None" = None
    size: int | None = None


def end_to_end(headers: CIMultiDictProxy[str], but: frozenset[str] = frozenset()) -> CIMultiDict[str]:
    """The headers that are not of the connection, without those in `but` (lower case)."""
    dropped = _HOP | but
    if "Connection" in headers:
        dropped |= {name.strip().lower() for name in headers["Connection"].split(",")}
    return CIMultiDict([pair for pair in headers.items() if pair[0].lower() not in dropped])


class _Connections:
    """Those that were opened since the last ones were suspected."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Something is asked on one of them; `end` is to follow."""
        self._users += 1
        self._idle.clear()

    def end(self) -> None:
        self._users -= 1
        if not self._users:
            self._idle.set()

    async def close_late(self) -> None:
        """When nothing is under way."""
        await self._idle.wait()
        await self.session.close()


class UnreadBody:
    """An answer's body that is still to be read; `close` it."""

    def __init__(self, response: ClientResponse, connections: _Connections) -> None:
        self._response = response
        self._connections = connections
        connections.begin()

    async def read(self) -> bytes:
        """What is there next; empty: that was all. Raises ClientError, OSError."""
        return await self._response.content.readany()

    def close(self) -> None:
        self._response.close()
        self._connections.end()


class Pool:
    """The connections to one worker: as many as there are requests under way. One event loop owns it."""

    def __init__(self, address: str, settings: GatewaySection, tls: ssl.SSLContext | None) -> None:
        self._base = f"{'http' if tls is None else 'https'}://{address}"
        self._settings = settings
        self._tls = tls
        self._connections = self._open()
        self._retiring: dict[asyncio.Task[None], _Connections] = {}
        self._renewed_at: float | None = None
        #: answers that have begun
        self.answers = 0

    async def ask(self, query: HttpQuery) -> HttpReply | Refusal:
        """Raises TimeoutError."""
        upload, headers, connections = query.upload, query.headers, self._connections
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
            return Refusal(StatusCode.UNAVAILABLE, "it cannot be reached in time")
        except ClientConnectorError:
            return Refusal(StatusCode.UNAVAILABLE, "it cannot be reached")
        except TimeoutError:
            raise
        except (ClientError, OSError):
            if upload is not None and upload.failed is not None:
                return upload.failed.refusal
            return Refusal(StatusCode.UNAVAILABLE, "the connection broke", lost=True)
        finally:
            connections.end()

    def unanswered(self, answers: int, now: float) -> bool:
        """A request has waited in vain; `answers` were there when it began, `now` is seconds of any one clock.

        If none came meanwhile, all connections may be half open: what is asked next goes on new ones, what is under way
        goes on. Whether that is done now.
        """
        if self.answers != answers or (self._renewed_at is not None and now - self._renewed_at < _RENEWAL_S):
            return False
        self._renewed_at = now
        self.retire()
        self._connections = self._open()
        return True

    def retire(self) -> None:
        """Nothing more is asked. What is under way goes on: a worker may be away for one probe only."""
        task = asyncio.get_running_loop().create_task(self._connections.close_late())
        self._retiring[task] = self._connections
        task.add_done_callback(self._retiring.pop)

    @property
    def closed(self) -> bool:
        return not self._retiring and self._connections.session.closed

    async def close(self) -> None:
        """Breaks off what is under way."""
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        for connections in (self._connections, *retiring.values()):
            await connections.session.close()

    def _open(self) -> _Connections:
        session = ClientSession(
            connector=TCPConnector(limit=0, ssl=self._tls or True, keepalive_timeout=_IDLE_S),
            # How long all may take is the caller's to say; a worker that takes longer to accept counts as dead.
            timeout=ClientTimeout(total=None, sock_connect=self._settings.probe_timeout_s),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NOT_OURS,
            trust_env=False,
        )
        return _Connections(session)

    async def _read(
        self, response: ClientResponse, query: HttpQuery, connections: _Connections
    ) -> HttpReply | Refusal:
        """Small answers are read whole, so that another worker can be asked when they break off. Raises ClientError,
        TimeoutError."""
        status, headers, size = response.status, end_to_end(response.headers), response.content_length
        if status >= 400:
            body = await response.read()
            # Of what was not asked for, no more is sent.
            response.close()
            return http_refusal(status, headers, body, query.generated)
        most = self._settings.max_message_bytes
        if size is not None and size > most:
            response.close()
            message = f"its answer has {size} bytes, and gateway.max_message_bytes is {most}"
            return Refusal(StatusCode.INTERNAL, message)
        if query.whole or (size is not None and size <= SMALL):
            return HttpReply(status, headers, await response.read())
        return HttpReply(status, headers, rest=UnreadBody(response, connections), size=size)

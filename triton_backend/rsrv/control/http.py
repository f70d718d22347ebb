"""The HTTP server of the control process: /metrics for Prometheus, and the live page."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from rsrv.address import parse_address
from rsrv.listening import KnownHosts, listen
from rsrv.live.routes import LivePage

log = logging.getLogger(__name__)

#: Maximum number of connections. Normal use needs only a few. If no idle connection can be closed, a new one is closed at once.
_MAX_CONNECTIONS = 128
#: A connection without a whole request for this many seconds may be closed, so that a new one is accepted.
_IDLE_S = 10.0
#: Content type of Prometheus' text format.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """The HTTP server. `metrics` returns the text of /metrics."""

    def __init__(self, metrics: Callable[[], Awaitable[str]], page: LivePage) -> None:
        self._metrics = metrics
        app = web.Application(middlewares=[self._answer])
        app.add_routes([web.get("/metrics", self._serve_metrics), *page.routes()])
        self._app = app
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=15)
        self._server: asyncio.Server | None = None
        #: For each idle connection, the time when its last answer ended.
        self._idle: dict[RequestHandler, float] = {}

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT, and return the port. Raises OSError, or ValueError if the text is not an address."""
        where = parse_address(address, any_port=True)
        self._app.middlewares.append(KnownHosts(address).middleware)
        await self._runner.setup()
        self._server = await listen(self._accept, where)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float = 0.0) -> None:
        """Stop listening. Connections end with the process."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server, now = self._runner.server, asyncio.get_running_loop().time()
        assert server is not None
        connections = {*server.connections}
        # Forget closed connections. Keep connections of the last second, because aiohttp's list may not contain them yet.
        self._idle = {
            connection: since
            for connection, since in self._idle.items()
            if connection in connections or now - since < 1
        }
        if len(connections) >= _MAX_CONNECTIONS and not self._close_idle(now - _IDLE_S):
            return _Full()
        protocol = server()
        self._idle[protocol] = now
        return protocol

    def _close_idle(self, since: float) -> int:
        """Close the connections that have been idle since this time or longer. Return their number."""
        idle = [protocol for protocol, began in self._idle.items() if began <= since]
        for protocol in idle:
            del self._idle[protocol]
            protocol.force_close()
        return len(idle)

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        protocol = request.protocol
        self._idle.pop(protocol, None)
        try:
            return await handler(request)
        finally:
            self._idle[protocol] = asyncio.get_running_loop().time()

    async def _serve_metrics(self, _: web.Request) -> web.Response:
        text = await self._metrics()
        return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})


class _Full(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()

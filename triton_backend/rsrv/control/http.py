"""HTTP for whoever watches this server: /metrics for Prometheus, and the live page."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from rsrv.address import parse_address
from rsrv.live.routes import LivePage

log = logging.getLogger("rsrv.control")

#: connections at a time: more than a few are a mistake, and one more is closed on
_CONNECTIONS = 128
#: seconds without a whole request after which one gives way to another
_PATIENCE = 10.0
#: of Prometheus' text format
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class HttpServer:
    """`metrics` makes the text of /metrics."""

    def __init__(self, metrics: Callable[[], Awaitable[str]], page: LivePage) -> None:
        self._metrics = metrics
        app = web.Application(middlewares=[self._answer])
        app.add_routes([web.get("/metrics", self._serve_metrics), *page.routes()])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, keepalive_timeout=15)
        self._server: asyncio.Server | None = None
        #: connections on which nothing is being answered, and since when
        self._idle: dict[RequestHandler, float] = {}

    async def start(self, address: str) -> int:
        """Listen on HOST:PORT; the port. Raises OSError, and ValueError: that is no address."""
        where = parse_address(address, any_port=True)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, where.host, where.port, reuse_address=True)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float = 0.0) -> None:
        """Connections end with the process."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server, now = self._runner.server, asyncio.get_running_loop().time()
        assert server is not None
        there = {*server.connections}
        # A new one is not yet among those.
        self._idle = {one: since for one, since in self._idle.items() if one in there or now - since < 1}
        if len(there) >= _CONNECTIONS and not self._close_idle(now - _PATIENCE):
            return _Full()
        protocol = server()
        self._idle[protocol] = now
        return protocol

    def _close_idle(self, since: float) -> int:
        """Those that have been so since then; how many."""
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

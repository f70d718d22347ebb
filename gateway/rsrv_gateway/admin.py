"""HTTP for whoever watches: /metrics of the gateway and all workers in one, /healthz and /readyz."""

import asyncio
import logging
from collections.abc import Mapping

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from rsrv.control.grpc_server import ListenError
from rsrv_gateway import merging, metrics
from rsrv_gateway.brain import Gateway

log = logging.getLogger("rsrv.gateway")

#: seconds that a worker may take for its metrics: Prometheus itself waits ten by default
_PATIENCE = 2.0
#: workers that are asked at a time
_AT_ONCE = 64
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Admin:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        self._session: ClientSession | None = None
        self._leavers = metrics.Leavers()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        #: that it listens on
        self.port = 0

    async def start(self, address: str) -> None:
        """Raises ListenError."""
        host, _, port = address.rpartition(":")
        await self._runner.setup()
        self._session = ClientSession(timeout=ClientTimeout(total=_PATIENCE), trust_env=False)
        try:
            site = web.TCPSite(
                self._runner, host.removeprefix("[").removesuffix("]") or None, int(port), reuse_address=True
            )
            await site.start()
        except (OSError, ValueError, OverflowError) as error:
            await self.stop()
            raise ListenError(f"gateway.admin: cannot listen on {address}: {error}") from None
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        if self._gateway.ready:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=f"{self._gateway.unready}\n")

    async def _metrics(self, _: web.Request) -> web.Response:
        gateway = self._gateway
        texts = await self._scrape()
        views = gateway.probes.views()
        own = metrics.expose(
            self._leavers.without(gateway.plane.counts(), views, gateway.clock()),
            views,
            gateway.status,
            {name: text is not None for name, text in texts.items()},
        )
        found = [(name, text) for name, text in texts.items() if text is not None]
        # Of hundreds of workers that takes longer than requests should wait.
        merged = await asyncio.to_thread(merging.merge, own, found)
        return web.Response(body=merged.encode(), headers={"Content-Type": _TYPE})

    async def _scrape(self) -> Mapping[str, str | None]:
        """What each worker that has metrics and answers probes says; None: nothing in time."""
        gateway = self._gateway
        views = gateway.probes.views()
        where = {name: one.metrics for name, one in gateway.probes.workers().items() if one.metrics}
        alive = {name: address for name, address in where.items() if views[name].alive}
        texts = await asyncio.gather(*map(self._text, alive.values()))
        return {**dict.fromkeys(where), **dict(zip(alive, texts, strict=True))}

    async def _text(self, address: str) -> str | None:
        assert self._session is not None
        try:
            async with self._slots, self._session.get(f"http://{address}/metrics") as response:
                # What is between may have a page of its own for a worker that is not there.
                wrong = response.status != 200 or response.content_type == "text/html"
                return None if wrong else await response.text()
        except (ClientError, TimeoutError, OSError, UnicodeError):
            return None

"""HTTP for operators: /metrics of the gateway and all workers, the live page, /healthz and /readyz."""

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

from rsrv.control.http import METRICS_TYPE
from rsrv.listening import KnownHosts
from rsrv.live.routes import LivePage, PageToken
from rsrv.placement.contract import Worker
from rsrv.renewal import Renewed
from rsrv_gateway import metrics
from rsrv_gateway.brain import GatewayLoop
from rsrv_gateway.connections import listen
from rsrv_gateway.live import Workers
from rsrv_gateway.probes import METRICS_TIMEOUT_S

log = logging.getLogger(__name__)

#: Maximum number of workers that are scraped at a time.
_SCRAPES_MAX = 64


class Admin:
    def __init__(
        self, gateway: GatewayLoop, token: PageToken | None = None, renewals: Iterable[Renewed[Any]] = ()
    ) -> None:
        """`token` authorises changes from the live page. If it is None, the page is read-only. The metrics show `renewals`."""
        self._renewals = renewals
        self._gateway = gateway
        self._app = app = web.Application()
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                *LivePage(Workers(gateway.probes), token).routes(),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        self._listener: asyncio.Server | None = None
        self._session: ClientSession | None = None
        self._departed = metrics.DepartedWorkers()
        self._slots = asyncio.Semaphore(_SCRAPES_MAX)
        #: Port that the server listens on.
        self.port = 0

    async def start(self, address: str) -> None:
        """Listen on `address`. Raises ListenError."""
        known = KnownHosts(address, "/healthz", "/readyz")
        self._app.middlewares.append(known.middleware)
        await self._runner.setup()
        assert self._runner.server is not None
        self._listener, self.port = await listen(self._runner.server, address, "gateway.admin", None)
        self._session = ClientSession(timeout=ClientTimeout(total=METRICS_TIMEOUT_S), trust_env=False)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
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
        views = gateway.probes.summaries()
        own = metrics.expose(
            self._departed.without(gateway.proxy.counts(), views, gateway.clock()),
            views,
            await gateway.status(),
            {name: None not in pages for name, pages in texts.items()},
            [renewed.state for renewed in self._renewals],
        )
        pages_by_worker = [
            (name, text) for name, pages in texts.items() for text in pages if text is not None
        ]
        # Merge on another thread. With hundreds of workers, merging would delay requests for too long.
        merged = await asyncio.to_thread(metrics.merge, own, pages_by_worker)
        return web.Response(body=merged.encode(), headers={"Content-Type": METRICS_TYPE})

    async def _scrape(self) -> Mapping[str, Sequence[str | None]]:
        """Return the metrics pages of each worker, from Triton and from rsrv. A page is None if it did not arrive in time."""
        probes = self._gateway.probes
        views, workers = probes.summaries(), probes.workers().values()
        scraped = {worker.name: worker for worker in workers if worker.metrics or worker.control}
        pages = (self._pages(worker, alive=views[name].alive) for name, worker in scraped.items())
        return dict(zip(scraped, await asyncio.gather(*pages), strict=True))

    async def _pages(self, worker: Worker, *, alive: bool) -> Sequence[str | None]:
        if not alive:
            return (None,)
        async with self._slots:
            tritons, ours = await asyncio.gather(
                self._text(worker.metrics), self._gateway.probes.metrics(worker.name)
            )
        return [*([tritons] if worker.metrics else ()), *([ours] if worker.control else ())]

    async def _text(self, address: str | None) -> str | None:
        if self._session is None or address is None:
            return None
        try:
            async with self._session.get(f"http://{address}/metrics") as response:
                # If the worker is absent, a proxy in front of it may answer with an HTML page.
                wrong = response.status != 200 or response.content_type == "text/html"
                return None if wrong else await response.text()
        except (ClientError, TimeoutError, OSError, UnicodeError):
            return None

"""The proxy's HTTP front in front of workers that a test controls. All run on the test's own event loop."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from aiohttp import ClientResponse, ClientSession, web
from multidict import CIMultiDict

from rsrv.placement.contract import Routes, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.brain import Proxy
from tests.unit.gateway.proxies import FakeBrain

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

INFER = "/v2/models/m/infer"


@dataclass
class Got:
    """A request as a worker received it."""

    method: str
    path: str
    headers: CIMultiDict[str]
    body: bytes


class FakeHttpWorker:
    """Calls the handler of a request's path in `does`, or the default handler, which records the request."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Handlers by path. The key "" has the default handler.
        self.does: dict[str, Handler] = {"": self.echo}
        self.got: list[Got] = []
        #: Client ports of the requests.
        self.peers: set[Any] = set()
        #: Set when a request arrives.
        self.called = asyncio.Event()
        self.port = 0
        self._runner: web.ServerRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        server = web.Server(self._handle, auto_decompress=False, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def kill(self) -> None:
        """Break all requests in progress, and close the port."""
        assert self._runner is not None
        await self._runner.cleanup()

    @property
    def worker(self) -> Worker:
        return Worker(self.name, "127.0.0.1:1", f"127.0.0.1:{self.port}")

    async def _handle(self, request: Any) -> web.StreamResponse:
        self.called.set()
        self.peers.add(request.transport.get_extra_info("peername"))
        handler = self.does.get(request.raw_path, self.does[""])
        return await handler(request)

    async def read(self, request: Any) -> bytes:
        """Read and record the request's body."""
        body: bytes = await request.content.read()
        self.got.append(Got(request.method, request.raw_path, CIMultiDict(request.headers), body))
        return body

    async def echo(self, request: Any) -> web.StreamResponse:
        """Answer with the request's body and content type, and with the worker's name in a header."""
        body = await self.read(request)
        headers = {"X-Worker": self.name, "Content-Type": request.headers.get("Content-Type", "text/plain")}
        return web.Response(body=body, headers=headers)

    def says(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> Handler:
        """Return a handler that answers with `body`, which is bytes or an object for JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()

        async def say(request: Any) -> web.StreamResponse:
            await self.read(request)
            return web.Response(
                status=status, body=data, headers=headers or {"Content-Type": "application/json"}
            )

        return say

    def holds(self) -> asyncio.Event:
        """Let the worker never answer from now on. The returned event is set when a request is cancelled."""
        cancelled = asyncio.Event()

        async def hold(request: Any) -> web.StreamResponse:
            try:
                await self.read(request)
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError("it was to wait forever")

        self.does[""] = hold
        return cancelled


@dataclass
class Answer:
    status: int
    headers: CIMultiDict[str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int, str]:
        return self.status, self.json["error"]


@dataclass
class House:
    """A proxy, its workers `a`, `b` and so on, and a client."""

    proxy: Proxy
    brain: FakeBrain
    workers: list[FakeHttpWorker]
    client: ClientSession
    scheme: str = "http"
    #: TLS settings of the client's requests, or None.
    tls: ssl.SSLContext | None = field(default=None)

    async def apply(self, table: Mapping[str, Routes], workers: list[FakeHttpWorker] | None = None) -> None:
        known = self.workers if workers is None else workers
        await self.proxy.apply({worker.name: worker.worker for worker in known}, table)

    def url(self, path: str) -> str:
        return f"{self.scheme}://127.0.0.1:{self.proxy.http.port}{path}"

    def open(self, method: str, path: str, **options: Any) -> Any:
        """Return a response as a context manager."""
        if self.tls is not None:
            options["ssl"] = self.tls
        return self.client.request(method, self.url(path), **options)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        response: ClientResponse
        async with self.open(method, path, **options) as response:
            return Answer(response.status, CIMultiDict(response.headers), await response.read())

    async def infer(self, body: Any = b"{}", path: str = INFER, **options: Any) -> Answer:
        """Send a request with `body`, which is bytes or an object for JSON."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        return await self.ask("POST", path, data=data, **options)


@asynccontextmanager
async def serving(
    count: int = 2,
    table: Mapping[str, Routes] | None = None,
    worker_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> AsyncIterator[House]:
    """Serve model `m` by all workers in turn, unless a table is given.

    No time limit depends on the machine's speed.
    """
    defaults = {"grpc": None, "http": "127.0.0.1:0", "mode": "round_robin"}
    section = GatewaySection(**{**defaults, **settings})
    brain = FakeBrain()
    workers = [FakeHttpWorker("abcdefgh"[number]) for number in range(count)]
    async with AsyncExitStack() as ends:
        ends.enter_context(patch("rsrv_gateway.http_pools.PROBE_TIMEOUT_S", 30.0))
        for worker in workers:
            await worker.start(worker_tls)
            ends.push_async_callback(worker.kill)
        proxy = Proxy(section, brain)
        ends.push_async_callback(proxy.stop)
        await proxy.start()
        client = await ends.enter_async_context(ClientSession(auto_decompress=False))
        scheme = "http" if section.tls_key is None else "https"
        house = House(proxy, brain, workers, client, scheme, client_tls)
        every = Routes(ready=tuple(worker.name for worker in workers))
        await house.apply({"m": every} if table is None else table)
        yield house

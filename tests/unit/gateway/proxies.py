"""A proxy in front of workers that a test controls. All run on the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from rsrv.placement.contract import Routes, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.brain import Proxy
from rsrv_gateway.outcomes import Refusal

SERVICE = "/inference.GRPCInferenceService/"
Handler = Callable[[Any, Any], Awaitable[Any]]
_OPTIONS = (("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1))
Infer: Any = service_pb2.ModelInferRequest


class FakeWorker:
    """Handles each call by the function in `does` for its method, and records the call.

    A handler gets the request and the context. The handler of ModelStreamInfer gets an asynchronous iterator of
    requests.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.does: dict[str, Handler] = {
            "ModelInfer": self.echo,
            "ModelStreamInfer": self.echo_stream,
            "ModelConfig": self.config,
        }
        #: Models that may answer a request more than once, or never.
        self.decoupled: set[str] = set()
        #: Requests, by method.
        self.got: dict[str, list[Any]] = {}
        #: Metadata of the calls, by method.
        self.metadata: dict[str, list[dict[str, Any]]] = {}
        self.port = 0
        #: Credentials for TLS.
        self.credentials: Any = None
        #: Client connections of the calls.
        self.peers: set[str] = set()
        #: Set when a call arrives.
        self.called = asyncio.Event()
        self._server: Any = None

    async def start(self) -> None:
        self._server = grpc.aio.server(handlers=[_Any(self)], options=_OPTIONS)
        address = f"127.0.0.1:{self.port}"
        if self.credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self.credentials)
        await self._server.start()

    async def kill(self) -> None:
        """Break all calls in progress, and close the port."""
        await self._server.stop(None)

    @property
    def worker(self) -> Worker:
        return Worker(self.name, f"127.0.0.1:{self.port}")

    async def echo(self, request: Any, context: Any) -> Any:
        """Answer with the worker's name as the version, and the request's id."""
        return service_pb2.ModelInferResponse(
            model_name=request.model_name, model_version=self.name, id=request.id
        )

    async def echo_stream(self, requests: Any, context: Any) -> None:
        async for request in requests:
            answer = service_pb2.ModelStreamInferResponse(infer_response=await self.echo(request, context))
            await context.write(answer)

    async def config(self, request: Any, context: Any) -> Any:
        response = service_pb2.ModelConfigResponse()
        response.config.model_transaction_policy.decoupled = request.name in self.decoupled
        return response

    def note(self, method: str, request: Any) -> None:
        self.got.setdefault(method, []).append(request)
        self.called.set()


class _Any(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A gRPC handler for all methods of a worker."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker

    def service(self, details: Any) -> Any:
        worker, method = self._worker, details.method.rpartition("/")[2]
        if method not in worker.does:
            return None
        request, response = types(method)

        def arrived(context: Any) -> None:
            worker.peers.add(context.peer())
            worker.metadata.setdefault(method, []).append(dict(context.invocation_metadata()))

        async def unary(request: Any, context: Any) -> Any:
            arrived(context)
            worker.note(method, request)
            return await worker.does[method](request, context)

        async def stream(requests: Any, context: Any) -> None:
            async def noted() -> AsyncIterator[Any]:
                async for request in requests:
                    worker.note(method, request)
                    yield request

            arrived(context)
            await worker.does[method](noted(), context)

        if method == "ModelStreamInfer":
            return grpc.stream_stream_rpc_method_handler(
                stream, request.FromString, response.SerializeToString
            )
        return grpc.unary_unary_rpc_method_handler(unary, request.FromString, response.SerializeToString)


class FakeBrain:
    def __init__(self) -> None:
        self.failures: list[str] = []
        self.refreshes = 0
        #: Workers that have died.
        self.dead: set[str] = set()
        #: Outputs with strings, by worker.
        self.strings: dict[str, frozenset[str] | Refusal] = {}
        #: Workers that were asked for their outputs with strings.
        self.asked: list[str] = []
        #: Called with each refresh.
        self.on_refresh: Callable[[], Awaitable[None]] | None = None

    def failed(self, worker: str) -> None:
        self.failures.append(worker)

    async def refresh(self, sure: bool = False) -> None:
        self.refreshes += 1
        if self.on_refresh is not None:
            await self.on_refresh()

    async def has_died(self, worker: str, model: str) -> bool:
        return worker in self.dead

    async def string_outputs(self, worker: str, model: str, version: str) -> frozenset[str] | Refusal:
        self.asked.append(worker)
        return self.strings.get(worker, frozenset())


class House:
    """A proxy, its workers `a`, `b` and so on, and a client."""

    def __init__(self, proxy: Proxy, brain: FakeBrain, workers: list[FakeWorker], client: Any) -> None:
        self.proxy = proxy
        self.brain = brain
        self.workers = workers
        self.client = client

    async def apply(self, table: Mapping[str, Routes], workers: list[FakeWorker] | None = None) -> None:
        known = self.workers if workers is None else workers
        await self.proxy.apply({worker.name: worker.worker for worker in known}, table)

    def call(self, method: str, request: Any = None, **options: Any) -> Any:
        """Start a call. Awaiting it returns the answer or raises AioRpcError."""
        request_class, answer_class = types(method)
        callee = self.client.unary_unary(
            SERVICE + method, request_class.SerializeToString, answer_class.FromString
        )
        return callee(request_class() if request is None else request, **options)

    def infer(self, model: str = "m", **fields: Any) -> Any:
        return self.call("ModelInfer", Infer(model_name=model, **fields))

    def stream(self, **options: Any) -> Any:
        request_class, answer_class = types("ModelStreamInfer")
        return self.client.stream_stream(
            SERVICE + "ModelStreamInfer", request_class.SerializeToString, answer_class.FromString
        )(**options)


def types(method: str) -> tuple[Any, Any]:
    """Return the types of a method's request and response."""
    if method == "ModelStreamInfer":
        return service_pb2.ModelInferRequest, service_pb2.ModelStreamInferResponse
    return getattr(service_pb2, method + "Request"), getattr(service_pb2, method + "Response")


@asynccontextmanager
async def serving(
    count: int = 2, table: Mapping[str, Routes] | None = None, **settings: Any
) -> AsyncIterator[House]:
    """Serve model `m` by all workers in turn, unless a table is given."""
    section = GatewaySection(**{"grpc": "127.0.0.1:0", "http": None, "mode": "round_robin", **settings})
    brain = FakeBrain()
    workers = [FakeWorker("abcdefgh"[number]) for number in range(count)]
    async with AsyncExitStack() as ends:
        for worker in workers:
            await worker.start()
            ends.push_async_callback(worker.kill)
        proxy = Proxy(section, brain)
        await proxy.start()
        ends.push_async_callback(proxy.stop)
        client = await ends.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc.port}"))
        house = House(proxy, brain, workers, client)
        every = Routes(ready=tuple(worker.name for worker in workers))
        await house.apply({"m": every} if table is None else table)
        yield house


def refusing(code: grpc.StatusCode, message: str, trailing: tuple[tuple[str, str], ...] = ()) -> Handler:
    async def refuse(request: Any, context: Any) -> None:
        if hasattr(request, "__anext__"):
            # If a stream ended while the client writes its first message, gRPC would report its own error.
            await anext(request)
        await context.abort(code, message, trailing)

    return refuse


async def refusal(call: Awaitable[Any]) -> tuple[str, str]:
    """Return the code and the message with which a call is refused."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    raise AssertionError(f"answered with {answer}")

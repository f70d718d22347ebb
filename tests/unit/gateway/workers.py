"""Fake tritonservers and control services on the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A fake tritonserver. `index` has the state of each model by name."""

    def __init__(self) -> None:
        self.index: dict[str, str] = {"m": "READY"}
        self.index_hangs = False
        #: KEY and VALUE of --grpc-restricted-protocol that its index requires.
        self.restricted: tuple[str, str] | None = None
        #: False while the server starts or ends.
        self.ready = True
        #: Number of requests.
        self.requests = 0
        #: Event for which requests wait.
        self.gate = asyncio.Event()
        self.gate.set()

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerReadyResponse(ready=self.ready)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        self.requests += 1
        await self.gate.wait()
        return service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        if self.index_hangs:
            await asyncio.Event().wait()
        if not self.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Server not ready")
        if self.restricted is not None:
            header, value = f"triton-grpc-protocol-{self.restricted[0]}", self.restricted[1]
            if dict(context.invocation_metadata()).get(header) != value:
                reason = f"This protocol is restricted, expecting header '{header}'"
                await context.abort(grpc.StatusCode.UNAVAILABLE, reason)
        response = service_pb2.RepositoryIndexResponse()
        for name, state in self.index.items():
            if state == "READY" or not request.ready:
                response.models.add(name=name, version="1", state=state)
        return response


class FakeControl(control_pb2_grpc.ControlServicer):
    """A fake control service that returns `load`. If `load` is None, no runtime answers. `steps` records the requested steps."""

    def __init__(self) -> None:
        self.load: pb.GetLoadResponse | None = pb.GetLoadResponse(devices=[pb.DeviceLoad(instance="1")])
        self.steps: list[tuple[str, str]] = []
        #: Devices by model, as the last SetPlacement set them.
        self.placed: dict[str, list[int]] = {}
        #: Devices of the last prefetch.
        self.devices: list[int] = []
        #: Metrics for Prometheus, or None for an older version without metrics.
        self.metrics: str | None = None
        self.token: str | None = None
        #: Positions in the last GetLoad request: device, instance and `next`.
        self.positions: list[tuple[int, str, int]] = []

    async def GetLoad(self, request: pb.GetLoadRequest, context: Any) -> pb.GetLoadResponse:
        self.token = dict(context.invocation_metadata()).get("authorization")
        self.positions = [
            (position.device, position.instance, position.next) for position in request.positions
        ]
        if self.load is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the runtime does not answer")
        assert self.load is not None
        return self.load

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Any) -> pb.GetMetricsResponse:
        if self.metrics is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what is that?")
        return pb.GetMetricsResponse(text=self.metrics)

    async def Prefetch(self, request: pb.PrefetchRequest, context: Any) -> pb.PrefetchResponse:
        self.steps.append(("prefetch", request.model))
        self.devices = list(request.devices)
        return pb.PrefetchResponse()

    async def SetPlacement(self, request: pb.SetPlacementRequest, context: Any) -> pb.SetPlacementResponse:
        self.placed = {model.model: list(model.devices) for model in request.models}
        return pb.SetPlacementResponse(generation=1)

    async def Evict(self, request: pb.EvictRequest, context: Any) -> pb.EvictResponse:
        if request.target.model == "unknown":
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no model 'unknown'")
        self.steps.append(("evict", request.target.model))
        return pb.EvictResponse()


@asynccontextmanager
async def serving(
    triton: FakeServer, control: FakeControl | None = None, port: int = 0
) -> AsyncIterator[int]:
    """Serve tritonserver and control service on one port, and yield this port."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    if control is not None:
        control_pb2_grpc.add_ControlServicer_to_server(control, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(0)


class Relay:
    """Forwards bytes to a port. After `stick`, the current connections carry no bytes. `cut` breaks the connections.

    While `stops` is set, new connections are closed at once, and existing ones work, as at a tritonserver that is stopping.
    """

    def __init__(self, to: int) -> None:
        self._to = to
        self._stuck: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stops = False
        #: Connections that clients have not closed.
        self.clients: set[asyncio.StreamReader] = set()
        self.port = 0
        self._server: asyncio.Server | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Relay"]:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            for writer in self._open:
                writer.close()

    def stick(self) -> None:
        self._stuck |= self._open

    async def close(self) -> None:
        """Break the connections and refuse new ones, as if the process behind the port had died."""
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Break the connections, as the death of the process does."""
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.stops:
            writer.close()
            return
        self.clients.add(reader)
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        for source, sink in ((reader, back), (there, writer)):
            self._open.add(sink)
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            if sink not in self._stuck:
                sink.write(data)
        self.clients.discard(source)

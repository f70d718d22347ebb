"""Probes of the workers. Each worker is probed every half second, and at once after a request to it has failed.

Over gRPC, a probe asks Triton whether it responds and which models are ready, and asks the control service for load figures.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakValueDictionary

import grpc
from tritonclient.grpc import service_pb2

from rsrv.control.load_messages import view_of
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.contract import Act, Worker, WorkerView
from rsrv.placement.devices import ModelDevices, ServerDevice, as_one, summed, taken_over, told_apart
from rsrv_gateway.connections import SERVICE, ChannelFactory, ControlClient, answer_of, cancel, gone
from rsrv_gateway.outcomes import Refusal

log = logging.getLogger(__name__)

#: Minimum number of seconds between two probes of a worker, however often requests to it fail.
_PROBE_MIN_S = 0.05
#: Timeout in seconds of a probe that checks whether a worker has died. It is short, because a connection to a port without a
#: listener is refused at once.
_DEATH_PROBE_S = 0.3
#: Text in gRPC's error if nothing listens.
_NO_LISTENER = re.compile("Connection refused|No such file")
#: Text in tritonserver's error while it stops.
_STOPPING = re.compile("exiting|not ready")
#: Seconds within which a worker must return its metrics. Prometheus itself waits ten seconds by default.
METRICS_TIMEOUT_S = 2.0
#: Seconds within which a control service must accept a request.
_ACTION_TIMEOUT_S = 10.0
#: Durations of more seconds than this (decades) are implausible.
_PLAUSIBLE_MAX_S = 1e9

#: Triton's error for a call without the right key. It contains the name of the key.
_RESTRICTED = re.compile("restricted, expecting header 'triton-grpc-protocol-([^']*)'")

#: Views of a server that does not answer and whose devices are unknown.
DEAD: tuple[WorkerView, ...] = (WorkerView(alive=False),)


class Prober(Protocol):
    """Client of one worker. `probe` and `act` may run at the same time."""

    async def probe(self) -> tuple[WorkerView, ...]:
        """Probe the worker, and return its view. Never raises.

        If the gateway chooses among the worker's devices, return one view for each. Return DEAD if no answer arrives in time.
        """

    async def act(self, act: Act, model: str, device: int | None) -> None:
        """Ask the control service for an action on one device, or on all devices if `device` is None. Raises ActError."""

    async def place(self, models: ModelDevices) -> None:
        """Send the placement of the models on devices to the control service. Raises ActError."""

    async def metrics(self) -> str | None:
        """Return the metrics of the control service for Prometheus, or None without an answer in time. Never raises."""

    def control(self) -> ControlClient | None:
        """Return the control service on the current channel, or None if none is known."""

    def has_died(self, model: str) -> bool:
        """Return True if the worker served the model in its last answer, and nothing listens at its port now."""

    async def string_outputs(self, model: str, version: str) -> frozenset[str] | Refusal:
        """Return the names of the outputs of a model that contain strings, or the worker's refusal. Never raises."""

    async def close(self) -> None: ...


class ActError(Exception):
    """A worker did not carry out an action. The message says why."""


class Probes:
    """Probes of all workers. One event loop owns them.

    `seen` is called when a worker appears or disappears, and when it starts or stops serving a model.
    """

    def __init__(self, make: Callable[[Worker], Prober], pause: float, seen: Callable[[], None]) -> None:
        self._make = make
        self._pause = pause
        self._seen = seen
        self._watches: dict[str, _WorkerProbe] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def watch(self, workers: Mapping[str, Worker]) -> None:
        """Probe these workers from now on, and no others."""
        for name in [name for name, watch in self._watches.items() if workers.get(name) != watch.worker]:
            task = asyncio.create_task(self._watches.pop(name).stop())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        for name, worker in workers.items():
            if name not in self._watches:
                self._watches[name] = _WorkerProbe(worker, self._make(worker), self._pause, self._seen)

    def workers(self) -> Mapping[str, Worker]:
        """Return the probed workers, by name."""
        return {name: watch.worker for name, watch in sorted(self._watches.items())}

    def views(self) -> Mapping[str, tuple[WorkerView, ...]]:
        """Return the last views of each worker's devices, by the worker's name. A worker counts as dead before its first probe."""
        return {name: watch.views for name, watch in sorted(self._watches.items())}

    def summaries(self) -> Mapping[str, WorkerView]:
        """Return a view of each worker as a whole, by name."""
        return {name: summed(views) for name, views in self.views().items()}

    def failed(self, worker: str) -> None:
        """Probe a worker now, because a request to it failed. This has no effect for an unknown name."""
        if worker in self._watches:
            self._watches[worker].hurry()

    async def probe(self, workers: Iterable[str] | None = None) -> None:
        """Probe these workers, or all workers. Return when a probe that started after this call has ended for each worker."""
        names = self._watches.keys() if workers is None else workers
        await asyncio.gather(
            *(self._watches[name].next_probe() for name in list(names) if name in self._watches)
        )

    async def act(self, act: Act, device: ServerDevice, model: str) -> None:
        """Request an action from a worker. Raises ActError, also for an unknown worker."""
        await self._prober(device.server).act(act, model, device.number)

    async def place(self, worker: str, models: ModelDevices) -> None:
        """Send a worker the devices of its models, as `Prober.place` does. Raises ActError, also for an unknown worker."""
        await self._prober(worker).place(models)

    def _prober(self, worker: str) -> Prober:
        watch = self._watches.get(worker)
        if watch is None:
            raise ActError("the worker was removed")
        return watch.prober

    async def metrics(self, worker: str) -> str | None:
        """Return the metrics as `Prober.metrics` does, or None for an unknown worker."""
        watch = self._watches.get(worker)
        return None if watch is None else await watch.prober.metrics()

    async def has_died(self, worker: str, model: str) -> bool:
        """Probe a worker, and return `Prober.has_died`. Return False if the probe takes too long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_DEATH_PROBE_S):
                await self.probe([worker])
                return worker in self._watches and self._watches[worker].prober.has_died(model)
        return False

    async def string_outputs(self, worker: str, model: str, version: str) -> frozenset[str] | Refusal:
        """Return the outputs that `Prober.string_outputs` returns, or a refusal for an unknown worker."""
        watch = self._watches.get(worker)
        return gone(worker) if watch is None else await watch.prober.string_outputs(model, version)

    def control(self, worker: str) -> ControlClient | None:
        """Return the control service as `Prober.control` does, or None for an unknown worker."""
        watch = self._watches.get(worker)
        return None if watch is None else watch.prober.control()

    async def close(self) -> None:
        self.watch({})
        await asyncio.gather(*self._closing)


class _WorkerProbe:
    """Probes one worker until `stop`."""

    def __init__(self, worker: Worker, prober: Prober, pause: float, seen: Callable[[], None]) -> None:
        self.worker = worker
        self.prober = prober
        self.views = DEAD
        self._pause = pause
        self._seen = seen
        self._hurried = asyncio.Event()
        #: Error of the last probe, if the probe failed in the gateway itself.
        self._error = ""
        #: Event at the end of the next probe that starts.
        self._next_ended = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"probe {worker.name}")

    def hurry(self) -> None:
        """Start another probe soon, even if a probe runs now, because that probe may report an earlier state."""
        self._hurried.set()

    async def next_probe(self) -> None:
        """Return at the end of the next probe that starts, or when no more probes follow."""
        ended = self._next_ended
        self.hurry()
        await ended.wait()

    async def stop(self) -> None:
        await cancel([self._task])
        self._next_ended.set()
        await self.prober.close()

    async def _run(self) -> None:
        while True:
            self._hurried.clear()
            ended, self._next_ended = self._next_ended, asyncio.Event()
            try:
                self._take(await self._probe())
            finally:
                ended.set()
            await asyncio.sleep(min(_PROBE_MIN_S, self._pause))
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause - _PROBE_MIN_S):
                    await self._hurried.wait()

    async def _probe(self) -> tuple[WorkerView, ...]:
        """Probe the worker. If the gateway cannot handle its answers, the worker counts as dead and is probed again."""
        try:
            views = await self.prober.probe()
        except Exception as error:
            if self._error != repr(error):
                self._error = repr(error)
                log.exception("worker %s cannot be probed, so it gets no requests", self.worker.name)
            return DEAD
        self._error = ""
        return views

    def _take(self, views: tuple[WorkerView, ...]) -> None:
        before, self.views = self.views, taken_over(self.views, views)
        alive = any(view.alive for view in views)
        if alive != any(view.alive for view in before):
            log.log(
                logging.INFO if alive else logging.WARNING,
                "worker %s %s",
                self.worker.name,
                "answers" if alive else "does not answer",
            )
        if _seen_of(self.views) != _seen_of(before):
            self._seen()


def _seen_of(views: tuple[WorkerView, ...]) -> tuple[object, ...]:
    return tuple([(view.device, view.alive, view.ready) for view in views])


#: Carries out an action on a device of a worker. Raises ActError.
Do = Callable[[Act, ServerDevice, str], Awaitable[None]]


class ActionQueue:
    """Carries out actions in the background: one at a time for each device, without duplicates in the queue."""

    def __init__(self, do: Do) -> None:
        self._do = do
        #: Queued and running actions.
        self._tasks: dict[tuple[Act, ServerDevice, str], asyncio.Task[None]] = {}
        #: Locks by device. A lock exists while actions of its device are queued or running.
        self._locks: WeakValueDictionary[ServerDevice, asyncio.Lock] = WeakValueDictionary()

    def send(self, act: Act, device: ServerDevice, model: str) -> None:
        errand = act, device, model
        if errand not in self._tasks:
            name = f"{act.value} {model} at {device.server}"
            self._tasks[errand] = asyncio.create_task(self._run(*errand), name=name)

    async def _run(self, act: Act, device: ServerDevice, model: str) -> None:
        try:
            async with self._locks.setdefault(device, asyncio.Lock()):
                await self._do(act, device, model)
        except ActError as error:
            log.warning("worker %s did not %s %s: %s", device.server, act.value, model, error)
        finally:
            del self._tasks[act, device, model]

    async def close(self) -> None:
        """Cancel all actions."""
        await cancel(self._tasks.values())


class PlacementSender:
    """Sends the placement of models on devices to servers with several devices, in the background.

    A server keeps its placement until it ends.
    """

    def __init__(self, place: Callable[[str, ModelDevices], Awaitable[None]]) -> None:
        self._place = place
        #: The placement that was sent to each server.
        self._sent: dict[str, ModelDevices] = {}
        #: The last logged problem with each server.
        self._logged: dict[str, str] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def update(self, placements: Mapping[str, ModelDevices]) -> None:
        """Send each server its placement if the placement has changed. `placements` has only the servers that respond now.

        When another server responds again, it gets its placement again.
        """
        self._sent = {server: placement for server, placement in self._sent.items() if server in placements}
        for server, models in placements.items():
            if self._sent.get(server) != models and server not in self._tasks:
                self._sent[server] = models
                self._tasks[server] = asyncio.create_task(
                    self._send(server, models), name=f"place at {server}"
                )

    async def _send(self, server: str, models: ModelDevices) -> None:
        problem = ""
        try:
            await self._place(server, models)
        except ActError as error:
            self._sent.pop(server, None)
            problem = f"did not get the devices of its models: {error}"
        finally:
            del self._tasks[server]
        if problem != self._logged.get(server, ""):
            self._logged[server] = problem
            if problem:
                log.warning("worker %s %s", server, problem)

    async def close(self) -> None:
        """Cancel all calls."""
        await cancel(self._tasks.values())


class GrpcProber:
    """Probes one worker over gRPC.

    If a worker takes longer than `timeout` seconds, the prober opens a new connection, because the old one may be half open.
    """

    def __init__(self, worker: Worker, channels: ChannelFactory, timeout: float) -> None:
        self._worker = worker
        self._channel_factory = channels
        self._timeout = timeout
        self._ready: frozenset[str] = frozenset()
        #: Models that the worker served in its last answer.
        self._served: frozenset[str] = frozenset()
        #: True if nothing listens at the worker's port now.
        self._vanished = False
        #: Last view of each device.
        self._views: dict[int, WorkerView] = {}
        #: Positions in the devices' load figures. With them, the worker may send only the changes since the last answer.
        self._positions: list[pb.LoadPosition] = []
        #: Last views of the devices, and the view of the whole server that was computed from them.
        self._whole: tuple[tuple[WorkerView, ...], WorkerView] | None = None
        #: Reason for which the worker last refused to list its models.
        self._refused = ""
        self._credentials = channels.credentials, channels.control_metadata
        self._triton = channels.open(worker.grpc)
        self._control = None if worker.control is None else channels.open_control(worker.control)
        self._closing: set[asyncio.Task[None]] = set()

    async def probe(self) -> tuple[WorkerView, ...]:
        credentials = self._channel_factory.credentials, self._channel_factory.control_metadata
        if credentials != self._credentials:
            self._credentials = credentials
            self._reopen_triton()
            self._reopen_control()
        alive, index, load = await asyncio.gather(self._ask_alive(), self._ask_index(), self._ask_load())
        if _is_late(alive):
            self._reopen_triton()
        if _is_late(load):
            self._reopen_control()
        if isinstance(alive, grpc.RpcError):
            details = alive.details() or ""
            self._vanished = _NO_LISTENER.search(details) is not None
            if _STOPPING.search(details):
                self._served = frozenset()
            return DEAD
        self._vanished = False
        # Triton may be slow to list its models while it loads some. It still serves the other models.
        if not _is_late(index):
            self._ready, reason = _listed(index)
            self._refuse(reason)
        if not isinstance(index, grpc.RpcError):
            self._served = self._ready
        if (
            isinstance(load, pb.GetLoadResponse)
            and any(device.instance for device in load.devices)
            and all(map(_is_sane, load.devices))
        ):
            self._views = {
                device.number: view_of(device, load, self._ready, self._views.get(device.number))
                for device in load.devices
            }
            self._positions = [
                pb.LoadPosition(device=device.number, instance=device.instance, next=device.next)
                for device in load.devices
            ]
            views = told_apart([*self._views.values()])
            if load.placement_mode == "external":
                return views
            self._whole = views, as_one(views, self._whole)
            return (self._whole[1],)
        return (WorkerView(True, self._ready),)

    async def act(self, act: Act, model: str, device: int | None) -> None:
        devices = [] if device is None else [device]
        match act:
            case Act.PREFETCH:
                await self._order("Prefetch", pb.PrefetchRequest(model=model, devices=devices))
            case Act.EVICT:
                await self._order("Evict", pb.EvictRequest(target=pb.Target(model=model), devices=devices))

    async def place(self, models: ModelDevices) -> None:
        pairs = [pb.ModelPlacement(model=name, devices=numbers) for name, numbers in sorted(models.items())]
        await self._order("SetPlacement", pb.SetPlacementRequest(models=pairs))

    async def _order(self, call: str, request: Any) -> None:
        """Call the control service. Raises ActError."""
        if self._control is None:
            raise ActError("no control service of the worker is known")
        try:
            await self._control.call(call, request, _ACTION_TIMEOUT_S)
        except grpc.RpcError as error:
            raise ActError(_reason_of(error)) from None

    async def metrics(self) -> str | None:
        if self._control is None:
            return None
        answer = await _answer(self._control.call("GetMetrics", pb.GetMetricsRequest(), METRICS_TIMEOUT_S))
        # `answer` is None if it could not be parsed.
        return None if answer is None or isinstance(answer, grpc.RpcError) else str(answer.text)

    def control(self) -> ControlClient | None:
        return self._control

    def has_died(self, model: str) -> bool:
        return self._vanished and model in self._served

    async def string_outputs(self, model: str, version: str) -> frozenset[str] | Refusal:
        call = self._triton.unary_unary(
            SERVICE + "ModelMetadata",
            request_serializer=service_pb2.ModelMetadataRequest.SerializeToString,
            response_deserializer=service_pb2.ModelMetadataResponse.FromString,
        )
        request = service_pb2.ModelMetadataRequest(name=model, version=version)
        answer: Any = await answer_of(call(request, timeout=self._timeout), self._worker.name)
        if isinstance(answer, Refusal):
            return answer
        return frozenset([output.name for output in answer.outputs if output.datatype == "BYTES"])

    async def close(self) -> None:
        """Cancel all calls."""
        for task in self._closing:
            task.cancel()
        channels = [self._triton, *([] if self._control is None else [self._control.channel])]
        await asyncio.gather(*(channel.close() for channel in channels))

    def _reopen_triton(self) -> None:
        self._close(self._triton)
        self._triton = self._channel_factory.open(self._worker.grpc)

    def _reopen_control(self) -> None:
        if self._control is not None and self._worker.control is not None:
            self._close(self._control.channel)
            self._control = self._channel_factory.open_control(self._worker.control)

    def _close(self, channel: Any) -> None:
        """Close a channel in the background when its running calls have ended, or after `_ACTION_TIMEOUT_S` seconds."""
        task = asyncio.create_task(channel.close(_ACTION_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _ask_alive(self) -> Any:
        """Call ServerReady, only to see whether the server answers.

        The content of the answer is ignored: a server that starts, loads or ends is not ready, but may have ready models.
        """
        return await _answer(self._triton.unary_unary(SERVICE + "ServerReady")(b"", timeout=self._timeout))

    async def _ask_index(self) -> Any:
        call = self._triton.unary_unary(
            SERVICE + "RepositoryIndex",
            request_serializer=service_pb2.RepositoryIndexRequest.SerializeToString,
            response_deserializer=service_pb2.RepositoryIndexResponse.FromString,
        )
        request = service_pb2.RepositoryIndexRequest(ready=True)
        metadata = self._channel_factory.repository_metadata
        return await _answer(call(request, timeout=self._timeout, metadata=metadata))

    async def _ask_load(self) -> Any:
        """Ask the control service for the load figures. Return None if there is no control service."""
        if self._control is None:
            return None
        request = pb.GetLoadRequest(positions=self._positions)
        return await _answer(self._control.call("GetLoad", request, self._timeout))

    def _refuse(self, reason: str) -> None:
        """Log once why a worker refuses to list its models, because it gets no requests then.

        `reason` is empty if the worker has not refused.
        """
        if reason and reason != self._refused:
            key = _RESTRICTED.search(reason)
            remedy = ""
            if key is not None:
                remedy = (
                    f"; its repository is restricted: set gateway.worker_repository_key to {key[1]}, and "
                    "gateway.worker_repository_value_file to a file with its value"
                )
            log.warning(
                "worker %s answers but does not list its ready models, so it gets no requests: %s%s",
                self._worker.name,
                reason,
                remedy,
            )
        self._refused = reason


async def _answer(call: Any) -> Any:
    """Return the answer to a call, or its error."""
    try:
        return await call
    except grpc.RpcError as error:
        return error


def _is_late(answer: Any) -> bool:
    return isinstance(answer, grpc.RpcError) and bool(answer.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


def _listed(index: Any) -> tuple[frozenset[str], str]:
    """Return the names of the ready models, or the reason for a refusal.

    A server that starts or ends has no ready models.
    """
    if isinstance(index, grpc.RpcError):
        restricted = _RESTRICTED.search(index.details() or "")
        starts_or_ends = index.code() is grpc.StatusCode.UNAVAILABLE and not restricted
        return frozenset(), "" if starts_or_ends else _reason_of(index)
    if index is None:  # The answer cannot be parsed, which gRPC has logged.
        return frozenset(), ""
    return frozenset(model.name for model in index.models if model.state == "READY"), ""


def _reason_of(error: Any) -> str:
    return f"{error.code().name}: {error.details() or 'no reason given'}"


def _is_sane(load: pb.DeviceLoad) -> bool:
    """Return True if the figures are finite and plausible. Others would make the sums over all workers wrong or infinite."""
    numbers = [load.backlog_s]
    for model in load.models:
        numbers += model.cost_s, model.device_seconds
    return all(0 <= number <= _PLAUSIBLE_MAX_S for number in numbers)

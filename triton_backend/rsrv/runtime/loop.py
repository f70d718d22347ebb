"""The loop: the one thread that owns all mutable state of the runtime.

Frames from stubs and messages from worker threads come in, become events of the scheduler, and the
scheduler's instructions go out to the threads and back to the stubs. Nothing here blocks but the selector.
"""

import json
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

from rsrv.runtime.connection import Connection
from rsrv.runtime.device import CacheCounts, Device, Weights
from rsrv.runtime.execution import Job, Part, Staging, execute
from rsrv.runtime.models import Model, build, identify, model_key, wire_ranks
from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.scheduler.snapshot import ModelSnapshot
from rsrv.runtime.workers import Inbox, Worker
from rsrv.settings import Settings
from rsrv.wire.frames import (
    COMMITTED,
    MAGIC,
    PROTOCOL_VERSION,
    Completion,
    Kind,
    ProtocolError,
    Status,
    check_hello,
    pack_json,
    unpack_ids,
    unpack_json,
    unpack_submissions,
)
from rsrv.wire.layout import ALIGNMENT
from rsrv.wire.memory import Board, create_sealed
from rsrv.wire.socket import Closed, check_peer
from rsrv_bundle import Bundle, BundleError

log = logging.getLogger("rsrv.loop")

#: seconds of expected execution below which the loop executes by itself: handing over to a thread and back
#: costs about 0.1 ms, and reading sockets that much later does no harm
_SHORT = 0.0005
#: seconds that such an execution may take at most before its model is no longer executed by the loop: some
#: models' costs depend on their inputs, and meanwhile no deadline, cancellation or arrival is noticed
_DECEIVED = 0.1

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40


@dataclass(slots=True)
class _Entry:
    """A model by its key: being built (no `model` yet) or loaded; with the connections that want it."""

    name: str
    model: Model | None = None
    connections: set[int] = field(default_factory=set)
    #: nobody wants it any more, but it still executes or loads
    leaving: bool = False
    #: what to do once it has left: those who wanted the same bundle again meanwhile
    afterwards: list[Callable[[], None]] = field(default_factory=list)


class Loop:
    """Serve `listener` until `server` (a pidfd) is readable.

    `make_device` runs on a worker thread: importing jax takes seconds in which stubs may already connect.
    """

    def __init__(
        self,
        listener: socket.socket,
        server: int,
        settings: Settings,
        scheduler: Scheduler,
        make_device: Callable[[], Device],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._clock = clock
        self._board = Board()
        self._inbox = Inbox()
        self._device: Device | None = None
        self._device_error = ""
        self._device_worker = Worker("device")
        self._build_worker = Worker("build")
        self._staging = Staging()
        self._connections: dict[int, Connection] = {}
        self._next_connection = 0
        self._models: dict[str, _Entry] = {}
        self._pending: dict[int, Part] = {}
        self._running: dict[int, Job] = {}
        self._arrived: list[ev.Request] = []
        self._answering: set[Connection] = set()
        self._started = clock()
        self._running_loop = True
        #: a job too short to be worth a thread, and, when it has run, the message that it ended in
        self._short: Job | None = None
        self._ended: Callable[[], None] | None = None
        #: models that once took far longer on the loop than predicted, by key: never again on the loop
        self._deceptive: set[str] = set()
        self._builds = 0

        self._selector = selectors.EpollSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._inbox.fd, selectors.EVENT_READ, self._drain)
        self._selector.register(server, selectors.EVENT_READ, self._server_gone)
        self._build_worker.put(lambda: self._make_device(make_device))

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        while self._running_loop:
            wakeup = self._scheduler.next_wakeup()
            timeout = None if wakeup is None else max(0.0, wakeup - self._clock())
            if self._ended is not None:
                timeout = 0.0
            for key, mask in self._selector.select(timeout):
                key.data(mask)
            self._flush_arrivals()
            if self._ended is not None:
                # After the arrivals: what came while this one executed may share the next execution.
                ended, self._ended = self._ended, None
                ended()
            elif wakeup is not None and self._clock() >= wakeup:
                self._feed(ev.Tick())
            self._answer()
            if self._short is not None:
                self._execute_short()
            self._publish()

    def _execute_short(self) -> None:
        job, self._short = self._short, None
        assert job is not None
        started = self._clock()
        self._ended = self._run_job(job)
        if self._clock() - started > _DECEIVED:
            self._deceptive.add(job.model.key)
        if len(self._pending) == len(job.requests):
            # Nobody waits for the next execution: the answers need not wait for a look at the sockets.
            ended, self._ended = self._ended, None
            ended()
            self._answer()

    def close(self) -> None:
        """End all connections, as the process's end would. For those who run a loop inside a process."""
        for connection in list(self._connections.values()):
            self._selector.unregister(connection.sock)
            connection.close()
        self._connections.clear()
        self._selector.close()

    def _drain(self, _mask: int) -> None:
        for message in self._inbox.drain():
            message()

    def _server_gone(self, _mask: int) -> None:
        log.info("tritonserver is gone")
        self._running_loop = False

    def _publish(self) -> None:
        """Tell the stubs when the device will have done everything that it has to do now."""
        now = self._clock()
        self._board.publish(int((now + self._scheduler.backlog_seconds(now)) * 1e9))

    def _answer(self) -> None:
        answering, self._answering = self._answering, set()
        for connection in answering:
            self._guard(connection, connection.send_completions)

    # --- connections --------------------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            try:
                peer = check_peer(sock)
            except ProtocolError as error:
                log.warning("refused a connection: %s", error)
                sock.close()
                continue
            self._next_connection += 1
            connection = Connection(self._next_connection, sock, peer)
            self._connections[connection.id] = connection
            self._selector.register(
                sock,
                selectors.EVENT_READ,
                lambda mask, c=connection: self._guard(c, lambda: self._ready(c, mask)),
            )

    def _guard(self, connection: Connection, action: Callable[[], None]) -> None:
        """What a connection does may end the connection, and nothing else."""
        try:
            action()
        except Closed:
            self._close(connection)
        except ProtocolError as error:
            log.error("closing the connection of pid %d: %s", connection.peer, error)
            self._close(connection)
        else:
            if connection.congested != connection.watched_for_write and connection.id in self._connections:
                connection.watched_for_write = connection.congested
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.congested else 0)
                self._selector.modify(connection.sock, events, self._selector.get_key(connection.sock).data)

    def _ready(self, connection: Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            connection.flush()
        for kind, count, frame, fds in connection.frames():
            try:
                self._receive(connection, kind, count, frame, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _receive(
        self, connection: Connection, kind: Kind, count: int, frame: memoryview, fds: list[int]
    ) -> None:
        if not connection.greeted:
            check_hello(frame)
            connection.greeted = True
            greeting = {"magic": MAGIC, "version": PROTOCOL_VERSION, "pid": os.getpid()}
            connection.send(pack_json(Kind.WELCOME, greeting), (self._board.fd,))
            return
        match kind:
            case Kind.SUBMIT:
                self._submit(connection, unpack_submissions(frame, count))
            case Kind.CANCEL:
                ids = tuple(self._global_id(connection, id) for id in unpack_ids(frame, count))
                self._flush_arrivals()
                self._feed(ev.RequestsCancelled(ids))
            case Kind.SEGMENT:
                connection.add_segment(unpack_ids(frame, 1)[0], fds)
            case Kind.DROP_SEGMENT:
                for id in unpack_ids(frame, count):
                    connection.segments.pop(id, None)
            case Kind.REGISTER:
                self._register(connection, unpack_json(frame))
            case Kind.STATUS:
                self._send_status(connection)
            case _:
                raise ProtocolError(f"{kind.name} is not for the runtime")

    def _close(self, connection: Connection) -> None:
        if self._connections.pop(connection.id, None) is None:
            return
        self._selector.unregister(connection.sock)
        connection.close()
        gone = tuple(id for id, part in self._pending.items() if part.connection is connection)
        if gone:
            self._flush_arrivals()
            self._feed(ev.RequestsCancelled(gone))
        if connection.model is not None:
            self._leave(connection)

    # --- models -------------------------------------------------------------------------------------------

    def _make_device(self, make: Callable[[], Device]) -> None:
        """On the build thread, before anything else."""
        device, error = None, ""
        try:
            device = make()
        except Exception as caught:
            log.exception("no device")
            error = f"{type(caught).__name__}: {caught}"

        def ready() -> None:
            self._device, self._device_error = device, error

        self._inbox.post(ready)

    def _register(self, connection: Connection, wanted: dict[str, Any]) -> None:
        """A stub wants a model: by its bundle's path, or, for a further connection, by its key."""
        if connection.model is not None:
            raise ProtocolError("REGISTER twice on one connection")
        if "key" in wanted:
            entry = self._models.get(wanted["key"])
            if entry is None or entry.model is None or entry.leaving:
                self._reject(connection, f"{wanted['key']} is not loaded")
            else:
                entry.connections.add(connection.id)
                connection.model = wanted["key"]
                self._welcome(connection, entry.model)
            return
        name, path = wanted.get("model"), wanted.get("bundle")
        if not isinstance(name, str) or not isinstance(path, str):
            raise ProtocolError("REGISTER without a model's name and its bundle's path")

        def read() -> None:
            result: Bundle | str
            try:
                result = identify(path)
            except BundleError as error:
                result = str(error)
            except Exception as error:
                log.exception("%s: cannot read the bundle", name)
                result = f"{type(error).__name__}: {error}"
            self._inbox.post(lambda: self._identified(connection, name, result))

        self._build_worker.put(read)

    def _identified(self, connection: Connection, name: str, result: Bundle | str) -> None:
        if connection.id not in self._connections:
            return
        if isinstance(result, str):
            self._guard(connection, lambda: self._reject(connection, result))
            return
        bundle, key = result, model_key(name, result)
        entry = self._models.get(key)
        if entry is not None and entry.leaving:
            entry.afterwards.append(lambda: self._identified(connection, name, bundle))
            return
        known = entry is not None
        if entry is None:
            entry = self._models[key] = _Entry(name)
            self._builds += 1
            self._build_worker.put(lambda: self._build(key, name, bundle))
        entry.connections.add(connection.id)
        connection.model = key
        if known and entry.model is not None:
            self._guard(connection, partial(self._welcome, connection, entry.model))

    def _build(self, key: str, name: str, bundle: Bundle) -> None:
        """On the build thread."""
        result: Model | str
        try:
            if self._device is None:  # the build thread made it, or failed to, before any bundle was read
                result = f"the runtime has no device: {self._device_error}"
            else:
                result = build(bundle, self._device, self._settings, name)
        except BundleError as error:
            result = str(error)
        except Exception as error:
            log.exception("%s: cannot be loaded", name)
            result = f"{type(error).__name__}: {error}"
        self._inbox.post(lambda: self._built(key, result))

    def _built(self, key: str, result: Model | str) -> None:
        self._builds -= 1
        entry = self._models[key]
        waiting = [self._connections[id] for id in entry.connections if id in self._connections]
        if isinstance(result, str):
            log.error("%s: not loaded: %s", entry.name, result)
            del self._models[key]
            for connection in waiting:
                connection.model = None
                self._guard(connection, partial(self._reject, connection, result))
            return
        entry.model = result
        if not waiting:
            del self._models[key]
            self._free(result)
            return
        self._feed(ev.ModelAdded(result.program))
        for connection in waiting:
            self._guard(connection, partial(self._welcome, connection, result))

    def _welcome(self, connection: Connection, model: Model) -> None:
        connection.send(
            pack_json(
                Kind.REGISTERED,
                {
                    "key": model.key,
                    "interface": model.interface.to_json(),
                    "ranks": wire_ranks(model.bundle),
                    "stub": self._settings.stub.model_dump(mode="json"),
                    "cost_ns": int(min(model.program.costs.values()) * 1e9),
                },
            )
        )

    def _reject(self, connection: Connection, reason: str) -> None:
        connection.send(pack_json(Kind.REJECTED, {"reason": reason}))

    def _leave(self, connection: Connection) -> None:
        key = connection.model
        assert key is not None
        entry = self._models[key]
        entry.connections.discard(connection.id)
        if not entry.connections and entry.model is not None:
            log.info("%s: unloaded", entry.name)
            entry.leaving = True
            self._feed(ev.ModelRemoved(key))
            self._forget_if_gone(key)

    def _forget_if_gone(self, key: str) -> None:
        """A leaving model is gone when the scheduler has let go of it, with or without weights to evict."""
        entry = self._models.get(key)
        if entry is None or not entry.leaving or self._scheduler.holds(key):
            return
        del self._models[key]
        self._deceptive.discard(key)
        assert entry.model is not None
        self._free(entry.model)
        for action in entry.afterwards:
            action()

    def _free(self, model: Model) -> None:
        """Give the weights back; on the device's thread, after what it executes now."""
        weights, model.weights = model.weights, None
        self._staging.forget(model.key)
        device = self._device
        if weights is not None and device is not None:
            self._device_worker.put(lambda: device.free(weights))

    # --- requests -----------------------------------------------------------------------------------------

    def _submit(self, connection: Connection, submissions: Iterable[tuple[int, ...]]) -> None:
        entry = self._models.get(connection.model or "")
        if entry is None or entry.model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, variants = entry.model.key, entry.model.interface.variants
        for (
            request,
            deadline_ns,
            rows,
            variant,
            priority,
            flags,
            segment_id,
            inputs_at,
            outputs_at,
        ) in submissions:
            if variant >= len(variants):
                raise ProtocolError(f"SUBMIT for variant {variant} of {len(variants)}")
            segment = connection.segments.get(segment_id)
            if segment is None:
                raise ProtocolError(f"SUBMIT in unknown segment {segment_id}")
            size = len(segment)
            if (
                (inputs_at | outputs_at) % ALIGNMENT
                or inputs_at + variants[variant].inputs.places(rows)[1] > size
                or outputs_at + variants[variant].outputs.places(rows)[1] > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            id = self._global_id(connection, request)
            if id in self._pending:
                raise ProtocolError(f"SUBMIT of request {request}, which is not answered yet")
            self._pending[id] = Part(connection, request, rows, segment, inputs_at, outputs_at)
            deadline = deadline_ns / 1e9 if deadline_ns else None
            self._arrived.append(
                ev.Request(id, key, variant, rows, deadline, priority, bool(flags & COMMITTED))
            )

    @staticmethod
    def _global_id(connection: Connection, id: int) -> int:
        if id >> _ID_BITS:
            raise ProtocolError(f"request id {id} has more than {_ID_BITS} bits")
        return connection.id << _ID_BITS | id

    def _flush_arrivals(self) -> None:
        """Before an event about requests: those that came first must be known to the scheduler."""
        if self._arrived:
            requests, self._arrived = tuple(self._arrived), []
            self._feed(ev.RequestsArrived(requests))

    def _feed(self, event: ev.Event, finished: Job | None = None, seconds: float = 0.0) -> None:
        self._carry_out(self._scheduler.handle(event, self._clock()), finished, seconds)

    def _carry_out(
        self, instructions: Iterable[ev.Instruction], finished: Job | None, seconds: float
    ) -> None:
        for instruction in instructions:
            match instruction:
                case ev.Finish():
                    self._finish(instruction, finished, seconds)
                case ev.Execute():
                    self._execute(instruction)
                case ev.LoadWeights(key, epoch):
                    self._load(key, epoch)
                case ev.EvictWeights(key):
                    model = self._models[key].model
                    assert model is not None
                    self._free(model)
                case _:
                    assert_never(instruction)

    def _finish(self, finish: ev.Finish, job: Job | None, seconds: float) -> None:
        part = self._pending.pop(finish.request)
        connection = part.connection
        if connection.id not in self._connections:
            return
        if finish.outcome is ev.Outcome.ANSWERED:
            assert job is not None
            done = Completion(part.request, Status.OK, job.size, job.rows, int(seconds * 1e9))
        else:
            status, text = _failure(finish)
            done = Completion(part.request, status, text=text)
        connection.completions.append(done)
        self._answering.add(connection)

    def _execute(self, instruction: ev.Execute) -> None:
        model = self._models[instruction.model].model
        assert model is not None
        job = Job(
            instruction.dispatch,
            model,
            instruction.variant,
            instruction.size,
            instruction.rows,
            instruction.requests,
            tuple([self._pending[id] for id in instruction.requests]),
        )
        self._running[job.dispatch] = job
        cost = self._scheduler.cost(job.model.key, job.variant, job.rows)
        # While a model is built, its warm-up may hold the device for long: then only the thread may wait.
        short = cost <= _SHORT and model.key not in self._deceptive
        if short and len(self._running) == 1 and not self._builds:
            self._short = job
        else:
            self._device_worker.put(lambda: self._inbox.post(self._run_job(job)))

    def _run_job(self, job: Job) -> Callable[[], None]:
        """Execute, on whichever thread; returns what the loop is to do about it."""
        assert self._device is not None
        seconds, error = 0.0, None
        try:
            seconds = execute(job, self._device, self._staging)
        except Exception as caught:
            log.exception("%s: execution failed", job.model.key)
            error = f"{type(caught).__name__}: {caught}"
        return lambda: self._executed(job, seconds, error)

    def _executed(self, job: Job, seconds: float, error: str | None) -> None:
        del self._running[job.dispatch]
        # Arrivals of this same moment first: the next execution should take them along.
        self._flush_arrivals()
        self._feed(ev.ExecutionFinished(job.dispatch, seconds, error), job, seconds)
        self._forget_if_gone(job.model.key)

    def _load(self, key: str, epoch: int) -> None:
        """Bring a model's weights to the device; the build left them there, so the first load is done already."""
        model = self._models[key].model
        assert model is not None
        device = self._device
        assert device is not None
        if model.weights is not None:
            self._inbox.post(lambda: self._loaded(ev.WeightsLoaded(key, epoch, 0.0), model, model.weights))
            return

        def load() -> None:
            started = self._clock()
            try:
                weights = device.upload(model.host_weights)
            except Exception as error:
                log.exception("%s: loading weights failed", key)
                failed = ev.LoadFailed(key, epoch, f"{type(error).__name__}: {error}")
                self._inbox.post(lambda: self._loaded(failed, model, None))
                return
            done = ev.WeightsLoaded(key, epoch, self._clock() - started)
            self._inbox.post(lambda: self._loaded(done, model, weights))

        self._build_worker.put(load)

    def _loaded(self, event: ev.WeightsLoaded | ev.LoadFailed, model: Model, weights: Weights | None) -> None:
        model.weights = weights
        self._feed(event)
        self._forget_if_gone(model.key)

    # --- status -------------------------------------------------------------------------------------------

    def _send_status(self, connection: Connection) -> None:
        """A JSON of any size, so it travels in a memfd."""
        text = json.dumps(self.status()).encode()
        fd = create_sealed(len(text), "rsrv-status")
        try:
            os.pwrite(fd, text, 0)
            connection.send(pack_json(Kind.STATUS_REPLY, {}), (fd,))
        finally:
            os.close(fd)

    def status(self) -> dict[str, Any]:
        counts = getattr(self._device, "cache_counts", CacheCounts(0, 0))
        snapshot = self._scheduler.snapshot()
        return {
            "pid": os.getpid(),
            "uptime_s": self._clock() - self._started,
            "connections": len(self._connections),
            "compiled": counts.compiled,
            "from_cache": counts.from_cache,
            "models": {
                entry.name: _model_status(snapshot.models[key])
                for key, entry in self._models.items()
                if key in snapshot.models
            },
        }


def _model_status(model: ModelSnapshot) -> dict[str, Any]:
    return {
        "residency": model.residency.value,
        "queued": model.queued,
        "executing": model.executing,
        "outcomes": {outcome.value: count for outcome, count in model.outcomes.items()},
        "dispatches": model.dispatches,
        "useful_rows": model.useful_rows,
        "padded_rows": model.padded_rows,
        "device_seconds": model.device_seconds,
        "sizes": {f"{variant}/{size}": count for (variant, size), count in model.sizes.items()},
        "costs": {f"{variant}/{size}": cost for (variant, size), cost in model.costs.items()},
    }


def _failure(finish: ev.Finish) -> tuple[Status, str]:
    """How a request ended, for its client: without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.CANCELLED:
            return Status.CANCELLED, "the request was cancelled"
        case ev.Outcome.FAILED:
            return Status.INTERNAL, "the model failed to execute; the server's log says why"
    match finish.reason:
        case ev.Reason.QUEUE_FULL:
            retry_ms = (finish.retry_after or 0) * 1e3
            return Status.QUEUE_FULL, f"too many requests wait for this model; retry after {retry_ms:.0f} ms"
        case ev.Reason.TOO_MANY_ROWS:
            return Status.INVALID, "the request has more rows than the model's largest batch"
        case ev.Reason.UNKNOWN_VARIANT:
            return Status.INVALID, "no module is compiled for this input shape"
        case _:
            return Status.NOT_FOUND, "the model is not loaded"

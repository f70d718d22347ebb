"""The loop: the one thread that owns all mutable state of the runtime.

Frames from stubs and messages from worker threads come in, become events of the scheduler, and the
scheduler's instructions go out to the threads and back to the stubs. Nothing here blocks but the poll, and
executions that are shorter than handing them over would be.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, assert_never

from rsrv.runtime.connection import Connection
from rsrv.runtime.device import Device
from rsrv.runtime.execution import Job, Part, Staging, execute
from rsrv.runtime.models import Model
from rsrv.runtime.orphans import open_stub
from rsrv.runtime.registry import Registry
from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.status import model_status
from rsrv.runtime.transport import Transport
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
    pack_json,
    unpack_ids,
    unpack_json,
    unpack_submissions,
)
from rsrv.wire.layout import ALIGNMENT
from rsrv.wire.memory import Board

log = logging.getLogger("rsrv.loop")

#: seconds of expected execution below which the loop executes by itself: handing over to a thread and back
#: costs about 0.1 ms, and reading sockets that much later does no harm
_SHORT = 0.0005
#: seconds that such an execution may take at most before its model is no longer executed by the loop: some
#: models' costs depend on their inputs, and meanwhile no deadline, cancellation or arrival is noticed
_DECEIVED = 0.02

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40


class Loop:
    """Serve the stubs of tritonserver `server_pid` that connect to `listener`."""

    def __init__(
        self,
        listener: socket.socket,
        server_pid: int,
        settings: Settings,
        scheduler: Scheduler,
        make_device: Callable[[], Device],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._started = clock()
        self._server_pid = server_pid
        #: the stubs that ever connected and still live, as far as known: pid -> pidfd
        self.stubs: dict[int, int] = {}
        self._serving = True
        self._board = Board()
        self._inbox = Inbox()
        self._transport = Transport(listener, self._greet, self._on_frame, self._on_close)
        self._transport.watch(self._inbox.fd, self._drain)
        self._registry = Registry(
            settings, scheduler, self._inbox, self._transport, self._feed, self._free, make_device
        )
        self._device_worker = Worker("device")
        self._staging = Staging()
        #: requests that are not answered yet, by global id
        self._pending: dict[int, Part] = {}
        self._arrived: list[ev.Request] = []
        self._answering: set[Connection] = set()
        #: a job too short to be worth a thread, and, when it has run, the message that it ended in
        self._short: Job | None = None
        self._ended: Callable[[], None] | None = None
        #: models that once took far longer on the loop than predicted, by key: never again on the loop
        self._deceptive: set[str] = set()

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        while self._serving:
            self.step()
        self._transport.close()

    def step(self) -> None:
        """Wait until something happens, and do all that follows from it."""
        wakeup = self._scheduler.next_wakeup()
        timeout = None if wakeup is None else max(0.0, wakeup - self._clock())
        self._transport.poll(0.0 if self._ended is not None else timeout)
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

    def stop(self) -> None:
        """From any thread: leave `run`, and end all connections as the process's end would."""
        self._inbox.post(self._stop)

    def _stop(self) -> None:
        self._serving = False

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

    def _drain(self) -> None:
        for message in self._inbox.drain():
            message()

    def _publish(self) -> None:
        """Tell the stubs when the device will have done everything that it has to do now."""
        now = self._clock()
        self._board.publish(int((now + self._scheduler.backlog_seconds(now)) * 1e9))

    def _answer(self) -> None:
        if self._answering:
            answering, self._answering = self._answering, set()
            for connection in answering:
                self._transport.guard(connection, connection.send_completions)

    # --- frames -------------------------------------------------------------------------------------------

    def _greet(self, connection: Connection) -> None:
        if connection.peer not in self.stubs:
            stub = open_stub(connection.peer, self._server_pid)
            if stub is not None:
                self.stubs[connection.peer] = stub
        greeting = {"magic": MAGIC, "version": PROTOCOL_VERSION, "pid": os.getpid()}
        connection.send(pack_json(Kind.WELCOME, greeting), (self._board.fd,))

    def _on_frame(
        self, connection: Connection, kind: Kind, count: int, frame: memoryview, fds: list[int]
    ) -> None:
        match kind:
            case Kind.SUBMIT:
                self._submit(connection, unpack_submissions(frame, count))
            case Kind.CANCEL:
                ids = tuple(_global_id(connection, id) for id in unpack_ids(frame, count))
                self._flush_arrivals()
                self._feed(ev.RequestsCancelled(ids))
            case Kind.SEGMENT:
                connection.add_segment(unpack_ids(frame, 1)[0], fds)
            case Kind.DROP_SEGMENT:
                for id in unpack_ids(frame, count):
                    connection.segments.pop(id, None)
            case Kind.REGISTER:
                self._registry.register(connection, unpack_json(frame))
            case Kind.STATUS:
                connection.send_document(Kind.STATUS_REPLY, self.status())
            case _:
                raise ProtocolError(f"{kind.name} is not for the runtime")

    def _on_close(self, connection: Connection) -> None:
        gone = tuple(id for id, part in self._pending.items() if part.connection is connection)
        if gone:
            self._flush_arrivals()
            self._feed(ev.RequestsCancelled(gone))
        self._registry.leave(connection)
        if all(other.peer != connection.peer for other in self._transport.connections):
            stub = self.stubs.pop(connection.peer, None)
            if stub is not None:
                os.close(stub)

    def _submit(self, connection: Connection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._registry.find(connection.model)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, variants = model.key, model.interface.variants
        for submission in submissions:
            request, deadline_ns, rows, index, priority, flags, segment_id, inputs_at, outputs_at = submission
            if index >= len(variants):
                raise ProtocolError(f"SUBMIT for variant {index} of {len(variants)}")
            segment = connection.segments.get(segment_id)
            if segment is None:
                raise ProtocolError(f"SUBMIT in unknown segment {segment_id}")
            variant, size = variants[index], len(segment)
            if (
                (inputs_at | outputs_at) % ALIGNMENT
                or inputs_at + variant.inputs.places(rows)[1] > size
                or outputs_at + variant.outputs.places(rows)[1] > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            id = _global_id(connection, request)
            if id in self._pending:
                raise ProtocolError(f"SUBMIT of request {request}, which is not answered yet")
            self._pending[id] = Part(connection, request, rows, segment, inputs_at, outputs_at)
            deadline = deadline_ns / 1e9 if deadline_ns else None
            committed = bool(flags & COMMITTED)
            self._arrived.append(ev.Request(id, key, index, rows, deadline, priority, committed))

    def status(self) -> dict[str, Any]:
        counts = self._registry.cache_counts
        snapshot = self._scheduler.snapshot()
        return {
            "pid": os.getpid(),
            "uptime_s": self._clock() - self._started,
            "connections": len(self._transport.connections),
            "compiled": counts.compiled,
            "from_cache": counts.from_cache,
            "models": {
                name: model_status(snapshot.models[key])
                for key, name in self._registry.names().items()
                if key in snapshot.models
            },
        }

    # --- the scheduler's events and instructions ----------------------------------------------------------

    def _flush_arrivals(self) -> None:
        """Before any other event: requests that came earlier must be known to the scheduler."""
        if self._arrived:
            requests, self._arrived = tuple(self._arrived), []
            self._feed(ev.RequestsArrived(requests))

    def _feed(self, event: ev.Event, finished: Job | None = None, seconds: float = 0.0) -> None:
        for instruction in self._scheduler.handle(event, self._clock()):
            match instruction:
                case ev.Finish():
                    self._finish(instruction, finished, seconds)
                case ev.Execute():
                    self._execute(instruction)
                case ev.LoadWeights(key, epoch):
                    self._registry.load(key, epoch)
                case ev.EvictWeights(key):
                    self._free(self._registry.get(key))
                case _:
                    assert_never(instruction)

    def _finish(self, finish: ev.Finish, job: Job | None, seconds: float) -> None:
        part = self._pending.pop(finish.request)
        connection = part.connection
        if connection.closed:
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
        model = self._registry.get(instruction.model)
        job = Job(
            instruction.dispatch,
            model,
            instruction.variant,
            instruction.size,
            instruction.rows,
            instruction.requests,
            tuple([self._pending[id] for id in instruction.requests]),
        )
        # While a model is built, its warm-up may hold the device for long: then only the thread may wait.
        short = (
            instruction.seconds <= _SHORT and model.key not in self._deceptive and not self._registry.builds
        )
        # And with several at a time the thread may be gathering into the same buffers.
        if short and self._scheduler.settings.depth == 1:
            self._short = job
        else:
            self._device_worker.put(lambda: self._inbox.post(self._run_job(job)))

    def _run_job(self, job: Job) -> Callable[[], None]:
        """Execute, on whichever thread; returns what the loop is to do about it."""
        device = self._registry.device
        assert device is not None
        seconds, error = 0.0, None
        try:
            seconds = execute(job, device, self._staging)
        except Exception as caught:
            log.exception("%s: execution failed", job.model.key)
            error = f"{type(caught).__name__}: {caught}"
        return lambda: self._executed(job, seconds, error)

    def _executed(self, job: Job, seconds: float, error: str | None) -> None:
        # Arrivals of this same moment first: the next execution should take them along.
        self._flush_arrivals()
        self._feed(ev.ExecutionFinished(job.dispatch, seconds, error), job, seconds)
        self._registry.let_go(job.model.key)

    def _free(self, model: Model) -> None:
        """Give a model's weights back; on the device's thread, after what it executes now."""
        weights, model.weights = model.weights, None
        self._staging.forget(model.key)
        self._deceptive.discard(model.key)
        device = self._registry.device
        if weights is not None and device is not None:
            self._device_worker.put(lambda: device.free(weights))


def _global_id(connection: Connection, id: int) -> int:
    if id >> _ID_BITS:
        raise ProtocolError(f"request id {id} has more than {_ID_BITS} bits")
    return connection.id << _ID_BITS | id


def _failure(finish: ev.Finish) -> tuple[Status, str]:
    """How a request ended, for its client: without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.SHED:
            return Status.DEADLINE, "the deadline cannot be met any more"
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

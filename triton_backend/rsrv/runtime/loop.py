"""The loop: the one thread that owns all mutable state of the runtime.

Frames from stubs and messages from worker threads come in, become events of the scheduler, and the
scheduler's instructions go out to the threads and back to the stubs. Nothing here blocks but the poll, and
executions that are shorter than handing them over would be (`executor`).
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, assert_never

from rsrv.runtime.blackbox import BlackBox
from rsrv.runtime.connection import Connection
from rsrv.runtime.device import Device
from rsrv.runtime.execution import AnyPart, CallPart, Job, Part
from rsrv.runtime.executor import Executor, Failure
from rsrv.runtime.orphans import open_stub
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.registry import Registry
from rsrv.runtime.runs import Run, Runs, find_sources, find_targets
from rsrv.runtime.scheduler import events as ev
from rsrv.runtime.scheduler.scheduler import Scheduler
from rsrv.runtime.status import memory_status, meta_status, model_status
from rsrv.runtime.transport import Transport
from rsrv.runtime.underway import Phase, Underway
from rsrv.runtime.workers import Inbox
from rsrv.settings import Settings, SettingsError, change_scheduler
from rsrv.wire.calls import (
    Call,
    Entrance,
    unpack_calls,
    unpack_entrances,
    unpack_leavings,
    unpack_releases,
)
from rsrv.wire.frames import (
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

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40
#: seconds; a deadline may be further away than epoll can wait
_LONGEST_WAIT = 3600.0
_NO_RUN = "the meta model's run that this call belongs to is over, or never was"


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
        blackbox: BlackBox | None = None,
    ) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._clock = clock
        self._started = clock()
        self._server_pid = server_pid
        #: the stubs that ever connected and still live, as far as known: pid -> pidfd
        self.stubs: dict[int, int] = {}
        self._serving = True
        self._board = Board()
        blackbox = blackbox or BlackBox()
        self.underway = Underway(blackbox.memory)
        self._inbox = Inbox()
        self._transport = Transport(listener, self._greet, self._on_frame, self._on_close)
        self._transport.watch(self._inbox.fd, self._drain)
        self._executor = Executor(self._inbox, self._executed, self.underway, clock)
        self._registry = Registry(
            settings,
            scheduler,
            self._inbox,
            self._transport,
            self._feed,
            self._executor.forget,
            make_device,
            lambda: self._decide_by(self._settings),
            self.underway,
            blackbox.deaths,
        )
        #: requests that are not answered yet, those of runs of meta models to be let in among them, by global id
        self._pending: dict[int, AnyPart | Run] = {}
        self._runs = Runs(self._feed, lambda request: self._arrived.append(request), self._done)
        self._arrived: list[ev.Request] = []
        self._answering: set[Connection] = set()

    @property
    def launcher(self) -> int | None:
        """From any thread: the device's."""
        return None if self._registry.device is None else self._registry.device.launcher

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        while self._serving:
            self.step()
        self._transport.close()

    def step(self) -> None:
        """Wait until something happens, and do all that follows from it."""
        wakeup = self._scheduler.next_wakeup()
        timeout = None if wakeup is None else min(max(0.0, wakeup - self._clock()), _LONGEST_WAIT)
        self.underway.round.end()
        self._transport.poll(0.0 if self._executor.has_ended else timeout)
        self.underway.round.begin(Phase.LOOPING, "")
        self._flush_arrivals()
        # After the arrivals: what came while this one executed may share the next execution.
        told = self._executor.tell()
        if not told and wakeup is not None and self._clock() >= wakeup:
            self._feed(ev.Tick())
        self._answer()
        job = self._executor.run_short()
        if job is not None and len(self._pending) == len(job.requests):
            # Nobody waits for the next execution: the answers need not wait for a look at the sockets.
            self._executor.tell()
            self._answer()
        self._publish()

    def stop(self) -> None:
        """From any thread: leave `run`, and end all connections as the process's end would."""
        self._inbox.post(self._stop)

    def _stop(self) -> None:
        self._serving = False

    def clear(self) -> None:
        """From any thread, as the process's last act: remove what would outlive it, weights in shared memory."""
        if self._registry.tiers is not None:
            self._registry.tiers.host.close()

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
                for id in ids:
                    waiting = self._pending.get(id)
                    if isinstance(waiting, Run):
                        self._runs.leave(waiting, Status.CANCELLED)
                self._feed(ev.RequestsCancelled(ids))
            case Kind.CALL:
                for call in unpack_calls(frame, count):
                    self._call(connection, call)
            case Kind.ENTER:
                self._enter(connection, unpack_entrances(frame, count))
            case Kind.LEAVE:
                self._flush_arrivals()
                for token, status in unpack_leavings(frame, count):
                    run = self._runs.of(connection, token)
                    if run is not None:
                        self._runs.leave(run, status)
            case Kind.RELEASE:
                for token, number in unpack_releases(frame, count):
                    run = self._runs.of(connection, token)
                    if run is not None:
                        run.kept.pop(number, None)
            case Kind.SEGMENT:
                connection.add_segment(unpack_ids(frame, 1)[0], fds)
            case Kind.DROP_SEGMENT:
                for id in unpack_ids(frame, count):
                    connection.segments.pop(id, None)
            case Kind.REGISTER:
                self._registry.register(connection, unpack_json(frame))
            case Kind.STATUS:
                connection.send_document(Kind.STATUS_REPLY, self.status())
            case Kind.CONFIGURE:
                connection.send(pack_json(Kind.CONFIGURED, self._configure(unpack_json(frame))))
            case Kind.COMMAND:
                connection.send(pack_json(Kind.COMMANDED, self._command(unpack_json(frame))))
            case _:
                raise ProtocolError(f"{kind.name} is not for the runtime")

    def _on_close(self, connection: Connection) -> None:
        gone = tuple(id for id, part in self._pending.items() if part.connection is connection)
        if gone:
            self._flush_arrivals()
            self._feed(ev.RequestsCancelled(gone))
        if self._runs:
            self._runs.closed(connection)
        self._registry.leave(connection)
        if all(other.peer != connection.peer for other in self._transport.connections):
            stub = self.stubs.pop(connection.peer, None)
            if stub is not None:
                os.close(stub)

    def _submit(self, connection: Connection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._registry.find(connection)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, variants = model.key, model.interface.variants
        for submission in submissions:
            request, deadline_ns, rows, index, priority, segment_id, inputs_at, outputs_at, token = submission
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
            id = self._new_id(connection, request)
            deadline = deadline_ns / 1e9 if deadline_ns else None
            run = None
            self._pending[id] = part = Part(connection, request, rows, segment, inputs_at, outputs_at)
            if token:
                run = part.run = self._runs.find(token, model.name)
                if run is None:
                    self._done(id, Status.NOT_FOUND, _NO_RUN)
                    continue
                deadline = run.deadline if deadline is None else min(deadline, run.deadline or inf)
            self._arrived.append(
                ev.Request(id, key, index, rows, deadline, priority, 0 if run is None else run.id)
            )

    # --- meta models --------------------------------------------------------------------------------------

    def _enter(self, connection: Connection, entrances: Sequence[Entrance]) -> None:
        group = connection.group
        if group is None or not self._registry.ready(group):
            raise ProtocolError("ENTER before REGISTERED")
        of_model = self._settings.for_model(group.name)
        limit = of_model.max_queue_depth or self._settings.scheduler.max_queue_depth
        runs = []
        for entrance in entrances:
            asking = self._new_id(connection, entrance.request)
            run = self._pending[asking] = self._runs.enter(connection, group, entrance, asking)
            runs.append(run)
        self._flush_arrivals()
        asked = tuple(ev.Run(run.id, run.group.name, run.deadline, run.priority, limit) for run in runs)
        self._feed(ev.RunsAsked(asked))

    def _call(self, connection: Connection, call: Call) -> None:
        run = self._runs.of(connection, call.run)
        if run is None:
            # It was not let in, which its stub has been told by now.
            self._answer_with(connection, Completion(call.request, Status.NOT_FOUND, text=_NO_RUN))
            return
        if call.callee >= len(run.group.models):
            raise ProtocolError(f"CALL of model {call.callee} of {len(run.group.models)}")
        model = self._registry.get(run.group.models[call.callee])
        if call.variant >= len(model.interface.variants):
            raise ProtocolError(f"CALL for variant {call.variant} of {len(model.interface.variants)}")
        variant = model.interface.variants[call.variant]
        sources = find_sources(run, connection, call, variant.inputs)
        targets, keep = find_targets(run, connection, call, variant.outputs)
        id = self._new_id(connection, call.request)
        self._pending[id] = CallPart(connection, call.request, call.rows, run, sources, targets, keep)
        limit = self._registry.kept_limit
        if keep:
            promised = {
                number: variant.outputs.tensors[index].nbytes(call.rows) for index, number in keep.items()
            }
            held, more = self._runs.kept_bytes, sum(promised.values())
            if limit is not None and held + more > limit:
                text = (
                    f"running meta models keep {held} bytes on the device, {limit} may be, and {more} more are "
                    "wanted; try again later, or keep less at a time"
                )
                self._done(id, Status.QUEUE_FULL, text)
                return
            run.promised |= promised
        request = ev.Request(id, model.key, call.variant, call.rows, run.deadline, run.priority, run.id)
        self._runs.call(run, request)

    def _done(self, id: int, status: Status, text: str) -> None:
        """Answer a request that was not executed, or tell a run how its asking ended."""
        part = self._pending.pop(id)
        if isinstance(part, CallPart):
            part.give_up()
        self._answer_with(part.connection, Completion(part.request, status, text=text))

    def _answer_with(self, connection: Connection, done: Completion) -> None:
        if not connection.closed:
            connection.completions.append(done)
            self._answering.add(connection)

    def _new_id(self, connection: Connection, request: int) -> int:
        id = _global_id(connection, request)
        if id in self._pending:
            raise ProtocolError(f"request {request} is there already, and not answered yet")
        return id

    def status(self) -> dict[str, Any]:
        counts = self._registry.cache_counts
        snapshot = self._scheduler.snapshot()
        return {
            "pid": os.getpid(),
            "uptime_s": self._clock() - self._started,
            "connections": len(self._transport.connections),
            "compiled": counts.compiled,
            "from_cache": counts.from_cache,
            "shared": counts.shared,
            "memory": memory_status(snapshot, self._registry.tiers, self._registry.device),
            "models": {
                model.name: model_status(snapshot.models[model.key], model.residency)
                for model in self._registry.models()
                if model.key in snapshot.models
            },
            "metas": {
                group.name: meta_status(group, self._runs, self._registry.names)
                for group in self._registry.metas()
            },
        }

    # --- how to decide ------------------------------------------------------------------------------------

    def _configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change the scheduler's section; returns what holds now, or what is wrong with it."""
        try:
            settings = change_scheduler(self._settings, changes)
        except SettingsError as error:
            return {"error": str(error)[:4000]}
        self._decide_by(settings)
        return {**self._settings.scheduler.model_dump(mode="json"), "depth": self._scheduler.settings.depth}

    def _command(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what an operator wants; returns what is wrong with it, if anything."""
        match command:
            case {"command": "compact", **rest} if not rest:
                self._flush_arrivals()
                self._feed(ev.Compact())
                return {}
            case {"command": "residency", "model": str(name), "residency": str(residency), **rest} if (
                not rest
            ):
                self._flush_arrivals()
                try:
                    self._registry.set_residency(name, residency)
                except SettingsError as error:
                    return {"error": str(error)[:4000]}
                return {}
        return {
            "error": 'commands are {"command": "compact"} and {"command": "residency", "model", "residency"}'
        }

    def _decide_by(self, settings: Settings) -> None:
        """Called once more when there is a device, and other models: some of it depends on what these are."""
        device = self._registry.device
        wanted = scheduler_settings(settings, asynchronous=device is not None and device.asynchronous)
        wanted = replace(wanted, weight_budget_bytes=self._registry.solve_budget(wanted.depth).pool)
        if wanted != self._scheduler.settings:
            self._flush_arrivals()
            self._feed(ev.SettingsChanged(wanted))
        self._settings = settings

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
                case ev.EvictWeights(key, _, heir):
                    self._registry.evict(key, heir)
                case ev.AbandonLoad(_, epoch):
                    self._registry.abandon(epoch)
                case ev.WarmUp(key, again):
                    self._when_moved(partial(self._registry.warm_up, key, again=again), again)
                case ev.GiveUp(key, error):
                    self._registry.give_up(key, error)
                case ev.Admit(run):
                    self._runs.admit(run)
                case _:
                    assert_never(instruction)
        # What runs that were let in have waited to call.
        self._flush_arrivals()

    def _finish(self, finish: ev.Finish, job: Job | None, seconds: float) -> None:
        if finish.outcome is ev.Outcome.ANSWERED:
            assert job is not None
            part = self._pending.pop(finish.request)
            self._answer_with(
                part.connection, Completion(part.request, Status.OK, job.size, job.rows, int(seconds * 1e9))
            )
            return
        status, text = _failure(finish)
        run = self._runs.get(finish.request)
        if run is not None:
            self._runs.refuse(run, status, text)
        else:
            self._done(finish.request, status, text)

    def _execute(self, instruction: ev.Execute) -> None:
        device = self._registry.device
        assert device is not None
        parts: Any = tuple([self._pending[id] for id in instruction.requests])
        job = Job(
            instruction.dispatch,
            self._registry.get(instruction.model),
            instruction.variant,
            instruction.size,
            instruction.rows,
            instruction.requests,
            parts,
            calls=any(isinstance(part, CallPart) for part in parts),
        )
        start = partial(
            self._executor.start,
            job,
            device,
            seconds=instruction.seconds,
            depth=self._scheduler.settings.depth,
            # While a model is built, its warm-up may hold the device for long.
            contended=self._registry.builds > 0 or job.merges,
        )
        self._when_moved(start, instruction.again)

    def _when_moved(self, start: Callable[[], None], again: bool) -> None:
        """Start something at once, or, if it is tried again, when it has the memory of those evicted for it."""
        if again:
            self._registry.when_moved(start)
        else:
            start()

    def _executed(self, job: Job, seconds: float, failure: Failure | None) -> None:
        # Arrivals of this same moment first: the next execution should take them along.
        self._flush_arrivals()
        error, out_of_memory = failure or (None, False)
        for part in job.parts if self._runs else ():
            if part.run is not None:
                part.run.account(seconds * part.rows / max(1, job.rows))
            if isinstance(part, CallPart):
                part.settle(well=failure is None)
        self._feed(ev.ExecutionFinished(job.dispatch, seconds, error, out_of_memory), job, seconds)
        self._registry.let_go(job.model.key)


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
            after = "later" if finish.retry_after is None else f"after {finish.retry_after * 1e3:.0f} ms"
            return Status.QUEUE_FULL, f"too many requests wait for this model; retry {after}"
        case ev.Reason.TOO_MANY_ROWS:
            return Status.INVALID, "the request has more rows than the model's largest batch"
        case ev.Reason.UNKNOWN_VARIANT:
            return Status.INVALID, "no module is compiled for this input shape"
        case _:
            return Status.NOT_FOUND, "the model is not loaded"

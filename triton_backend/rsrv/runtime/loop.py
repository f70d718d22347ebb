"""The loop: the one thread that owns all mutable state of the runtime.

Stubs send frames, and threads post messages when their work ends. The parts of the runtime turn both into events of the
scheduler, in one outbox. Only `Loop._handle` passes events to the scheduler; the parts may only query it. The scheduler's
instructions go to the threads and to the stubs. Nothing here blocks except the poll and short executions (`executor`).
"""

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple, assert_never

from rsrv.runtime.activity import Activity
from rsrv.runtime.call_execution import CallDispatch, CallSlice
from rsrv.runtime.catalog import Catalog, StateFeed
from rsrv.runtime.child_processes import Stub, open_stub
from rsrv.runtime.commands import Commands, NextPrepared, ProfileChanged
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Device
from rsrv.runtime.execution import Dispatch
from rsrv.runtime.executor import ExecutionEnded, Executor
from rsrv.runtime.handover import HandedModel, Handover
from rsrv.runtime.meta_requests import MetaRequests
from rsrv.runtime.model_builder import (
    BundlesRead,
    DeviceReady,
    ModelBuilder,
    ModelCompiled,
    ModelWarmedUp,
    ModuleCompiled,
    ModulesRead,
    StepEnded,
)
from rsrv.runtime.policy import Policy, scheduler_settings
from rsrv.runtime.records import Records
from rsrv.runtime.registry import Registry
from rsrv.runtime.reports import Reports
from rsrv.runtime.requests import Requests
from rsrv.runtime.spare import Successor
from rsrv.runtime.start_queue import Demand
from rsrv.runtime.stateful_requests import StatefulRequests
from rsrv.runtime.threads import Inbox
from rsrv.runtime.timeline import Timeline, Traces
from rsrv.runtime.timers import Timers
from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.runtime.unanswered import UnansweredRequests
from rsrv.runtime.weight_manager import Outbox, WeightManager
from rsrv.runtime.weight_mover import HostMemoryMeasured, LoadEnded, MemoryFreed, ReadEnded
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler
from rsrv.settings import Settings
from rsrv.wire.blackbox import Phase
from rsrv.wire.frames import (
    MAGIC,
    PROTOCOL_VERSION,
    Kind,
    ProtocolError,
    pack_json,
    unpack_ids,
    unpack_json,
    unpack_submissions,
)
from rsrv.wire.memory import BEAT_S, Board, SharedMemoryError, read_document
from rsrv.wire.paths import start_time
from rsrv.wire.traces import read_spans, unpack_marks
from rsrv_bundle.inspection import Inspector

#: Maximum timeout, because a deadline may be further away than epoll can wait.
_MAX_WAIT_S = 3600.0
#: Seconds from a change of the models on the device until the note for the next runtime is written. The first note is written
#: later: if this runtime dies before its models have returned, the previous note still lists all of them.
_HANDOVER_S, _FIRST_HANDOVER_S = 5.0, 30.0


class ServerProcess(NamedTuple):
    """The tritonserver whose models the runtime executes."""

    pid: int
    #: Number of the server's devices. Each has a runtime, and stubs register with all of them.
    devices: int = 1


class Loop:
    """Serves the stubs of `server` that connect to `listener`."""

    def __init__(
        self,
        listener: socket.socket,
        server: ServerProcess,
        settings: Settings,
        make_device: Callable[[], Device],
        blackbox: BlackBox | None = None,
        inspector: Inspector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._started = self._clock()
        #: Time when the last request ended. The device sleeps `runtime.idle.server` seconds later.
        self._last_request_ended = self._started
        self._timers = Timers()
        self._timers.set(self._sleep_if_idle, -inf)
        self._server = server
        self._traced = settings.traced
        self._serving = True
        #: Stubs with a connection, by pid. After the server's end, stubs that have ended stay here.
        self.stubs: dict[int, Stub] = {}
        self._board = Board()
        self._blackbox = blackbox = blackbox or BlackBox()
        self.activity = Activity(blackbox.memory)
        self._inbox = Inbox()
        #: Events for the scheduler, in order.
        self._outbox: Outbox = deque()
        self._passing_on = False
        #: End of an execution that the loop ran in the previous round. The scheduler gets it after the arrivals of this round.
        self._ended: ExecutionEnded | None = None
        self._scheduler = Scheduler(scheduler_settings(settings))
        self._transport = Transport(listener, self._greet, self._on_frame, self._on_close)
        self._transport.watch(self._inbox.fd, self._drain)
        self._executor = Executor(self._inbox, self.activity, self._clock)
        self._catalog = Catalog(Policy(settings), StateFeed(self._transport), self._clock)
        self._builder = ModelBuilder(make_device, settings, self._inbox, self.activity, blackbox, inspector)
        self._weights = WeightManager(self._catalog, self._scheduler, self._outbox, server.devices)
        self._registry = Registry(
            self._catalog,
            self._weights,
            self._builder,
            self._scheduler,
            self._transport,
            self._outbox,
            self._timers,
            self._clock,
        )
        self._timeline = Timeline()
        self._traces = Traces(self._timeline)
        #: Unanswered requests of all kinds.
        self.unanswered = UnansweredRequests(self._transport, self._traces)
        self._meta = MetaRequests(self.unanswered, self._catalog, self._weights, self._traces, self._outbox)
        #: Sequences and generations in progress.
        self.stateful = StatefulRequests(
            self.unanswered, self._catalog, self._traces, self._outbox, self._clock, self._timers
        )
        self._requests = Requests(
            self.unanswered, self.stateful, self._meta, self._catalog, self._traces, self._outbox
        )
        records = Records(
            self._registry,
            self._scheduler,
            self._meta.runs,
            self.stateful,
            self._executor.bans,
            self._clock,
        )
        self._reports = Reports(self._catalog, records, self._scheduler, self._traces, self._clock)
        self._commands = Commands(
            self._registry,
            self.unanswered,
            self._requests,
            self.stateful,
            self._reports,
            self._transport,
            self._inbox,
            self._outbox,
        )

    def inherit(self, handover: Handover, *, slept: bool) -> None:
        """Take over the models of the previous runtime. Call this before `run`.

        After a crash, the stubs register these models again. If the device `slept`, stubs connect only for models with
        requests, so this method starts all of the models.
        """
        self._registry.handover = handover
        for model in (handover.before or ()) if slept else ():
            self._registry.start(model.name, model.bundle, Demand())

    def _hand_over(self, *, whole: bool) -> list[HandedModel]:
        """Return the models for the next runtime.

        `whole`: include starting models, and models without weights on the device.
        """
        models = [
            HandedModel(entry.key, entry.name, str(entry.model.bundle.path), entry.weights == "resident")
            for entry in self._catalog.entries.values()
            if entry.model is not None and not entry.ending and (whole or entry.weights == "resident")
        ]
        handover = self._registry.handover
        if whole:
            starting, returned = self._registry.starting(), {model.key for model in models}
            before = handover.before or ()
            models += [model for model in before if model.name in starting and model.key not in returned]
        place, last_arrival = handover.place, self._scheduler.last_arrival
        # Models without a request since the start keep their earlier order.
        return sorted(models, key=lambda model: (-last_arrival(model.key), place(model.key)))

    def have_successor(self, successor: Successor) -> None:
        """Set the process that becomes the next runtime after a planned restart. It is prepared first."""
        self._commands.successor = successor

    @property
    def sleeps(self) -> bool:
        """True if the runtime has ended to put its device to sleep."""
        return self._commands.sleeps

    @property
    def launcher(self) -> int | None:
        """Thread in which the device executes, if it is synchronous. None: unknown, or no device. May be read on any thread."""
        return None if self._weights.device is None else self._weights.device.launcher

    @property
    def building(self) -> bool:
        """True if a model is being built, or the device is missing. May be read on any thread."""
        return self._weights.device is None or bool(self._catalog.building)

    # --- rounds -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop` is called, an operator restarts the runtime, or the device goes to sleep."""
        while self._serving:
            self.step()
        self._transport.close()

    def step(self) -> None:
        """Report to the stubs how busy the device is, wait until something happens, and handle it completely."""
        unanswered, executor, scheduler, clock = self.unanswered, self._executor, self._scheduler, self._clock
        # Use the time before the wait. Actions that fall due during the wait run in the next round, which does not
        # wait.
        now, due, wakeup = clock(), self._timers.next(), scheduler.next_wakeup()
        ahead = scheduler.seconds_until_idle(now)
        self._board.publish(int((now + (ahead or 0.0)) * 1e9), busy=ahead is not None)
        if self._server.devices > 1:
            self._board.publish_admission(int(scheduler.admission_seconds() * 1e9))
        if self._ended is not None or executor.short is not None or unanswered.answering:
            # Connections that ended late in the previous round may have caused answers that are not sent yet.
            timeout = 0.0
        else:
            # While the device is free, publish every BEAT_S: with several devices, stubs regard a runtime with an
            # old beat as stopped.
            timeout = BEAT_S if self._server.devices > 1 and ahead is None else _MAX_WAIT_S
            timeout = min(max(0.0, (due if wakeup is None else min(due, wakeup)) - now), timeout)
        self.activity.round.end()
        ready = self._transport.wait(timeout)
        self.activity.round.begin(Phase.LOOPING, "")
        self._transport.handle(ready)
        if due <= now:
            self._timers.call(now)
        if unanswered.arrived:
            self._pass_on()
        # Handle the end of an execution after the arrivals, so that requests that arrived during it may share the next one.
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._executed(ended)
        elif wakeup is not None and clock() >= wakeup:
            self._outbox.append(ev.Tick())
            self._pass_on()
        if unanswered.answering:
            unanswered.send_answers()
        if executor.short is not None:
            ended = executor.run_short()
            if len(unanswered.pending) == len(ended.dispatch.execute.requests):
                # No other request waits, so send the answers before the sockets are read again.
                self._executed(ended)
                unanswered.send_answers()
            else:
                self._ended = ended
        if self._catalog.feed.unsent:
            self._catalog.feed.flush()
        if self._catalog.moves:
            soon = max(now + _HANDOVER_S, self._started + _FIRST_HANDOVER_S)
            self._timers.advance(self._write_handover, soon)
        while self._catalog.moves:
            key = self._catalog.moves.pop()
            self._board.publish_load(self._catalog.entries[key].slot, int(scheduler.load_seconds(key) * 1e9))
        if self._commands.ends:
            if self.sleeps:
                self._blackbox.fall_asleep()
            self._registry.handover.write(self._hand_over(whole=True), wait=True)
            unanswered.send_answers()
            self._transport.settle()
            self._stop()

    # --- timers -------------------------------------------------------------------------------------------

    def _measure(self, now: float) -> float:
        return self._weights.copies.measure(now, self.stateful.host_bytes())

    def _write_handover(self, now: float) -> float:
        self._registry.handover.write(self._hand_over(whole=False))
        return inf

    def _sleep_if_idle(self, now: float) -> float:
        """Let the device sleep if no request has ended for `runtime.idle.server`, and nothing is under way.

        Return the time of the next check.
        """
        sleeps_after = self._catalog.policy.settings.runtime.idle.server
        if now - self._last_request_ended >= sleeps_after:
            self._last_request_ended = now
            if not (self.unanswered.pending or self.stateful.sequences or self.building):
                self._commands.fall_asleep()
        return self._last_request_ended + sleeps_after

    # --- the end ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Make `run` return, and end all connections as the end of the process would. May be called on any thread."""
        self._inbox.post(self._stop)

    def _stop(self) -> None:
        self._serving = False

    def end(self, *, leave: bool) -> None:
        """Leave the weights in shared memory to the next runtime, or remove them. Call this last, on any thread."""
        self._weights.end(leave=leave)

    # --- messages of threads ------------------------------------------------------------------------------

    def _drain(self) -> None:
        for message in self._inbox.drain():
            self._take(message)
            self._pass_on()

    def _take(self, message: Any) -> None:
        match message:
            case ExecutionEnded():
                self._executed(message)
            case LoadEnded():
                self._weights.load_ended(message)
            case ReadEnded():
                self._weights.read_ended(message)
            case MemoryFreed(instruction):
                self._start(instruction, freed=True)
            case HostMemoryMeasured():
                now = self._clock()
                lacking = self._weights.measured(message, now)
                copies = self._weights.copies
                shortage = copies.shortage
                relieved = shortage is not None and self._registry.relieve(shortage, now)
                # If models fall back because memory is short, they free memory, so keep the state for now. If they fall back
                # because mappings are scarce, they free hardly any memory.
                if not (relieved and copies.is_short):
                    self.stateful.drop_states(lacking)
            case DeviceReady():
                self._weights.device_ready(message)
                self._timers.set(self._measure, -inf)
            case BundlesRead():
                self._registry.bundles_read(message)
            case ModulesRead():
                self._registry.modules_read(message)
            case ModuleCompiled():
                self._registry.module_compiled(message)
            case StepEnded():
                self._builder.step_ended(message)
                self._registry.tell_places(self._clock())
            case ModelCompiled():
                self._registry.compiled(message)
            case ModelWarmedUp():
                self._registry.warmed_up(message)
            case ProfileChanged():
                self._commands.profile_changed(message)
            case NextPrepared():
                self._commands.next_prepared(message)
            case _:  # The message is an action, such as the one that `stop` posts.
                message()

    # --- frames of connections ----------------------------------------------------------------------------

    def _greet(self, connection: PeerConnection) -> None:
        if connection.peer not in self.stubs:
            stub = open_stub(connection.peer, self._server.pid)
            if stub is not None:
                self.stubs[connection.peer] = stub
        greeting = {
            "magic": MAGIC,
            "version": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "devices": self._server.devices,
        }
        connection.send(pack_json(Kind.WELCOME, greeting, self._server.devices), (self._board.fd,))

    def _on_frame(
        self, connection: PeerConnection, kind: Kind, count: int, frame: memoryview, fds: list[int]
    ) -> None:
        match kind:
            case Kind.SUBMIT:
                self._requests.submit(connection, unpack_submissions(frame, count))
                return  # All requests that arrive in one round are passed to the scheduler in one event.
            case Kind.CANCEL:
                self._requests.cancel(connection, unpack_ids(frame, count))
            case Kind.SEGMENT:
                connection.add_segment(unpack_ids(frame, 1)[0], fds)
            case Kind.DROP_SEGMENT:
                for id in unpack_ids(frame, count):
                    connection.segments.pop(id, None)
            case Kind.REGISTER:
                self._registry.register(connection, unpack_json(frame))
            case Kind.DEMAND:
                self._registry.change_demand(connection, unpack_json(frame))
            case Kind.GENERATE:
                self.stateful.generate(connection, unpack_json(frame))
            case Kind.CALL | Kind.ENTER | Kind.LEAVE | Kind.RELEASE:
                self._meta.take_frame(connection, kind, count, frame)
            case _:
                self._on_other_frame(connection, kind, count, frame, fds)
        if self._outbox or self._commands.unanswered:
            self._pass_on()

    def _on_other_frame(
        self, connection: PeerConnection, kind: Kind, count: int, frame: memoryview, fds: list[int]
    ) -> None:
        """Handle a frame of an operator or of an observer, or a report of a stub."""
        match kind:
            case Kind.STATUS:
                since = unpack_json(frame).get("since", 0)
                if not isinstance(since, int):
                    raise ProtocolError("STATUS with an invalid number")
                connection.send_document(Kind.STATUS_REPLY, self._commands.record(since).SerializeToString())
            case Kind.COMMAND:
                self._commands.take(connection, _read_command(frame, fds))
            case Kind.REPORT:
                self._report(connection, unpack_json(frame))
            case Kind.TRACE:
                if self._traced:
                    connection.mark(unpack_marks(frame, count))
            case Kind.SPANS:
                if connection.group is None:
                    raise ProtocolError("SPANS before REGISTERED")
                self._traces.report(*read_spans(unpack_json(frame)))
            case Kind.WATCH:
                self._catalog.feed.watch(connection)
            case _:
                raise ProtocolError(f"{kind.name} is not for the runtime")

    def _on_close(self, connection: PeerConnection) -> None:
        self._catalog.feed.leave(connection)
        self._commands.leave(connection)
        self._requests.closed(connection)
        self._registry.leave(connection)
        last = all(open_connection.peer != connection.peer for open_connection in self._transport.connections)
        if last and connection.peer in self.stubs and start_time(self._server.pid):
            os.close(self.stubs.pop(connection.peer).pidfd)
        self._pass_on()

    def _report(self, connection: PeerConnection, report: dict[str, Any]) -> None:
        group = connection.group
        if group is None or not self._catalog.ready(group):
            raise ProtocolError("REPORT before REGISTERED")
        self._reports.take(group, report)
        connection.note_import(report.get("importing"), self._clock())
        connection.send(pack_json(Kind.REPORTED, {}))

    # --- events and instructions of the scheduler ---------------------------------------------------------

    def _pass_on(self) -> None:
        """Pass all arrivals and events to the scheduler, and carry out its instructions, until there is nothing left.

        Arrivals come first, because an event must find the requests that arrived before it.
        """
        if self._passing_on:
            return  # An instruction has closed a connection. The outer call passes on the connection's events.
        self._passing_on = True
        try:
            while True:
                if self.unanswered.arrived:
                    arrived, self.unanswered.arrived = self.unanswered.arrived, []
                    self._handle(ev.RequestsArrived(tuple(arrived)))
                elif self._outbox:
                    self._handle(self._outbox.popleft())
                elif self._catalog.ending and (released := self._registry.release()):
                    for key in released:
                        self._executor.forget(key)
                        self.stateful.forget(key)
                else:
                    break
        finally:
            self._passing_on = False
        if self._commands.unanswered:
            # A client of the control service reads the models' states as soon as its command is answered, so send them first.
            self._catalog.feed.flush()
            self._commands.answer()
            # A command may have changed `runtime.idle.server`.
            self._timers.set(self._sleep_if_idle, -inf)

    def _executed(self, ended: ExecutionEnded) -> None:
        if self._outbox or self.unanswered.arrived:
            # Arrivals of the same moment come first, because the next execution should include them.
            self._pass_on()
        error = ended.error
        if self._meta.runs.by_token:
            self._meta.executed(ended)
        if ended.dispatch.model.pool is not None and (lost := self.stateful.executed(ended)):
            error = f"{error}; the state of {lost} sequences of the model was lost"
        if self._outbox or self.unanswered.arrived:
            # Do this before the next execution is chosen. The next steps of the model's generations should share it, and
            # requests of lost sequences must not execute.
            self._pass_on()
        self._passing_on = True
        try:
            number = ended.dispatch.execute.number
            event = ev.ExecutionFinished(number, ended.seconds, error, ended.out_of_memory)
            self._handle(event, ended)
        finally:
            self._passing_on = False
        self._pass_on()

    def _handle(self, event: ev.Event, ended: ExecutionEnded | None = None) -> None:
        """Pass one event to the scheduler, and carry out its instructions. `ended` is given only with `ExecutionFinished`."""
        now = self._clock()
        instructions = self._scheduler.handle(event, now)
        span = self._timeline.happened(event, now)
        traces = self._traces if self._traces.live else None
        if traces is not None:
            traces.happened(event, span, now)
        for instruction in instructions:
            match instruction:
                case ev.Finish():
                    self._last_request_ended = now
                    if traces is not None:
                        traces.finished(instruction, now)
                    if instruction.outcome is ev.Outcome.ANSWERED:
                        assert ended is not None
                        self.unanswered.answer(instruction, ended)
                    else:
                        self._requests.fail(instruction)
                case ev.Execute():
                    if traces is not None:
                        traces.executes(instruction, now)
                    self._timeline.begins(instruction, now)
                    self._start(instruction)
                case ev.WarmUp():
                    self._timeline.begins(instruction, now)
                    self._start(instruction)
                case ev.ReadWeights():
                    self._weights.read(instruction)
                case ev.LoadWeights():
                    self._timeline.begins(instruction, now)
                    self._weights.load(instruction)
                case ev.EvictWeights():
                    self._timeline.begins(instruction, now)
                    self._weights.evict(instruction)
                case ev.AbandonLoad():
                    self._weights.abandon(instruction)
                case ev.GiveUp():
                    self._registry.give_up(instruction)
                case ev.Admit():
                    self._meta.admit(instruction)
                case ev.WoundDown():
                    self._commands.wound_down(instruction)
                case _:
                    assert_never(instruction)

    def _start(self, instruction: ev.Execute | ev.WarmUp, *, freed: bool = False) -> None:
        """Start an execution or a warm-up. A retry first waits until the memory of evicted weights is free.

        `freed`: True if this memory is free.
        """
        if instruction.again and not freed:
            self._weights.retry_when_freed(instruction)
            return
        if isinstance(instruction, ev.WarmUp):
            self._registry.warm_up(instruction)
            return
        device = self._weights.device
        assert device is not None
        model = self._catalog.get(instruction.model)
        slices = self.unanswered.slices(instruction.requests)
        variant = model.interface.variants[instruction.variant]
        dispatch: Dispatch
        if model.pool is not None:
            dispatch = self.stateful.dispatch(instruction, model, slices)
        elif CallSlice in map(type, slices):
            dispatch = CallDispatch(instruction, model, variant, slices)
        else:
            dispatch = Dispatch(instruction, model, variant, slices)
        if instruction.exclusive:
            # This execution may end the process. Requests that executed before it must get their answers first.
            self.unanswered.send_answers()
        self._executor.start(
            dispatch,
            device,
            depth=self._scheduler.settings.depth,
            # While a model is built, its warm-up may hold the device for long.
            contended=bool(self._catalog.building) or dispatch.compiles,
        )


def _read_command(frame: memoryview, fds: list[int]) -> dict[str, Any]:
    """Return a command. A command that is larger than a frame, such as a desired document, arrives in a memfd."""
    try:
        return read_document(fds[0]) if fds else unpack_json(frame)
    except SharedMemoryError as error:
        raise ProtocolError(str(error)) from None

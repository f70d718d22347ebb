"""The loop: the one thread that owns all mutable state of the runtime.

Frames from stubs and messages from worker threads come in, become events of the scheduler, and the
scheduler's instructions go out to the threads and back to the stubs. Nothing here blocks but the poll, and
executions that are shorter than handing them over would be (`executor`).
"""

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

from rsrv.runtime.activity import Activity, Phase
from rsrv.runtime.child_processes import open_stub
from rsrv.runtime.commands import Commands
from rsrv.runtime.crash_history import BlackBox
from rsrv.runtime.device import Device
from rsrv.runtime.executor import CallSlice, Executor, Failure, Job
from rsrv.runtime.metrics import StubMetrics, figures
from rsrv.runtime.registry import Registry
from rsrv.runtime.requests import Requests
from rsrv.runtime.state_feed import StateFeed
from rsrv.runtime.status import status
from rsrv.runtime.threads import Inbox
from rsrv.runtime.timeline import Timeline, Traces
from rsrv.runtime.transport import Connection, Transport
from rsrv.scheduler import events as ev
from rsrv.scheduler.scheduler import Scheduler
from rsrv.settings import Settings
from rsrv.wire.calls import unpack_calls, unpack_entrances, unpack_leavings, unpack_releases
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
from rsrv.wire.memory import Board
from rsrv.wire.traces import read_spans, unpack_marks
from rsrv_bundle.inspection import Inspector

#: seconds; a deadline may be further away than epoll can wait
_LONGEST_WAIT = 3600.0


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
        inspector: Inspector | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._started = clock()
        self._server_pid = server_pid
        #: the stubs that ever connected and still live, as far as known: pid -> pidfd
        self.stubs: dict[int, int] = {}
        self._serving = True
        self._board = Board()
        blackbox = blackbox or BlackBox()
        self.activity = Activity(blackbox.memory)
        self._inbox = Inbox()
        self._transport = Transport(listener, self._greet, self._on_frame, self._on_close)
        self._transport.watch(self._inbox.fd, self._drain)
        self._executor = Executor(self._inbox, self._executed, self.activity, clock)
        self._state_feed = StateFeed(self._transport)
        self._registry = Registry(
            settings,
            scheduler,
            self._inbox,
            self._transport,
            self._state_feed,
            self._feed,
            self._executor.forget,
            make_device,
            self.activity,
            blackbox.deaths,
            inspector,
        )
        self._catalog, self._placement = self._registry.catalog, self._registry.placement
        self._timeline = Timeline()
        self._traces = Traces(self._timeline)
        self._traced = settings.traced
        self._requests = Requests(self._registry, self._transport, self._feed, self._traces)
        self._stub_metrics = StubMetrics()
        self._commands = Commands(
            self._registry,
            scheduler,
            self._requests,
            self._stub_metrics,
            self._state_feed,
            self._transport,
            self._inbox,
            self._timeline,
            self._traces,
            self._executor.bans,
            self._feed,
            clock,
        )

    @property
    def launcher(self) -> int | None:
        """From any thread: the device's."""
        return None if self._placement.device is None else self._placement.device.launcher

    # --- the loop -----------------------------------------------------------------------------------------

    def run(self) -> None:
        while self._serving:
            self.step()
        self._transport.close()

    def step(self) -> None:
        """Wait until something happens, and do all that follows from it."""
        wakeup = self._scheduler.next_wakeup()
        timeout = None if wakeup is None else min(max(0.0, wakeup - self._clock()), _LONGEST_WAIT)
        # Connections that ended late in the last round may have left something to do.
        due = self._executor.is_due or self._requests.has_answers
        self.activity.round.end()
        ready = self._transport.wait(0.0 if due else timeout)
        self.activity.round.begin(Phase.LOOPING, "")
        self._transport.handle(ready)
        self._flush_arrivals()
        # After the arrivals: what came while this one executed may share the next execution.
        told = self._executor.tell()
        if not told and wakeup is not None and self._clock() >= wakeup:
            self._feed(ev.Tick())
        self._requests.answer()
        job = self._executor.run_short()
        if job is not None and len(self._requests) == len(job.requests):
            # Nobody waits for the next execution: the answers need not wait for a look at the sockets.
            self._executor.tell()
            self._requests.answer()
        self._publish()
        self._state_feed.flush()

    def stop(self) -> None:
        """From any thread: leave `run`, and end all connections as the process's end would."""
        self._inbox.post(self._stop)

    def _stop(self) -> None:
        self._serving = False

    def clear(self) -> None:
        """From any thread, as the process's last act: remove what would outlive it, weights in shared memory."""
        if self._placement.weight_mover is not None:
            self._placement.weight_mover.host.close()

    def _drain(self) -> None:
        for message in self._inbox.drain():
            message()

    def _publish(self) -> None:
        """Tell the stubs when the device will have done everything that it has to do now."""
        now = self._clock()
        self._board.publish(int((now + self._scheduler.backlog_seconds(now)) * 1e9))

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
                self._requests.submit(connection, unpack_submissions(frame, count))
            case Kind.CANCEL:
                self._requests.cancel(connection, unpack_ids(frame, count))
            case Kind.CALL:
                for call in unpack_calls(frame, count):
                    self._requests.call(connection, call)
            case Kind.ENTER:
                self._requests.enter(connection, unpack_entrances(frame, count))
            case Kind.LEAVE:
                for token, status in unpack_leavings(frame, count):
                    self._requests.leave(connection, token, status)
            case Kind.RELEASE:
                for token, number in unpack_releases(frame, count):
                    self._requests.release(connection, token, number)
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
                connection.send(pack_json(Kind.CONFIGURED, self._commands.configure(unpack_json(frame))))
            case Kind.COMMAND:
                self._commands.take(connection, unpack_json(frame))
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
                self._state_feed.watch(connection)
            case _:
                raise ProtocolError(f"{kind.name} is not for the runtime")

    def _on_close(self, connection: Connection) -> None:
        self._state_feed.leave(connection)
        self._commands.leave(connection)
        self._requests.closed(connection)
        self._registry.leave(connection)
        if all(other.peer != connection.peer for other in self._transport.connections):
            stub = self.stubs.pop(connection.peer, None)
            if stub is not None:
                os.close(stub)

    def _report(self, connection: Connection, report: dict[str, Any]) -> None:
        group = connection.group
        if group is None or not self._catalog.ready(group):
            raise ProtocolError("REPORT before REGISTERED")
        self._stub_metrics.take(group.name, group.calls, report)
        shown = figures(group, self._scheduler) if report.get("figures") is True else {}
        connection.send(pack_json(Kind.REPORTED, shown))

    def status(self) -> dict[str, Any]:
        return {
            "uptime_s": self._clock() - self._started,
            "connections": len(self._transport.connections),
            **status(self._registry, self._scheduler, self._requests.runs),
        }

    # --- the scheduler's events and instructions ----------------------------------------------------------

    def _flush_arrivals(self) -> None:
        """Before any other event: requests that came earlier must be known to the scheduler."""
        while arrived := self._requests.take_arrived():
            self._handle(ev.RequestsArrived(arrived))

    def _feed(self, event: ev.Event, finished: Job | None = None, seconds: float = 0.0) -> None:
        """Tell the scheduler, and carry out what it says. `finished`: what the event is the end of, if it is one."""
        self._flush_arrivals()
        self._handle(event, finished, seconds)
        # What runs that were let in have waited to call.
        self._flush_arrivals()

    def _handle(self, event: ev.Event, finished: Job | None = None, seconds: float = 0.0) -> None:
        now = self._clock()
        instructions = self._scheduler.handle(event, now)
        ended = self._timeline.happened(event, now)
        traces = self._traces if self._traces.live else None
        if traces is not None:
            traces.happened(event, ended, now)
        for instruction in instructions:
            match instruction:
                case ev.Finish():
                    if traces is not None:
                        traces.finished(instruction, now)
                    self._requests.finish(instruction, finished, seconds)
                case ev.Execute():
                    self._timeline.begins(instruction, now)
                    if traces is not None:
                        traces.executes(instruction, now)
                    self._execute(instruction)
                case ev.LoadWeights(key, epoch):
                    self._timeline.begins(instruction, now)
                    self._placement.load(key, epoch)
                case ev.EvictWeights(key, _, loading_for):
                    self._timeline.begins(instruction, now)
                    self._placement.evict(key, loading_for)
                case ev.AbandonLoad(_, epoch):
                    self._placement.abandon(epoch)
                case ev.WarmUp(key, again):
                    self._timeline.begins(instruction, now)
                    self._when_moved(partial(self._registry.warm_up, key, again=again), again)
                case ev.GiveUp(key, error):
                    self._registry.give_up(key, error)
                case ev.Admit(run):
                    self._requests.runs.admit(run)
                case _:
                    assert_never(instruction)

    def _execute(self, instruction: ev.Execute) -> None:
        device = self._placement.device
        assert device is not None
        parts = self._requests.parts(instruction.requests)
        job = Job(
            instruction.dispatch,
            self._catalog.get(instruction.model),
            instruction.variant,
            instruction.size,
            instruction.rows,
            instruction.requests,
            parts,
            calls=any(isinstance(part, CallSlice) for part in parts),
        )
        start = partial(
            self._executor.start,
            job,
            device,
            seconds=instruction.seconds,
            depth=self._scheduler.settings.depth,
            # While a model is built, its warm-up may hold the device for long.
            contended=self._placement.builds > 0 or job.merges,
        )
        self._when_moved(start, instruction.again)

    def _when_moved(self, start: Callable[[], None], again: bool) -> None:
        """Start something at once, or, if it is tried again, when it has the memory of those evicted for it."""
        if again:
            self._placement.when_moved(start)
        else:
            start()

    def _executed(self, job: Job, seconds: float, failure: Failure | None) -> None:
        error, out_of_memory = failure or (None, False)
        self._requests.executed(job, seconds, well=failure is None)
        # After the arrivals of this same moment: the next execution should take them along.
        self._feed(ev.ExecutionFinished(job.dispatch, seconds, error, out_of_memory), job, seconds)
        self._registry.let_go(job.model.key)

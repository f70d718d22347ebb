"""One run of a meta model: its sub-calls, and its place on devices. If a runtime dies, the run gets another place.

The stub keeps the inputs of a sub-call until the sub-call ends, and sends them again to the next runtime. So a runtime's death
only delays a run, which loses nothing but the tensors that it kept on the device.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from rsrv.front.rules import CHECK_PERIOD_S, CLIENT_CANCELLED, DOWN, TICK_S
from rsrv.logs import of_request, request_name
from rsrv.stub.bls import ThroughTriton
from rsrv.stub.calls import Callee, Keep, LargeCall, LargeCallError, Pending, Results, check_keep, grace
from rsrv.stub.deferred import DeferredRequest
from rsrv.stub.direct import DirectCall, DirectRun
from rsrv.stub.front_loop import FrontLoop
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.replies import RequestFailure
from rsrv.stub.session import Attachment
from rsrv.stub.tensors import Array, size_of
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Completion, Status

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class MetaRequest(DeferredRequest):
    """One request of a meta model in the stub. If it waits for admission, `id` and `connection` belong to its ENTER."""

    #: Attachment of the engine that serves the request.
    attachment: Attachment = field(kw_only=True)
    #: Token of the run. It is random, so that other requests cannot name it.
    token: int = field(default_factory=lambda: secrets.randbits(64) or 1, kw_only=True)
    admitted: bool = False
    #: Arrays that the response may refer to.
    results: Sequence[Array] = ()
    #: The queue at which execute() waits for the request.
    inbox: SimpleQueue["MetaRequest"] | None = None

    def write(self) -> Entrance:
        deadline_ns, priority, *_ = self.request.params
        return Entrance(self.id, self.token, deadline_ns, priority, tag=self.request.tag)

    def finish(self, done: Completion) -> None:
        self.admitted = done.status is Status.OK
        if self.request.span is not None:
            self.request.span.add_child("queue", self.request.since, done.text)
        if not self.admitted:
            self.fail(done.status, done.text)

    @property
    def nbytes(self) -> int:
        return sum(map(size_of, self.results))

    def release(self) -> None:
        self.request.triton, self.results = None, ()

    def check(self) -> None:
        """Raise RequestFailure if the request is late or cancelled."""
        if 0 < self.request.params.deadline_ns <= time.monotonic_ns():
            raise RequestFailure(Status.DEADLINE, "the deadline passed before the model was called")
        now = time.monotonic()
        reply = self.request.reply
        if reply is not None and now - self.checked > CHECK_PERIOD_S:
            self.checked = now
            if reply.cancelled():
                raise RequestFailure(Status.CANCELLED, CLIENT_CANCELLED)


class RunPlace:
    """The device or the devices that have admitted a run. A place lasts until the run or a runtime of the place ends."""

    def __init__(self, deadline_ns: int) -> None:
        #: For each callee by name: the run on the device of the callee, and the callee on this device.
        self.callees: dict[str, tuple[DirectRun, Callee]] = {}
        self._until_ns = grace(deadline_ns)
        self._runs: list[DirectRun] = []
        self._ends: list[Callable[[Status], object]] = []

    def add(self, run: DirectRun, end: Callable[[Status], object]) -> None:
        """Add the run on a further device. `end` releases the connection for it."""
        self._runs.append(run)
        self._ends.append(end)

    @property
    def first(self) -> DirectRun:
        return self._runs[0]

    @property
    def by_stage(self) -> bool:
        return len(self._runs) > 1

    @property
    def down(self) -> bool:
        return any(run.down for run in self._runs)

    @property
    def suspect(self) -> bool:
        """True if a call of the run may have crashed a runtime."""
        return any(run.suspect for run in self._runs)

    def poll(self) -> None:
        """Check whether runtimes are gone."""
        for run in self._runs:
            run.poll()

    def leave(self, status: Status) -> None:
        """Wait for the calls of the run, and end the run on all devices of this place."""
        for run in reversed(self._runs):
            run.leave(status, self._until_ns)

    def abandon(self) -> None:
        """End the run on the devices whose runtime still works.

        The run's connections stay open, because they hold the memory of calls that will be repeated.
        """
        self.leave(Status.RUNTIME_DOWN)
        for run in self._runs:
            run.fail(RequestFailure(Status.RUNTIME_DOWN, DOWN))

    def release(self, status: Status) -> None:
        """Release the connections."""
        for end in self._ends:
            end(status)


class PlacedRun:
    """A run with its current place. If a runtime of this place dies, the run gets another place.

    `enter` returns a place, or None if there is no runtime now.
    """

    def __init__(
        self,
        meta_request: MetaRequest,
        enter: Callable[[], RunPlace | None],
        front: FrontLoop,
        guard: HookGuard,
    ) -> None:
        self._one = meta_request
        self._enter = enter
        self._front = front
        self.guard = guard
        self._place: RunPlace | None = None
        self._abandoned = False
        #: True if the run has changed its place since `run` began.
        self._moved = False

    def begin(self, first: RunPlace | None) -> None:
        """Begin at the place `first`. If it is None, wait for a place. Raises RequestFailure if the run cannot wait longer."""
        self._place = first
        while self._place is None:
            if self.renew() is None:
                time.sleep(TICK_S)

    def begins_again(self) -> bool:
        """Return whether `run` must begin again, because tensors were lost with a dead runtime. Forget this loss."""
        needed = self._moved and self.place.first.lacks_tensor
        self._moved = self.place.first.lacks_tensor = False
        return needed

    @property
    def place(self) -> RunPlace:
        assert self._place is not None
        return self._place

    def is_lost(self, place: RunPlace, failure: RequestFailure) -> bool:
        """Return True if a call at a place failed because a runtime died.

        This includes the status NOT_FOUND: a callee's stub that is called through Triton may send the call to the next runtime,
        which does not know the run.
        """
        if failure.status not in (Status.RUNTIME_DOWN, Status.NOT_FOUND):
            return False
        place.poll()
        return place is not self._place or place.down

    def renew(self) -> RunPlace | None:
        """Return the place where lost calls must be repeated, or None if the run must wait for a place.

        If a runtime of the current place has died, this is a new place. Raises RequestFailure if the run cannot wait longer.
        """
        lost, request = self._place, self._one.request
        is_lost = lost is None or lost.down
        if lost is not None and is_lost and not self._abandoned:
            self._abandoned = True
            request.deaths += lost.suspect
            with self.guard.waiting():
                lost.abandon()
        self._one.check()
        if not self._front.may_go_on(request):
            return None
        if not is_lost:
            return lost
        with self.guard.waiting():
            place = self._enter()
        if place is not None:
            log.info(
                "%s: its run continues at another runtime",
                request_name(request.id),
                extra=of_request(request.id),
            )
            if lost is not None:
                lost.release(Status.RUNTIME_DOWN)
            self._place, self._abandoned, self._moved = place, False, True
        return place

    def progress(self) -> None:
        """Record that a call was answered. After a further death, the run may wait for the whole `retry_s` again."""
        self._one.request.waiting_since = self._one.request.retry_until = 0.0

    def end(self, status: Status) -> None:
        """End the run at its current place."""
        if self._place is not None:
            self._place.leave(status)
            self._place.release(status)


#: Sends a call through Triton for a run on a device.
Start = Callable[[DirectRun, Callee], Pending]


class RepeatedCall:
    """A sub-call to a runtime. If the runtime dies, the sub-call is repeated. It implements `Pending`."""

    def __init__(self, run: PlacedRun, name: str, sent: DirectCall | Start) -> None:
        self._run = run
        self._name = name
        self._place = run.place
        self._pending: Pending | None = None
        self._paused = False
        if isinstance(sent, DirectCall):
            self._pending = sent
        else:
            self._start = sent
            self._begin()

    def wait(self, until_ns: int) -> Results:
        while True:
            if self._pending is not None:
                try:
                    return self._answered(self._pending.wait(until_ns))
                except RequestFailure as failure:
                    if not self._is_lost(failure):
                        raise
            while not self._is_sent_again():
                time.sleep(TICK_S)

    async def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Results:
        while True:
            if self._pending is not None:
                try:
                    return self._answered(await self._pending.when_done(loop, until_ns))
                except RequestFailure as failure:
                    if not self._is_lost(failure):
                        raise
            while not self._is_sent_again():
                await asyncio.sleep(TICK_S)

    def _answered(self, results: Results) -> Results:
        self._run.progress()
        return results

    def _is_lost(self, failure: RequestFailure) -> bool:
        if isinstance(self._pending, DirectCall):
            return self._run.is_lost(self._place, failure)
        if self._run.is_lost(self._place, failure):
            self._place.callees[self._name][0].suspect_calls()
            return True
        # The callee's stub may have lost the runtime earlier than this stub, or may not have reached the next runtime yet.
        return failure.status is Status.RUNTIME_DOWN and failure.text == DOWN

    def _is_sent_again(self) -> bool:
        """Send the call to the run's present place. Return False if the caller must try again after a pause."""
        if self._run.place is self._place and not self._paused:
            # Pause first: a living runtime may close the run's connection again and again, or the callee's stub may have no
            # connection yet.
            self._paused = True
            return False
        place = self._run.renew()
        if place is None:
            return False
        self._place, self._paused = place, False
        self._begin()
        return True

    def _begin(self) -> None:
        run, callee = self._place.callees[self._name]
        if isinstance(self._pending, DirectCall):
            self._pending = run.again(self._pending, callee)
            return
        self._pending = None
        try:
            self._pending = self._start(run, callee)
        except RequestFailure as failure:
            if not self._run.is_lost(self._place, failure):
                raise


class CallRouter:
    """Sends each sub-call of one run straight to the runtime or through Triton. It implements `Callees`."""

    def __init__(
        self,
        run: PlacedRun,
        external: Collection[str],
        triton: ThroughTriton | None,
        deadline_ns: int,
        *,
        through_triton: bool,
    ) -> None:
        self._run = run
        self._external = external
        self._triton = triton
        self._until_ns = grace(deadline_ns)
        self._through_triton = through_triton
        self._thread = threading.get_ident()
        #: True if the run has ended. Its connection may belong to another run now.
        self.over = False

    def start(self, name: str, inputs: Mapping[str, Any], keep: Keep) -> Pending:
        if self.over or threading.get_ident() != self._thread:
            raise RequestFailure(
                Status.INTERNAL,
                "`call` works only on the thread that executes `run`, and only until `run` returns",
            )
        if self._triton is not None and name in self._external:
            return self._triton.external(name, inputs)
        place = self._run.place
        if name not in place.callees:
            raise RequestFailure(
                Status.INTERNAL, "model.py calls this model, but the manifest's meta section does not list it"
            )
        if place.by_stage:
            # Check `keep`, but keep nothing on the device, because the next callee may be on another device.
            check_keep(place.callees[name][1], keep)
            keep = False
        if self._through_triton:
            return RepeatedCall(self._run, name, partial(self._send_through, inputs, keep))
        return self._send(name, inputs, keep)

    def _send(self, name: str, inputs: Mapping[str, Any], keep: Keep) -> Pending:
        run, callee = self._run.place.callees[name]
        try:
            return RepeatedCall(self._run, name, run.start(callee, inputs, keep))
        except LargeCallError as large:
            # If the next runtime has smaller compiled sizes, a part may also be too large.
            return LargeCall(large, lambda part: self._send(name, part, keep=False))

    def waiting(self) -> AbstractContextManager[None]:
        return self._run.guard.waiting()

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._through_triton:
            return np.empty(shape, dtype)
        return self._run.place.first.scratch(shape, dtype)

    def _send_through(self, inputs: Mapping[str, Any], keep: Keep, run: DirectRun, callee: Callee) -> Pending:
        assert self._triton is not None
        with self.waiting():
            run.await_admission(self._until_ns)
        return self._triton.internal(callee, inputs, keep, run)

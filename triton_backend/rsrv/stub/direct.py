"""Sub-calls of a meta model straight to the runtime: tensors by reference in shared memory, or kept on the device."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rsrv.stub.calls import GRACE_NS, Callee, Elsewhere, Keep, Results, check_inputs, check_keep
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.deferred import STUCK
from rsrv.stub.endpoint import Array, ExecutionPlan, check_results
from rsrv.stub.replies import RequestFailure
from rsrv.stub.session import DOWN
from rsrv.stub.tracing import Trace, end_call
from rsrv.wire.calls import Call, Entrance, Leaving, Release, Spot, Where
from rsrv.wire.frames import Completion, ProtocolError, Status
from rsrv.wire.layout import NUMPY, Tensor
from rsrv.wire.socket import Closed

_LATE = "the deadline passed, and the model runtime does not answer"
_NO_MEMORY = "the server has no memory for this request; try again later"
#: seconds; a deadline may be further away than poll can wait
_LONGEST_WAIT = 3600.0

T = TypeVar("T")


class DeviceTensor(Elsewhere):
    """A result that stayed on the device: later calls of the same request take it as an input."""

    def __init__(self, run: "DirectRun", number: int, tensor: Tensor, rows: int) -> None:
        super().__init__(tensor.shape(rows), NUMPY[tensor.dtype])
        self._run = run
        self._number = number
        self._tensor = tensor
        self._rows = rows

    def __del__(self) -> None:
        self._run.released.append(self._number)

    def spot(self, run: "DirectRun", tensor: Tensor, rows: int) -> Spot:
        """Where the runtime finds it as that input of a call with so many rows. Raises RequestFailure."""
        if self._run is not run:
            raise RequestFailure(
                Status.INTERNAL,
                f"input {tensor.name!r} was kept on the device by another request, which is over",
            )
        mine = self._tensor
        # The same bits may have two types, and the same extents other axes for their rows.
        if mine.dtype != tensor.dtype:
            raise RequestFailure(
                Status.INVALID,
                f"input {tensor.name!r} is on the device as {mine.dtype}, expected {tensor.dtype}",
            )
        if (mine.batch_axis, mine.dims) != (tensor.batch_axis, tensor.dims) or (
            mine.batch_axis is not None and self._rows != rows
        ):
            raise RequestFailure(
                Status.INVALID,
                f"input {tensor.name!r} is on the device with other axes for its rows; do not keep it there",
            )
        return Spot(Where.DEVICE, 0, self._number)


@dataclass(slots=True, eq=False)
class _Sent:
    """A call that the runtime has."""

    callee: Callee
    plan: ExecutionPlan
    client_rows: int | None
    #: held until it is over: the runtime reads them
    inputs: list[Array]
    #: by output; None: on the device
    outputs: dict[str, Array | DeviceTensor]
    #: of time.perf_counter, when it was asked for, and what it is in a trace
    since: float
    trace: Trace | None
    outcome: Results | RequestFailure | None = None
    future: asyncio.Future[Results] | None = None

    def end(self, outcome: Results | RequestFailure) -> None:
        self.outcome = outcome
        failure = outcome if isinstance(outcome, RequestFailure) else None
        end_call(self.trace, self.callee.remote.name, self.since, failure)


class DirectRun:
    """One run on a connection of its own. For one thread; `released` is for any."""

    def __init__(
        self,
        connection: RuntimeConnection,
        token: int,
        deadline_ns: int,
        priority: int,
        tag: int,
        who: str,
        trace: Trace | None = None,
    ) -> None:
        """`tag` and `who`: what stands for its client's id in frames, and in the log. `trace`: what calls are parts of."""
        self._connection = connection
        self.trace = trace
        self._token = token
        self._deadline_ns = deadline_ns
        self._priority = priority
        self._tag = tag
        self._who = who
        #: how it was turned away, once it was
        self._refused: RequestFailure | None = None
        self._entering: int | None = None
        #: when it asked, of time.perf_counter
        self._asked = 0.0
        self.entered = False
        self._sent: dict[int, _Sent] = {}
        #: those that were given up: the runtime, if it is there, may still write to their memory
        self._lost: list[_Sent] = []
        self._numbers = itertools.count()
        #: numbers of tensors on the device that nobody needs any more
        self.released: deque[int] = deque()
        #: whether the connection is of no use any more
        self.broken = False

    # --- entering and leaving -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Ask to be let in, without waiting for it. Raises RequestFailure."""
        if self.entered:
            return
        self.entered = True
        (self._entering,) = self._connection.next_ids(1)
        self._asked = time.perf_counter()
        entrance = Entrance(self._entering, self._token, self._deadline_ns, self._priority, self._tag)
        if not self._guard(lambda: self._connection.enter([entrance])):
            self._lose(RequestFailure(Status.QUEUE_FULL, STUCK))
            raise RequestFailure(Status.QUEUE_FULL, STUCK)

    def let_in(self, until_ns: int) -> None:
        """Wait until it is. Raises RequestFailure."""
        self.enter()
        while self._entering is not None:
            self._pump(until_ns)
        if self._refused is not None:
            raise self._refused.anew()

    def leave(self, status: Status, until_ns: int) -> None:
        """The run is over; wait for calls that are still under way: the runtime may write to their memory."""
        if not self.entered:
            return
        if until_ns:
            until_ns = max(until_ns, time.monotonic_ns() + GRACE_NS)
        try:
            while self._sent:
                self._pump(until_ns)
            self._guard(lambda: self._connection.leave(Leaving(self._token, status)))
            while self._entering is not None:
                self._pump(until_ns)
        except RequestFailure:
            self.broken = True

    # --- calls --------------------------------------------------------------------------------------------

    def start(self, callee: Callee, inputs: Mapping[str, Any], keep: Keep) -> "_DirectCall":
        """Send a call. Raises RequestFailure."""
        since, trace = time.perf_counter(), None if self.trace is None else self.trace.child()
        try:
            return self._start(callee, inputs, keep, since, trace)
        except RequestFailure as failure:
            end_call(trace, callee.remote.name, since, failure)
            raise

    def _start(
        self, callee: Callee, inputs: Mapping[str, Any], keep: Keep, since: float, trace: Trace | None
    ) -> "_DirectCall":
        arrays = check_inputs(callee, inputs)
        kept = check_keep(callee, keep)
        values, plan = callee.endpoint.prepare(arrays, self._who, trace)
        rows = arrays[callee.remote.inputs[0].name].shape[0] if callee.remote.batched else None
        (id,) = self._connection.next_ids(1)
        sent = _Sent(callee, plan, rows, [], {}, since, trace)
        try:
            spots = [
                self._place(value, tensor, plan.rows, sent.inputs)
                for value, (tensor, _) in zip(values, plan.inputs, strict=True)
            ]
            targets = [
                self._target(tensor, plan.rows, tensor.name in kept, sent) for tensor, _ in plan.outputs
            ]
        except OSError:
            raise RequestFailure(Status.QUEUE_FULL, _NO_MEMORY) from None
        if not plan.rows:
            sent.end(self._finish(sent))
            return _DirectCall(self, sent)
        self.enter()
        self._sent[id] = sent
        if trace is not None:
            self._connection.mark([trace.mark(id)])
        call = Call(id, self._token, callee.index, plan.index, plan.rows, spots, targets)
        self._guard(lambda: self._connection.call([call], self._releases()))
        return _DirectCall(self, sent)

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return self._connection.array(shape, dtype)
        except OSError:
            raise RequestFailure(Status.QUEUE_FULL, _NO_MEMORY) from None

    def _releases(self) -> list[Release]:
        return [Release(self._token, self.released.popleft()) for _ in range(len(self.released))]

    def _place(self, value: Any, tensor: Tensor, rows: int, held: list[Array]) -> Spot:
        if isinstance(value, DeviceTensor):
            return value.spot(self, tensor, rows)
        place = self._connection.locate(value)
        if place is None:
            # It came from elsewhere: the client, or numpy.
            copy = self._connection.array(value.shape, value.dtype)
            copy[...] = value
            value, place = copy, self._connection.locate(copy)
            assert place is not None
        held.append(value)
        return Spot(Where.MEMORY, *place)

    def _target(self, tensor: Tensor, rows: int, keep: bool, sent: _Sent) -> Spot:
        if keep and rows:
            number = next(self._numbers)
            sent.outputs[tensor.name] = DeviceTensor(self, number, tensor, rows)
            return Spot(Where.DEVICE, 0, number)
        array = self._connection.array(tensor.shape(rows), NUMPY[tensor.dtype])
        sent.outputs[tensor.name] = array
        place = self._connection.locate(array)
        assert place is not None
        return Spot(Where.MEMORY, *place)

    def _finish(self, sent: _Sent) -> Results | RequestFailure:
        hooks = sent.callee.endpoint.hooks
        if hooks.postprocess is None:
            return dict(sent.outputs)
        arrays: Any = sent.outputs
        try:
            results = sent.callee.endpoint.results(arrays, self._who, sent.trace)
            remote = sent.callee.remote
            checked = check_results(results, remote.outputs, sent.client_rows, "postprocess", self._who)
        except RequestFailure as failure:
            return failure
        return {wire.name: array for wire, array in zip(remote.outputs, checked, strict=True)}

    # --- the connection -----------------------------------------------------------------------------------

    def _pump(self, until_ns: int) -> None:
        """Wait for some of what the runtime has to say. Raises RequestFailure when it says nothing any more."""
        left = (until_ns - time.monotonic_ns()) / 1e9 if until_ns else _LONGEST_WAIT
        try:
            self._receive(min(left, _LONGEST_WAIT))
        except TimeoutError:
            if until_ns and time.monotonic_ns() >= until_ns:
                self._lose(RequestFailure(Status.DEADLINE, _LATE))
                raise RequestFailure(Status.DEADLINE, _LATE) from None

    def _receive(self, timeout: float) -> None:
        for completion in self._guard(lambda: self._connection.receive(timeout)):
            self._take(completion)

    def _take(self, done: Completion) -> None:
        if done.request == self._entering:
            self._entering = None
            if self.trace is not None:
                self.trace.part("queue", self._asked, done.text)
            if done.status is not Status.OK:
                self._refused = RequestFailure(done.status, done.text)
            return
        sent = self._sent.pop(done.request)
        if done.status is not Status.OK:
            # A call of a run that was not let in fails for that reason.
            sent.end(self._refused or RequestFailure(done.status, done.text))
        else:
            sent.end(self._finish(sent))
        sent.inputs.clear()
        _resolve(sent)

    def _lose(self, failure: RequestFailure) -> None:
        """The connection is of no use: all that is under way fails."""
        self.broken = True
        self._entering = None
        lost, self._sent = self._sent, {}
        self._lost += lost.values()
        for sent in lost.values():
            sent.end(failure)
            _resolve(sent)

    def _guard(self, action: Callable[[], T]) -> T:
        if self.broken:
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN)
        try:
            return action()
        except TimeoutError:
            raise
        except (Closed, ProtocolError, OSError):
            self._lose(RequestFailure(Status.RUNTIME_DOWN, DOWN))
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN) from None

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take what the runtime says while the event loop runs."""
        fd = self._connection.sock.fileno()
        loop.add_reader(fd, self._read_now, loop, fd)

    def _read_now(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        try:
            self._receive(0)
        except TimeoutError:
            pass
        except RequestFailure:
            # Who waits has been told. A lost connection would be readable for ever.
            loop.remove_reader(fd)


class _DirectCall:
    """A call under way; `Pending`."""

    def __init__(self, run: DirectRun, sent: _Sent) -> None:
        self._run = run
        self._sent = sent

    def wait(self, until_ns: int) -> Results:
        while self._sent.outcome is None:
            self._run._pump(until_ns)
        if isinstance(self._sent.outcome, RequestFailure):
            raise self._sent.outcome.anew()
        return self._sent.outcome

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        sent = self._sent
        future = sent.future = loop.create_future()
        if sent.outcome is not None:
            _resolve(sent)
            return future
        self._run.listen(loop)
        if until_ns:
            late = (until_ns - time.monotonic_ns()) / 1e9
            timer = loop.call_later(late, self._run._lose, RequestFailure(Status.DEADLINE, _LATE))
            future.add_done_callback(lambda _: timer.cancel())
        return future


def _resolve(sent: _Sent) -> None:
    future, sent.future = sent.future, None
    if future is None or future.done():
        return
    if isinstance(sent.outcome, RequestFailure):
        future.set_exception(sent.outcome.anew())
    elif sent.outcome is not None:
        future.set_result(sent.outcome)

"""Sub-calls straight to the runtime: tensors by reference in shared memory, or kept on the device."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from rsrv.front.rules import DOWN, STUCK
from rsrv.stub.calls import GRACE_NS, Callee, Keep, LargeCallError, Results, check_inputs, check_keep
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.deferred import no_room
from rsrv.stub.endpoint import Elsewhere, ExecutionPlan, PlannedTensor, hook_failed
from rsrv.stub.replies import RequestFailure, invalid
from rsrv.stub.tensors import Array
from rsrv.stub.tracing import OpenSpan, end_call
from rsrv.wire.calls import Call, Entrance, Release, RunExit, Spot, Where, pack_entrances
from rsrv.wire.frames import ALONE, Completion, ProtocolError, Status
from rsrv.wire.layout import NUMPY, Tensor
from rsrv.wire.socket import Closed

_LATE = "the deadline passed, and the model runtime does not answer"
#: Error text for clients of meta models without `restartable: true`.
LOST_TENSOR = (
    "the model runtime ended with a tensor that this request kept on the device; send the request again"
)
#: Maximum seconds of one wait, because a deadline may be further away than poll can wait.
_MAX_WAIT_S = 3600.0

T = TypeVar("T")


class DeviceTensor(Elsewhere):
    """A result that stays on the device, as an input of later calls of the same run."""

    def __init__(self, run: "DirectRun", number: int, tensor: Tensor, rows: int) -> None:
        super().__init__(tensor.shape(rows), NUMPY[tensor.dtype])
        self._run = run
        self._number = number
        self._tensor = tensor
        self._rows = rows

    def __del__(self) -> None:
        self._run.released.append(self._number)

    def spot(self, run: "DirectRun", tensor: Tensor, rows: int) -> Spot:
        """Return the place of the tensor as an input of a call with this many rows. Raises RequestFailure."""
        if self._run is not run and self._run.down:
            run.lacks_tensor = True
            raise RequestFailure(Status.RUNTIME_DOWN, LOST_TENSOR)
        if self._run is not run:
            raise RequestFailure(
                Status.INTERNAL,
                f"input {tensor.name!r} was kept on the device by another request, which has ended",
            )
        tensor_kept = self._tensor
        # `check_inputs` has only compared numpy's types and the shapes. It does not see the difference between bf16 and u16, or
        # between two batch axes.
        if tensor_kept.dtype != tensor.dtype:
            raise invalid(
                f"input {tensor.name!r} is on the device as {tensor_kept.dtype}, expected {tensor.dtype}"
            )
        if (tensor_kept.batch_axis, tensor_kept.dims) != (tensor.batch_axis, tensor.dims) or (
            tensor_kept.batch_axis is not None and self._rows != rows
        ):
            raise invalid(
                f"input {tensor.name!r} is on the device with another batch axis or number of rows; do not keep it there"
            )
        return Spot(Where.DEVICE, 0, self._number)


@dataclass(slots=True, eq=False)
class DirectCall:
    """A sub-call that was sent to the runtime. It implements `Pending`."""

    run: "DirectRun"
    callee: Callee
    plan: ExecutionPlan
    client_rows: int | None
    #: Inputs of the module. They are kept at least until the call has ended, because the runtime reads them.
    values: list[Array | DeviceTensor]
    #: Names of the outputs that stay on the device.
    kept: frozenset[str]
    #: Outputs by name.
    outputs: dict[str, Array | DeviceTensor]
    #: Time of the call, by time.perf_counter.
    since: float
    #: Span of the call, if it is traced.
    span: OpenSpan | None
    #: Bytes of the first output in shared memory. Their first byte is 0 until the runtime gives the call to the device.
    marker: Array | None = None
    outcome: Results | RequestFailure | None = None
    future: asyncio.Future[Results] | None = None

    @property
    def launched(self) -> bool:
        """False if no device has received the call. True if this is unknown, because the call has no outputs in shared memory."""
        return self.marker is None or bool(self.marker[0])

    def end(self, outcome: Results | RequestFailure) -> None:
        self.outcome = outcome
        failure = outcome if isinstance(outcome, RequestFailure) else None
        end_call(self.span, self.callee.remote.name, self.since, failure, self.run.stage)

    def wait(self, until_ns: int) -> Results:
        while self.outcome is None:
            self.run.receive(until_ns)
        if isinstance(self.outcome, RequestFailure):
            raise self.outcome.copy()
        return self.outcome

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        future = self.future = loop.create_future()
        if self.outcome is not None:
            self.resolve()
            return future
        self.run.listen(loop)
        if until_ns:
            left_s = (until_ns - time.monotonic_ns()) / 1e9
            timer = loop.call_later(left_s, self.run.fail, RequestFailure(Status.DEADLINE, _LATE))
            future.add_done_callback(lambda _: timer.cancel())
        return future

    def resolve(self) -> None:
        """Pass the outcome to the future, if the call is awaited."""
        future, self.future = self.future, None
        if future is None or future.done():
            return
        if isinstance(self.outcome, RequestFailure):
            future.set_exception(self.outcome.copy())
        elif self.outcome is not None:
            future.set_result(self.outcome)


class DirectRun:
    """One run of a meta model on a connection of its own. Only one thread may use it, but any thread may append to `released`."""

    def __init__(
        self, connection: RuntimeConnection, entrance: Entrance, client_id: str, span: OpenSpan | None = None
    ) -> None:
        """`entrance` describes the run; `enter` replaces its request number. Spans of sub-calls become children of `span`."""
        self._connection = connection
        self.span = span
        self._entrance = entrance
        self.token = entrance.run
        self._client_id = client_id
        self.device = 0
        #: The run's device if the run's callees are on several devices, otherwise None.
        self.stage: int | None = None
        #: True if the run's calls must execute alone, because a runtime died while it executed one of them.
        self.alone = False
        #: Set if the runtime refused the run.
        self._refused: RequestFailure | None = None
        self._entering: int | None = None
        #: time.perf_counter of the ENTER frame.
        self._entered_at = 0.0
        self.entered = False
        #: Calls that have not ended.
        self._calls: dict[int, DirectCall] = {}
        #: Calls that failed before the runtime answered. The runtime may still write to their memory.
        self._lost: list[DirectCall] = []
        self._numbers = itertools.count()
        #: Numbers of device tensors that were garbage-collected.
        self.released: deque[int] = deque()
        #: `broken`: the connection must not be used any more. `down`: it is broken because the runtime is gone.
        self.broken = self.down = False
        #: True if a call of this run may have crashed the runtime.
        self.suspect = False
        #: True if a call needed a tensor that was lost with an earlier runtime.
        self.lacks_tensor = False
        #: The event loop that reads the connection, and the descriptor number that it uses.
        self._listening: tuple[asyncio.AbstractEventLoop, int] | None = None

    # --- entering and leaving -----------------------------------------------------------------------------

    def enter(self) -> None:
        """Ask the runtime to admit the run, without waiting. Raises RequestFailure."""
        if self.entered:
            return
        self.entered = True
        (self._entering,) = self._connection.next_ids(1)
        self._entered_at = time.perf_counter()
        entrance = self._entrance._replace(request=self._entering)
        if not self._guard(lambda: self._connection.submit([entrance], pack_entrances)):
            self.fail(RequestFailure(Status.QUEUE_FULL, STUCK))
            raise RequestFailure(Status.QUEUE_FULL, STUCK)

    def await_admission(self, until_ns: int) -> None:
        """Wait until the runtime has admitted the run. Raises RequestFailure."""
        self.enter()
        while self._entering is not None:
            self.receive(until_ns)
        if self._refused is not None:
            raise self._refused.copy()

    def leave(self, status: Status, until_ns: int) -> None:
        """Wait for the calls in flight, because the runtime may write to their memory. Then end the run."""
        if not self.entered:
            return
        if until_ns:
            until_ns = max(until_ns, time.monotonic_ns() + GRACE_NS)
        try:
            while self._calls:
                self.receive(until_ns)
            self._guard(lambda: self._connection.leave(RunExit(self.token, status)))
            while self._entering is not None:
                self.receive(until_ns)
        except RequestFailure:
            self.broken = True

    def forget_lost(self) -> None:
        """Forget the lost calls. Call this when the connection is closed: from then on, no other call can get their memory."""
        # The calls refer to this run, so they would otherwise stay until a garbage collection.
        self._lost.clear()

    # --- calls --------------------------------------------------------------------------------------------

    def start(self, callee: Callee, inputs: Mapping[str, Any], keep: Keep) -> DirectCall:
        """Send a call. It fails at once if the runtime is lost. Raises RequestFailure and LargeCallError."""
        since, span = time.perf_counter(), None if self.span is None else self.span.child()
        try:
            arrays = check_inputs(callee, inputs)
            names_kept = check_keep(callee, keep)
            values, plan = callee.endpoint.prepare(arrays, self._client_id, span)
            if plan.rows > plan.largest:
                if names_kept or any(isinstance(value, DeviceTensor) for value in values):
                    raise callee.endpoint.refuse_rows(plan)
                raise LargeCallError(arrays, plan)
            rows = arrays[callee.remote.inputs[0].name].shape[0] if callee.remote.batched else None
            return self._send(DirectCall(self, callee, plan, rows, list(values), names_kept, {}, since, span))
        except RequestFailure as failure:
            end_call(span, callee.remote.name, since, failure, self.stage)
            raise

    def again(self, lost: DirectCall, callee: Callee) -> DirectCall:
        """Send again a call that another runtime did not answer, with the same inputs. Raises RequestFailure.

        This runtime may have another version of the callee, so the call is planned again. The outputs get new memory,
        because a runtime that was only stopped may still write to the old memory.
        """
        since, span = time.perf_counter(), None if self.span is None else self.span.child()
        try:
            names_kept = check_keep(callee, sorted(lost.kept))
            names = [planned.tensor.name for planned in lost.plan.inputs]
            values, plan = callee.endpoint.plan_again(
                dict(zip(names, lost.values, strict=True)), self._client_id
            )
            return self._send(
                DirectCall(self, callee, plan, lost.client_rows, values, names_kept, {}, since, span)
            )
        except RequestFailure as failure:
            end_call(span, callee.remote.name, since, failure, self.stage)
            raise

    def _send(self, call: DirectCall) -> DirectCall:
        plan = call.plan
        try:
            spots = [
                self._place(call, index, planned.tensor, plan.rows)
                for index, planned in enumerate(plan.inputs)
            ]
            targets = [self._target(planned, plan.rows, call) for planned in plan.outputs]
        except OSError as error:
            raise no_room(error) from None
        if not plan.rows:
            call.end(self._results(call))
            return call
        (id,) = self._connection.next_ids(1)
        try:
            self.enter()
            self._calls[id] = call
            if call.span is not None:
                self._connection.mark([call.span.mark(id)])
            flags = ALONE if self.alone else 0
            frame = Call(id, self.token, call.callee.index, plan.variant, plan.rows, spots, targets, flags)
            self._guard(lambda: self._connection.call([frame], self._releases()))
        except RequestFailure as failure:
            if failure.status is not Status.RUNTIME_DOWN:
                raise
            self._calls.pop(id, None)
            if call.outcome is None:
                call.end(failure.copy())
        return call

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        try:
            return self._connection.array(shape, dtype)
        except OSError as error:
            raise no_room(error) from None

    def _releases(self) -> list[Release]:
        return [Release(self.token, self.released.popleft()) for _ in range(len(self.released))]

    def _place(self, call: DirectCall, index: int, tensor: Tensor, rows: int) -> Spot:
        value = call.values[index]
        if isinstance(value, DeviceTensor):
            return value.spot(self, tensor, rows)
        place = self._connection.locate(value)
        if place is None:
            # Copy an array that is not in this connection's memory, for example an array of numpy, of the client, or of an
            # earlier connection.
            copy = self._connection.array(value.shape, value.dtype)
            copy[...] = value
            call.values[index], place = copy, self._connection.locate(copy)
            assert place is not None
        return Spot(Where.MEMORY, *place)

    def _target(self, planned: PlannedTensor, rows: int, call: DirectCall) -> Spot:
        tensor = planned.tensor
        if tensor.name in call.kept and rows:
            number = next(self._numbers)
            call.outputs[tensor.name] = DeviceTensor(self, number, tensor, rows)
            return Spot(Where.DEVICE, 0, number)
        array = self._connection.array(planned.shape, planned.dtype)
        call.outputs[tensor.name] = array
        if call.marker is None and array.nbytes:
            call.marker = array.reshape(-1).view(np.uint8)
            call.marker[0] = 0
        place = self._connection.locate(array)
        assert place is not None
        return Spot(Where.MEMORY, *place)

    def _results(self, call: DirectCall) -> Results | RequestFailure:
        if call.callee.endpoint.hooks.postprocess is None:
            return dict(call.outputs)
        arrays: Any = call.outputs
        wires = call.callee.remote.outputs
        try:
            results = call.callee.endpoint.results(
                arrays, wires, call.client_rows, self._client_id, call.span
            )
        except RequestFailure as failure:
            return failure
        except Exception as error:  # noqa: BLE001 - the run would wait forever for a call without an end
            return hook_failed("postprocess", f"its result cannot be read: {error!r}", self._client_id)
        return {wire.name: array for wire, array in zip(wires, results, strict=True)}

    # --- the connection -----------------------------------------------------------------------------------

    def receive(self, until_ns: int) -> None:
        """Wait for a frame of the runtime. Raises RequestFailure if no frame arrives by `until_ns`."""
        left = (until_ns - time.monotonic_ns()) / 1e9 if until_ns else _MAX_WAIT_S
        try:
            self._receive(min(left, _MAX_WAIT_S))
        except TimeoutError:
            if until_ns and time.monotonic_ns() >= until_ns:
                self.fail(RequestFailure(Status.DEADLINE, _LATE))
                raise RequestFailure(Status.DEADLINE, _LATE) from None

    def _receive(self, timeout: float) -> None:
        for completion in self._guard(lambda: self._connection.receive(timeout)):
            self._take(completion)

    def _take(self, done: Completion) -> None:
        if done.request == self._entering:
            self._entering = None
            if self.span is not None:
                self.span.add_child("queue", self._entered_at, done.text)
            if done.status is not Status.OK:
                self._refused = RequestFailure(done.status, done.text)
            return
        call = self._calls.pop(done.request)
        if done.status is not Status.OK:
            # If the run was not admitted, its calls fail for the same reason.
            call.end(self._refused or RequestFailure(done.status, done.text))
        else:
            call.end(self._results(call))
            call.values.clear()  # A failed call keeps its inputs, because it may be repeated.
        call.resolve()

    def poll(self) -> None:
        """Handle a frame that has arrived, without waiting. If the runtime is gone, fail the calls."""
        with suppress(TimeoutError, RequestFailure):
            self._receive(0)

    def suspect_calls(self) -> None:
        """Set `suspect` if the runtime crashed. For calls through Triton, only the callee's stub knows if the device had them."""
        self.suspect = self.down and self._connection.ended_by()

    def fail(self, failure: RequestFailure) -> None:
        """Fail all calls in flight, because the connection must not be used any more."""
        self.broken = True
        self._entering = None
        if self._listening is not None and not self._listening[0].is_closed():
            # Remove the reader at once: a lost connection would stay readable, and its descriptor number may soon belong to
            # another file.
            self._listening[0].remove_reader(self._listening[1])
        lost, self._calls = self._calls, {}
        self._lost += lost.values()
        for call in lost.values():
            call.end(failure)
            call.resolve()

    def _guard(self, action: Callable[[], T]) -> T:
        if self.broken:
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN)
        try:
            return action()
        except TimeoutError:
            raise
        except (Closed, ProtocolError, OSError):
            launched = any(call.launched for call in self._calls.values())
            self.down, self.suspect = True, launched and self._connection.ended_by()
            self.fail(RequestFailure(Status.RUNTIME_DOWN, DOWN))
            raise RequestFailure(Status.RUNTIME_DOWN, DOWN) from None

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Receive the runtime's frames while the event loop runs."""
        if self._listening is None or self._listening[0] is not loop:
            fd = self._connection.sock.fileno()
            loop.add_reader(fd, self.poll)
            self._listening = loop, fd

"""`call` of a meta model's `run(inputs, call)`: the sub-calls of a run.

A sub-call goes straight to the runtime (`direct`) or through Triton (`bls`), and `call` waits for its end. An `async def run`
awaits it instead. A bundle's `model.py` imports `CallError` from here.
"""

import asyncio
import selectors
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rsrv.front.parts import Parts, RowRange
from rsrv.hooks.loader import Hooks
from rsrv.stub.endpoint import Elsewhere, Endpoint, ExecutionPlan, copy_rows, fits, rows_of
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import CallError as CallError  # noqa: PLC0414 - models import it from here
from rsrv.stub.replies import RequestFailure, invalid
from rsrv.stub.session import Remote
from rsrv.stub.tensors import BYTES, CLIENT_DTYPES, Array, as_array, strings_encoded
from rsrv.wire.frames import Status

#: Names of the outputs that stay on the device, or True for all of them.
Keep = bool | Sequence[str]
Results = dict[str, Any]

#: A run waits for a sub-call for this many nanoseconds after its deadline. A healthy runtime ends the sub-call by then.
GRACE_NS = 1_000_000_000


def grace(deadline_ns: int) -> int:
    """Return the time until which a run waits for a sub-call. Return 0 (no limit) if the sub-call has no deadline."""
    return deadline_ns + GRACE_NS if deadline_ns else 0


class Pending(Protocol):
    """A sub-call in flight."""

    def wait(self, until_ns: int) -> Results:
        """Wait for the results, and return them. Raises RequestFailure.

        `until_ns` is a time of CLOCK_MONOTONIC; 0 means no limit. If the sub-call has not ended by then, the failure has the
        status DEADLINE.
        """

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        """Return an awaitable of the results."""


class Callees(Protocol):
    """The models that one run may call."""

    def start(self, name: str, inputs: Mapping[str, Any], keep: Keep) -> Pending:
        """Start a sub-call. Raises RequestFailure."""

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the run waits for its calls. This time does not count as the run's own time."""

    def scratch(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array: ...


class LargeCallError(Exception):
    """A sub-call has more rows than the largest compiled size."""

    def __init__(self, inputs: Mapping[str, Array], plan: ExecutionPlan) -> None:
        super().__init__(f"{plan.rows} rows")
        self.inputs = inputs
        self.plan = plan


class LargeCall:
    """A sub-call that is executed in parts. It implements `Pending`.

    At most `MAX_PARTS` parts are in flight at a time, as for a client's large request.
    """

    def __init__(self, large: LargeCallError, start: Callable[[Mapping[str, Array]], Pending]) -> None:
        """`start` starts the call of a part, or raises RequestFailure, which then ends the whole call."""
        self._inputs, self._plan = large.inputs, large.plan
        self._start = start
        self._parts = Parts(large.plan.rows, large.plan.largest)
        self._under_way: deque[tuple[RowRange, Pending]] = deque()
        self._results: Results = {
            planned.tensor.name: np.empty(planned.shape, planned.dtype) for planned in large.plan.outputs
        }
        self._failure: RequestFailure | None = None
        with self._until_all_ended():
            self._start_next()
        if large.plan.rows > len(self._under_way) * large.plan.largest:
            # Copy the inputs, because the run may refill its buffers after any call has started.
            self._inputs = {name: array.copy() for name, array in large.inputs.items()}

    def wait(self, until_ns: int) -> Results:
        while self._under_way:
            part, pending = self._under_way.popleft()
            with self._until_all_ended():
                self._take(part, pending.wait(until_ns))
        return self._result()

    async def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Results:
        while self._under_way:
            part, pending = self._under_way.popleft()
            with self._until_all_ended():
                self._take(part, await pending.when_done(loop, until_ns))
        return self._result()

    @contextmanager
    def _until_all_ended(self) -> Iterator[None]:
        """Return a context that stores a part's failure. No further part starts after the first failure.

        The failure is raised after the other submitted parts have ended.
        """
        try:
            yield
        except RequestFailure as failure:
            self._failure = self._failure or failure
            self._parts.end(answered=False)

    def _result(self) -> Results:
        if self._failure is not None:
            raise self._failure
        return self._results

    def _take(self, part: RowRange, results: Results) -> None:
        copy_rows(results, part, self._plan, self._results)
        self._parts.end(answered=True)
        self._start_next()

    def _start_next(self) -> None:
        for part in self._parts.take():
            inputs = {
                planned.tensor.name: self._inputs[planned.tensor.name][rows_of(planned, part)]
                for planned in self._plan.inputs
            }
            self._under_way.append((part, self._start(inputs)))


class _Calls:
    """The common base of `SyncCall` and `AsyncCall`. `check` is called before each sub-call, and raises to stop the run."""

    def __init__(self, callees: Callees, deadline_ns: int, check: Callable[[], None]) -> None:
        self._callees = callees
        self._deadline_ns = deadline_ns
        self._until_ns = grace(deadline_ns)
        self._check = check

    def scratch(self, shape: int | Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Return an uninitialised array in memory that the runtime sees, so sub-calls need not copy it."""
        # An extent may also be an integer of numpy, alone or in a sequence.
        extents = tuple(int(extent) for extent in np.atleast_1d(shape))
        return self._callees.scratch(extents, np.dtype(dtype))

    def remaining(self) -> float | None:
        """Return the seconds until the request's deadline, or None if it has none."""
        return (self._deadline_ns - time.monotonic_ns()) / 1e9 if self._deadline_ns else None

    def _start(self, name: str, inputs: Mapping[str, Any], keep: Keep) -> Pending:
        try:
            self._check()
            return self._callees.start(name, inputs, keep)
        except RequestFailure as failure:
            raise CallError(name, failure.status, failure.text) from None


class SyncCall(_Calls):
    """The argument `call` of a `run` that is not `async`."""

    def __call__(self, name: str, inputs: Mapping[str, Any], keep_on_device: Keep = False) -> Results:
        """Call the model `name`, and return its results by output. Raises CallError."""
        return self._wait(name, self._start(name, inputs, keep_on_device))

    def many(self, calls: Iterable[Sequence[Any]]) -> list[Results]:
        """Make several calls at the same time, and return their results in order.

        A call is (name, inputs) or (name, inputs, keep_on_device). If calls failed, the CallError of the first of them is
        raised after all calls have ended.
        """
        started: list[tuple[str, Pending | CallError]] = []
        for call in calls:
            name, inputs, keep = _spell_out(call)
            try:
                started.append((name, self._start(name, inputs, keep)))
            except CallError as error:
                started.append((name, error.copy()))
        ended: list[Results | CallError] = []
        for name, pending in started:
            try:
                ended.append(pending if isinstance(pending, CallError) else self._wait(name, pending))
            except CallError as error:
                ended.append(error.copy())
        return _raise_first(ended)

    def _wait(self, name: str, pending: Pending) -> Results:
        try:
            with self._callees.waiting():
                return pending.wait(self._until_ns)
        except RequestFailure as failure:
            raise CallError(name, failure.status, failure.text) from None


class AsyncCall(_Calls):
    """The argument `call` of an `async def run`. Every call starts at once, and the run awaits its result."""

    #: Number of calls that have not ended.
    under_way = 0

    def __call__(
        self, name: str, inputs: Mapping[str, Any], keep_on_device: Keep = False
    ) -> Awaitable[Results]:
        """Start a call of the model `name`, and return an awaitable of its results. Awaiting raises CallError."""
        try:
            return asyncio.ensure_future(self._wait(name, self._start(name, inputs, keep_on_device)))
        except CallError as error:
            failed: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
            failed.set_exception(error.copy())
            return failed

    async def many(self, calls: Iterable[Sequence[Any]]) -> list[Results]:
        """Make several calls, as `SyncCall.many`."""
        started = [self(*_spell_out(call)) for call in calls]
        return _raise_first(await asyncio.gather(*started, return_exceptions=True))

    async def _wait(self, name: str, pending: Pending) -> Results:
        self.under_way += 1
        try:
            return await pending.when_done(asyncio.get_running_loop(), self._until_ns)
        except RequestFailure as failure:
            raise CallError(name, failure.status, failure.text) from None
        finally:
            self.under_way -= 1

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context in which the run's event loop waits. If calls are in progress, the run waits for its calls."""
        return self._callees.waiting() if self.under_way else nullcontext()


def run_async(run: Callable[..., Any], inputs: Any, call: AsyncCall) -> Any:
    """Execute an `async def run`, and return its result."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_Selector(call))) as runner:
        return runner.run(run(inputs, call))


class _Selector(selectors.EpollSelector):
    """The selector of a run's event loop.

    It separates the time in which the run waits for calls from the run's own time.
    """

    def __init__(self, call: AsyncCall) -> None:
        super().__init__()
        self._call = call

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        with self._call.waiting():
            return super().select(timeout)


def _spell_out(call: Sequence[Any]) -> tuple[str, Mapping[str, Any], Keep]:
    match call:
        case (name, inputs):
            return name, inputs, False
        case (name, inputs, keep):
            return name, inputs, keep
    raise TypeError("call.many takes (name, inputs) or (name, inputs, keep_on_device)")


def _raise_first(ended: Sequence[Results | BaseException]) -> list[Results]:
    results = []
    for result in ended:
        if isinstance(result, CallError):
            raise result.copy()
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results


# --- callees, and the checks of their inputs -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Callee:
    """A model that a meta model calls."""

    #: Index of the model in the list of REGISTERED.
    index: int
    remote: Remote
    endpoint: Endpoint


def make_callees(
    remotes: Sequence[Remote], hooks: Mapping[str, Hooks], guard: HookGuard, meters: Meters
) -> dict[str, Callee]:
    """Return the callees by name."""
    return {
        remote.name: Callee(
            index,
            remote,
            Endpoint(
                remote.interface,
                hooks[remote.name],
                guard,
                partial(meters.hook, remote.name),
                # Do not split a call if the callee has hooks, because a hook must get all rows of the call.
                splits=not (hooks[remote.name].preprocess or hooks[remote.name].postprocess),
            ),
        )
        for index, remote in enumerate(remotes)
    }


def check_inputs(callee: Callee, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sub-call's inputs by name, checked as Triton checks the inputs of clients. Raises RequestFailure."""
    arrays = {
        name: value if isinstance(value, Elsewhere) else as_array(value) for name, value in inputs.items()
    }
    for wire in callee.remote.inputs:
        array = arrays.get(wire.name)
        if array is None:
            raise invalid(f"input {wire.name!r} is missing")
        if wire.dtype == BYTES and not isinstance(array, Elsewhere):
            array = arrays[wire.name] = strings_encoded(array)
        if array.dtype != CLIENT_DTYPES[wire.dtype]:
            raise invalid(f"input {wire.name!r} is {array.dtype}, expected {wire.dtype}")
        if not fits(wire.dims, array.shape):
            raise invalid(f"input {wire.name!r}: expected shape {list(wire.dims)}, got {list(array.shape)}")
        if isinstance(array, Elsewhere) and callee.endpoint.hooks.preprocess is not None:
            raise RequestFailure(
                Status.INTERNAL,
                f"its preprocess hook needs input {wire.name!r} in host memory: do not keep it on the device",
            )
    unknown = sorted(arrays.keys() - {wire.name for wire in callee.remote.inputs})
    if unknown:
        raise invalid(f"there is no input {unknown[0]!r}")
    return arrays


def check_keep(callee: Callee, keep: Keep) -> frozenset[str]:
    """Return the names of the outputs that stay on the device. Raises RequestFailure."""
    names = [tensor.name for tensor in callee.remote.interface.variants[0].outputs.tensors]
    names_kept = frozenset(names if keep is True else keep or ())
    if names_kept and callee.endpoint.hooks.postprocess is not None:
        raise RequestFailure(
            Status.INTERNAL,
            "its postprocess hook needs the outputs in host memory: call without keep_on_device",
        )
    if unknown := sorted(names_kept - set(names)):
        raise RequestFailure(Status.INTERNAL, f"keep_on_device names {unknown[0]!r}, which is not an output")
    return names_kept

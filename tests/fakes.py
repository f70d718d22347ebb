"""Fakes for unit tests: a device without jax, and Triton's Python API without Triton.

The fakes have the limits of the originals that the product must respect. A device runs one execution at a
time. A response sender accepts one final response, and any later call of the sender is fatal.
"""

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from rsrv.runtime.device import (
    Abandoned,
    Array,
    ArrayKind,
    Buffer,
    DeviceError,
    DeviceRows,
    Executable,
    Hardware,
    Launched,
    OutOfMemory,
    Pools,
    never,
)
from rsrv_bundle.modules import Signature
from tests.waiting import PATIENCE_S

Compute = Callable[[Sequence[Array], Sequence[Array]], list[Array]]


class Gate:
    """A gate that is open until a test clears it. `waiting` is set while the gate holds a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._pass = 0
        self.waiting = threading.Event()

    def clear(self, after: int = 0) -> None:
        """Let the next `after` threads pass, and hold every later thread."""
        with self._lock:
            self._pass = after
            if self._open.is_set():
                self._open = threading.Event()

    def set(self) -> None:
        """Release all held threads. `waiting` is cleared at once, even if the threads continue only later."""
        with self._lock:
            self.waiting.clear()
            self._open.set()

    def enter(self) -> None:
        with self._lock:
            if self._open.is_set():
                return
            if self._pass:
                self._pass -= 1
                return
            self.waiting.set()
            opened = self._open
        opened.wait(PATIENCE_S)

    def wait_until_held(self) -> None:
        """Wait until the gate holds a thread."""
        assert self.waiting.wait(PATIENCE_S), "no thread is held"


Operation = Literal["upload", "launch", "read", "read_slot", "write_slot", "page_lock", "profile"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class FakeBuffer:
    """A tensor on a `FakeDevice`. It is a copy, as on a real device."""

    array: Array
    live: bool = True


@dataclass(slots=True, eq=False)
class FakePools:
    """State tensors on a `FakeDevice`. If an execution fails, its state tensors are lost."""

    arrays: list[Array]
    live: bool = True


@dataclass(slots=True)
class _Failures:
    """Outcomes of the next calls of each operation. None means that the call succeeds."""

    _next: dict[Operation, deque[Exception | None]] = field(default_factory=dict)

    def put(self, operation: Operation, fates: Iterable[Exception | None]) -> None:
        self._next[operation] = deque(fates)

    def meet(self, operation: Operation) -> None:
        fates = self._next.get(operation)
        if fates and (error := fates.popleft()) is not None:
            try:
                raise error
            finally:
                # The error's traceback refers to this frame. The cycle would keep the call's buffers until the next collection.
                del error


@dataclass(slots=True, eq=False)
class _FakeExecution:
    """An execution that runs when its outputs are first requested."""

    run: Callable[[], list[Array]]
    unread: Collection[int]
    targets: Mapping[int, Sequence[Array]]
    _outputs: list[Array] | None = None

    def outputs(self) -> list[Array]:
        if self._outputs is None:
            self._outputs = self.run()
        return self._outputs


class FakeDevice:
    """Computes with a Python function. Tests can hold executions, let them fail, and watch them.

    `compute(inputs, weights)` stands for every module. `executed` collects the number of rows of each execution,
    padding included. `launched` gets this number at the launch. An asynchronous device computes as late as
    possible, when a test reads the outputs: so it sees any later change of its inputs and weights. If `fail` is
    set at the launch, the execution fails when it is read. Clear `gate` to hold executions, `uploads` to hold the
    transfer of each tensor, `compiles` to hold compilations, and `profiles` to hold the start and the end of
    profiles. Executing on freed weights and freeing twice are errors.

    Uploads respect `memory_limit`, if there is one. `scratch` is the reported memory that every execution needs
    in addition to its weights.
    """

    def __init__(self, compute: Compute, *, asynchronous: bool = False) -> None:
        self.compute = compute
        self.asynchronous = asynchronous
        self.writes_host = False
        self.hardware = Hardware("cpu")
        self.name = "cpu"
        self._lock = threading.Lock()
        self._executing = threading.Lock()
        self._failures = _Failures()
        self.gate = Gate()
        self.uploads = Gate()
        self.compiles = Gate()
        self.profiles = Gate()
        self.executed: list[int] = []
        self.launched: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.warm = False
        self.fail: str | None = None
        self.seconds = 0.001
        self.memory_limit: int | None = None
        self.scratch = 0
        self.launcher: int | None = None
        #: Number of tensors on the device.
        self.resident = 0
        #: Bytes of the tensors on the device.
        self.device_bytes = 0
        #: Number of all tensors that were ever uploaded.
        self.uploaded = 0
        #: Outputs that stay on the device.
        self.kept: WeakSet[FakeBuffer] = WeakSet()
        #: Number of inputs that were on the device before their execution.
        self.in_place = 0
        #: Number of tensors that were merged from pieces.
        self.merged = 0
        #: Bytes of page-locked host memory, by address.
        self.locked: dict[int, int] = {}
        #: Costs of executions by the key of a model, as the product measured them or a test set them.
        self.costs: dict[str, Mapping[tuple[int, int], float]] = {}
        #: Seconds of a model's build by the key of the model, as the product measured them or a test set them.
        self.starts: dict[str, float] = {}
        #: Keys of models whose executables are stored.
        self.stored: set[str] = set()

    def fail_next(
        self, operation: Operation, *, after: int = 0, times: int = 1, error: Exception | None = None
    ) -> None:
        """Let `times` calls of an operation raise `error`, by default OutOfMemory. The `after` calls before them succeed.

        Each tensor of an upload is one call.
        """
        error = error or OutOfMemory(f"{operation}: told to")
        self._failures.put(operation, [None] * after + [error] * times)

    def compile(self, module: bytes, signature: Signature) -> Executable:
        self.compiles.enter()
        return Executable(signature)

    def known_costs(self, model: str) -> Mapping[tuple[int, int], float] | None:
        return self.costs.get(model)

    def keep_costs(self, model: str, costs: Mapping[tuple[int, int], float]) -> None:
        self.costs[model] = costs

    def known_start(self, model: str) -> float | None:
        return self.starts.get(model)

    def has_executables(self, model: str, name: str) -> bool:
        return model in self.stored

    def keep_start(self, model: str, seconds: float) -> None:
        self.starts.setdefault(model, seconds)

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        return self.scratch

    def memory_in_use(self) -> int | None:
        return None if self.memory_limit is None else self.device_bytes

    def largest_free(self) -> int | None:
        return None if self.memory_limit is None else self.memory_limit - self.device_bytes

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]:
        buffers: list[Buffer] = []
        try:
            for array in arrays:
                self.uploads.enter()
                if abandoned():
                    raise Abandoned
                buffers.append(self._move(array))
        except BaseException:
            self.free(buffers)
            raise
        return buffers

    def _move(self, array: Array) -> Buffer:
        with self._lock:
            self._failures.meet("upload")
            if self.memory_limit is not None and self.device_bytes + array.nbytes > self.memory_limit:
                raise OutOfMemory(f"{array.nbytes} bytes more than {self.memory_limit}")
            self.resident += 1
            self.device_bytes += array.nbytes
            self.uploaded += 1
            return Buffer(FakeBuffer(array.copy()))

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        with self._lock:
            for buffer in buffers:
                assert isinstance(buffer, FakeBuffer)
                assert buffer.live, "freed twice"
                buffer.live = False
                self.resident -= 1
                self.device_bytes -= buffer.array.nbytes

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        with self._lock:
            self._failures.meet("page_lock")
            assert address not in self.locked, "page-locked twice"
            self.locked[address] = nbytes
        return partial(self._unlock, address)

    def _unlock(self, address: int) -> None:
        with self._lock:
            del self.locked[address]

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
        pools: Pools | None = None,
        targets: Mapping[int, Sequence[Array]] = MappingProxyType({}),
    ) -> Launched:
        arrays = [value.array if isinstance(value, FakeBuffer) else np.asarray(value) for value in inputs]
        self.in_place += sum(isinstance(value, FakeBuffer) for value in inputs)
        rows = len(arrays[0]) if arrays and arrays[0].ndim else 0
        with self._lock:
            self._failures.meet("launch")
        if pools is not None:
            # The state is computed at once, because the next launch continues from it.
            outputs = self._execute_on(pools, rows, weights, arrays)
            execution = _FakeExecution(lambda: outputs, unread, targets)
        else:
            run = partial(self._execute, rows, weights, arrays, self.fail)
            execution = _FakeExecution(run, unread, targets)
        self.launched.put(rows)
        if not self.asynchronous:
            execution.outputs()
        return Launched(execution)

    def _execute_on(
        self, pools: Pools, rows: int, weights: Sequence[Buffer], inputs: Sequence[Array]
    ) -> list[Array]:
        assert isinstance(pools, FakePools)
        assert pools.live, "executes on lost state"
        state = [Buffer(FakeBuffer(array)) for array in pools.arrays]
        pools.live = False
        results = self._execute(rows, [*weights, *state], inputs, self.fail)
        count = len(results) - len(state)
        pools.arrays, pools.live = results[count:], True
        return results[:count]

    def make_pools(self, kinds: Sequence[ArrayKind]) -> Pools:
        arrays = [np.zeros(*kind) for kind in kinds]
        for array in arrays:
            self._move(array)
        return Pools(FakePools(arrays))

    def free_pools(self, pools: Pools) -> None:
        assert isinstance(pools, FakePools)
        pools.live = False
        with self._lock:
            self.resident -= len(pools.arrays)
            self.device_bytes -= sum(array.nbytes for array in pools.arrays)

    def holds(self, pools: Pools) -> bool:
        assert isinstance(pools, FakePools)
        return pools.live

    def read_slot(self, pools: Pools, slot: int) -> list[Array]:
        assert isinstance(pools, FakePools)
        with self._lock:
            self._failures.meet("read_slot")
        return [array[slot].copy() for array in pools.arrays]

    def write_slot(self, pools: Pools, slot: int, values: Sequence[Array]) -> None:
        assert isinstance(pools, FakePools)
        with self._lock:
            self._failures.meet("write_slot")
        for array, value in zip(pools.arrays, values, strict=True):
            array[slot] = value

    def keep(self, launched: Launched, index: int) -> Buffer:
        assert isinstance(launched, _FakeExecution)
        buffer = FakeBuffer(launched.outputs()[index].copy())
        self.kept.add(buffer)
        return Buffer(buffer)

    def merge(self, base: Array, axis: int, pieces: Sequence[DeviceRows]) -> Buffer:
        merged = np.moveaxis(base.copy(), axis, 0)
        for piece in pieces:
            assert isinstance(piece.buffer, FakeBuffer)
            source = np.moveaxis(piece.buffer.array, axis, 0)
            merged[piece.at : piece.at + piece.rows] = source[piece.first : piece.first + piece.rows]
        self.merged += 1
        return Buffer(FakeBuffer(np.moveaxis(merged, 0, axis)))

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        assert isinstance(launched, _FakeExecution)
        with self._lock:
            self._failures.meet("read")
        outputs = launched.outputs()
        for index, arrays in launched.targets.items():
            rest = outputs[index].reshape(-1)
            for array in arrays:
                array[...] = rest[: array.size].reshape(array.shape)
                rest = rest[array.size :]
        absent = {*launched.unread, *launched.targets}
        return [
            np.empty(0) if index in absent else array for index, array in enumerate(outputs)
        ], self.seconds

    def start_profile(self, directory: Path) -> None:
        self.profiles.enter()
        self._failures.meet("profile")
        (directory / "trace").touch()

    def stop_profile(self) -> None:
        self.profiles.enter()
        self._failures.meet("profile")

    def _execute(
        self, rows: int, weights: Sequence[Buffer], inputs: Sequence[Array], fail: str | None
    ) -> list[Array]:
        with self._executing:
            self.launcher = None if self.asynchronous else threading.get_ident()
            self.gate.enter()
            if fail is not None:
                raise DeviceError(fail)
            arrays = []
            for buffer in weights:
                assert isinstance(buffer, FakeBuffer)
                assert buffer.live, "executes on freed weights"
                arrays.append(buffer.array)
            self.executed.append(rows)
            return self.compute(inputs, arrays)


class FakeTensor:
    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self._name = name
        self._array = np.asarray(array)
        if self._array.dtype == object:
            # If the type of an element is not bytes, Triton sends str(element).
            sent = [
                element if type(element) is bytes else str(element).encode() for element in self._array.flat
            ]
            self._array = np.array([*sent, None], object)[:-1].reshape(self._array.shape)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        return self._array

    def to_dlpack(self) -> Any:
        return np.ascontiguousarray(self._array).__dlpack__()

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> "FakeTensor":
        class Holder:
            def __dlpack__(self, **_: object) -> Any:
                return capsule

            def __dlpack_device__(self) -> tuple[int, int]:
                return 1, 0

        return FakeTensor(name, np.from_dlpack(Holder()).copy())


class FakeError:
    INVALID_ARG, NOT_FOUND, UNAVAILABLE, INTERNAL, CANCELLED = "inv", "nf", "una", "int", "can"

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


class FakeResponse:
    def __init__(self, output_tensors: list[FakeTensor], error: FakeError | None = None) -> None:
        # Triton copies a tensor when it sends it, so the memory may change afterwards.
        self.arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in output_tensors}
        self.error = error
        self._tensors = output_tensors

    def has_error(self) -> bool:
        return self.error is not None

    def output_tensors(self) -> list[FakeTensor]:
        return self._tensors


class FakeSender:
    """A sender that puts responses into `request.answers` and accepts no response after the final one."""

    def __init__(self, request: "FakeRequest") -> None:
        self._request = request
        self._final = False

    def send(self, response: FakeResponse | None = None, flags: int = 0) -> None:
        assert not self._final, "something after the final response"
        self._final = flags == FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is not None:
            self._request.answers.put(response)

    def is_cancelled(self) -> bool:
        assert not self._final, "is_cancelled() after the final response kills the server"
        return self._request.cancelled


class FakeRequest:
    def __init__(
        self,
        inputs: dict[str, npt.NDArray[Any]],
        timeout_us: int = 0,
        parameters: str = "{}",
        id: str = "fake",
        traceparent: str | None = None,
        *,
        sequence: int | str = 0,
        flags: int = 0,
    ) -> None:
        """`traceparent`: the context of Triton's own span, if it traces the request. `flags`: 1 starts the sequence, 2 ends it."""
        self.context = None if traceparent is None else json.dumps({"traceparent": traceparent})
        self._inputs = [FakeTensor(name, array) for name, array in inputs.items()]
        self._timeout = timeout_us
        self._parameters = parameters
        self._id = id
        self._sequence = sequence
        self._flags = flags
        #: True after the product has read the request's trace.
        self.trace_read = False
        self.cancelled = False
        self.answers: queue.SimpleQueue[FakeResponse] = queue.SimpleQueue()

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._sequence

    def flags(self) -> int:
        return self._flags

    def trace(self) -> "FakeRequest":
        self.trace_read = True
        return self

    def get_context(self) -> str | None:
        return self.context

    def get_response_sender(self) -> FakeSender:
        return FakeSender(self)


class FakePbUtils:
    """The part of `triton_python_backend_utils` that models use."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = FakeTensor
    TritonError = FakeError
    InferenceResponse = FakeResponse


class NewResponse(FakeResponse):
    """A response of release 25.02 and later, which has parameters."""

    def __init__(
        self,
        output_tensors: list[FakeTensor],
        error: FakeError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(output_tensors, error)
        self.given = parameters

    def parameters(self) -> str:
        return json.dumps(self.given or {})


class NewPbUtils(FakePbUtils):
    """`triton_python_backend_utils` of release 25.02 and later."""

    InferenceResponse = NewResponse


class FakeBackstop:
    """A backstop that records its calls in order."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[float | str] = queue.SimpleQueue()

    def put_off(self, seconds: float) -> None:
        self.told.put(seconds)

    def cancel(self) -> None:
        self.told.put("cancel")

    def wait_for(self, what: float | str) -> None:
        while self.told.get(timeout=PATIENCE_S) != what:
            pass

"""A device without jax, and Triton's Python API without Triton: seams for unit tests.

The fakes keep the originals' quirks that the product must live with: a device runs one execution at a
time; a response sender takes one response, and asking it anything afterwards is fatal.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.runtime.device import Array, DeviceError, Executable, Launched, Weights
from rsrv_bundle.modules import Signature

Compute = Callable[[Sequence[Array], Sequence[Array]], list[Array]]


class Gate:
    """Open, until it is cleared to hold whoever comes; `waiting` is set while somebody is held."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()

    def clear(self) -> None:
        self._open.clear()

    def set(self) -> None:
        self._open.set()

    def enter(self) -> None:
        if not self._open.is_set():
            self.waiting.set()
            self._open.wait(30)
            self.waiting.clear()


class FakeDevice:
    """Computes with a Python function; executions can be held, failed and watched.

    `compute(inputs, weights)` stands for every module. `executed` collects the rows that each execution was
    given, padding included; `launched` takes them when it is launched. An asynchronous one computes as late
    as it may, when it is read: so it sees whatever anyone did to its inputs meanwhile, and fails, if it was to
    fail when it was launched. Clear `gate` to hold executions, `uploads` and `compiles` to hold those.
    """

    def __init__(self, compute: Compute, *, asynchronous: bool = False) -> None:
        self._compute = compute
        self.asynchronous = asynchronous
        self._lock = threading.Lock()
        self._executing = threading.Lock()
        self.gate = Gate()
        self.uploads = Gate()
        self.compiles = Gate()
        self.executed: list[int] = []
        self.launched: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.warm = False
        self.fail: str | None = None
        self.seconds = 0.001
        self.resident = 0
        self.uploaded = 0

    def compile(self, module: bytes, signature: Signature) -> Executable:
        self.compiles.enter()
        return Executable(signature)

    def upload(self, arrays: Sequence[Array]) -> Weights:
        self.uploads.enter()
        with self._lock:
            self.resident += 1
            self.uploaded += 1
        return Weights(list(arrays))

    def free(self, weights: Weights) -> None:
        assert isinstance(weights, list)
        weights.clear()
        with self._lock:
            self.resident -= 1

    def launch(self, executable: Executable, weights: Weights, inputs: Sequence[Array]) -> Launched:
        rows = len(inputs[0]) if inputs and inputs[0].ndim else 0
        execution = partial(self._execute, rows, weights, inputs, self.fail)
        self.launched.put(rows)
        if self.asynchronous:
            return Launched(execution)
        outputs = execution()
        return Launched(lambda: outputs)

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        assert callable(launched)
        return launched(), self.seconds

    def _execute(self, rows: int, weights: Weights, inputs: Sequence[Array], fail: str | None) -> list[Array]:
        assert isinstance(weights, list)
        with self._executing:
            self.gate.enter()
            if fail is not None:
                raise DeviceError(fail)
            self.executed.append(rows)
            return self._compute(inputs, weights)


class FakeTensor:
    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        self._name = name
        self._array = np.asarray(array)

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
        # Triton copies when it sends; so the memory may change afterwards.
        self.arrays = {tensor.name(): tensor.as_numpy().copy() for tensor in output_tensors}
        self.error = error


class FakeSender:
    """Takes one final response, into `request.answers`."""

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
        self, inputs: dict[str, npt.NDArray[Any]], timeout_us: int = 0, parameters: str = "{}"
    ) -> None:
        self._inputs = [FakeTensor(name, array) for name, array in inputs.items()]
        self._timeout = timeout_us
        self._parameters = parameters
        self.cancelled = False
        self.answers: queue.SimpleQueue[FakeResponse] = queue.SimpleQueue()

    def inputs(self) -> list[FakeTensor]:
        return self._inputs

    def timeout(self) -> int:
        return self._timeout

    def parameters(self) -> str:
        return self._parameters

    def request_id(self) -> str:
        return "fake"

    def get_response_sender(self) -> FakeSender:
        return FakeSender(self)


class FakePbUtils:
    """What `triton_python_backend_utils` offers a model."""

    TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
    Tensor = FakeTensor
    TritonError = FakeError
    InferenceResponse = FakeResponse

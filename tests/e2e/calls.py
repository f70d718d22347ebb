"""Requests of standard clients over gRPC and over HTTP, and their outcomes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from local_triton import LOOPBACK
from tests.e2e.answers import exact_kernel, stepped
from tests.e2e.harness import RunningTriton
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
T = TypeVar("T")

PROTOCOLS = ("grpc", "http")
_LIBRARIES: Mapping[str, ModuleType] = {"grpc": tritonclient.grpc, "http": tritonclient.http}

#: Code of each protocol, by Triton's error code.
CODES: Mapping[str, Mapping[str, str]] = {
    "INVALID_ARG": {"grpc": "StatusCode.INVALID_ARGUMENT", "http": "400"},
    "NOT_FOUND": {"grpc": "StatusCode.NOT_FOUND", "http": "404"},
    "UNAVAILABLE": {"grpc": "StatusCode.UNAVAILABLE", "http": "503"},
    "INTERNAL": {"grpc": "StatusCode.INTERNAL", "http": "500"},
}


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message

    def assert_is(self, code: str, protocol: str) -> None:
        """Check that the refusal has Triton's `code`, and that its text shows clients no internals of the server."""
        assert self.status == CODES[code][protocol], str(self)
        for leak in ("Traceback", 'File "', ".py", "/tmp", "/work", "/home", "/usr", "0x", "secret"):
            assert leak not in self.message, str(self)


class Caller:
    """A client of one protocol. Only one thread may use it."""

    def __init__(self, server: RunningTriton, protocol: str) -> None:
        self.protocol = protocol
        self._library = _LIBRARIES[protocol]
        url = server.server.grpc_url if protocol == "grpc" else server.server.http_url
        options = {"network_timeout": 120.0} if protocol == "http" else {}
        self._client = self._library.InferenceServerClient(url, **options)

    def __call__(self, model: str, inputs: Mapping[str, Array], **options: Any) -> Arrays:
        """Return the model's answer. `options` are arguments of tritonclient's `infer`. Raises Refused."""
        try:
            result = self._client.infer(model, tensors(self._library, inputs), **options)
        except InferenceServerException as error:
            raise Refused(str(error.status()), str(error.message())) from None
        return {name: result.as_numpy(name) for name in output_names(result)}

    def close(self) -> None:
        self._client.close()


def post_bytes(
    port: int, model: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, bytes]:
    """Post any bytes to a model's inference URL. Return the status and the body of the answer."""
    with closing(HTTPConnection(LOOPBACK, port, timeout=PATIENCE_S)) as connection:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def post_json(
    port: int, model: str, document: Mapping[str, Any], raw: bytes | None = None
) -> tuple[int, bytes]:
    """Post a request in JSON, and the bytes of its tensors if `raw` is given. Return the status and the body of the answer."""
    head = json.dumps(document).encode()
    headers = {} if raw is None else {"Inference-Header-Content-Length": str(len(head))}
    return post_bytes(port, model, head + (raw or b""), headers)


def tensors(library: ModuleType, inputs: Mapping[str, Array]) -> list[Any]:
    """Return the arrays as inputs of tritonclient."""
    out = []
    for name, array in inputs.items():
        datatype = "BF16" if array.dtype == ml_dtypes.bfloat16 else np_to_triton_dtype(array.dtype)
        out.append(library.InferInput(name, list(array.shape), datatype))
        out[-1].set_data_from_numpy(array)
    return out


def output_names(result: Any) -> list[str]:
    response = result.get_response()
    if isinstance(response, dict):
        return [output["name"] for output in response["outputs"]]
    return [output.name for output in response.outputs]


@contextmanager
def caller(server: RunningTriton, protocol: str = "grpc") -> Iterator[Caller]:
    made = Caller(server, protocol)
    try:
        yield made
    finally:
        made.close()


def refusal(call: Callable[[], object]) -> Refused:
    """Make a call that the server must refuse, and return the refusal."""
    try:
        result = call()
    except Refused as refused:
        return refused
    raise AssertionError(f"answered with {result!r}")


def outcome(call: Callable[[], T]) -> T | Refused:
    """Make a call, and return its answer or its refusal."""
    try:
        return call()
    except Refused as refused:
        return refused


def at_once(
    server: RunningTriton, count: int, work: Callable[[Caller, int], T], protocol: str = "grpc"
) -> list[T]:
    """Run `work` for `count` clients at the same time. It gets a client and its number. Return the results in the order of the numbers."""
    start = threading.Barrier(count)

    def run_client(number: int) -> T:
        with caller(server, protocol) as call:
            start.wait(PATIENCE_S)
            return work(call, number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run_client, range(count)))


def at_once_behind_a_pause(
    server: RunningTriton, model: str, count: int, work: Callable[[Caller, int], T], protocol: str = "grpc"
) -> list[T]:
    """Call `at_once` while the model is paused. Each client sends one request, and the model executes none until all have arrived."""
    server.operate("pause", model)
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(at_once, server, count, work, protocol)
        try:
            wait_until(
                lambda: read_status(server.pid)["models"][model]["queued"] == count or clients.done(),
                what=f"{count} requests to wait",
            )
        finally:
            server.operate("continue", model)
        return clients.result()


def check_exact(call: Caller) -> None:
    """Send a request to `exact`, and check the answer."""
    x = np.ones((1, 64), np.float32)
    assert_same(call("exact", {"x": x}), {"y": x @ exact_kernel()})


def check_sudden(call: Caller, steps: int) -> None:
    """Send a request to `sudden` whose execution has `steps` steps, and check the answer."""
    x = random_u32(np.random.default_rng(steps), 1)
    got = call("sudden", {"x": x, "steps": np.full((1, 1), steps, np.int32)})
    assert_same(got, {"y": stepped(x, steps)})


def random_u32(rng: np.random.Generator, rows: int) -> Array:
    """Return random rows for `elastic`, `sudden` and `steady`."""
    return rng.integers(0, 2**32, (rows, 4), np.uint32)


def assert_same(got: Mapping[str, Array], want: Mapping[str, Array]) -> None:
    """Check that names, types, shapes and bits are equal. A NaN equals the same NaN."""
    assert set(got) == set(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].shape == array.shape, name
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes(), name


def only(model: str, items: Sequence[T]) -> T:
    assert len(items) == 1, f"{model}: {items}"
    return items[0]

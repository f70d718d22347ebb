"""Sub-calls through Triton. In this fake of Triton, models are functions."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from rsrv.stub.bls import Bls, ThroughTriton, failure_of, limit, pool_size
from rsrv.stub.calls import Callee
from rsrv.stub.direct import DirectRun
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.replies import RequestFailure, tag_failure
from rsrv.stub.session import Remote
from rsrv.stub.tensors import Array, Tensors
from rsrv.stub.tracing import OpenSpan, Spans
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Status
from rsrv.wire.layout import Block, Interface, Variant
from tests.fakes import FakeError, FakePbUtils, FakeTensor
from tests.waiting import PATIENCE_S, wait_until

Arrays = dict[str, Array]
X = np.arange(6, dtype=np.float32).reshape(2, 3)
#: Time limit in seconds for events that should happen at once.
SOON = PATIENCE_S


class FakeAnswer:
    """The answer to one call: outputs, or Triton's message with a code."""

    def __init__(self, outcome: Arrays | str, code: str) -> None:
        self._outcome = outcome
        self._code = code

    def code(self) -> str:
        return self._code

    def has_error(self) -> bool:
        return isinstance(self._outcome, str)

    def error(self) -> "FakeAnswer":
        return self

    def message(self) -> str:
        assert isinstance(self._outcome, str)
        return self._outcome

    def output_tensors(self) -> list[FakeTensor]:
        assert isinstance(self._outcome, dict)
        return [FakeTensor(name, array) for name, array in self._outcome.items()]


class FakeCall:
    def __init__(
        self, models: dict[str, Callable[["FakeCall"], Arrays | str]], code: str, **arguments: Any
    ) -> None:
        self._models = models
        self._code = code
        self.arguments = arguments
        self.arrays = {tensor.name(): tensor.as_numpy() for tensor in arguments["inputs"]}

    def exec(self) -> FakeAnswer:
        return FakeAnswer(self._models[self.arguments["model_name"]](self), self._code)


class PickyTensor(FakeTensor):
    """A tensor that refuses numpy's type for texts, as tensors of Triton do."""

    def __init__(self, name: str, array: Array) -> None:
        if array.dtype.kind == "U":
            raise RuntimeError("NumPy dtype is not supported.")
        super().__init__(name, array)


class FakeBls(FakePbUtils):
    TRITONSERVER_MEMORY_CPU = "cpu"
    Tensor = PickyTensor

    def __init__(self) -> None:
        self.models: dict[str, Callable[[FakeCall], Arrays | str]] = {}
        #: The code of errors. Up to release 25.03, every error has this one.
        self.code = FakeError.INTERNAL

    def InferenceRequest(self, **arguments: Any) -> FakeCall:
        return FakeCall(self.models, self.code, **arguments)

    def PreferredMemory(self, kind: str, device: int) -> tuple[str, int]:
        return kind, device


class Held:
    """A model that answers when the test allows it, and counts the calls in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entered = threading.Semaphore(0)
        self.answer = threading.Event()
        self.inside = 0
        self.most = 0

    def __call__(self, call: FakeCall) -> Arrays:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.answer.wait(SOON)
        with self._lock:
            self.inside -= 1
        return call.arrays


@pytest.fixture
def triton() -> FakeBls:
    made = FakeBls()
    made.models["echo"] = lambda call: call.arrays
    return made


@pytest.fixture
def held(triton: FakeBls) -> Iterator[Held]:
    made = Held()
    triton.models["held"] = made
    yield made
    made.answer.set()


@pytest.fixture
def make(triton: FakeBls) -> Iterator[Callable[..., Bls]]:
    """Return a function that makes a `Bls`. Each one is closed after the test."""
    made = []

    def make_bls(concurrency: int = 2, timeout: float = SOON) -> Bls:
        made.append(Bls(triton, Tensors(triton), concurrency, timeout))
        return made[-1]

    yield make_bls
    for bls in made:
        bls.close()


def failure(future: Future[Arrays]) -> RequestFailure:
    error = future.exception(SOON)
    assert isinstance(error, RequestFailure)
    return error


def in_ns(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


# --- one call -----------------------------------------------------------------------------------------------------


def test_a_call_gives_the_outputs_that_were_asked_for(triton: FakeBls, make: Callable[..., Bls]) -> None:
    """A call returns the requested outputs in order, or all outputs."""
    triton.models["two"] = lambda call: {"y": X, "z": -X}

    outputs = make().start("two", {"x": X}, outputs=["z", "y"]).result()
    every = make().start("two", {"x": X}).result()

    assert list(outputs) == ["z", "y"]
    assert list(every) == ["y", "z"]
    np.testing.assert_array_equal(outputs["z"], -X)


def test_a_call_says_what_it_has_to(triton: FakeBls, make: Callable[..., Bls]) -> None:
    """A call passes the run's token as a text, the remaining time, the requested outputs, and the memory type of the answer."""
    seen: list[dict[str, Any]] = []

    def note(call: FakeCall) -> Arrays:
        seen.append(call.arguments)
        return {"y": X}

    triton.models["note"] = note
    terms: dict[str, Any] = {"deadline_ns": in_ns(SOON), "run": 2**64 - 1, "traceparent": "00-1-2-01"}
    make().start("note", {"x": X}, outputs=["y"], **terms).result()
    make().start("note", {"x": X}).result()

    assert seen[0]["parameters"] == {"rsrv_run": "18446744073709551615", "traceparent": "00-1-2-01"}
    assert 0 < seen[0]["timeout"] <= SOON * 1e6
    assert seen[0]["requested_output_names"] == ["y"]
    assert seen[0]["preferred_memory"] == ("cpu", 0)
    assert "parameters" not in seen[1]
    assert "timeout" not in seen[1]


def test_a_call_of_a_run_by_stage_names_its_device(triton: FakeBls, make: Callable[..., Bls]) -> None:
    """If a run goes by stage, each call may execute on another device than the run. The call's span names this device."""
    triton.models["note"] = lambda call: {"y": X}
    wires = tuple(WireTensor(name, "f32", (-1, 3)) for name in "xy")
    interface = Interface((Variant(Block(()), Block(()), (1,)),), exact=False)
    remote = Remote("note", interface, wires[:1], wires[1:], True, (), 0)
    endpoint: Any = None
    ends: list[None] = []
    spans = Spans(lambda: ends.append(None), threading.Lock())
    calls = ThroughTriton(make(), in_ns(SOON), "", OpenSpan(spans, "ab" * 16, "cd" * 8))
    connection: Any = None
    run = DirectRun(connection, Entrance(0, 7, 0, 0), "")
    for run.stage in (None, 1):
        ends.clear()
        calls.internal(Callee(0, remote, endpoint), {"x": X}, False, run).wait(in_ns(SOON))
        wait_until(lambda: bool(ends))

    assert [span.attributes.get("rsrv.stage.device") for span in spans.take()[0]] == [None, 1]


def test_an_output_that_does_not_come_is_an_error(make: Callable[..., Bls]) -> None:
    """A missing output is an error, because Triton does not check the names of a model's outputs."""
    error = failure(make().start("echo", {"x": X}, outputs=["x", "missing"]))

    assert error.status is Status.INTERNAL
    assert "'missing'" in error.text


def test_an_input_that_triton_has_no_type_for_is_refused(make: Callable[..., Bls]) -> None:
    """An input of a type that Triton lacks is refused by name before it is sent."""
    error = failure(make().start("echo", {"x": X, "words": np.array(["a", "b"])}))

    assert error.status is Status.INVALID
    assert "'words'" in error.text


def test_a_call_that_raises_tells_the_log_why(
    triton: FakeBls, make: Callable[..., Bls], caplog: pytest.LogCaptureFixture
) -> None:
    """If a call raises an error, the reason is logged. It is not sent to the client."""

    def broken(call: FakeCall) -> Arrays:
        raise RuntimeError("of no concern to clients")

    triton.models["broken"] = broken
    error = failure(make().start("broken", {"x": X}))

    assert error.status is Status.INTERNAL
    assert "concern" not in error.text
    assert "of no concern to clients" in caplog.text


# --- several calls ------------------------------------------------------------------------------------------------


def test_never_more_calls_are_under_way_than_allowed(held: Held, make: Callable[..., Bls]) -> None:
    """With a concurrency of three, never more than three of eight calls are in progress. All eight are answered."""
    bls = make(concurrency=3)
    calls = [bls.start("held", {"x": X + number}) for number in range(8)]
    for _ in range(3):
        assert held.entered.acquire(timeout=SOON)
    assert held.inside == 3

    held.answer.set()

    for number, call in enumerate(calls):
        np.testing.assert_array_equal(call.result(SOON)["x"], X + number)
    assert held.most == 3


def test_a_call_given_up_while_it_waits_is_never_made(held: Held, make: Callable[..., Bls]) -> None:
    """A call that is cancelled while it waits is never made."""
    bls = make(concurrency=1)
    first = bls.start("held", {"x": X})
    assert held.entered.acquire(timeout=SOON)
    second, third = (bls.start("held", {"x": X}) for _ in range(2))

    assert second.cancel()
    held.answer.set()

    first.result(SOON)
    third.result(SOON)
    assert held.entered.acquire(timeout=SOON)
    assert not held.entered.acquire(blocking=False)


def test_no_room_for_a_single_call_is_refused_with_what_to_do(make: Callable[..., Bls]) -> None:
    """A pool with a single thread is refused, because a model that waits for its call would block the pool."""
    with pytest.raises(ValueError, match="thread-pool-size=2"):
        make(concurrency=limit(1))


def test_few_threads_for_calls_are_a_warning(
    make: Callable[..., Bls], caplog: pytest.LogCaptureFixture
) -> None:
    """If the pool has fewer threads than a stub may have calls in progress, a warning names the number and the remedy.

    This happens if the first bundle with such calls is added while the server runs.
    """
    make(concurrency=limit(2))
    assert "calls through Triton run 1 at a time" in caplog.text
    assert "restart `rsrv serve`" in caplog.text

    caplog.clear()
    make(concurrency=limit(9))
    assert not caplog.text


# --- calls that take too long -------------------------------------------------------------------------------------


def test_a_call_ends_at_its_deadline(held: Held, make: Callable[..., Bls]) -> None:
    """A call ends at its deadline, while the model continues to execute. The later answer is ignored."""
    bls = make(concurrency=1)
    call = bls.start("held", {"x": X}, deadline_ns=in_ns(0.02))

    error = failure(call)
    held.answer.set()

    assert error.status is Status.DEADLINE
    assert "'held'" in error.text
    np.testing.assert_array_equal(bls.start("echo", {"x": X}).result()["x"], X)
    assert failure(call) is error


def test_a_deadline_in_the_past_makes_no_call(held: Held, make: Callable[..., Bls]) -> None:
    """A deadline in the past makes no call."""
    assert failure(make().start("held", {"x": X}, deadline_ns=in_ns(-1))).status is Status.DEADLINE
    assert not held.entered.acquire(blocking=False)


def test_a_call_without_a_deadline_ends_all_the_same(held: Held, make: Callable[..., Bls]) -> None:
    """A call without a deadline ends after the general limit."""
    error = failure(make(timeout=0.02).start("held", {"x": X}))

    assert error.status in (Status.DEADLINE, Status.QUEUE_FULL)
    assert "0.02 s" in error.text


def test_a_call_that_waits_ends_at_its_deadline(held: Held, make: Callable[..., Bls]) -> None:
    """A call that waits because too many calls are in progress ends at its deadline, and is never made.

    The other calls are made and answered.
    """
    bls = make(concurrency=1)
    first = bls.start("held", {"x": X})
    assert held.entered.acquire(timeout=SOON)
    late = bls.start("held", {"x": X}, deadline_ns=in_ns(0.02))
    patient = bls.start("held", {"x": X}, deadline_ns=in_ns(SOON))

    assert failure(late).status is Status.DEADLINE
    held.answer.set()

    first.result(SOON)
    patient.result(SOON)
    assert held.entered.acquire(timeout=SOON)
    assert not held.entered.acquire(blocking=False)


def test_when_no_call_is_ever_answered_further_ones_fail_at_once(
    held: Held, make: Callable[..., Bls]
) -> None:
    """If all allowed calls have passed the general limit without an answer, further calls fail at once.

    The error names the called models. When a call is answered, further calls are made again.
    """
    bls = make(concurrency=2, timeout=0.02)
    for _ in range(2):
        # A call whose thread starts too late is not made.
        while not held.entered.acquire(blocking=False):
            assert failure(bls.start("held", {"x": X})).status in (Status.DEADLINE, Status.QUEUE_FULL)

    refused = bls.start("echo", {"x": X})

    assert refused.done()
    assert failure(refused).status is Status.QUEUE_FULL
    assert "2 calls, the limit" in failure(refused).text
    assert "'held'" in failure(refused).text
    held.answer.set()
    wait_until(lambda: bls.start("echo", {"x": X}).exception(SOON) is None, what="a call is made again")


def test_a_late_call_is_no_reason_to_refuse_others(held: Held, make: Callable[..., Bls]) -> None:
    """A call that ended at its own deadline does not prove that the model hangs, so the next call waits and does not fail."""
    bls = make(concurrency=1)
    # A call whose thread starts after the deadline is not made.
    while not held.entered.acquire(blocking=False):
        late = bls.start("held", {"x": X}, deadline_ns=in_ns(0.02))
        assert failure(late).status is Status.DEADLINE

    following = bls.start("echo", {"x": X})

    assert not following.done()
    held.answer.set()
    np.testing.assert_array_equal(following.result(SOON)["x"], X)


def test_closing_ends_all_calls_and_waits_for_none(held: Held, make: Callable[..., Bls]) -> None:
    """When a `Bls` is closed, calls in progress and waiting calls fail at once, and so do later calls. It may be closed twice."""
    bls = make(concurrency=1)
    calls = [bls.start("held", {"x": X}) for _ in range(2)]
    assert held.entered.acquire(timeout=SOON)

    bls.close()
    bls.close()

    assert held.inside == 1
    for call in [*calls, bls.start("echo", {"x": X})]:
        assert failure(call).status is Status.RUNTIME_DOWN


# --- Triton's messages
# --------------------------------------------------------------------------------------------

_PREFIX = "Model m - Error when running inference: "
_REQUEST = "[request id: <id_unknown>] "
_RAISED = "Failed to process the request(s) for model 'm_0_0', message: "
_AT = "\n\nAt:\n  /models/m/1/model.py(10): execute\n"
_ABSENT = "model 'm' is not loaded, or its process has ended"
_TYPES = "inference input 'X' data-type is 'FP64', but model 'm' expects 'FP32'"


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (
            f"{_PREFIX}Failed for execute the inference request. Model 'm' is not ready.",
            Status.NOT_FOUND,
            _ABSENT,
        ),
        ("Failed for execute the inference request. Model 'm' is not ready.", Status.NOT_FOUND, _ABSENT),
        (
            f"{_PREFIX}Request for unknown model: 'm' has no available versions",
            Status.NOT_FOUND,
            _ABSENT,
        ),
        (f"{_PREFIX}Request for unknown model: 'm' is not found", Status.NOT_FOUND, _ABSENT),
        (
            f"{_RAISED}ValueError: the scanner is not ready.{_AT}",
            Status.INTERNAL,
            "ValueError: the scanner is not ready.",
        ),
        (
            f"{_PREFIX}{_REQUEST}Exceeds maximum queue size",
            Status.QUEUE_FULL,
            "the queue of model 'm' is full; try again later",
        ),
        (
            f"{_PREFIX}{_REQUEST}{_TYPES}",
            Status.INVALID,
            f"model 'm' cannot be called like this: {_TYPES}",
        ),
        (
            "Stub process 'm_0_0' is not healthy.",
            Status.INTERNAL,
            "the process of model 'm' has ended; the model must be loaded again",
        ),
        (f"{_RAISED}ValueError: no such thing{_AT}", Status.INTERNAL, "ValueError: no such thing"),
        (
            f"in ensemble 'm', {_RAISED}OSError: no file '/data/secret/a.bin'\nsorry{_AT}",
            Status.INTERNAL,
            "in ensemble 'm', OSError: no file '(path)' sorry",
        ),
        ("in ensemble 'm', [rsrv:DEADLINE] too late", Status.DEADLINE, "in ensemble 'm', too late"),
        ("and/or 3/4 of http://host/a/b", Status.INTERNAL, "and/or 3/4 of http://host/a/b"),
        ("", Status.INTERNAL, ""),
    ],
)
def test_triton_messages_become_statuses(message: str, status: Status, text: str) -> None:
    """A message of Triton without a code becomes a status and a text. File names and line numbers are removed from the text."""
    call_failure = failure_of("m", message)

    assert (call_failure.status, call_failure.text) == (status, text)


@pytest.mark.parametrize(
    ("code", "message", "status"),
    [
        (FakeError.INVALID_ARG, "x must be positive", Status.INVALID),
        (FakeError.NOT_FOUND, "no such user", Status.NOT_FOUND),
        (FakeError.CANCELLED, "cancelled", Status.CANCELLED),
        (FakeError.UNAVAILABLE, "a cache is down", Status.RUNTIME_DOWN),
        (FakeError.INTERNAL, "a bug", Status.INTERNAL),
        # If the message is a known one of Triton, or has a tag of rsrv, it decides the status, and not the code.
        (FakeError.UNAVAILABLE, f"{_PREFIX}Request for unknown model: 'm' is not found", Status.NOT_FOUND),
        (FakeError.UNAVAILABLE, tag_failure(Status.QUEUE_FULL, "later"), Status.QUEUE_FULL),
        (FakeError.UNAVAILABLE, f"{_PREFIX}the server is stopping", Status.RUNTIME_DOWN),
        (FakeError.INVALID_ARG, f"{_PREFIX}{_TYPES}", Status.INVALID),
    ],
)
def test_an_error_keeps_its_code_from_release_25_04_on(
    triton: FakeBls, make: Callable[..., Bls], code: str, message: str, status: Status
) -> None:
    """From release 25.04 on, the code of a plain model's error reaches the client of the calling model."""
    triton.code = code
    triton.models["m"] = lambda call: message

    assert failure(make().start("m", {"x": X})).status is status


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ([], 32),
        (["--model-repository=x", "--backend-config=python,shm-default-byte-size=1048576"], 32),
        (["--backend-config=python,thread-pool-size=2"], 2),
        (["--backend-config", "python,thread-pool-size=2", ""], 2),
        (["--backend-conf=python,thread-pool-size=2"], 2),
        (["--backend-config=python,thread-pool-size=8", "--backend-config=python,thread-pool-size=2"], 2),
        (["--backend-config=python,thread-pool-size=3junk"], 3),
        (["--backend-config=onnx,thread-pool-size=2"], 32),
        (["--backend-config=python, thread-pool-size = 2"], 32),
        (["--backend-directory=python,thread-pool-size=2"], 32),
        (["--backend-config"], 32),
    ],
)
def test_the_size_of_the_pool_is_read_from_the_command_line(arguments: list[str], size: int) -> None:
    """The size of the pool is read from `--backend-config` in any spelling, even an abbreviated one.

    If several options set the size for the Python backend, the last one is used.
    """
    assert pool_size(["tritonserver", *arguments]) == size

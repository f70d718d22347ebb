"""The stub's engine and the real loop: each request is answered once, with its own rows."""

import json
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.connection import RuntimeConnection, Slab
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.model import ModelStub
from rsrv.wire.memory import Arena, Place
from tests.fakes import FakeError, FakeRequest, FakeSender
from tests.unit.runtime.conftest import Runtime, StartEngine, StartRuntime
from tests.unit.runtime.engines import make_engine, ramp, refused
from tests.unit.runtime.metas import answer_of, ask, assert_y, queued
from tests.waiting import wait_until

Array = npt.NDArray[Any]


def test_requests_of_one_execute_share_an_execution_and_get_their_own_rows(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """1 + 2 + 1 rows run as one execution of size 4; each answer holds its request's rows."""
    engine = start_engine()
    runtime.device.executed.clear()
    sent = [ramp(1), ramp(2, 10), ramp(1, 100)]

    answers = ask(engine, *(FakeRequest({"x": x}) for x in sent))

    assert runtime.device.executed == [4]
    for x, answer in zip(sent, answers, strict=True):
        assert_y(answer, 2 * x + 1)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((1, 4), np.float32), "expected shape [-1, 3] (axis 0 is the batch), got [1, 4]"),
        (np.zeros(3, np.float32), "got [3]"),
    ],
)
def test_a_bad_shape_is_refused_and_its_neighbours_are_answered(
    start_engine: StartEngine, array: Array, text: str
) -> None:
    """A request with a wrong shape is refused, and the error has the input and both shapes.

    Others in its batch are answered.
    """
    engine = start_engine()

    before, bad, after = ask(engine, *(FakeRequest({"x": x}) for x in (ramp(1), array, ramp(2))))

    assert refused(bad, FakeError.INVALID_ARG, text)
    assert_y(before, 2 * ramp(1) + 1)
    assert_y(after, 2 * ramp(2) + 1)


def test_no_rows_need_no_device(runtime: Runtime, start_engine: StartEngine) -> None:
    """A request without rows is answered with empty outputs of the right shape, without an execution."""
    engine = start_engine()
    runtime.device.executed.clear()

    (answer,) = ask(engine, FakeRequest({"x": np.zeros((0, 3), np.float32)}))

    assert answer.arrays["y"].shape == (0, 3)
    assert runtime.device.executed == []


def test_a_failing_execution_fails_its_requests_and_nothing_else(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """If an execution fails, its client gets an error without the device's text. The next request is served."""
    engine = start_engine()
    runtime.device.fail = "secret detail of the device"

    (failed,) = ask(engine, FakeRequest({"x": ramp(1)}))
    runtime.device.fail = None
    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}))

    assert refused(failed, FakeError.INTERNAL, "failed to execute")
    assert failed.error is not None
    assert "secret" not in failed.error.message
    assert_y(answer, 2 * ramp(1) + 1)


def test_what_takes_longer_than_predicted_is_answered_later(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """If a request takes longer than predicted, execute() returns first, and all requests of the batch are answered later."""
    engine = start_engine()
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(2)}), FakeRequest({"x": np.zeros((1, 4), np.float32)})]

    assert engine.execute(list(requests)) is None

    assert refused(answer_of(requests[1]), FakeError.INVALID_ARG, "got [1, 4]")
    assert requests[0].answers.empty()
    runtime.device.gate.set()
    assert_y(answer_of(requests[0]), 2 * ramp(2) + 1)


def test_a_deadline_that_passed_is_told_and_never_executed(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """A request whose deadline, `rsrv_deadline_unix_ns`, has passed is refused without an execution."""
    engine = start_engine()
    runtime.device.executed.clear()
    past = json.dumps({"rsrv_deadline_unix_ns": time.time_ns() - 1})

    (answer,) = ask(engine, FakeRequest({"x": ramp(1)}, parameters=past))

    assert refused(answer, FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    assert runtime.device.executed == []


def test_a_request_whose_time_runs_out_in_the_queue_is_not_executed(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """A request whose deadline passes in the queue is answered at once, while the device is busy."""
    engine = start_engine()
    runtime.device.gate.clear()
    first, second = FakeRequest({"x": ramp(1)}), FakeRequest({"x": ramp(1)}, timeout_us=10**9)
    assert engine.execute([first]) is None
    runtime.device.executed.clear()

    assert engine.execute([second]) is None
    wait_until(lambda: queued("doubling") == 1)
    runtime.pass_time(2000.0)

    assert refused(answer_of(second), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    runtime.device.gate.set()
    assert answer_of(first).error is None
    assert runtime.device.executed == [1]


def test_each_waiting_request_is_checked_for_cancellation(
    runtime: Runtime, start_engine: StartEngine
) -> None:
    """Of 60 waiting requests, the cancelled one ends, although each check looks only at a few."""
    engine = start_engine()
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(1)}) for _ in range(60)]
    for request in requests:
        assert engine.execute([request]) is None

    requests[50].cancelled = True

    assert refused(answer_of(requests[50]), FakeError.CANCELLED, "cancelled")
    runtime.device.gate.set()
    assert all(answer_of(r).error is None for r in requests if not r.cancelled)


def test_a_fault_in_serving_a_client_leaves_the_others_served(
    runtime: Runtime, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If is_cancelled() raises, the thread that reads answers continues."""

    def fault(self: FakeSender) -> bool:
        raise RuntimeError("a fault of Triton's")

    monkeypatch.setattr(FakeSender, "is_cancelled", fault)
    engine = start_engine()
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(1)}) for _ in range(3)]
    for request in requests:
        assert engine.execute([request]) is None
    with pytest.raises(queue.Empty):
        requests[0].answers.get(timeout=0.2)  # The thread checks for cancellations in this time.

    runtime.device.gate.set()

    assert all(answer_of(request).error is None for request in requests)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("seconds", [0.0001, 0.001])
def test_executions_of_any_length_and_depth_do_not_mix(
    start_runtime: StartRuntime, doubling: Path, depth: int, seconds: float
) -> None:
    """For any length and depth of executions, each request gets its own rows."""
    runtime = start_runtime(load_settings(f"scheduler: {{depth: {depth}}}\nstub: {{in_place_ms: 0}}"))
    runtime.device.seconds = seconds
    engine = make_engine(runtime, doubling)
    requests = [FakeRequest({"x": ramp(1 + i % 3, i)}) for i in range(200)]

    for request in requests:
        assert engine.execute([request]) is None

    for i, request in enumerate(requests):
        assert_y(answer_of(request), 2 * ramp(1 + i % 3, i) + 1)


@pytest.mark.parametrize(
    "parameters",
    [
        '{"rsrv_priority": "high"}',
        '{"rsrv_deadline_unix_ns": 1.5}',
        '{"rsrv_priority": -1}',
        '{"rsrv_priority": true}',
    ],
)
def test_a_wrong_parameter_of_ours_is_the_clients_fault(start_engine: StartEngine, parameters: str) -> None:
    """A wrong value of a parameter of rsrv is the client's fault, and the error names the parameter."""
    (answer,) = ask(start_engine(), FakeRequest({"x": ramp(1)}, parameters=parameters))

    assert refused(answer, FakeError.INVALID_ARG, "parameter rsrv_")


def test_hooks_change_tensors_on_both_sides(runtime: Runtime, start_engine: StartEngine) -> None:
    """`preprocess` gets the client's tensors. `postprocess` gets the request's own rows."""
    engine = start_engine(
        Hooks(lambda arrays: {"x": arrays["x"] * 10}, lambda arrays: {"y": arrays["y"][:, :1]}),
        (WireTensor("y", "f32", (-1, 1)),),
    )

    first, second = ask(engine, FakeRequest({"x": ramp(1)}), FakeRequest({"x": ramp(2, 5)}))

    assert_y(first, (20 * ramp(1) + 1)[:, :1])
    assert_y(second, (20 * ramp(2, 5) + 1)[:, :1])


def raising(arrays: dict[str, Array]) -> dict[str, Array]:
    if arrays[next(iter(arrays))][0, 0] == 666:
        raise ValueError("secret in the hook")
    return arrays


@pytest.mark.parametrize("hooks", [Hooks(preprocess=raising), Hooks(postprocess=lambda a: raising_result(a))])
def test_a_hook_that_raises_fails_its_own_request(start_engine: StartEngine, hooks: Hooks) -> None:
    """If a hook raises, its request fails without the exception's text. Others in the batch are answered."""
    engine = start_engine(hooks)
    bad = np.full((1, 3), 666, np.float32)

    fine, failed = ask(engine, FakeRequest({"x": ramp(1)}), FakeRequest({"x": bad}))

    assert fine.error is None
    assert refused(failed, FakeError.INTERNAL, "hook failed")
    assert failed.error is not None
    assert "secret" not in failed.error.message


def test_an_id_of_megabytes_is_cut_in_every_line(
    start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """A very long id is cut in every line of the log."""
    id = "i" * 10_000_000
    failed = ask(
        start_engine(Hooks(preprocess=raising)),
        FakeRequest({"x": np.full((1, 3), 666, np.float32)}, id=id),
    )
    assert failed[0].error is not None
    assert len(caplog.records) >= 2
    for record in caplog.records:
        assert len(record.getMessage()) < 1000
        assert len(str(record.__dict__["fields"])) < 1000


def raising_result(arrays: dict[str, Array]) -> dict[str, Array]:
    if arrays["y"][0, 0] == 2 * 666 + 1:
        raise ValueError("secret in the hook")
    return arrays


@pytest.mark.parametrize(
    "result",
    [
        None,
        {},
        {"y": "text"},
        {"y": np.zeros((1, 3))},
        {"z": np.zeros((1, 3), np.float32)},
        {"x": np.zeros((1, 4), np.float32), "y": np.zeros((1, 4), np.float32)},
        {"x": np.zeros(3, np.float32), "y": np.zeros((2, 3), np.float32)},
        42,
    ],
)
def test_a_hook_with_a_wrong_result_fails_its_request(start_engine: StartEngine, result: object) -> None:
    """A request fails if its hook returns nothing, wrong names or wrong types."""
    wrong: Callable[..., Any] = lambda arrays: result

    for hooks in (Hooks(preprocess=wrong), Hooks(postprocess=wrong)):
        (answer,) = ask(start_engine(hooks), FakeRequest({"x": ramp(1)}))
        assert refused(answer, FakeError.INTERNAL, "hook failed")


def test_a_preprocess_that_changes_the_rows_is_named(start_engine: StartEngine) -> None:
    """If `preprocess` changes the number of rows, the request fails with an error that names the hook.

    It does not fail if `postprocess` restores the number of rows.
    """

    def doubled(arrays: dict[str, Array]) -> dict[str, Array]:
        return {"x": np.repeat(arrays["x"], 2, axis=0)}

    (failed,) = ask(start_engine(Hooks(preprocess=doubled)), FakeRequest({"x": ramp(1)}))
    assert refused(failed, FakeError.INTERNAL, "preprocess hook failed")

    both = Hooks(doubled, lambda arrays: {"y": arrays["y"][::2]})
    (answered,) = ask(start_engine(both), FakeRequest({"x": ramp(1)}))
    assert_y(answered, 2 * ramp(1) + 1)


def test_the_runtimes_end_is_told_and_its_successor_is_used(
    runtime: Runtime, start_runtime: StartRuntime, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """When the runtime ends, the log has one line.

    Requests in flight and later ones wait, and the next runtime answers them.
    """
    engine = start_engine()
    runtime.device.gate.clear()
    held = [FakeRequest({"x": ramp(1, i)}) for i in range(5)]
    for request in held:
        assert engine.execute([request]) is None

    runtime.stop()

    wait_until(lambda: engine.session.reading is None)
    wait_until(lambda: engine._process.front.snapshot.waiting)
    assert (
        sum(
            "runtime" in message
            for message in caplog.messages
            if not message.startswith("no connection to the runtime yet")
        )
        == 1
    )
    held.append(FakeRequest({"x": ramp(1, 5)}))
    assert engine.execute(held[5:]) is None
    start_runtime()
    for start, request in enumerate(held):
        assert_y(answer_of(request), 2 * ramp(1, start) + 1)


def test_a_model_is_ready_for_calls_while_its_runtime_restarts(
    runtime: Runtime, start_runtime: StartRuntime, start_engine: StartEngine
) -> None:
    """While its runtime restarts, a model is ready, so that calls of other models wait as clients' requests do.

    Triton 26.03 asks `is_ready`, if the model has it, before each such call.
    """
    stub = ModelStub()
    stub._served = engine = start_engine()
    runtime.stop()
    wait_until(lambda: engine.session.reading is None)

    assert getattr(stub, "is_ready", lambda: True)()
    call = FakeRequest({"x": ramp(1)})
    assert stub.execute([call]) is None
    start_runtime()
    assert answer_of(call).error is None


def test_a_request_waits_whose_runtime_ends_during_its_hook(
    runtime: Runtime, start_runtime: StartRuntime, start_engine: StartEngine
) -> None:
    """If the runtime ends during a request's hook, the connection is closed and its memory is gone.

    The next runtime answers the request.
    """
    ends: list[Callable[[], None]] = []

    def preprocess(arrays: dict[str, Any]) -> dict[str, Any]:
        if ends:
            ends.pop()()
        return arrays

    engine = start_engine(Hooks(preprocess=preprocess))
    attachment = engine.session.attachment
    assert attachment is not None

    def end() -> None:
        runtime.stop()
        wait_until(lambda: attachment.deferred.sock.fileno() < 0)

    ends.append(end)
    request = FakeRequest({"x": ramp(1)})
    assert engine.execute_later([request]) is None

    start_runtime()

    assert_y(answer_of(request), 2 * ramp(1) + 1)


def test_a_runtime_that_does_not_come_back_is_told(start_runtime: StartRuntime, doubling: Path) -> None:
    """Requests in flight and later ones fail if no next runtime comes within `stub.retry_s`, which is 0 in this test.

    When the engine is closed, the old connections are closed as well.
    """
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0, retry_s: 0}"))
    engine = make_engine(runtime, doubling)
    attachment = engine.session.attachment
    assert attachment is not None
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(1)}) for _ in range(2)]
    engine.execute(requests[:1])

    runtime.stop()

    wait_until(lambda: engine.session.reading is None)
    engine.execute(requests[1:])
    for request in requests:
        assert refused(answer_of(request), FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN]")
    engine.close()
    assert attachment.direct.sock.fileno() == attachment.deferred.sock.fileno() == -1


def test_a_model_leaves_with_its_last_stub_and_comes_back(
    runtime: Runtime, doubling: Path, start_engine: StartEngine
) -> None:
    """A model leaves the runtime with its last stub. Another stub loads it again."""
    first = make_engine(runtime, doubling)
    second = make_engine(runtime, doubling)
    assert runtime.device.resident == 1

    first.close()
    (answer,) = ask(second, FakeRequest({"x": ramp(1)}))
    assert answer.error is None
    second.close()
    wait_until(lambda: runtime.device.resident == 0)

    (answer,) = ask(start_engine(), FakeRequest({"x": ramp(1)}))
    assert answer.error is None
    assert runtime.device.resident == 1


def test_the_stub_closes_while_requests_wait(runtime: Runtime, doubling: Path) -> None:
    """Closing the stub answers the executing and the waiting request with an error at once."""
    engine = make_engine(runtime, doubling)
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(1)}) for _ in range(2)]
    for request in requests:
        assert engine.execute([request]) is None

    engine.close()

    for request in requests:
        answer = answer_of(request)
        assert refused(answer, FakeError.UNAVAILABLE, "the model is being unloaded")
    runtime.device.gate.set()


def test_outputs_without_axes_of_their_own_get_one_for_triton(start_engine: StartEngine) -> None:
    """If a hook returns an array of shape [N] and the model's configuration has [N, 1], the output is sent as [N, 1]."""
    engine = start_engine(
        Hooks(postprocess=lambda arrays: {"best": arrays["y"].max(axis=1)}),
        (WireTensor("best", "f32", (-1, 1)),),
    )

    (answer,) = ask(engine, FakeRequest({"x": ramp(2)}))

    assert answer.arrays["best"].shape == (2, 1)


def test_a_large_answer_is_finished_even_if_it_finds_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Triton's shared memory has no room for a large answer, the request is still ended."""
    from rsrv.stub import replies
    from rsrv.stub.replies import Reply, Responses
    from tests.fakes import FakePbUtils

    monkeypatch.setattr(replies, "free_shared_memory", lambda: 1 << 21)
    sent: list[tuple[object, int]] = []

    class FullSender:
        def send(self, response: object = None, flags: int = 0) -> None:
            sent.append((response, flags))
            if response is not None:
                raise RuntimeError("no room")

        def is_cancelled(self) -> bool:
            return False

    reply = Reply(FullSender(), Responses(FakePbUtils))

    with pytest.raises(RuntimeError, match="no room"):
        reply.send("a large answer", 1 << 20)

    assert sent == [("a large answer", 0), (None, FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)]
    reply.send("another")
    assert len(sent) == 2


def test_a_dropped_request_is_answered(runtime: Runtime) -> None:
    """A reply that is dropped without an answer sends an error."""
    from rsrv.stub.replies import Reply, Responses
    from tests.fakes import FakePbUtils

    request = FakeRequest({})
    reply = Reply(request.get_response_sender(), Responses(FakePbUtils))

    del reply

    assert refused(request.answers.get(timeout=1), FakeError.INTERNAL, "dropped")


def test_memory_that_was_refused_once_is_requested_again(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, long_in_place: None
) -> None:
    """If there is no memory for a batch, the batch is refused. Each later batch requests memory again."""
    engine = start_engine()
    first = engine.execute([FakeRequest({"x": ramp(1)})])
    assert first is not None

    def full(lane: RuntimeConnection, nbytes: int, users: int) -> Slab:
        raise OSError("no memory")

    places: list[Place] = []
    give = Arena.give

    def recorded(arena: Arena, place: Place) -> None:
        places.append(place)
        give(arena, place)

    with monkeypatch.context() as patched:
        patched.setattr(Arena, "give", recorded)
        patched.setattr(
            "rsrv.stub.engine._KEEP_SLAB_BYTES", -(1 << 30)
        )  # No memory is kept, so each batch requests it.
        patched.setattr(RuntimeConnection, "take", full)
        for _ in range(2):
            (refusal,) = ask(engine, FakeRequest({"x": ramp(1)}))
            assert refused(refusal, FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")

    assert len(places) == 1
    (answer,) = ask(engine, FakeRequest({"x": ramp(2)}))
    assert_y(answer, 2 * ramp(2) + 1)

"""Results of meta models' calls that stay on the device."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.runtime.weight_manager import SLACK_FRACTION
from rsrv.stub.engine import Engine
from tests.fakes import FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta
from tests.unit.runtime.metas import (
    Pause,
    answer_of,
    ask,
    assert_fails,
    assert_y,
    model_engine,
    queued,
    request,
    rows,
    send,
    status_of,
)
from tests.waiting import wait_until


def hold_device(runtime: Runtime, plain: Engine) -> Any:
    """Hold the device with a plain request, until the test opens the device's gate.

    Return the thread that waits for the answer.
    """
    runtime.device.gate.clear()
    thread = send(plain, request())
    runtime.device.gate.wait_until_held()
    return thread


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_padded_rows_on_the_device_never_show(runtime: Runtime, start_meta: StartMeta, count: int) -> None:
    """Rows of three stages stay on the device. For any number of rows, no padding appears in the result."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs, keep_on_device=True)["y"]
        second = call("b", {"x": first}, keep_on_device=["y"])["y"]
        for handle in (first, second):
            assert handle.shape == inputs["x"].shape
            assert handle.dtype == np.float32
        return {"y": call("a", {"x": second}, keep_on_device=[])["y"]}

    engine = start_meta(runtime, run)
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    (answer,) = ask(engine, FakeRequest({"x": x}))
    assert_y(answer, 2 * (2 * (2 * x + 1) + 2) + 1)
    assert (runtime.device.in_place, runtime.device.merged) == (2, 0)


def test_runs_whose_rows_share_an_output_keep_their_own(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta
) -> None:
    """Two runs share an execution. Each run continues with its own rows of the output, in a shared execution or alone."""
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        pause()
        first = call("a", inputs, keep_on_device=True)["y"]
        pause()
        return {"y": call("b", {"x": first})["y"]}

    engine, plain = start_meta(runtime, run), start_engine()
    for together in (True, False):
        requests = [request(1, 10), request(2, 20)]
        assert engine.execute(requests) is None
        pause.reached(2)
        thread = hold_device(runtime, plain)
        runtime.device.executed.clear()
        pause.go(2)
        wait_until(lambda: queued("a") == 2)
        runtime.device.gate.set()
        thread.join()
        pause.reached(2)
        assert runtime.device.executed == [1, 4]
        if together:
            thread = hold_device(runtime, plain)
            pause.go(2)
            wait_until(lambda: queued("b") == 2)
            runtime.device.gate.set()
            thread.join()
        else:
            pause.go()
            pause.go()
        assert_y(answer_of(requests[0]), rows(1, 44))
        assert_y(answer_of(requests[1]), rows(2, 84))
        if together:
            assert runtime.device.executed[-1] == 4


def test_rows_from_the_host_and_the_device_share_an_execution(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta, doublings: dict[str, Path]
) -> None:
    """One execution merges kept rows of two outputs, a client's rows, and the row of a plain request."""
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        x = inputs["x"]
        tensors = [call(name, {"x": x[:1]}, keep_on_device=True)["y"] for name in "ac"]
        pause()
        a, host, c = call.many([("b", {"x": tensor}) for tensor in (tensors[0], x, tensors[1])])
        return {"y": host["y"] + 100 * a["y"] + 10_000 * c["y"]}

    engine, other = start_meta(runtime, run, "abc"), start_engine()
    plain = model_engine(runtime, doublings["b"])
    client_request = request(2, 1)
    assert engine.execute([client_request]) is None
    pause.reached()
    holding = hold_device(runtime, other)
    runtime.device.executed.clear()
    waits = send(plain, direct := request(1, 7))
    pause.go()
    wait_until(lambda: queued("b") == 4)
    runtime.device.gate.set()

    # For 1, a computes 3 and c computes 5. For these, b computes 8 and 12, and for 1 it computes 4.
    assert_y(answer_of(client_request), rows(2, 4 + 100 * 8 + 10_000 * 12))
    assert_y(answer_of(direct), rows(1, 16))
    for thread in (holding, waits):
        thread.join()
    assert runtime.device.executed == [1, 8]  # The second execution has 1 + 2 + 1 + 1 rows.
    assert runtime.device.merged == 1


def test_a_handle_that_is_dropped_frees_the_device(runtime: Runtime, start_meta: StartMeta) -> None:
    """When a run drops a handle, the device frees the handle's tensor at the run's next call at the latest."""
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        for _ in range(50):
            outputs = call("a", inputs, keep_on_device=True)
        pause()
        del outputs
        y = call("b", inputs)["y"]
        pause()
        return {"y": y}

    engine = start_meta(runtime, run)
    thread = send(engine, request(3))
    pause.reached()
    # The runtime keeps at most two outputs of size 4: that of the last call, and that of the call before. The stub has dropped
    # the second one, and reports this with its next call.
    assert status_of()["kept_bytes"] <= 2 * 4 * 3 * 4
    pause.go()
    pause.reached()
    assert status_of()["kept_bytes"] == 0
    wait_until(lambda: gc.collect() >= 0 and not runtime.device.kept)
    pause.go()
    thread.join()


def test_a_handle_does_not_outlive_its_request(runtime: Runtime, start_meta: StartMeta) -> None:
    """If a run stores a handle and the next run uses it, the next run fails with an error that says this."""
    stored: list[Any] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if not stored:
            stored.append(call("a", inputs, keep_on_device=True)["y"])
        return {"y": call("b", {"x": stored[0]})["y"]}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, request())
    assert_y(answer, rows(1, 8))
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, "stage 'b': input 'x' was kept on the device by another request")
    stored.clear()


@pytest.mark.parametrize("count", [1, 2])
def test_calls_with_kept_inputs_are_tried_again_when_memory_runs_out(
    runtime: Runtime, start_meta: StartMeta, count: int
) -> None:
    """A call with kept inputs is retried when the device's memory runs out."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs, keep_on_device=True)["y"]
        runtime.device.fail_next("launch")
        second = call("b", {"x": first}, keep_on_device=True)["y"]
        return {"y": call("a", {"x": second})["y"]}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, request(count, 5))
    assert_y(answer, rows(count, 49))


def test_more_than_may_be_kept_is_refused(runtime: Runtime, start_meta: StartMeta) -> None:
    """If a run would keep more than half of the device's slack, its call gets QUEUE_FULL. Dropping handles avoids this."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        outputs: list[Any] = []
        greedy = inputs["x"][0, 0] == 1
        for _ in range(4):
            outputs.append(call("a", inputs, keep_on_device=True))
            if not greedy:
                outputs.clear()
        return {"y": call("b", inputs)["y"]}

    engine = start_meta(runtime, run)
    runtime.device.memory_limit = int(1.5 * 12 / (SLACK_FRACTION / 2))

    (answer,) = ask(engine, request(value=1))
    assert_fails(answer, FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL] stage 'a': ")
    (answer,) = ask(engine, request(value=2))
    assert_y(answer, rows(1, 6))


# --- what may not be kept ---------------------------------------------------------------------------------


def plus(amount: float) -> Any:
    return lambda arrays: {name: array + np.float32(amount) for name, array in arrays.items()}


def test_hooks_of_stages_apply(runtime: Runtime, start_meta: StartMeta) -> None:
    """The hooks of a callee are called with the client's arrays and with results of other stages."""
    engine = start_meta(
        runtime,
        lambda inputs, call: {"y": call("b", {"x": call("a", inputs)["y"]})["y"]},
        hooks={"a": Hooks(preprocess=plus(10)), "b": Hooks(postprocess=plus(1000))},
    )
    for count in (1, 2, 8):
        (answer,) = ask(engine, request(count, 5))
        assert_y(answer, rows(count, 2 * (2 * 15 + 1) + 2 + 1000))


@pytest.mark.parametrize(
    ("keep", "x", "text"),
    [
        (True, None, "stage 'a': its postprocess hook needs the outputs"),
        (["y"], None, "stage 'a': its postprocess hook needs the outputs"),
        (False, "kept", "stage 'a': its preprocess hook needs input 'x'"),
    ],
)
def test_hooks_need_their_tensors_on_the_host(
    runtime: Runtime, start_meta: StartMeta, keep: Any, x: str | None, text: str
) -> None:
    """A stage with hooks can neither keep outputs on the device nor take kept inputs."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("b", inputs, keep_on_device=True)["y"] if x else inputs["x"]
        return call("a", {"x": first}, keep_on_device=keep)  # type: ignore[no-any-return]

    engine = start_meta(runtime, run, hooks={"a": Hooks(plus(1), plus(1))})
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, text)


def test_an_output_that_is_not_there_cannot_be_kept(runtime: Runtime, start_meta: StartMeta) -> None:
    """Keeping an unknown output fails with its name."""
    engine = start_meta(runtime, lambda inputs, call: call("a", inputs, keep_on_device=["z"]))
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, "stage 'a': keep_on_device names 'z'")


@pytest.mark.parametrize("misuse", ["result", "numpy"])
def test_a_handle_is_not_an_array(runtime: Runtime, start_meta: StartMeta, misuse: str) -> None:
    """A run that returns a handle, or computes with it, fails its request with an error that refers to the log."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        tensor = call("a", inputs, keep_on_device=True)["y"]
        return {"y": tensor if misuse == "result" else np.add(tensor, 1)}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, "run hook")

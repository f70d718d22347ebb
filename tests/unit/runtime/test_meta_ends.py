"""Requests of meta models that end early: by deadlines, clients that leave, and stages that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.stub.calls import CallError
from rsrv.wire.frames import Status
from tests.fakes import FakeError
from tests.unit.runtime.conftest import Runtime, StartEngine, StartMeta
from tests.unit.runtime.metas import (
    FakeCallees,
    Pause,
    Run,
    answer_of,
    ask,
    assert_fails,
    assert_served,
    assert_y,
    both_kinds,
    chain,
    queued,
    request,
    rows,
    send,
    status_of,
)
from tests.waiting import wait_until

# --- deadlines --------------------------------------------------------------------------------------------


def test_the_deadline_passes_between_stages(
    runtime: Runtime, start_meta: StartMeta, pass_stub_time: Callable[[float], None]
) -> None:
    """If the deadline passes between stages, the next call fails with the stage's name."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)["y"]
        if inputs["x"][0, 0] != 100:
            assert 0 < call.remaining() <= 1000
            pass_stub_time(2000.0)
            assert call.remaining() <= 0
        else:
            assert call.remaining() is None
        return {"y": call("b", {"x": first})["y"]}

    engine = start_meta(runtime, run)
    (late,) = ask(engine, request(timeout=1000))
    assert_fails(late, FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    assert_served(engine)
    assert status_of()["calls"] == 3


@both_kinds
def test_the_deadline_passes_while_a_call_waits(
    runtime: Runtime, start_engine: StartEngine, start_meta: StartMeta, run: Run
) -> None:
    """If the deadline passes while a call waits in the queue, the call and its run end at once."""
    engine, plain = start_meta(runtime, run), start_engine()
    runtime.device.gate.clear()
    other = request()
    waits = send(plain, other)
    runtime.device.gate.wait_until_held()

    send(engine, late := request(timeout=1000))
    wait_until(lambda: queued("a") == 1)
    runtime.pass_time(2000.0)
    assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:DEADLINE] stage 'a'")
    runtime.device.gate.set()
    waits.join()
    assert_y(answer_of(other), rows(1, 3))
    assert_served(engine)


@both_kinds
def test_the_deadline_passes_in_a_stage(
    runtime: Runtime,
    start_meta: StartMeta,
    run: Run,
    long_grace: None,
    pass_stub_time: Callable[[float], None],
) -> None:
    """An execution that is in progress at the deadline is not interrupted.

    If the run has a further stage, it ends before this stage. Otherwise the run is answered.
    """
    engine = start_meta(runtime, run)
    for stage, code in ((0, FakeError.UNAVAILABLE), (1, None)):
        runtime.device.gate.clear(after=stage)
        late = request(timeout=1000)
        thread = send(engine, late)
        runtime.device.gate.wait_until_held()
        pass_stub_time(2000.0)
        runtime.device.gate.set()
        thread.join()
        if code:
            assert_fails(answer_of(late), code, "[rsrv:DEADLINE]")
        else:
            assert_y(answer_of(late), rows(1, 8))
        assert_served(engine)


@both_kinds
def test_a_device_that_does_not_come_back_holds_no_client(
    runtime: Runtime, start_meta: StartMeta, run: Run
) -> None:
    """If the device hangs, the client gets an answer some time after the deadline. Later requests are served."""
    engine = start_meta(runtime, run)
    runtime.device.gate.clear()

    (late,) = ask(engine, request(timeout=0.01))
    assert_fails(late, FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    runtime.device.gate.set()
    assert_served(engine)


def test_a_request_whose_deadline_has_passed_calls_no_model(runtime: Runtime, start_meta: StartMeta) -> None:
    """If the deadline has already passed, run is not called."""
    called: list[Any] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        called.append(inputs)
        return {"y": inputs["x"]}

    engine = start_meta(runtime, run)
    (late,) = ask(engine, request(timeout=1e-6))
    assert_fails(late, FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    assert not called


# --- clients that go --------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", ["call", "many"])
def test_a_client_that_goes_is_noticed_before_a_stage(
    runtime: Runtime, start_meta: StartMeta, through: str
) -> None:
    """A run calls models in an endless loop. After its client has left, its next call fails."""
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        pause()
        while True:
            if through == "call":
                call("a", inputs)
            else:
                call.many([("a", inputs), ("b", inputs)])

    engine = start_meta(runtime, run)
    thread = send(engine, gone := request())
    pause.reached()
    gone.cancelled = True
    pause.go()
    thread.join()
    assert_fails(answer_of(gone), FakeError.CANCELLED, "cancelled")


# --- models that fail -------------------------------------------------------------------------------------


@both_kinds
def test_a_stage_that_fails_is_named(runtime: Runtime, start_meta: StartMeta, run: Run) -> None:
    """If the device fails in a stage, the error names the stage and no details."""
    engine = start_meta(runtime, run)
    runtime.device.fail_next("launch", after=1, error=RuntimeError("secret detail"))

    (failed,) = ask(engine, request())
    assert_fails(failed, FakeError.INTERNAL, "stage 'b': ")
    assert "secret" not in failed.error.message  # type: ignore[union-attr]
    assert_served(engine)


def test_a_run_may_go_on_without_a_stage(runtime: Runtime, start_meta: StartMeta) -> None:
    """CallError has the stage, status and text, and a run may continue after it."""
    caught: list[CallError] = []
    wrong: dict[str, dict[str, Any]] = {
        "float64, expected f32": {"x": rows(1).astype(np.float64)},
        "[1, 4]": {"x": np.zeros((1, 4), np.float32)},
        "[3]": {"x": np.zeros(3, np.float32)},
        "missing": {},
        "'z'": {"x": rows(1), "z": rows(1)},
    }

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        for bad in wrong.values():
            with pytest.raises(CallError) as info:
                call("a", bad)
            caught.append(info.value)
        return {"y": call("b", inputs)["y"]}

    engine = start_meta(runtime, run)
    (answer,) = ask(engine, request())
    assert_y(answer, rows(1, 4))
    assert {error.stage for error in caught} == {"a"}
    assert {error.status for error in caught} == {Status.INVALID}
    for error, text in zip(caught, wrong, strict=True):
        assert text in error.text


def test_a_model_that_is_not_listed_cannot_be_called(runtime: Runtime, start_meta: StartMeta) -> None:
    """A run cannot call a model that its manifest does not list, even if the model is loaded."""
    start_meta(runtime, chain, "abc", name="other")
    engine = start_meta(runtime, lambda inputs, call: call("c", inputs), "ab")

    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, "stage 'c': ")


def test_external_models_are_called_through_triton(runtime: Runtime, start_meta: StartMeta) -> None:
    """External models are called through Triton. If one is missing, the client gets NOT_FOUND with its name."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        first = call("a", inputs)["y"]
        name = "ocr" if inputs["x"][0, 0] < 5 else "gone"
        second, third = call.many([(name, {"x": first}), ("b", {"x": first})])
        return {"y": second["y"] + third["y"]}

    triton = FakeCallees({"ocr": lambda inputs: {"y": inputs["x"] * 100}, "gone": lambda inputs: {}})
    engine = start_meta(runtime, run, triton=triton)
    assert isinstance(triton.models, dict)
    del triton.models["gone"]

    (answer,) = ask(engine, request(value=2))
    assert_y(answer, rows(1, 500 + 12))
    (answer,) = ask(engine, request(value=7))
    assert_fails(answer, FakeError.NOT_FOUND, "stage 'gone': ")


@pytest.mark.parametrize(
    ("hooks", "which"),
    [
        (Hooks(preprocess=lambda inputs: {"z": inputs["x"]}), "preprocess"),
        (Hooks(postprocess=lambda outputs: {"y": outputs["y"][:, :1]}), "postprocess"),
        (Hooks(postprocess=lambda outputs: {"y": outputs["y"][:0]}), "postprocess"),
    ],
)
@both_kinds
def test_a_hook_of_a_stage_that_fails_is_named(
    runtime: Runtime, start_meta: StartMeta, run: Run, hooks: Hooks, which: str
) -> None:
    """If a stage's hook returns a wrong result, the request fails with an error that names the stage and the hook."""
    engine = start_meta(runtime, run, hooks={"b": hooks})

    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INTERNAL, "stage 'b': ")
    assert which in answer.error.message  # type: ignore[union-attr]


def test_of_several_the_first_failure_is_told_when_all_have_ended(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """If several parallel calls fail, the run gets the first failure after all of them have ended."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        if inputs["x"][0, 0] == 100:
            return chain(inputs, call)
        return call.many(  # type: ignore[no-any-return]
            [("a", inputs), ("b", {}), ("a", {"x": rows(1)[:, :2]}), ("b", inputs)]
        )[0]

    engine = start_meta(runtime, run)
    runtime.device.executed.clear()
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.INVALID_ARG, "stage 'b': input 'x' is missing")
    assert runtime.device.executed == [1, 1]
    assert_served(engine)

"""A meta model's run outlives its runtime: the next runtime repeats the calls that were in progress."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest

from rsrv.front.rules import EQUAL, SUSPECT
from rsrv.hooks.loader import Hooks
from rsrv.runtime.crash_history import BlackBox
from rsrv.settings import load_settings
from rsrv.stub.meta_engine import MetaEngine, MetaModel
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.blackbox import read_slots
from rsrv_bundle.export import export_bundle
from tests.builders import write_meta
from tests.fakes import FakeError, FakePbUtils, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime, export_doubling
from tests.unit.runtime.metas import (
    OUTPUTS,
    FakeCallees,
    Pause,
    Run,
    answer_of,
    assert_fails,
    assert_served,
    assert_y,
    awaiting,
    both_kinds,
    model_engine,
    request,
    rows,
    status_of,
    stopping,
)
from tests.waiting import wait_until

#: Part of the error that a client gets if its run kept a tensor on the device, and the runtime has ended.
LOST = "a tensor that this request kept on the device"


class Deaths:
    """The runtimes of a meta model, one after another."""

    def __init__(self, start: StartRuntime, settings: str = "") -> None:
        self._start = start
        self._settings = load_settings(settings)
        self.runtime: Runtime = start(self._settings)

    def die(self) -> None:
        self.runtime.stop()

    def die_in_a_call(self) -> None:
        """Let the runtime die during an execution. The device's gate must be clear."""
        self.runtime.device.gate.wait_until_held()
        self.die()
        self.runtime.device.gate.set()

    def come_back(self, box: BlackBox | None = None) -> None:
        self.runtime = self._start(self._settings, blackbox=box)

    def replace(self, engine: MetaEngine) -> None:
        """End the runtime, start the next one, and wait until it serves the engine's model."""
        self.die()
        # The engine seems to be ready until it notices the death.
        wait_until(lambda: engine.session.reading is None)
        self.come_back()
        wait_until(lambda: engine.session.reading)


@pytest.fixture
def deaths(start_runtime: StartRuntime) -> Deaths:
    return Deaths(start_runtime)


@both_kinds
def test_runs_in_a_call_go_on_in_the_next_runtime(deaths: Deaths, start_meta: StartMeta, run: Run) -> None:
    """After a runtime's death, runs that wait for a call or for admission are all answered, once and correctly."""
    engine = start_meta(deaths.runtime, run)
    requests = [request(value=n) for n in range(5)]
    deaths.runtime.device.gate.clear()
    assert engine.execute(requests) is None
    wait_until(lambda: status_of()["waiting"] == 3)
    deaths.die_in_a_call()

    deaths.come_back()

    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, 4 * n + 4))
    assert_served(engine)
    assert all(waiting_request.answers.empty() for waiting_request in requests)


@both_kinds
def test_the_memory_of_a_dead_runtimes_calls_is_freed_with_them(
    deaths: Deaths, start_meta: StartMeta, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a death, the memory of lost calls and connections is freed without a garbage collection.

    Shared memory is scarce, so it must not wait for a collection.
    """
    collect = gc.collect
    collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    try:
        engine = start_meta(deaths.runtime, run)
        requests = [request(value=n) for n in range(2)]
        deaths.runtime.device.gate.clear()
        assert engine.execute(requests) is None
        deaths.die_in_a_call()
        deaths.come_back()
        for n, client_request in enumerate(requests):
            assert_y(answer_of(client_request), rows(1, 4 * n + 4))
        del requests, client_request
        assert_served(engine)

        file_count = count_memory_files()

        collect()
        assert count_memory_files() == file_count
    finally:
        gc.enable()


def count_memory_files() -> int:
    """Return how many segments of shared memory this process maps."""
    return sum("memfd:rsrv-tensors" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_run_between_calls_goes_on_with_its_results(deaths: Deaths, start_meta: StartMeta) -> None:
    """A runtime dies between two calls of a run. The next one executes only the second call, with the first one's result."""
    pause = Pause()
    engine = start_meta(deaths.runtime, stopping(pause))
    client_request = request(value=3)
    assert engine.execute([client_request]) is None
    pause.reached()
    deaths.replace(engine)
    before = len(deaths.runtime.device.executed)

    pause.go()

    assert_y(answer_of(client_request), rows(1, 16))
    assert len(deaths.runtime.device.executed) == before + 1


def test_a_run_that_was_just_let_in_begins_in_the_next_runtime(
    deaths: Deaths, start_meta: StartMeta, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime dies just after it has admitted a run, which has no connection yet. The run begins in the next runtime."""
    pause = Pause()
    engine = start_meta(deaths.runtime, stopping(pause))
    requests = [request(value=n) for n in range(3)]
    assert engine.execute(requests[:2]) is None
    pause.reached(2)
    assert engine.execute(requests[2:]) is None
    wait_until(lambda: status_of()["waiting"] == 1)
    taken: Callable[..., Any] = engine._take_connection

    def take(run: Any) -> Any:
        if run.admitted:
            deaths.die()
            wait_until(lambda: engine.session.reading is None)
        return taken(run)

    monkeypatch.setattr(engine, "_take_connection", take)
    pause.go(1)
    wait_until(lambda: engine.session.reading is None)
    deaths.come_back()
    pause.go(2)

    for n, client_request in enumerate(requests):
        assert_y(answer_of(client_request), rows(1, 4 * n + 4))


def test_calls_in_parallel_are_repeated_as_they_were_sent(deaths: Deaths, start_meta: StartMeta) -> None:
    """Parallel calls are repeated with the inputs that they were sent with, even if the run has filled its buffer again."""

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        buffer, calls = np.zeros_like(inputs["x"]), []
        for n in range(8):
            buffer[:] = n
            calls.append(call("ab"[n % 2], {"x": buffer}))
        ends = await asyncio.gather(*calls)
        return {"y": sum(10**n * end["y"].astype(np.float64) for n, end in enumerate(ends)).astype("f4")}

    engine = start_meta(deaths.runtime, run)
    deaths.runtime.device.gate.clear()
    client_request = request()
    assert engine.execute([client_request]) is None
    deaths.die_in_a_call()

    deaths.come_back()

    expected = sum(10**n * (2 * n + 1 + n % 2) for n in range(8))
    assert_y(answer_of(client_request), rows(1, expected))


@pytest.mark.parametrize("kind", ["another output", "other columns"])
def test_a_call_is_repeated_as_the_next_version_of_its_model_takes_it(
    start_runtime: StartRuntime, start_meta: StartMeta, tmp_path: Path, kind: str
) -> None:
    """During a call, the callee's bundle is replaced, and then the runtime dies.

    The call is repeated with the new version, or refused if its inputs do not fit the new version.
    """
    bundle, columns = tmp_path / "callee", 5 if kind == "other columns" else 3

    def compute(inputs: Any, weights: Any) -> list[Any]:
        return [2 * inputs[0] + weights[0]] * (2 if kind == "another output" else 1)

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        return {"y": call("callee", inputs)["y"]}

    export_doubling(bundle, w=[1, 1, 1])
    runtime = start_runtime()
    engine = start_meta(runtime, run, ["callee"], bundles={"callee": bundle})
    runtime.device.gate.clear()
    client_request = request(value=3)
    assert engine.execute([client_request]) is None
    runtime.device.gate.wait_until_held()
    rmtree(bundle)
    export_bundle(
        lambda params, x: dict.fromkeys("yz" if kind == "another output" else "y", 2 * x + params["w"]),
        {"w": np.ones(columns, np.float32)},
        {"x": np.zeros((1, columns), np.float32)},
        batch_sizes=[1, 4],
        out_dir=bundle,
    )
    runtime.stop()
    runtime.device.gate.set()
    start_runtime(compute=compute)

    if kind == "other columns":
        text = "input 'x': expected shape [-1, 5] (axis 0 is the batch), got [1, 3]"
        assert_fails(answer_of(client_request), FakeError.INVALID_ARG, text)
    else:
        assert_y(answer_of(client_request), rows(1, 7))


def test_a_run_goes_on_at_the_other_device(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """If a device's runtime dies, a run continues on the other device at once.

    Results that it already has are sent to the other device.
    """
    pause, runtimes = Pause(), list[Runtime]()
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    write_meta(tmp_path / "meta", "def run(inputs, call): ...", "ab")

    def open_session(device: int) -> Session:
        # The next runtime takes the socket's path, so this runtime's socket is renamed.
        runtime = start_runtime(devices=2)
        runtime.socket = runtime.socket.rename(runtime.socket.with_name(f"{device}.sock"))
        runtimes.append(runtime)
        calls = {name: str(doublings[name]) for name in "ab"}
        return Session(runtime.open, "meta", str(tmp_path / "meta"), calls, device)

    def make(session: Session, attachment: Attachment) -> MetaEngine:
        engines.append(
            MetaEngine(
                session,
                attachment,
                process,
                MetaModel(stopping(pause), {"a": Hooks(), "b": Hooks()}, OUTPUTS),
                lambda settings: pytest.fail("nothing goes through Triton"),
            )
        )
        return engines[-1]

    engines: list[MetaEngine] = []
    replicas = Replicas(open_session, make, "meta", process)
    replicas.load()
    assert len(engines) == 2
    client_request = request(value=3)
    assert engines[0].execute([client_request]) is None
    pause.reached()
    runtimes[0].stop()
    pause.go()

    assert_y(answer_of(client_request), rows(1, 16))
    replicas.close()


# --- tensors on the device -------------------------------------------------------------------------------------


def keeping(pause: Pause, begun: list[float]) -> Run:
    """Return a run like `stopping` that keeps the first result on the device.

    When it begins, it appends its input to `begun`.
    """

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        begun.append(inputs["x"][0, 0])
        first = call("a", inputs, keep_on_device=True)["y"]
        pause()
        return {"y": call("b", {"x": first})["y"]}

    return run


def test_a_run_whose_tensor_is_gone_fails_with_the_reason(deaths: Deaths, start_meta: StartMeta) -> None:
    """If a run's tensor was on the device of a dead runtime, the run fails.

    The client gets the reason, and may try again.
    """
    pause, begun = Pause(), list[float]()
    engine = start_meta(deaths.runtime, keeping(pause, begun))
    client_request = request()
    assert engine.execute([client_request]) is None
    pause.reached()
    deaths.die()
    deaths.come_back()
    pause.go()

    answer = answer_of(client_request)
    assert_fails(answer, FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN] stage 'b': ")
    assert_fails(answer, FakeError.UNAVAILABLE, LOST)
    assert len(begun) == 1


def outlive(
    client_request: FakeRequest, engine: MetaEngine, deaths: Deaths, pause: Pause, *, times: int
) -> None:
    """Execute a request whose runtime dies in each of the first `times` pauses. The deaths are 1,000 s apart."""
    passed = [0.0]
    engine._process.front._clock = lambda: time.monotonic() + passed[0]
    assert engine.execute([client_request]) is None
    for _ in range(times):
        pause.reached()
        deaths.replace(engine)
        passed[0] += 1000.0
        pause.go()
    pause.reached()
    pause.go()


def test_a_restartable_run_begins_again_once_for_each_death(deaths: Deaths, start_meta: StartMeta) -> None:
    """After each death, a restartable run begins again with its inputs. It is answered correctly.

    The time between two deaths does not count as waiting for a runtime.
    """
    pause, begun = Pause(), list[float]()
    engine = start_meta(deaths.runtime, keeping(pause, begun), restartable=True)
    client_request = request(value=5)
    outlive(client_request, engine, deaths, pause, times=2)

    assert_y(answer_of(client_request), rows(1, 24))
    assert begun == [5] * 3


def test_a_restartable_run_that_uses_another_runs_tensor_does_not_begin_again(
    deaths: Deaths, start_meta: StartMeta
) -> None:
    """A restartable run that uses a lost tensor of an earlier run fails, and does not begin again.

    If it began again, the tensor would still be missing. The earlier run had kept it in the runtime that has died.
    """
    tensors: list[Any] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        tensors.append(call("a", inputs, keep_on_device=True)["y"])
        return {"y": call("b", {"x": tensors[0]})["y"].copy()}

    engine = start_meta(deaths.runtime, run, restartable=True)
    client_request, late = request(), request()
    assert engine.execute([client_request]) is None
    assert_y(answer_of(client_request), rows(1, 8))
    deaths.replace(engine)
    assert engine.execute([late]) is None

    assert_fails(answer_of(late), FakeError.INTERNAL, "by another request, which has ended")
    assert len(tensors) == 2


# --- limits ----------------------------------------------------------------------------------------------------


def test_a_run_that_two_runtimes_died_with_is_not_tried_again(deaths: Deaths, start_meta: StartMeta) -> None:
    """A run that was in progress at two deaths fails. A later run with its inputs fails at once, and others are served."""
    pause = Pause()
    engine = start_meta(deaths.runtime, stopping(pause))
    # The answer must not begin with a zero byte, because memory without an answer does: this device still writes the
    # answer after the death.
    client_request = request(value=0.3)
    deaths.runtime.device.gate.clear()
    assert engine.execute([client_request]) is None
    deaths.die_in_a_call()
    deaths.come_back()
    pause.reached()
    deaths.runtime.device.gate.clear()
    pause.go()
    deaths.die_in_a_call()

    assert_fails(answer_of(client_request), FakeError.INTERNAL, SUSPECT)
    deaths.come_back()
    wait_until(lambda: engine.session.reading)
    assert_served(engine)
    executed, again = len(deaths.runtime.device.executed), request(value=0.3)
    assert engine.execute([again]) is None
    assert_fails(answer_of(again), FakeError.INTERNAL, EQUAL)
    assert len(deaths.runtime.device.executed) == executed


def test_a_run_that_may_have_ended_a_runtime_has_the_device_to_itself(
    deaths: Deaths, start_meta: StartMeta
) -> None:
    """After a death, the calls of a run that may have caused the death execute alone.

    So a second death blames only this run. Calls of other runs share the device.
    """
    pause, box = Pause(), BlackBox()
    engine = start_meta(deaths.runtime, stopping(pause))
    suspect, other = request(value=0.3), request(value=0.4)
    deaths.runtime.device.gate.clear()
    assert engine.execute([suspect]) is None
    deaths.die_in_a_call()
    deaths.come_back(box)
    for client_request, alone in ((suspect, True), (other, False)):
        if not alone:
            assert engine.execute([client_request]) is None
        pause.reached()
        deaths.runtime.device.gate.clear()
        pause.go()
        deaths.runtime.device.gate.wait_until_held()
        assert [task.alone for task in read_slots(bytes(box.memory))] == [alone]
        deaths.runtime.device.gate.set()
        assert answer_of(client_request).error is None


def test_a_run_waits_for_retry_s_after_each_death(deaths: Deaths, start_meta: StartMeta) -> None:
    """After each death, a run waits up to `retry_s` for a runtime. The time between two deaths does not count."""
    pause = Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        y = inputs["x"]
        for _ in range(4):
            y = call("a", {"x": y})["y"]
            pause()
        return {"y": y}

    engine = start_meta(deaths.runtime, run)
    client_request = request(value=0)
    outlive(client_request, engine, deaths, pause, times=3)

    assert_y(answer_of(client_request), rows(1, 15))


@both_kinds
@pytest.mark.parametrize("kind", ["deadline", "cancelled", "unloaded", "retry_s"])
def test_a_run_waits_no_longer_than_its_request(
    start_runtime: StartRuntime,
    start_meta: StartMeta,
    run: Run,
    kind: str,
    pass_stub_time: Callable[[float], None],
) -> None:
    """A run stops waiting for a runtime at its deadline, after `retry_s`, or when it is cancelled or its model is unloaded."""
    deaths = Deaths(start_runtime, "stub: {retry_s: 0.2}" if kind == "retry_s" else "stub: {retry_s: 60}")
    engine = start_meta(deaths.runtime, run)
    client_request = request(timeout=1000 if kind == "deadline" else 0)
    deaths.runtime.device.gate.clear()
    assert engine.execute([client_request]) is None
    deaths.die_in_a_call()
    if kind == "deadline":
        pass_stub_time(2000.0)
    if kind == "cancelled":
        client_request.cancelled = True
    if kind == "unloaded":
        engine.close()

    code, text = {
        "deadline": (FakeError.UNAVAILABLE, "[rsrv:DEADLINE]"),
        "cancelled": (FakeError.CANCELLED, "cancelled"),
        "unloaded": (FakeError.UNAVAILABLE, "the model is being unloaded"),
        "retry_s": (FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN]"),
    }[kind]
    assert_fails(answer_of(client_request), code, text)
    assert client_request.answers.empty()


# --- through Triton --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [stopping, awaiting])
def test_calls_through_triton_are_repeated(
    start_runtime: StartRuntime, start_meta: StartMeta, doublings: Any, run: Any
) -> None:
    """If a runtime dies during a run's call through Triton, the callee's stub refuses the call.

    The run enters the next runtime and sends the call again.
    """
    deaths = Deaths(start_runtime, "meta: {transport: bls}")
    engines = {name: model_engine(deaths.runtime, doublings[name], internal=True) for name in "ab"}
    pause = Pause()
    engine = start_meta(
        deaths.runtime,
        run(pause) if run is stopping else run,
        triton=FakeCallees(engines=engines),
    )
    client_request: FakeRequest = request(value=2)
    if run is awaiting:
        deaths.runtime.device.gate.clear()
        assert engine.execute([client_request]) is None
        deaths.die_in_a_call()
    else:
        assert engine.execute([client_request]) is None
        pause.reached()
        deaths.die()
        pause.go()

    deaths.come_back()

    assert_y(answer_of(client_request), rows(1, 12))

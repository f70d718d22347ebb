"""Executions that are launched ahead: the device gets the next one early, and results are not mixed up."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime.activity import Activity
from rsrv.runtime.device import Array, Device
from rsrv.runtime.execution import Dispatch
from rsrv.runtime.executor import ExecutionEnded, Executor
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.policy import scheduler_settings
from rsrv.runtime.slices import RequestSlice
from rsrv.runtime.threads import Inbox
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler.events import Execute
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.settings import Settings, load_settings
from rsrv.stub.engine import Engine
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeError, FakeRequest
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartRuntime, build_here
from tests.unit.runtime.engines import make_engine, ramp, refused
from tests.unit.runtime.metas import answer_of
from tests.unit.runtime.watchers import configure
from tests.waiting import PATIENCE_S, wait_until


def in_depth(depth: int) -> Settings:
    """Return settings with this depth. With them, execute() does not wait for answers."""
    return load_settings(f"scheduler: {{depth: {depth}}}\nstub: {{in_place_ms: 0, retry_s: 0}}")


@pytest.fixture(autouse=True)
def launched_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch executions as soon as the depth allows, however slow this machine is."""

    def early(*args: Any, **options: Any) -> SchedulerSettings:
        return replace(scheduler_settings(*args, **options), launch_ahead_ms=1000.0)

    monkeypatch.setattr("rsrv.runtime.weight_manager.scheduler_settings", early)


@pytest.fixture
def runtime(start_runtime: StartRuntime) -> Runtime:
    """Start a runtime of depth 2 on an asynchronous device."""
    return start_runtime(in_depth(2), asynchronous=True)


@pytest.fixture
def engine(runtime: Runtime, doubling: Path) -> Engine:
    engine = make_engine(runtime, doubling)
    forget_the_warm_up(runtime)
    return engine


def forget_the_warm_up(runtime: Runtime) -> None:
    while not runtime.device.launched.empty():
        runtime.device.launched.get()
    runtime.device.executed.clear()


def launch(runtime: Runtime, engine: Engine, *requests: FakeRequest) -> None:
    """Send requests as one batch, and wait until it is launched."""
    assert engine.execute(list(requests)) is None
    runtime.device.launched.get(timeout=PATIENCE_S)


def correct(request: FakeRequest) -> bool:
    x = request.inputs()[0].as_numpy()
    return np.array_equal(answer_of(request).arrays["y"], 2 * x + 1)


def test_the_next_execution_is_launched_before_the_last_one_is_read(runtime: Runtime, engine: Engine) -> None:
    """The second execution is launched before the first one's outputs are read."""
    runtime.device.gate.clear()
    first, second = FakeRequest({"x": ramp(1)}), FakeRequest({"x": ramp(1, 10)})
    launch(runtime, engine, first)

    launch(runtime, engine, second)

    assert runtime.device.executed == []
    runtime.device.gate.set()
    assert correct(first)
    assert correct(second)


def test_no_more_is_launched_than_the_depth_allows(runtime: Runtime, engine: Engine) -> None:
    """With depth 2, two executions are launched. Later requests wait until one of these executions has ended."""
    runtime.device.gate.clear()
    launched = [FakeRequest({"x": ramp(1, i)}) for i in range(2)]
    for request in launched:
        launch(runtime, engine, request)
    waiting = [FakeRequest({"x": ramp(1, i)}) for i in range(4)]
    for request in waiting:
        assert engine.execute([request]) is None
    assert runtime.device.launched.empty()

    runtime.device.gate.set()

    assert all(correct(request) for request in (*launched, *waiting))
    assert runtime.device.executed[:2] == [1, 1]


def test_a_failure_leaves_the_execution_behind_it_right(runtime: Runtime, engine: Engine) -> None:
    """If reading the outputs of an execution fails, the execution that was launched after it is still correct."""
    runtime.device.gate.clear()
    first = [FakeRequest({"x": ramp(1, i)}) for i in range(3)]
    second = [FakeRequest({"x": ramp(1, 100 + i)}) for i in range(3)]
    runtime.device.fail = "out of order"
    launch(runtime, engine, *first)
    runtime.device.fail = None
    launch(runtime, engine, *second)

    runtime.device.gate.set()

    assert all(refused(answer_of(request), FakeError.INTERNAL, "failed to execute") for request in first)
    assert all(correct(request) for request in second)


def test_what_is_launched_is_answered_although_its_client_left(runtime: Runtime, engine: Engine) -> None:
    """A launched request is answered even if its client has left. A waiting request whose client leaves ends at once."""
    runtime.device.gate.clear()
    launched = [FakeRequest({"x": ramp(1, i)}) for i in range(2)]
    for request in launched:
        launch(runtime, engine, request)
    waiting = FakeRequest({"x": ramp(1)})
    assert engine.execute([waiting]) is None

    launched[1].cancelled = waiting.cancelled = True

    assert refused(answer_of(waiting), FakeError.CANCELLED, "cancelled")
    runtime.device.gate.set()
    assert all(correct(request) for request in launched)
    assert runtime.device.executed == [1, 1]


def test_a_model_that_leaves_while_launched_keeps_its_weights_until_the_end(
    runtime: Runtime, engine: Engine
) -> None:
    """If a model leaves, its weights stay on the device until its launched executions have ended."""
    runtime.device.gate.clear()
    for i in range(2):
        launch(runtime, engine, FakeRequest({"x": ramp(1, i)}))

    engine.close()
    # The only connection is that of the status request.
    wait_until(lambda: read_status(os.getpid())["connections"] == 1)
    assert runtime.device.resident == 1
    runtime.device.gate.set()

    wait_until(lambda: runtime.device.resident == 0)
    assert runtime.device.executed == [1, 1]
    wait_until(lambda: read_status(os.getpid())["models"] == {})


def test_a_runtime_that_stops_with_executions_launched_answers_nothing_wrong(
    runtime: Runtime, engine: Engine
) -> None:
    """If a runtime stops with launched executions, their clients get RUNTIME_DOWN."""
    runtime.device.gate.clear()
    requests = [FakeRequest({"x": ramp(1, i)}) for i in range(2)]
    for request in requests:
        launch(runtime, engine, request)

    runtime.stop()
    runtime.device.gate.set()

    assert all(refused(answer_of(r), FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN]") for r in requests)


@pytest.mark.parametrize(
    ("asynchronous", "depth"), [(True, 2), (False, 1)], ids=["beside the CPU", "on the CPU"]
)
def test_the_depth_is_the_devices_by_default(
    start_runtime: StartRuntime, doubling: Path, asynchronous: bool, depth: int
) -> None:
    """Without a setting, the depth is the default of the device."""
    runtime = start_runtime(load_settings("stub: {in_place_ms: 0}"), asynchronous=asynchronous)
    make_engine(runtime, doubling)

    assert configure(runtime, {})["depth"] == depth


def test_the_depth_may_change_while_executions_are_launched(runtime: Runtime, engine: Engine) -> None:
    """The depth may change between 1 and 3 while executions are launched."""
    requests = [FakeRequest({"x": ramp(1 + i % 3, i)}) for i in range(120)]
    for i, request in enumerate(requests):
        if i % 10 == 0:
            assert configure(runtime, {"depth": 1 + i // 10 % 3})["depth"] == 1 + i // 10 % 3
        assert engine.execute([request]) is None

    assert all(correct(request) for request in requests)


_SERVE = """
import sys
from tests.unit.runtime.test_pipelining import serve_on_jax
serve_on_jax(*sys.argv[1:])
"""


@pytest.mark.long
def test_jax_computes_the_same_at_any_depth(tmp_path: Path) -> None:
    """jax answers 200 random batches correctly, launched one and two at a time on an asynchronous CPU. The arithmetic is exact.

    The reported seconds of three executions that are launched together add up to no more than the elapsed time, in
    whatever order they are read.
    """
    rng = np.random.default_rng(1)
    export_bundle(
        lambda params, x: {"y": x @ params["a"] @ params["b"]},
        {name: jnp.asarray(rng.integers(-2, 3, (96, 96)), jnp.float32) for name in "ab"},
        {"x": np.zeros((1, 96), np.float32)},
        batch_sizes=[1, 4, 16],
        out_dir=tmp_path / "squares",
    )
    # jax decides once per process whether its CPU is asynchronous.
    done = subprocess.run(
        [sys.executable, "-c", _SERVE, str(tmp_path / "squares")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [200, 200, True]


def serve_on_jax(path: str) -> None:
    """Print how many of 200 batches are right at depth 1 and 2, and whether seconds add up. This runs in its own process."""
    device = JaxDevice("cpu", asynchronous_cpu=True)
    assert device.asynchronous
    model = build_here(path, device)
    a, b = (model.host.read(index) for index in range(2))
    right = [right_answers(model, device, a @ b, depth) for depth in (1, 2)]
    print(json.dumps([*right, all(seconds_add_up(model, device, order) for order in permutations(range(3)))]))


def seconds_add_up(model: CompiledModel, device: Device, order: Iterable[int]) -> bool:
    assert model.weights is not None
    started = time.perf_counter()
    x = np.ones((16, 96), np.float32)
    launched = [device.launch(model.executables[0, 16], model.weights, [x]) for _ in range(3)]
    seconds = [device.read(launched[index])[1] for index in order]
    return min(seconds) >= 0 and 0 < sum(seconds) <= time.perf_counter() - started


def right_answers(model: CompiledModel, device: Device, product: Array, depth: int) -> int:
    rng = np.random.default_rng(2)
    inbox, ends = Inbox(), list[ExecutionEnded]()
    executor = Executor(inbox, Activity())
    dispatches = []
    for number in range(200):
        size = int(rng.choice([1, 4, 16]))
        dispatch = lay_out(model, number, size, rng)
        dispatches.append(dispatch)
        while number - len(ends) >= depth:
            ends += take_ends(inbox)
        executor.start(dispatch, device, depth=depth, contended=False)
    while len(ends) < len(dispatches):
        ends += take_ends(inbox)
    assert [(end.dispatch, end.error) for end in ends] == [(dispatch, None) for dispatch in dispatches]
    (variant,) = model.interface.variants
    return sum(
        all(
            np.array_equal(
                part.target(0, variant.outputs),
                part.source(0, variant.inputs) @ product,
            )
            for part in dispatch.slices
            if isinstance(part, RequestSlice)
        )
        for dispatch in dispatches
    )


def lay_out(
    model: CompiledModel, number: int, size: int, rng: np.random.Generator, seconds: float = 1.0
) -> Dispatch:
    """Return a dispatch of at most `size` requests of one row with random inputs. `seconds` is its expected duration."""
    (variant,) = model.interface.variants
    count = int(rng.integers(1, size + 1))
    stride = 2 * variant.inputs.places[1].nbytes
    segment = np.zeros(count * stride, np.uint8)
    no_peer = cast(PeerConnection, None)
    parts = tuple(
        RequestSlice(no_peer, i, 1, segment, i * stride, i * stride + stride // 2) for i in range(count)
    )
    for part in parts:
        view = part.source(0, variant.inputs)
        view[...] = rng.integers(-4, 5, view.shape)
    execute = Execute(number, model.key, 0, size, count, tuple(range(count)), seconds)
    return Dispatch(execute, model, variant, parts)


def take_ends(inbox: Inbox) -> list[ExecutionEnded]:
    assert wait([inbox.fd], 30), "no execution has ended"
    return inbox.drain()

"""Faults around meta models on a real server: processes that die, models that are unloaded, and loads that fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.wire.socket import Closed
from tests.e2e.calls import Caller, Refused, at_once, caller, outcome, refusal
from tests.e2e.combinations import recorded
from tests.e2e.harness import EXPLICIT, RunningTriton, StartTriton, make_repository, running_triton
from tests.e2e.metas import ADDS_11, COLUMNS, plain_model, rows, write_meta, write_scale
from tests.status import read_status
from tests.unit.bundle.forge import seal
from tests.waiting import PATIENCE_S, wait_until

#: Flags of tritonserver. They give each model instance two threads for its answers and its calls.
TWO_THREADS = ("--backend-config=python,thread-pool-size=2",)
ONE_THREAD = ("--backend-config=python,thread-pool-size=1",)

#: A meta model that returns 6 x. If x is negative, it creates a file after its first stage, and waits there.
CHAIN = """
import os
import time
from pathlib import Path


def run(inputs, call):
    x = inputs["x"]
    first = call("double", {"x": x})["y"]
    if x[0, 0] < 0:
        here = Path(os.environ["RSRV_TEST_FOLDER"])
        (here / f"inside{-int(x[0, 0])}").touch()
        while not (here / "go").exists():
            time.sleep(0.005)
    return {"y": call("triple", {"x": first})["y"]}
"""
OUTSIDE = """
def run(inputs, call):
    return {"y": call("plain", {"x": call("double", inputs)["y"]})["y"]}
"""


def write_repository(folder: Path, transport: str = "direct", options: Sequence[str] = ()) -> Path:
    """Make a repository of the meta models `chain` and `outside`, and their callees."""
    bundles = folder / "bundles"
    write_scale(bundles / "double", 2, internal=True)
    write_scale(bundles / "triple", 3)
    write_meta(bundles / "chain", CHAIN, ["double", "triple"])
    write_meta(bundles / "outside", OUTSIDE, ["double"], ["plain"])
    gen = make_repository(folder, settings=f"meta: {{transport: {transport}}}", options=options)
    plain_model(gen, "plain", ADDS_11)
    return gen


class Stopped:
    """Requests to `chain` that wait between its two stages. Each has its own client."""

    def __init__(self, server: RunningTriton, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._pool = ThreadPoolExecutor(8)
        self._count = 0

    def send(self, count: int = 1, **options: Any) -> list[Future[Any]]:
        """Send more requests. They may wait before their runs begin."""

        def ask(x: float) -> Any:
            with caller(self._server) as call:
                return outcome(lambda: call("chain", rows(1, x), **options))

        first, self._count = self._count + 1, self._count + count
        return [self._pool.submit(ask, float(-n)) for n in range(first, first + count)]

    def inside(self, count: int) -> None:
        """Wait until `count` runs are between their stages."""
        wait_until(lambda: len(list(self._folder.glob("inside*"))) == count, what=f"{count} runs inside")

    def go(self) -> None:
        (self._folder / "go").touch()

    def close(self) -> None:
        self.go()
        self._pool.shutdown()
        for file in self._folder.iterdir():
            file.unlink()


class House:
    """A server, and the folder through which runs and tests communicate."""

    def __init__(self, running: RunningTriton, folder: Path) -> None:
        self.server = running
        self._folder = folder

    @contextmanager
    def stopped(self) -> Iterator[Stopped]:
        made = Stopped(self.server, self._folder)
        try:
            yield made
        finally:
            made.close()

    def meta(self) -> Mapping[str, Any]:
        status: Mapping[str, Any] = read_status(self.server.pid)["metas"]["chain"]
        return status

    def check(self, call: Caller) -> None:
        assert (call("chain", rows(3, 5.0))["y"] == 30).all()
        assert (call("outside", rows(3, 5.0))["y"] == 21).all()
        assert (call("triple", rows(3, 5.0))["y"] == 15).all()


#: With bls, these tests run only in the long suite. Other tests check the answers of bls in every suite.
TRANSPORTS = {"direct": "direct", "bls": pytest.param("bls", marks=pytest.mark.long)}


@pytest.fixture(scope="module", params=TRANSPORTS.values())
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Yield a server for each transport. It has the smallest pool of threads that allows calls through Triton."""
    folder = tmp_path_factory.mktemp(request.param)
    repository = write_repository(folder, request.param)
    meeting = folder / "meeting"
    meeting.mkdir()
    with (
        running_triton(
            repository,
            folder / "server.log",
            extra_args=(*EXPLICIT, *TWO_THREADS),
            env={"RSRV_TEST_FOLDER": str(meeting)},
        ) as running,
        recorded(running),
    ):
        yield House(running, meeting)


def one_transport(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("house", [TRANSPORTS[name]], indirect=True)


def six_times(future: Future[Any], number: int) -> None:
    assert (future.result(PATIENCE_S)["y"] == -6 * number).all()


def test_forty_requests_at_once_are_all_answered(house: House) -> None:
    """Forty clients ask at the same time. Two threads per model instance are enough to answer all requests."""

    def work(call: Caller, number: int) -> None:
        for n in range(3):
            x = float(number + n)
            assert (call("chain", rows(1 + number % 16, x))["y"] == 6 * x).all()
            assert (call("outside", rows(1 + number % 16, x))["y"] == 2 * x + 11).all()

    at_once(house.server, 40, work)
    wait_until(lambda: house.meta()["running"] == house.meta()["waiting"] == 0, what="the runs to leave")


def test_a_deadline_passes_before_the_gate(house: House) -> None:
    """Two runs are between their stages. A third run waits, and is refused at its deadline. The first two runs complete."""
    with house.stopped() as stopped:
        inside = stopped.send(2)
        stopped.inside(2)
        (late,) = stopped.send(1, timeout=100_000)
        refused = late.result(PATIENCE_S)
        assert isinstance(refused, Refused)
        refused.assert_is("UNAVAILABLE", "grpc")
        assert refused.message.startswith("[rsrv:DEADLINE]")
        assert house.meta()["running"] == 2
        stopped.go()
        for number, future in enumerate(inside, 1):
            six_times(future, number)
    with caller(house.server) as call:
        house.check(call)


def test_the_runtime_is_killed_in_the_middle_of_runs(house: House) -> None:
    """The runtime is killed while runs are between their stages. These runs and the waiting ones continue in the next runtime."""
    old = int(read_status(house.server.pid)["pid"])
    with house.stopped() as stopped:
        requests = stopped.send(2)
        stopped.inside(2)
        requests += stopped.send(3)
        wait_until(lambda: house.meta()["waiting"] == 3)
        os.kill(old, signal.SIGKILL)
        stopped.go()
        for number, future in enumerate(requests, 1):
            six_times(future, number)
    wait_until(lambda: new_runtime(house.server, old), what="another runtime")
    with caller(house.server) as call:
        for model in ("chain", "outside", "triple"):
            wait_until(lambda model=model: isinstance(outcome(lambda: call(model, rows(1))), dict))  # type: ignore[misc]
        house.check(call)


def new_runtime(server: RunningTriton, old: int) -> bool:
    try:
        return int(read_status(server.pid)["pid"]) != old
    except (OSError, Closed):
        return False


@one_transport("direct")
def test_a_public_callee_is_unloaded_beneath_a_meta_model(house: House) -> None:
    """After a public callee is unloaded, clients cannot call it. Its meta model still calls it."""
    with house.stopped() as stopped, caller(house.server) as call:
        (inside,) = stopped.send()
        stopped.inside(1)
        house.server.grpc.unload_model("triple")
        wait_until(lambda: not house.server.grpc.is_model_ready("triple"))
        assert isinstance(outcome(lambda: call("triple", rows(1))), Refused)
        stopped.go()
        six_times(inside, 1)
        assert (call("chain", rows(2, 4.0))["y"] == 24).all()
        house.server.grpc.load_model("triple")
        house.check(call)


@one_transport("bls")
def test_a_public_callee_is_unloaded_while_a_run_calls_it_through_triton(house: House) -> None:
    """With bls, a callee is unloaded during a run. This run and later ones fail with NOT_FOUND and the callee's name.

    Other meta models are still served. After the callee is loaded again, runs succeed.
    """
    with house.stopped() as stopped, caller(house.server) as call:
        (inside,) = stopped.send()
        stopped.inside(1)
        house.server.grpc.unload_model("triple")
        wait_until(lambda: not house.server.grpc.is_model_ready("triple"))
        stopped.go()
        for refused in (inside.result(PATIENCE_S), refusal(lambda: call("chain", rows(1)))):
            assert isinstance(refused, Refused)
            refused.assert_is("NOT_FOUND", "grpc")
            assert refused.message.startswith("stage 'triple': model 'triple' is not loaded, or ")
        assert (call("outside", rows(1, 4.0))["y"] == 19).all()
        house.server.grpc.load_model("triple")
        house.check(call)


@pytest.mark.long
def test_the_stub_of_a_callee_is_killed(start_triton: StartTriton, tmp_path: Path) -> None:
    """With bls, a callee's stub is killed. Runs fail with the callee's name until the callee is loaded again.

    Other models are still served.
    """
    server = start_triton(write_repository(tmp_path, "bls"), extra_args=EXPLICIT)
    house = House(server, tmp_path)
    with caller(server) as call:
        (stub,) = server.stub_pids("double")
        os.kill(stub, signal.SIGKILL)
        refused = refusal(lambda: call("chain", rows(1)))
        # Triton 26.01 and later report a dead callee as a model that is not loaded.
        assert refused.message.startswith("stage 'double': ")
        assert (
            "process of model 'double' has ended" in refused.message
            or "its process has ended" in refused.message
        )
        assert (call("triple", rows(1, 5.0))["y"] == 15).all()
        server.grpc.unload_model("double")
        wait_until(lambda: not server.grpc.is_model_ready("double"))
        server.grpc.load_model("double")
        house.check(call)
    assert house.meta()["running"] == 0
    # After the death of a stub, an orderly stop of Triton would take as long as its exit timeout.
    server.server.kill()


# --- loads that fail ----------------------------------------------------------------------------------------------


def break_module(gen: Path) -> None:
    module = gen / "chain" / "1" / "calls" / "triple" / "model.b1.mlir"
    module.unlink()
    module.write_bytes(b"ML\xefR no module at all")
    seal(module.parent)


@pytest.mark.long
def test_loads_that_fail_say_why(start_triton: StartTriton, tmp_path: Path) -> None:
    """Loads fail because of a broken callee, a missing `run`, or a transport for which the repository was not generated.

    Triton's repository index has the reasons, and other models are served.
    """
    gen = write_repository(tmp_path, options=("--link", "copy"))
    more = tmp_path / "more"
    break_module(gen)
    model_py = gen / "outside" / "1" / "bundle" / "model.py"
    model_py.unlink()
    model_py.write_text("def ran(inputs, call): ...\n")
    write_scale(more / "bundles" / "single", 1)
    write_meta(
        more / "bundles" / "other", "def run(inputs, call):\n    return call('single', inputs)\n", ["single"]
    )
    (make_repository(more) / "other").rename(gen / "other")

    server = start_triton(gen, exit_on_error=False, env={"RSRV_META__TRANSPORT": "bls"})
    states = server.server.model_states()
    for name, texts in {
        "chain": ("triple", "model.b1.mlir"),
        "outside": ("model.py", "run(inputs, call)"),
        "other": ("single", "meta.transport", "rsrv-gen"),
    }.items():
        state, message = states[name]
        assert state == "UNAVAILABLE", states
        for text in texts:
            assert text in message, message
    with caller(server) as call:
        assert (call("triple", rows(1, 5.0))["y"] == 15).all()
        assert (call("plain", rows(1, 5.0))["y"] == 16).all()


@pytest.mark.long
def test_one_thread_is_enough_for_direct_calls_only(start_triton: StartTriton, tmp_path: Path) -> None:
    """With thread-pool-size=1, the load of a model that calls through Triton fails. A model with direct calls is served."""
    server = start_triton(write_repository(tmp_path), exit_on_error=False, extra_args=ONE_THREAD)
    state, message = server.server.model_states()["outside"]
    assert state == "UNAVAILABLE"
    assert "thread-pool-size=2" in message, message

    def work(call: Caller, number: int) -> None:
        assert (call("chain", rows(1, float(number)))["y"] == np.full((1, COLUMNS), 6 * number)).all()

    at_once(server, 16, work)

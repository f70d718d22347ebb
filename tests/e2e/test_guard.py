"""The runtime's guards: against executions that hang, and against deaths while models are built."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rsrv.wire import paths
from rsrv.wire.blackbox import Phase, read_slots
from rsrv.wire.socket import Closed
from tests.e2e import bundles
from tests.e2e.calls import Caller, Refused, assert_same, caller, outcome, random_u32, refusal
from tests.e2e.harness import RunningTriton, StartTriton, is_alive, make_repository
from tests.status import read_status
from tests.waiting import wait_until

pytestmark = pytest.mark.long

ONES = np.ones((1, 64), np.float32)


@pytest.fixture
def made() -> Mapping[str, Path]:
    return {path.name: path for path in bundles.ensure().iterdir()}


@pytest.fixture
def start(start_triton: StartTriton, tmp_path: Path) -> Callable[..., RunningTriton]:
    """Return a function that starts a server on some bundles, with a compilation cache of its own."""

    def make(*sources: Path, env: Mapping[str, str] | None = None, **options: object) -> RunningTriton:
        repository = make_repository(tmp_path, *sources)
        own = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache"), **(env or {})}
        return start_triton(repository, env=own, spare=True, **options)  # type: ignore[arg-type]

    return make


def check_exact(call: Caller) -> None:
    assert_same(call("exact", {"x": ONES}), {"y": ONES @ bundles.exact_kernel()})


def sudden(call: Caller, steps: int) -> None:
    x = random_u32(np.random.default_rng(steps), 1)
    got = call("sudden", {"x": x, "steps": np.full((1, 1), steps, np.int32)})
    assert_same(got, {"y": bundles.stepped(x, steps)})


def works(check: Callable[[], None]) -> bool:
    return not isinstance(outcome(check), Refused)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_execution_that_hangs_ends_the_runtime_and_not_the_service(
    start: Callable[..., RunningTriton], made: Mapping[str, Path], depth: int
) -> None:
    """The client of an execution that hangs gets an error at the second runtime; all models recover."""
    env = {"RSRV_RUNTIME__WATCHDOG_S": "1.5", "RSRV_SCHEDULER__DEPTH": str(depth)}
    server = start(made["sudden"], made["exact"], env=env)
    old = read_status(server.pid)["pid"]
    with caller(server) as call:
        sudden(call, 3)
        started = time.monotonic()

        refused = refusal(lambda: sudden(call, 2**31 - 1))

        refused.assert_is("INTERNAL", "grpc")
        assert "two runtimes ended while they executed this request" in refused.message
        assert time.monotonic() - started > 3.0
        wait_until(lambda: works(lambda: check_exact(call)), what="the other model to come back")
        print(f"the others are back after {time.monotonic() - started:.1f} s")
        latest = read_status(server.pid)["pid"]
        assert latest != old
        sudden(call, 3)

        refusal(lambda: sudden(call, 2**31 - 1)).assert_is("INTERNAL", "grpc")

        check_exact(call)
        assert read_status(server.pid)["pid"] == latest
    said = server.log_text()
    assert "sudden@" in said
    assert "hangs: it has been executing for" in said
    assert not is_alive(old)


def test_a_runtime_that_is_stopped_for_longer_than_its_patience_lives_on(
    start: Callable[..., RunningTriton], made: Mapping[str, Path]
) -> None:
    """A runtime that is stopped for six seconds in an execution limited to three still answers right."""
    server = start(made["sudden"], env={"RSRV_RUNTIME__WATCHDOG_S": "3"})
    pid = read_status(server.pid)["pid"]
    directory = paths.runtime_directory(server.pid, "0")

    def executing() -> bool:
        slots = read_slots((directory / paths.BLACKBOX).read_bytes())
        return any(one.phase is Phase.EXECUTING for one in slots)

    with caller(server) as call, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(sudden, call, 2000)
        wait_until(executing)
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(AssertionError):
                wait_until(answer.done, 6)
        finally:
            os.kill(pid, signal.SIGCONT)
        answer.result(20)
    assert read_status(server.pid)["pid"] == pid


def test_a_runtime_killed_while_it_compiles_comes_back(
    start: Callable[..., RunningTriton], made: Mapping[str, Path], tmp_path: Path
) -> None:
    """Killed twice during the first load and once later, it gets all models ready and blames none."""
    server = start(made["exact"], made["hooked"], made["elastic"], wait_ready=False)

    directory = paths.runtime_directory(server.pid, "0")
    killed: set[int] = set()

    def kill_while_compiling() -> None:
        def kill() -> bool:
            try:
                slots = read_slots((directory / paths.BLACKBOX).read_bytes())
                pid = int(read_status(server.pid)["pid"])
            except (OSError, Closed):
                return False
            if pid in killed or all(one.phase is not Phase.BUILDING for one in slots):
                return False
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
            return True

        wait_until(kill, 60, what="a compilation")

    kill_while_compiling()
    kill_while_compiling()
    server.server.wait_ready(60)
    with caller(server) as call:
        check_exact(call)
        shutil.rmtree(tmp_path / "cache")
        pid = int(read_status(server.pid)["pid"])
        killed.add(pid)
        os.kill(pid, signal.SIGKILL)
        kill_while_compiling()
        started = time.monotonic()
        wait_until(lambda: works(lambda: check_exact(call)), 60, what="the model to come back")
        print(f"back after {time.monotonic() - started:.1f} s")
    wait_until(lambda: len(read_status(server.pid)["models"]) == 3, 60, what="all models to come back")
    wait_until(lambda: json.loads((directory / paths.DEATHS).read_text()) == {}, what="no model to be blamed")


def test_a_version_with_other_weights_compiles_nothing(
    start: Callable[..., RunningTriton], made: Mapping[str, Path], tmp_path: Path
) -> None:
    """A new version with other weights takes the old one's executables, and keeps them when that one has gone."""
    kernel = bundles.exact_kernel()[::-1].copy()
    tuned = bundles.with_weights(made["exact"], tmp_path / "tuned", {"kernel": kernel})
    server = start(made["exact"], tuned, extra_args=["--model-control-mode=explicit", "--load-model=exact"])
    before = read_status(server.pid)
    assert before["compiled"] == len(before["models"]["exact"]["costs"])

    server.grpc.load_model("tuned")

    after = read_status(server.pid)
    assert (after["compiled"], after["from_cache"]) == (before["compiled"], before["from_cache"])
    assert after["shared"] == before["compiled"]
    with caller(server) as call:
        check_exact(call)
        server.grpc.unload_model("exact")
        wait_until(lambda: "exact" not in read_status(server.pid)["models"])
        assert_same(call("tuned", {"x": ONES}), {"y": ONES @ kernel})

"""Hooks that misbehave on a real server. Their own model fails, and no other model is affected."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import psutil
import pytest

from tests.e2e.calls import Arrays, Refused, caller, outcome
from tests.e2e.harness import (
    EXPLICIT,
    RunningTriton,
    aborted_by_a_lock,
    despite,
    is_alive,
    make_repository,
    replaced_after,
    running_triton,
)
from tests.e2e.lives import Living
from tests.e2e.metas import rows, write_meta, write_scale
from tests.status import read_status
from tests.waiting import wait_until

#: Seconds: the limit of a hook, and the time for which a hook hangs. On a busy machine, good hooks must stay within the limit.
TIMEOUT, HANG = 8.0, 60
LIMIT = 128 << 20
SETTINGS = f"stub: {{hook_timeout_s: {TIMEOUT}, memory_limit_bytes: {LIMIT}}}"

#: Code of each model's preprocess hook for a request whose first number is negative.
DEEDS = {
    "sleeps": f"print('asleep', flush=True); time.sleep({HANG})",
    "spins": "while True: pass",
    "holds": f"ctypes.PyDLL(None).sleep({HANG})",
    "greedy": "inputs['y'] = np.ones(10**9)",
    # The hook does not write to this memory. On a slow machine, zeroing it would take longer than TIMEOUT.
    "hoards": "inputs['y'] = [np.zeros(10**5) for _ in range(10**9)]",
    "keeps": "kept.extend(bytearray(1000) for _ in range(10**9))",
    "leaves": "os._exit(3)",
    "quits": "sys.exit(3)",
    "interrupts": "raise KeyboardInterrupt",
    "closes": "os.closerange(3, 1000)",
    "opens": "kept.extend(iter(lambda: os.dup(0), None))",
    "hides": "kept.extend(fill())",
    "wanders": "os.chdir('/')",
    "forks": "os.fork()",
    "begets": "subprocess.Popen(['sleep', '60']); multiprocessing.get_context('fork').Process(target=time.sleep, args=[60]).start()",
    "speaks": "print(open(__file__).readline(), end='', flush=True)",
    "pools": "inputs['x'] = pooled(inputs['x'])",
    "starts": "[threading.Thread(target=time.sleep, args=[60], daemon=True).start() for _ in range(10)]",
}
HOOKS = """# grüße
import ctypes, multiprocessing, os, subprocess, sys, threading, time
import numpy as np

kept = []


def fill():
    while True:
        try:
            yield os.dup(0)
        except OSError:
            return


def double(x):
    return 2 * x


def sleep(begun):
    begun.set()
    time.sleep(60)


def pooled(x):
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()
    sleeper = fork.Process(target=sleep, args=[begun])
    sleeper.start()
    begun.wait()
    sleeper.terminate()
    sleeper.join()
    with fork.Pool(1) as pool:
        return pool.apply(double, [x])


def preprocess(inputs):
    if inputs["x"][0, 0] < 0:
        {deed}
    elif inputs["x"][0, 0] > 1000:
        time.sleep(0.01)
    return {{"x": inputs["x"]}}
"""
RUN = """
import time
import numpy as np


def run(inputs, call):
    x = inputs["x"]
    for _ in range(10 if x[0, 0] == 7 else 0):
        call("inner", {"x": x})
        time.sleep(1)
    if x[0, 0] < 0:
        time.sleep(60)
    return call("inner", {"x": x})
"""
ASYNC_RUN = """
import asyncio, time


async def run(inputs, call):
    x = inputs["x"]
    if x[0, 0] == -1:
        await asyncio.sleep(60)
    if x[0, 0] == -2:
        time.sleep(60)
    return await call("inner", {"x": x})
"""


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], RunningTriton]]:
    """Yield a function that returns the server of all tests. If Triton's own fault with locks ended it, the function starts another one."""
    folder = tmp_path_factory.mktemp("hook_faults")
    bundles = folder / "bundles"
    calm = write_scale(bundles / "calm", 2)
    for name, deed in DEEDS.items():
        shutil.copytree(calm, bundles / name)
        (bundles / name / "model.py").write_text(HOOKS.format(deed=deed))
    shutil.copytree(calm, bundles / "inner")
    write_meta(bundles / "meta", RUN, ["inner"])
    write_meta(bundles / "async", ASYNC_RUN, ["inner"])
    repository = make_repository(folder, settings=SETTINGS)

    def start(number: int) -> AbstractContextManager[RunningTriton]:
        log, expected = folder / f"server{number}.log", ["requests_fail"]
        return running_triton(repository, log, extra_args=EXPLICIT, expected=expected)

    with replaced_after(aborted_by_a_lock, start) as living:
        yield living


@pytest.fixture
def server(living: Callable[[], RunningTriton]) -> RunningTriton:
    return living()


@contextmanager
def calm(server: RunningTriton) -> Iterator[None]:
    """Ask a model without hooks during the block. Check that its answers are right and in time."""
    stop = threading.Event()
    slowest = 0.0

    def ask() -> None:
        nonlocal slowest
        with caller(server) as call:
            while not stop.is_set():
                started = time.monotonic()
                assert (call("calm", rows(2, 3.0))["y"] == 6).all()
                slowest = max(slowest, time.monotonic() - started)
                stop.wait(0.005)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            stop.set()
            asking.result()
    # These answers must not wait for a hook of another model that hangs for TIMEOUT.
    assert slowest < TIMEOUT


def ask(server: RunningTriton, model: str, value: float, **options: Any) -> Arrays | Refused:
    with caller(server) as call:
        return outcome(lambda: call(model, rows(1, value), **options))


def refused(server: RunningTriton, model: str, value: float = -1.0) -> str:
    answer = ask(server, model, value)
    assert isinstance(answer, Refused), answer
    assert answer.status == "StatusCode.INTERNAL", answer
    return answer.message


def well(server: RunningTriton, model: str) -> bool:
    answer = ask(server, model, 4.0)
    assert isinstance(answer, dict), answer
    return bool((answer["y"] == 8).all())


def stub(server: RunningTriton, model: str) -> int:
    (pid,) = server.stub_pids(model)
    return pid


def gone(server: RunningTriton, model: str, pid: int) -> None:
    """Wait until the process has ended."""
    wait_until(lambda: not is_alive(pid), what=f"end of {model}")


def back(server: RunningTriton, model: str, pid: int) -> None:
    """Wait until the process has ended and another process serves the model."""
    gone(server, model, pid)
    wait_until(lambda: isinstance(ask(server, model, 4.0), dict), what=f"return of {model}")
    assert well(server, model)
    assert pid not in server.stub_pids(model)


def slow_down(server: RunningTriton, model: str) -> None:
    """Send requests that make the hooks slow, so that later requests are answered after execute()."""
    with caller(server) as call:
        for _ in range(15):
            assert (call(model, rows(1, 1001.0))["y"] == 2002).all()


# --- hooks that hang --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [pytest.param("spins", marks=pytest.mark.long), "holds"])
def test_a_hook_that_hangs_inside_execute_ends_its_process(server: RunningTriton, model: str) -> None:
    """A hook that hangs inside execute(), with or without the interpreter's lock, ends its process. The client gets Triton's error."""
    pid = stub(server, model)
    assert well(server, model)
    with calm(server):
        started = time.monotonic()
        assert "not healthy" in refused(server, model)
        assert TIMEOUT <= time.monotonic() - started < HANG
        gone(server, model, pid)


def test_a_hook_that_hangs_on_another_thread_leaves_no_request_unanswered(server: RunningTriton) -> None:
    """All requests that hang or wait for a thread get the reason before their process ends."""
    pid = stub(server, "sleeps")
    slow_down(server, "sleeps")
    with calm(server), ThreadPoolExecutor(8) as pool:
        hanging = [pool.submit(ask, server, "sleeps", -1.0) for _ in range(4)]
        wait_until(lambda: server.log_text().count("asleep\n") == 4, what="four that hang")
        in_time = pool.submit(ask, server, "sleeps", -1.0, timeout=200_000)
        waiting = [pool.submit(ask, server, "sleeps", 5.0) for _ in range(3)]
        late = in_time.result()
        assert isinstance(late, Refused)
        assert late.message.startswith("[rsrv:DEADLINE]")
        assert is_alive(pid)
        for answer in (future.result() for future in (*hanging, *waiting)):
            assert isinstance(answer, Refused)
            answer.assert_is("INTERNAL", "grpc")
            assert answer.message == "the model's preprocess hook hangs; the model is being restarted"
        back(server, "sleeps", pid)
    log = server.log_text()
    assert "preprocess has not returned for 8 s (stub.hook_timeout_s). It is here:" in log
    assert "time.sleep(60)" in log


@pytest.mark.parametrize(
    ("model", "value"), [("meta", -1.0), pytest.param("async", -1.0, marks=pytest.mark.long)]
)
def test_a_run_that_hangs_ends_its_process(server: RunningTriton, model: str, value: float) -> None:
    """A `run` that hangs between two calls ends its process. A `run` that makes many calls and takes long does not."""
    pid = stub(server, model)
    assert well(server, model)
    if model == "meta":
        answer = ask(server, model, 7.0)
        assert isinstance(answer, dict), answer
    with calm(server):
        assert "the model's run hook hangs" in refused(server, model, value)
        back(server, model, pid)


# --- hooks that want too much memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["greedy", "hoards"])
def test_a_hook_that_wants_too_much_memory_fails_its_request(server: RunningTriton, model: str) -> None:
    """If a hook wants too much memory, its request fails. The process frees the memory and answers other requests."""
    pid = stub(server, model)
    assert well(server, model)
    with calm(server):
        for _ in range(3):
            assert refused(server, model) == "the model's preprocess hook needs more memory than its limit"
            assert well(server, model)
        before = psutil.Process(pid).memory_info().rss
        for _ in range(3):
            refused(server, model)
            assert well(server, model)
        assert psutil.Process(pid).memory_info().rss < before + LIMIT // 4
    assert stub(server, model) == pid


def test_a_hook_that_keeps_all_memory_ends_its_process(server: RunningTriton) -> None:
    """If a hook keeps all memory, its process ends, and another process serves the model."""
    pid = stub(server, "keeps")
    with calm(server):
        refused(server, "keeps")
        back(server, "keeps", pid)


# --- other misdeeds of hooks --------------------------------------------------------------------------------------


def test_a_hook_that_opens_all_files_ends_its_process(server: RunningTriton) -> None:
    """If a hook uses up the file descriptors of its process, its request fails, and the process ends.

    The server is unhealthy until the next process serves.
    """
    pid = stub(server, "opens")
    life = Living(server)
    wait_until(lambda: life.serves, what="the server to be healthy")
    assert well(server, "opens")
    healthy = life.watch_health()
    assert next(healthy)
    with calm(server):
        assert "open" in refused(server, "opens")
        back(server, "opens", pid)
    assert not next(healthy)
    assert next(healthy)
    life.close()


def test_a_process_whose_hook_opened_all_files_is_replaced_when_its_runtime_ends(
    server: RunningTriton,
) -> None:
    """A process whose hook has opened all files cannot connect to another runtime. When its runtime ends, the process is replaced."""
    pid = stub(server, "hides")
    assert well(server, "hides")
    assert isinstance(ask(server, "hides", -1.0), dict)
    assert is_alive(pid)
    os.kill(int(read_status(server.pid)["pid"]), signal.SIGKILL)
    back(server, "hides", pid)
    assert "the model's process cannot reach its runtime" in server.log_text()


@pytest.mark.parametrize("model", ["quits", "interrupts"])
def test_a_hook_that_wants_to_leave_fails_its_request(server: RunningTriton, model: str) -> None:
    """sys.exit() and Ctrl-C in a hook make its request fail, as other exceptions do. The process continues."""
    pid = stub(server, model)
    with calm(server):
        assert "preprocess hook failed" in refused(server, model)
        assert well(server, model)
    assert stub(server, model) == pid


@pytest.mark.parametrize("model", ["wanders", "starts"])
def test_a_hook_may_go_elsewhere_and_start_things(server: RunningTriton, model: str) -> None:
    """A hook may change the directory and start threads. Its model still serves."""
    pid = stub(server, model)
    with calm(server):
        assert isinstance(ask(server, model, -1.0), dict)
        assert well(server, model)
    assert stub(server, model) == pid


def test_processes_that_a_hook_made_do_not_hide_the_end_of_their_parent(server: RunningTriton) -> None:
    """A hook's child processes have none of the stub's connections. So when the stub ends, the runtime frees the model."""
    pid = stub(server, "begets")
    with calm(server):
        assert isinstance(ask(server, "begets", -1.0), dict)
        assert well(server, "begets")
        children = psutil.Process(pid).children(recursive=True)
        assert len(children) == 2
        psutil.Process(pid).kill()
        wait_until(lambda: set(server.stub_pids("begets")) - {pid, *(child.pid for child in children)})
        assert all(child.is_running() for child in children)
        for child in children:
            child.kill()
        back(server, "begets", pid)


def test_a_hook_that_forks_and_returns_twice_answers_once(server: RunningTriton) -> None:
    """A hook forks, and both copies return. The copy ends at the end of the hook, and the client gets one answer."""
    pid = stub(server, "forks")
    with calm(server):
        for _ in range(3):
            answer = ask(server, "forks", -4.0)
            assert isinstance(answer, dict), answer
            assert (answer["y"] == -8).all()
        assert well(server, "forks")
    # The copy may not have ended yet.
    wait_until(lambda: server.stub_pids("forks") == [pid])


def test_a_hook_reads_and_prints_utf_8(server: RunningTriton) -> None:
    """A hook reads and prints text beyond ASCII, although Triton starts the Python of its stubs without a locale."""
    assert isinstance(ask(server, "speaks", -1.0), dict)
    wait_until(lambda: "# grüße\n" in server.log_text(), what="the hook's line in the log")


def test_a_hook_may_use_a_pool_of_processes(server: RunningTriton) -> None:
    """A hook calls a function of model.py in a pool of processes, and ends another child process."""
    pid = stub(server, "pools")
    with calm(server):
        answer = ask(server, "pools", -1.0)
        assert isinstance(answer, dict), answer
        assert (answer["y"] == -4).all()
    # A process of the pool may not have ended yet.
    wait_until(lambda: server.stub_pids("pools") == [pid])


@pytest.mark.parametrize("model", ["leaves", pytest.param("closes", marks=pytest.mark.long)])
def test_a_hook_that_ends_or_robs_its_process_harms_no_other_model(
    living: Callable[[], RunningTriton], model: str
) -> None:
    """A hook that calls os._exit or closes all files ends its process. The client gets an error, and no other model is affected."""

    def check(server: RunningTriton) -> None:
        pid = stub(server, model)
        assert well(server, model)
        with calm(server):
            refused(server, model)
            back(server, model, pid)

    despite(aborted_by_a_lock, living, check)

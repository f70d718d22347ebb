"""The runtime ends while it executes a request. The request may be to blame for a crash, but not for a kill."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rsrv.wire import paths
from rsrv.wire.blackbox import Phase, read_slots
from tests.e2e import bundles
from tests.e2e.calls import Caller, caller, check_exact, check_sudden, refusal
from tests.e2e.harness import RunningTriton, StartTriton, make_repository
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

#: Number of steps of a request that executes for weeks, and of a request that executes long enough to be seen.
ENDLESS, LONG = 2**31 - 1, 20_000
CLIENTS = 16


@pytest.fixture
def server(start_triton: StartTriton, tmp_path: Path) -> RunningTriton:
    made = {path.name: path for path in bundles.ensure().iterdir()}
    repository = make_repository(tmp_path, made["sudden"], made["exact"])
    return start_triton(repository, spare=True, expected=["runtime_restarts"])


def wait_for_execution(server: RunningTriton, *, alone: bool = False) -> None:
    """Wait until the runtime executes a request. With `alone`, wait until it executes a suspect separately."""
    box = paths.runtime_directory(server.pid, "0") / paths.BLACKBOX

    def executes() -> bool:
        with suppress(FileNotFoundError):
            slots = read_slots(box.read_bytes())
            return any((slot.phase, slot.alone) == (Phase.EXECUTING, alone) for slot in slots)
        return False

    wait_until(executes, what="an execution")


def end_runtime(server: RunningTriton, number: signal.Signals) -> None:
    """Send a signal to the runtime, and wait for the next runtime.

    The runtime is the process that maps the black box. Its loop may be too busy to report the pid.
    """
    box = paths.runtime_directory(server.pid, "0") / paths.BLACKBOX
    old = next(pid for pid in pids() if maps(pid, box))
    os.kill(old, number)
    wait_until(lambda: any(pid != old and maps(pid, box) for pid in pids()), what="the next runtime")


def maps(pid: int, box: Path) -> bool:
    """Return True if a process maps the black box."""
    with suppress(OSError):
        return any(line.endswith(f" {box}") for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return False


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


@contextmanager
def crowd(server: RunningTriton) -> Iterator[None]:
    """Let clients ask both models until the block ends, and check every answer."""
    stop = threading.Event()

    def ask(number: int, call: Caller) -> None:
        while not stop.is_set():
            check_exact(call) if number % 2 else check_sudden(call, number)

    with ExitStack() as stack, ThreadPoolExecutor(CLIENTS) as pool:
        calls = [stack.enter_context(caller(server)) for _ in range(CLIENTS)]
        asking = [pool.submit(ask, number, call) for number, call in enumerate(calls)]
        try:
            yield
        finally:
            stop.set()
        for future in asking:
            future.result(PATIENCE_S)


def test_a_hostile_request_ends_two_runtimes_and_fails_alone(server: RunningTriton) -> None:
    """A hostile request ends two runtimes, and is refused. When it is sent again, it ends no runtime.

    All answers of other clients are right.
    """
    with caller(server) as call, ThreadPoolExecutor(1) as pool:
        check_sudden(call, 3)
        refused = pool.submit(refusal, lambda: check_sudden(call, ENDLESS))
        wait_for_execution(server)
        with crowd(server):
            end_runtime(server, signal.SIGSEGV)
            wait_for_execution(server, alone=True)
            end_runtime(server, signal.SIGSEGV)
            refused.result(PATIENCE_S).assert_is("INTERNAL", "grpc")
            check_exact(call)
            latest = read_status(server.pid)["pid"]
            refusal(lambda: check_sudden(call, ENDLESS)).assert_is("INTERNAL", "grpc")
        assert read_status(server.pid)["pid"] == latest


@pytest.mark.long
def test_kills_cost_no_answer(server: RunningTriton) -> None:
    """Two runtimes are killed while they execute a request. The third runtime answers it."""
    with caller(server) as call, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(check_sudden, call, LONG)
        for _ in range(2):
            wait_for_execution(server)
            end_runtime(server, signal.SIGKILL)
        answered.result(60)

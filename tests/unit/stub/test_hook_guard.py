"""Hooks that go wrong: threads that hang, too much memory, and forks of the process."""

import errno
import gc
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.hook_guard import (
    CHECKS,
    KEPT_DESCRIPTORS,
    Faulthandler,
    HookGuard,
    HookInterval,
    Seen,
    check,
    find_hung,
    frame_of,
)
from tests.fakes import FakeBackstop
from tests.waiting import PATIENCE_S

#: Time limit in seconds for events that should happen at once.
SOON = PATIENCE_S


@given(st.lists(st.tuples(st.sampled_from(["same", "new", "none"]), st.integers(1, CHECKS + 2)), max_size=8))
def test_a_thread_hangs_if_too_many_checks_in_a_row_find_it_in_one_interval(
    checks: list[tuple[str, int]],
) -> None:
    """A thread hangs if more than CHECKS checks in a row find it in the same interval of a hook.

    In a new interval, the count begins again.
    """
    seen: Seen = {}
    interval = None
    in_a_row = 0
    for kind in (kind for kind, times in checks for _ in range(times)):
        if kind == "none":
            interval = None
        elif kind == "new" or interval is None:
            interval, in_a_row = HookInterval("run", "r"), 0
        in_a_row = in_a_row + 1 if interval is not None else 0

        seen = check(seen, {7: interval, 8: None})

        hung = find_hung(seen)
        assert hung == ((7, interval) if in_a_row > CHECKS else None)


@pytest.fixture
def backstop() -> FakeBackstop:
    return FakeBackstop()


@pytest.fixture
def guard(backstop: FakeBackstop) -> Iterator[HookGuard]:
    made = HookGuard(backstop)
    yield made
    made.close()


def test_a_hook_that_hangs_is_told_with_where_it_is(
    guard: HookGuard, caplog: pytest.LogCaptureFixture
) -> None:
    """If a hook hangs, the log has its request and its stack, and the error for clients has the hook's name."""
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    go = threading.Event()

    def hangs_here() -> None:
        with guard.within("postprocess", "request 9"):
            go.wait(SOON)

    guard.watch(0.1, messages.put)
    thread = threading.Thread(target=hangs_here)
    thread.start()

    assert "the model's postprocess hook hangs" in messages.get(timeout=SOON)
    go.set()
    thread.join()
    assert "request 'request 9': model.py: postprocess has not returned for 0.1 s" in caplog.text
    assert "in hangs_here" in caplog.text


def test_waiting_for_a_call_is_not_hanging(guard: HookGuard) -> None:
    """A hook that waits for its sub-call is not reported as hanging.

    Of three threads here, only the one that hangs outside of a sub-call is reported.
    """
    messages: queue.SimpleQueue[str] = queue.SimpleQueue()
    go = threading.Event()

    def waits() -> None:
        with guard.within("run", "patient"), guard.waiting(), guard.within("postprocess", "quick"):
            pass
        with guard.within("run", "patient"), guard.waiting():
            go.wait(SOON)

    def works() -> None:
        with guard.within("run", "busy"):
            while not go.is_set():
                with guard.waiting():
                    go.wait(0.001)
                sum(range(1000))

    def hangs() -> None:
        with guard.within("preprocess", "hung"):
            go.wait(SOON)

    # With a shorter limit, a thread that waits for a processor on a busy machine would seem to hang.
    guard.watch(1.0, messages.put)
    threads = [threading.Thread(target=target) for target in (waits, works, hangs)]
    for thread in threads:
        thread.start()

    first = messages.get(timeout=SOON)
    go.set()
    for thread in threads:
        thread.join()
    assert "preprocess" in first


def test_the_backstop_stands_ready_only_while_there_are_hooks(
    guard: HookGuard, backstop: FakeBackstop
) -> None:
    """The backstop is armed only while hooks run. Otherwise, it would end an idle process that was suspended and resumed."""
    guard.watch(0.1, lambda text: None)
    for _ in range(2):
        with guard.within("preprocess", "r"):
            assert backstop.told.get(timeout=SOON) == pytest.approx(0.2)
        backstop.wait_for("cancel")


# --- processes of their own -------------------------------------------------------------------------------------------

_START = """
import ctypes, os, sys, time
import numpy as np
from rsrv.stub.endpoint import run_hook
from rsrv.stub.hook_guard import HookGuard
from rsrv.stub.replies import RequestFailure

def end(text):
    print(text, flush=True)
    os._exit(7)

def ask(hook):
    try:
        run_hook("preprocess", hook, {"x": np.ones(3)}, "r", guard)
    except RequestFailure as failure:
        print(failure.text, flush=True)
    else:
        print("well", flush=True)

guard = HookGuard()
guard.start({"hook_timeout_s": TIMEOUT, "memory_limit_bytes": 1 << 26}, 0, end)
"""


def run(script: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    text = _START.replace("TIMEOUT", repr(timeout)) + dedent(script)
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_a_hook_that_holds_the_interpreters_lock_ends_the_process() -> None:
    """A hook that holds the interpreter's lock ends the process, because no other thread can act.

    The log has the stacks of all threads.
    """
    done = run("ask(lambda inputs: ctypes.PyDLL(None).sleep(50))", timeout=0.2)

    assert done.returncode == 1
    assert "run_hook" in done.stderr
    assert done.stdout == ""


def test_a_hook_that_allocates_too_much_memory_fails_and_frees_it() -> None:
    """A hook that allocates too much memory fails, in one piece or in many, and its memory is freed.

    The next request has the whole limit.
    """
    done = run("""
        def has_a_name(inputs):
            many = []
            while True:
                many.append(bytearray(1000))

        for _ in range(3):
            ask(lambda inputs: {"x": np.ones(10**9)})
            ask(lambda inputs: {"x": [bytearray(1000) for _ in range(10**9)]})
            ask(has_a_name)
            ask(lambda inputs: {"x": np.ones(4 * 10**6)})
    """)

    refused = "the model's preprocess hook needs more memory than its limit"
    assert done.stdout.splitlines() == [refused, refused, refused, "well"] * 3, done.stderr


def test_a_hook_that_keeps_all_memory_ends_the_process() -> None:
    """If hooks never free the memory that they may have, the process ends, because each further request would fail."""
    done = run("""
        kept = []
        ask(lambda inputs: kept.extend(bytearray(1000) for _ in range(10**9)))
    """)

    assert done.returncode == 7
    assert (
        done.stdout
        == "the model's hooks keep nearly all the memory that they are allowed to use; the model is being restarted\n"
    )


def test_a_fork_of_the_process_ends_with_its_hook() -> None:
    """If a hook forks the process, the child ends when the hook returns. Only the parent answers the request."""
    done = run("""
        ask(lambda inputs: {"pid": np.array(os.fork())})
        ask(lambda inputs: {"pid": np.array(os.fork() or sys.exit())})
        for _ in range(2):
            os.wait()
    """)

    assert done.stdout.splitlines() == ["well", "well"], done.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_a_frame_leaves_garbage_collection_as_it_was(enabled: bool) -> None:
    """Reading the frame of a thread does not switch the garbage collector on or off."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        assert frame_of(threading.get_ident()) is not None
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_each_owner_of_the_backstop_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each owner of the backstop has a time of its own, and the backstop fires at the earliest of them.

    If the guard of an alias's target cancels its time, the time for another target's import stays.
    """
    calls: list[float | None] = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, exit, file: calls.append(round(seconds, -1))
    )
    monkeypatch.setattr("faulthandler.cancel_dump_traceback_later", lambda: calls.append(None))
    monkeypatch.setattr(Faulthandler, "_ends", {})
    guards, imports = Faulthandler(), Faulthandler()

    imports.put_off(1200)
    guards.cancel()
    assert calls == [1200]
    guards.put_off(100)
    imports.put_off(1200)
    assert calls[1:] == [100, 100]
    guards.cancel()
    imports.cancel()
    assert calls[3:] == [1200, None]


def test_a_hook_that_keeps_all_descriptors_ends_its_process(
    guard: HookGuard, few_descriptors: list[int]
) -> None:
    """If hooks keep all file descriptors, the process ends.

    It continues if descriptors are free again, or if the error has another cause.
    """
    texts: list[str] = []
    guard.watch(SOON, texts.append)
    assert not guard.out_of_descriptors(OSError(errno.ENFILE, "the system's limit"))
    with pytest.raises(OSError, match="Too many open files") as failed:
        os.dup(0)

    assert guard.out_of_descriptors(failed.value)

    assert texts == [KEPT_DESCRIPTORS]
    while few_descriptors:
        os.close(few_descriptors.pop())
    assert guard.out_of_descriptors(failed.value)
    assert len(texts) == 1

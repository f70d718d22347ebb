"""Each end of a meta model's run frees its place, and no memory is reused too early."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rsrv.settings import load_settings
from rsrv.stub.calls import CallError
from rsrv.stub.direct import DirectRun
from tests.fakes import FakeError
from tests.status import read_status
from tests.unit.runtime.conftest import Runtime, StartMeta, StartRuntime
from tests.unit.runtime.metas import (
    Pause,
    Run,
    answer_of,
    ask,
    assert_fails,
    assert_y,
    chain,
    request,
    rows,
    send,
)
from tests.waiting import wait_until


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon calls 10 ms after their deadline."""
    monkeypatch.setattr("rsrv.stub.calls.GRACE_NS", 10_000_000)
    monkeypatch.setattr("rsrv.stub.direct.GRACE_NS", 10_000_000)


@pytest.mark.parametrize("count", [1, 6], ids=["in place", "later"])
def test_a_deadline_may_be_as_far_away_as_it_likes(
    runtime: Runtime, start_meta: StartMeta, count: int
) -> None:
    """A deadline may be years away, which is longer than the operating system can wait."""
    engine = start_meta(runtime, chain)
    for answer in ask(engine, *(request(timeout=1e8) for _ in range(count))):
        assert_y(answer, rows(1, 8))


def test_a_run_that_waited_leaves_though_its_stage_outlasts_its_deadline(
    start_runtime: StartRuntime, start_meta: StartMeta, short_grace: None
) -> None:
    """A run that had to wait for admission ends at its deadline, although its call still executes.

    Its place is free for the next run.
    """
    runtime, pause = start_runtime(load_settings("scheduler: {meta_concurrency: 1}")), Pause()

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        a = call("a", inputs)["y"]
        if inputs["x"][0, 0] == 1:
            pause()
        return {"y": call("b", {"x": a})["y"]}

    engine = start_meta(runtime, run)
    first, second = request(value=1), request(value=2, timeout=0.5)
    sending = send(engine, first)
    pause.reached()
    engine.execute([second])
    runtime.device.gate.clear(after=1)  # Only the last call of the first run is executed.
    pause.go()
    sending.join()

    assert_fails(answer_of(second), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")

    runtime.device.gate.set()
    (answer,) = ask(engine, request(value=3))
    assert_y(answer, rows(1, 16))


def test_scratch_is_nothing_that_the_runtime_may_still_write_to(
    runtime: Runtime,
    start_meta: StartMeta,
    short_grace: None,
    pass_stub_time: Callable[[float], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The memory of an abandoned call is not used as scratch while the runtime may still write to it."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        with pytest.raises(CallError):
            call("a", inputs)
        try:
            buffers = [call.scratch((1, 3), np.float32) for _ in range(5)]
        except CallError:
            buffers = [np.empty((1, 3), np.float32)]
        for buffer in buffers:
            buffer[:] = 7
        runtime.device.gate.set()
        wait_until(
            lambda: not read_status(os.getpid())["models"]["a"]["executing"], what="the execution's end"
        )
        return {"y": sum(buffers) / len(buffers)}

    # The call soon notices that the deadline has passed, and the late answer of the run is still sent.
    monkeypatch.setattr("rsrv.stub.direct._MAX_WAIT_S", 0.05)
    monkeypatch.setattr("rsrv.stub.deferred.DEADLINE_GRACE_S", 1e6)
    engine = start_meta(runtime, run, "a")
    runtime.device.gate.clear()
    sending = send(engine, late := request(timeout=1000))
    runtime.device.gate.wait_until_held()
    pass_stub_time(2000.0)
    assert_y(answer_of(late), rows(1, 7))
    sending.join()


def test_no_memory_for_scratch_is_not_the_models_fault(runtime: Runtime, start_meta: StartMeta) -> None:
    """If there is no memory for scratch, the request gets QUEUE_FULL, so that the client may retry."""
    engine = start_meta(runtime, lambda inputs, call: {"y": call.scratch((1 << 50,), "f4")}, "a")
    (answer,) = ask(engine, request())
    assert_fails(answer, FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")


def test_call_is_of_no_use_after_its_run_or_to_another_thread(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """`call` fails after the end of its run and in another thread, without an effect on the current run."""
    old: list[Any] = []

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        messages: list[str] = []

        def use(call: Any) -> None:
            try:
                call("a", inputs)
                messages.append("well")
            except CallError as error:
                messages.append(str(error))

        if old:
            use(old[0])
        old.append(call)
        thread = threading.Thread(target=use, args=[call])
        thread.start()
        thread.join()
        assert all("stage 'a': `call` works only on the thread" in text for text in messages), messages
        return call("a", inputs)  # type: ignore[no-any-return]

    engine = start_meta(runtime, run, "a")
    for _ in range(3):
        (answer,) = ask(engine, request())
        assert_y(answer, rows(1, 3))


def test_an_async_run_that_goes_on_without_the_runtime_does_not_spin(
    runtime: Runtime, start_meta: StartMeta
) -> None:
    """If the runtime ends during an async run, the run's event loop stops watching the lost connection.

    A lost connection is always readable, so the event loop would use all of a CPU.
    """

    async def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        await call("a", inputs)
        runtime.stop()
        used = time.thread_time()
        await asyncio.sleep(0.3)
        used = time.thread_time() - used
        assert used < 0.1, used
        return {"y": inputs["x"]}

    (answer,) = ask(start_meta(runtime, run, "a"), request())
    assert_y(answer, rows(1))


def failing_call(inputs: dict[str, Any], call: Any) -> Any:
    return call("a", inputs)


def failing_calls(inputs: dict[str, Any], call: Any) -> Any:
    return call.many([("a", inputs), ("b", inputs)])


async def failing_await(inputs: dict[str, Any], call: Any) -> Any:
    return await call("a", inputs)


async def failing_awaits(inputs: dict[str, Any], call: Any) -> Any:
    return await call.many([("a", inputs), ("b", inputs)])


@pytest.mark.parametrize("run", [failing_call, failing_calls, failing_await, failing_awaits])
def test_a_call_that_failed_keeps_no_memory(runtime: Runtime, start_meta: StartMeta, run: Run) -> None:
    """The tensors of a failed call are freed without the garbage collector, which does not know how large they are."""
    engine = start_meta(runtime, run)
    runtime.device.fail = "told to"
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            (answer,) = ask(engine, request())
            assert_fails(answer, FakeError.INTERNAL, "stage 'a'")
        # The last run is freed with its thread, a moment after its answer.
        wait_until(
            lambda: not any(isinstance(thing, DirectRun) for thing in gc.get_objects()),
            what="the failed runs to be freed",
        )
    finally:
        gc.enable()


def test_a_large_buffer_goes_with_its_run(runtime: Runtime, start_meta: StartMeta) -> None:
    """A large scratch buffer is freed after its run, because the connection that holds it may stay unused for long."""

    def run(inputs: dict[str, Any], call: Any) -> dict[str, Any]:
        buffer = call.scratch((1 << 26, 3), "f4")
        buffer[:1] = inputs["x"]
        return {"y": call("a", {"x": buffer[:1]})["y"].copy()}

    (answer,) = ask(start_meta(runtime, run, "a"), request())
    assert_y(answer, rows(1, 3))

    def mapped() -> int:
        connections = runtime.loop._transport.connections
        return sum(
            len(segment) for connection in connections for segment in list(connection.segments.values())
        )

    wait_until(lambda: mapped() <= 1 << 26, what="the buffer's segment to be unmapped")

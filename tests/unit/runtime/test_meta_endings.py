"""Every end of a meta model's run frees its place, and no memory is reused too early."""

import gc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rsrv.settings import load_settings
from rsrv.stub.direct import DirectRun
from rsrv.wire.socket import read_status
from tests.builders import write_meta
from tests.fakes import FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.metas import ask, meta_engine, rows, send
from tests.waiting import wait_until

#: model `a` makes 2 x + 1, `b` 2 x + 2, ...
CHAIN = """
    def run(inputs, call):
        return {"y": call("b", {"x": call("a", inputs)["y"]})["y"]}
"""


class Meeting:
    """Stops a meta model's code at `meeting.point` for the test."""

    def __init__(self) -> None:
        self._came = threading.Semaphore(0)
        self._go = threading.Event()
        self.meet: Callable[[], None] = self._meet

    def _meet(self) -> None:
        self._came.release()
        assert self._go.wait(20)

    def come(self) -> None:
        """Wait for one more to arrive."""
        assert self._came.acquire(timeout=20)

    def go(self) -> None:
        """Let all go on."""
        self._go.set()


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    module = types.ModuleType("meeting")
    point = Meeting()
    monkeypatch.setattr(module, "point", point, raising=False)
    monkeypatch.setitem(sys.modules, "meeting", module)
    yield point
    point.go()


def why(request: FakeRequest) -> str:
    """Return the error that the client got."""
    error = request.answers.get(timeout=20).error
    assert error is not None
    return error.message


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Abandon calls 10 ms after their deadline."""
    monkeypatch.setattr("rsrv.stub.calls.GRACE_NS", 10_000_000)
    monkeypatch.setattr("rsrv.stub.direct.GRACE_NS", 10_000_000)


@pytest.mark.parametrize("later", [False, True])
def test_a_deadline_may_be_as_far_away_as_it_likes(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, later: bool
) -> None:
    """A deadline may be years away, beyond the operating system's range of waiting."""
    meta = write_meta(tmp_path / "chain", CHAIN, ["a", "b"])
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        requests = [FakeRequest({"x": rows(1)}, timeout_us=10**14) for _ in range(1 + 5 * later)]
        for answer in ask(engine, *requests):
            assert answer.error is None, answer.error.message


def test_a_run_that_waited_leaves_though_its_stage_outlasts_its_deadline(
    start_runtime: StartRuntime,
    doublings: dict[str, Path],
    tmp_path: Path,
    meeting: Meeting,
    short_grace: None,
) -> None:
    """A run whose call outlasts the deadline leaves both of its connections' places free."""
    runtime = start_runtime(load_settings("scheduler: {meta_concurrency: 1}"))
    meta = write_meta(
        tmp_path / "chain",
        """
        import meeting

        def run(inputs, call):
            a = call("a", inputs)["y"]
            if inputs["x"][0, 0] == 1:
                meeting.point.meet()
            return {"y": call("b", {"x": a})["y"]}
        """,
        ["a", "b"],
    )
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        first, second = FakeRequest({"x": rows(1, 1)}), FakeRequest({"x": rows(1, 2)}, timeout_us=500_000)
        sending = send(engine, first)
        meeting.come()
        engine.execute([second])
        runtime.device.gate.clear(after=1)  # the last call of the first
        meeting.go()
        sending.join()

        assert why(second).startswith("[rsrv:DEADLINE]")

        runtime.device.gate.set()
        (answer,) = ask(engine, FakeRequest({"x": rows(1, 3)}, timeout_us=5_000_000))
        assert answer.error is None, answer.error.message


def test_a_run_that_the_last_runtime_let_in_is_none_of_the_next_one(
    start_runtime: StartRuntime, doublings: dict[str, Path], tmp_path: Path, meeting: Meeting
) -> None:
    """A run that the last runtime admitted fails with RUNTIME_DOWN in the next one."""
    settings = load_settings("{scheduler: {meta_concurrency: 2}, stub: {retry_s: 0}}")
    runtime = start_runtime(settings)
    meta = write_meta(
        tmp_path / "slow",
        """
        import meeting

        def run(inputs, call):
            meeting.point.meet()
            return call("a", inputs)
        """,
        ["a"],
    )
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        requests = [FakeRequest({"x": rows(1)}) for _ in range(4)]
        engine.execute(requests)  # two at once, a third one when it is let in, and no thread for the fourth
        for _ in range(3):
            meeting.come()
        wait_until(lambda: read_status(os.getpid())["metas"]["slow"]["running"] == 2, what="two runs")
        runtime.stop()
        start_runtime(settings)
        wait_until(lambda: engine.ready, what="the next runtime")

        meeting.go()

        for request in requests:
            assert why(request).startswith("[rsrv:RUNTIME_DOWN]")


def test_scratch_is_nothing_that_the_runtime_may_still_write_to(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, meeting: Meeting, short_grace: None
) -> None:
    """The memory of an abandoned call is not used as scratch."""
    meta = write_meta(
        tmp_path / "stubborn",
        """
        import meeting
        import numpy as np
        from rsrv.stub.calls import CallError

        def run(inputs, call):
            try:
                call("a", inputs)
            except CallError:
                pass
            try:
                buffers = [call.scratch((1, 3), np.float32) for _ in range(5)]
            except CallError:
                buffers = [np.empty((1, 3), np.float32)]
            for buffer in buffers:
                buffer[:] = 7
            meeting.point.meet()
            return {"y": sum(buffers) / len(buffers)}
        """,
        ["a"],
    )

    def execute() -> None:
        runtime.device.gate.set()
        wait_until(
            lambda: not read_status(os.getpid())["models"]["a"]["executing"], what="the execution's end"
        )

    meeting.meet = execute
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        runtime.device.gate.clear()
        (answer,) = ask(engine, FakeRequest({"x": rows(1)}, timeout_us=100_000))
        assert answer.error is None, answer.error.message
        np.testing.assert_array_equal(answer.arrays["y"], rows(1, 7))


def test_no_memory_for_scratch_is_not_the_models_fault(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """A lack of memory for scratch is QUEUE_FULL, so that the client may retry."""
    meta = write_meta(
        tmp_path / "greedy",
        """
        def run(inputs, call):
            return {"y": call.scratch((1 << 50,), "f4")}
        """,
        ["a"],
    )
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(1)}))
        assert answer.error is not None
        assert answer.error.message.startswith("[rsrv:QUEUE_FULL]"), answer.error.message


def test_call_is_of_no_use_after_its_run_or_to_another_thread(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """`call` is useless after its run and in another thread, and does not disturb the present run."""
    meta = write_meta(
        tmp_path / "keeper",
        """
        import threading
        old = []

        def run(inputs, call):
            said = []

            def use(call):
                try:
                    call("a", inputs)
                    said.append("well")
                except Exception as error:
                    said.append(str(error))

            if old:
                use(old[0])
            old.append(call)
            thread = threading.Thread(target=use, args=[call])
            thread.start()
            thread.join()
            assert all("stage 'a': call is for the thread" in text for text in said), said
            return call("a", inputs)
        """,
        ["a"],
    )
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        for _ in range(3):
            (answer,) = ask(engine, FakeRequest({"x": rows(1)}))
            assert answer.error is None, answer.error.message


def test_an_async_run_that_goes_on_without_the_runtime_does_not_spin(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, meeting: Meeting
) -> None:
    """A lost connection, which stays readable, is no longer watched by the run's loop."""
    meta = write_meta(
        tmp_path / "sleeper",
        """
        import asyncio, meeting, time

        async def run(inputs, call):
            await call("a", inputs)
            meeting.point.meet()
            used = time.thread_time()
            await asyncio.sleep(0.3)
            used = time.thread_time() - used
            assert used < 0.1, used
            return inputs | {"y": inputs["x"]}
        """,
        ["a"],
    )

    meeting.meet = runtime.stop
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(1)}))
        assert answer.error is None, answer.error.message


@pytest.mark.parametrize(
    "failing",
    [
        'def run(inputs, call):\n    call("a", inputs)',
        'def run(inputs, call):\n    call.many([("a", inputs), ("b", inputs)])',
        'async def run(inputs, call):\n    await call("a", inputs)',
        'async def run(inputs, call):\n    await call.many([("a", inputs), ("b", inputs)])',
    ],
)
def test_a_call_that_failed_keeps_no_memory(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path, failing: str
) -> None:
    """Its tensors are not left to the garbage collector, which does not know how large they are."""
    meta = write_meta(tmp_path / "failing", failing, ["a", "b"])
    with meta_engine(runtime, meta, {n: doublings[n] for n in "ab"}) as engine:
        runtime.device.fail = "told to"
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                (answer,) = ask(engine, FakeRequest({"x": rows(1)}))
                assert answer.error is not None
                assert "stage 'a'" in answer.error.message
            # The last one leaves with its thread, a moment after its answer.
            wait_until(
                lambda: not any(isinstance(thing, DirectRun) for thing in gc.get_objects()),
                what="the failed runs to be freed",
            )
        finally:
            gc.enable()


def test_a_large_buffer_goes_with_its_run(
    runtime: Runtime, doublings: dict[str, Path], tmp_path: Path
) -> None:
    """Its connection may not be used again for long."""
    meta = write_meta(
        tmp_path / "large",
        """
        def run(inputs, call):
            buffer = call.scratch((1 << 26, 3), "f4")
            buffer[:1] = inputs["x"]
            return {"y": call("a", {"x": buffer[:1]})["y"].copy()}
        """,
        ["a"],
    )
    with meta_engine(runtime, meta, {"a": doublings["a"]}) as engine:
        (answer,) = ask(engine, FakeRequest({"x": rows(1)}))
        assert answer.error is None, answer.error.message

        def mapped() -> int:
            connections = runtime.loop._transport.connections
            return sum(len(segment) for one in connections for segment in list(one.segments.values()))

        wait_until(lambda: mapped() <= 1 << 26, what="the buffer's segment to be unmapped")

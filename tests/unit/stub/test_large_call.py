"""Sub-calls in parts: a call ends when all of its parts have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rsrv.front.rules import MAX_PARTS
from rsrv.stub.calls import LargeCall, LargeCallError, Results
from rsrv.stub.meta_run import CallRouter
from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Status


class Part:
    """A part of a sub-call. It fails or succeeds when the caller waits for it."""

    def __init__(self, rows: int, *, fails: bool) -> None:
        self.rows, self.fails, self.ended = rows, fails, False

    def wait(self, until_ns: int) -> Results:
        self.ended = True
        if self.fails:
            raise RequestFailure(Status.INTERNAL, "the part failed")
        return {"y": np.ones((self.rows, 1), np.float32)}

    def when_done(self, loop: asyncio.AbstractEventLoop, until_ns: int) -> Awaitable[Results]:
        async def done() -> Results:
            return self.wait(until_ns)

        return done()


def plan(rows: int, largest: int) -> Any:
    """Return the plan of a call with this number of rows, of which `largest` fit into one execution."""

    def planned(name: str) -> Any:
        tensor = SimpleNamespace(name=name, batch_axis=0)
        return SimpleNamespace(tensor=tensor, shape=(rows, 1), dtype=np.dtype(np.float32))

    return SimpleNamespace(rows=rows, largest=largest, inputs=(planned("x"),), outputs=(planned("y"),))


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failed_call_ends_after_its_other_parts(*, awaited: bool) -> None:
    """If the first of six parts fails, the call waits for the parts that were submitted, and starts no others."""
    parts: list[Part] = []

    def start(inputs: Any) -> Part:
        parts.append(Part(len(inputs["x"]), fails=not parts))
        return parts[-1]

    call = LargeCall(LargeCallError({"x": np.zeros((12, 1), np.float32)}, plan(12, 2)), start)

    def end() -> Results:
        if awaited:
            with asyncio.Runner() as runner:
                return runner.run(call.when_done(runner.get_loop(), 0))
        return call.wait(0)

    with pytest.raises(RequestFailure, match="the part failed"):
        end()

    assert [part.ended for part in parts] == [True] * 4


def test_parts_of_two_versions_make_no_answer() -> None:
    """If a version with outputs of another shape replaces the model during a call, the call fails.

    Without this check, numpy would repeat the single value of the new version's rows.
    """
    whole = plan(4, 2)
    (output,) = whole.outputs
    output.shape = (4, 3)

    class OldPart(Part):
        def wait(self, until_ns: int) -> Results:
            return {"y": np.ones((self.rows, 3), np.float32)}

    parts = iter((OldPart(2, fails=False), Part(2, fails=False)))
    call = LargeCall(LargeCallError({"x": np.zeros((4, 1), np.float32)}, whole), lambda _: next(parts))

    with pytest.raises(RequestFailure, match="replaced by a version"):
        call.wait(0)


def test_a_call_whose_third_part_cannot_start_ends_after_the_first_two() -> None:
    """If the third part cannot start, the call ends with this error after the first two parts. No further part starts."""
    parts: list[Part] = []

    def start(inputs: Any) -> Part:
        if len(parts) == 2:
            raise RequestFailure(Status.INTERNAL, "no room")
        parts.append(Part(len(inputs["x"]), fails=False))
        return parts[-1]

    call = LargeCall(LargeCallError({"x": np.zeros((12, 1), np.float32)}, plan(12, 2)), start)
    with pytest.raises(RequestFailure, match="no room"):
        call.wait(0)

    assert [part.ended for part in parts] == [True] * 2


def test_parts_are_divided_again_if_the_next_runtime_has_smaller_executions() -> None:
    """If a new runtime has a smaller `max_batch_size`, the parts that have not started are divided again."""
    largest, started = 4, list[int]()

    def start(callee: Any, inputs: Any, keep: Any) -> Any:
        rows = len(inputs["x"])
        if rows > largest:
            raise LargeCallError(inputs, plan(rows, largest))
        started.append(rows)
        # The router expects a function that sends the call.
        return lambda run, callee: Part(rows, fails=False)

    place = SimpleNamespace(by_stage=False, callees={"m": (SimpleNamespace(start=start), None)})
    run: Any = SimpleNamespace(place=place, progress=lambda: None)
    router = CallRouter(run, (), None, 0, through_triton=False)
    call = router.start("m", {"x": np.zeros((24, 1), np.float32)}, keep=False)
    assert started == [4] * MAX_PARTS
    largest = 3

    assert call.wait(0)["y"].tolist() == [[1.0]] * 24

    assert started == [4] * MAX_PARTS + [3, 1] * 2

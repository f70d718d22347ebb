"""Sub-calls in parts: the call ends when all of its parts have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rsrv.stub.calls import LargeCall, LargeCallError, Results
from rsrv.stub.replies import RequestFailure
from rsrv.wire.frames import Status


class Part:
    """A sub-call that fails or is answered when somebody waits for it."""

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


@pytest.mark.parametrize("awaited", [False, True])
def test_a_failed_call_ends_after_its_other_parts(*, awaited: bool) -> None:
    """Of six parts, the first fails: the submitted ones are waited for, and no further one starts."""
    parts: list[Part] = []

    def start(inputs: Any) -> Part:
        parts.append(Part(len(inputs["x"]), fails=not parts))
        return parts[-1]

    def planned(name: str) -> Any:
        tensor = SimpleNamespace(name=name, batch_axis=0)
        return SimpleNamespace(tensor=tensor, shape=(12, 1), dtype=np.dtype(np.float32))

    plan: Any = SimpleNamespace(rows=12, largest=2, inputs=(planned("x"),), outputs=(planned("y"),))
    call = LargeCall(LargeCallError({"x": np.zeros((12, 1), np.float32)}, plan), start)

    def end() -> Results:
        if awaited:
            with asyncio.Runner() as runner:
                return runner.run(call.when_done(runner.get_loop(), 0))
        return call.wait(0)

    with pytest.raises(RequestFailure, match="the part failed"):
        end()

    assert [part.ended for part in parts] == [True] * 4

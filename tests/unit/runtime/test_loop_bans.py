"""Bans of models from the loop: when they begin and end, and their effect in an executor. The tests set the time."""

from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.activity import Activity
from rsrv.runtime.device import Array
from rsrv.runtime.executor import BAN_S, SLOW_S, WINDOW_S, Executor, LoopBans
from rsrv.runtime.threads import Inbox
from tests.fakes import FakeDevice
from tests.logged import logged_here
from tests.unit.runtime.conftest import build_here, double
from tests.unit.runtime.test_pipelining import lay_out, take_ends


def slow(bans: LoopBans, seconds: float, *moments: float, model: str = "m") -> list[bool]:
    return [bans.executed(model, seconds, moment) for moment in moments]


def test_a_single_slow_execution_bans_nothing() -> None:
    """A single slow execution, for example because the CPU was busy, bans nothing. Fast executions ban nothing either."""
    bans = LoopBans()

    assert slow(bans, 0.04, 0.0, 1.0) == [False, False]
    assert not any(bans.executed("m", SLOW_S, moment) for moment in range(100))
    assert not bans.banned("m", 100.0)
    assert bans.count == 0


def test_an_execution_that_blocks_the_loop_for_long_bans_its_model_at_once() -> None:
    """An execution that blocks the loop for long bans its model at once, because the next may do the same."""
    bans = LoopBans()

    assert slow(bans, 3.0, 5.0) == [True]
    assert bans.banned("m", 5.0)


def test_slow_executions_in_a_row_ban_a_model_for_a_while() -> None:
    """Three slow executions in a row ban that model for a while, and then the count starts again."""
    bans = LoopBans()

    assert slow(bans, 0.04, 0.0, 1.0, 2.0) == [False, False, True]
    assert bans.banned("m", 2.0)
    assert not bans.banned("other", 2.0)
    assert bans.banned("m", 2.0 + BAN_S - 0.1)
    assert not bans.banned("m", 2.0 + BAN_S)
    assert slow(bans, 0.04, 70.0, 71.0, 72.0) == [False, False, True]
    assert bans.count == 2


def test_slow_executions_far_apart_ban_nothing() -> None:
    """Slow executions that are far apart never ban a model."""
    bans = LoopBans()

    assert not any(slow(bans, 0.04, *(number * (WINDOW_S / 2 + 0.1) for number in range(100))))


def test_a_model_that_comes_back_begins_without_slow_executions() -> None:
    """If a model is unloaded, its ban and its slow executions are forgotten. The total number of bans stays."""
    bans = LoopBans()
    slow(bans, 1.0, 0.0)
    slow(bans, 0.08, 0.0, model="other")

    for model in ("m", "other"):
        bans.forget(model)

    assert not bans.banned("m", 0.0)
    assert slow(bans, 0.04, 0.0, model="other") == [False]
    assert bans.count == 1


def test_the_loop_executes_a_banned_model_again_when_the_ban_ends(
    doubling: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After three slow executions, the model is banned: a thread executes it, and the log has one line.

    When the ban ends, the loop executes the model again. Each execution takes 40 ms instead of the expected 0.1 ms.
    """
    now = 0.0

    def compute(inputs: list[Array], weights: list[Array]) -> list[Array]:
        nonlocal now
        now += 0.04
        return double(inputs, weights)

    device = FakeDevice(compute)  # type: ignore[arg-type]
    model = build_here(doubling, device)
    inbox = Inbox()
    executor = Executor(inbox, Activity(), lambda: now)

    def on_loop(number: int) -> bool:
        """Execute once. Return whether the loop executed."""
        dispatch = lay_out(model, number, 1, np.random.default_rng(0), 1e-4)
        executor.start(dispatch, device, depth=1, contended=False)
        short = executor.short is not None
        (end,) = [executor.run_short()] if short else take_ends(inbox)
        assert end.dispatch is dispatch
        return short

    assert [on_loop(dispatch) for dispatch in range(5)] == [True, True, True, False, False]
    assert executor.bans.count == 1
    (record,) = logged_here(caplog)
    assert "A separate thread executes the model for the next 60 s" in record.getMessage()
    now += BAN_S
    assert on_loop(5)

"""Weights that leave the device because their model is not used."""

from __future__ import annotations

from math import inf

import pytest

from rsrv.scheduler.events import (
    CallerError,
    EvictWeights,
    ModelAdded,
    Outcome,
    Pause,
    Pinned,
    PolicyChanged,
    Prefetch,
)
from rsrv.scheduler.residency import IDLE_CHECK_S
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Cause
from tests.unit.scheduler.driver import Driver, program

LIMIT = 10.0


@pytest.fixture
def driver() -> Driver:
    """Return a driver with two resident models. `a` leaves after ten idle seconds, and `b` has no limit."""
    driver = Driver()
    driver.add(program("a", idle_seconds=LIMIT), program("b"))
    return driver


def evicted(driver: Driver, at: float) -> list[str]:
    return [instruction.model for instruction in driver.tick(at) if isinstance(instruction, EvictWeights)]


def test_weights_leave_when_their_model_was_not_used_for_its_limit(driver: Driver) -> None:
    """Weights leave when their model has been idle for its limit, and not before. Weights without a limit stay."""
    assert driver.scheduler.next_wakeup() == LIMIT
    assert evicted(driver, LIMIT - 0.1) == []

    assert evicted(driver, LIMIT) == ["a"]

    assert driver.resident == {"b"}
    assert driver.scheduler.totals()["a"].evictions == {Cause.IDLE: 1}
    assert driver.scheduler.next_wakeup() is None


def test_each_use_begins_the_limit_again(driver: Driver) -> None:
    """The idle time of weights begins at the end of their latest execution."""
    driver.tick(6.0)
    driver.arrive(driver.request("a"))
    driver.finish(seconds=1.0)

    assert evicted(driver, LIMIT) == []
    assert driver.scheduler.next_wakeup() == 7.0 + LIMIT
    assert evicted(driver, 7.0 + LIMIT) == ["a"]


def test_the_next_request_loads_them_again(driver: Driver) -> None:
    """A request loads evicted weights again. They leave after another idle time."""
    evicted(driver, LIMIT)
    request = driver.request("a")
    driver.arrive(request)
    driver.load("a", 1.0)
    driver.finish()

    assert driver.outcome(request) is Outcome.ANSWERED
    assert evicted(driver, 2 * LIMIT) == []
    assert evicted(driver, 3 * LIMIT) == ["a"]


def test_weights_stay_while_something_executes_on_them(driver: Driver) -> None:
    """Weights stay while they are in use, however long this takes. The idle time begins when the execution ends."""
    driver.arrive(driver.request("a"))
    assert evicted(driver, 3 * LIMIT) == []
    driver.finish(seconds=0.0)

    assert evicted(driver, 4 * LIMIT - 1.0) == []
    assert evicted(driver, 4 * LIMIT) == ["a"]


def test_weights_stay_while_requests_of_a_held_model_wait(driver: Driver) -> None:
    """Weights of a held model stay while its requests wait, so that these execute as soon as it continues."""
    driver.pause(Pause.HOLD, "a")
    driver.arrive(driver.request("a"))

    assert evicted(driver, 2 * LIMIT) == []
    driver.pause(None, "a")
    assert len(driver.executing) == 1


def test_pinned_weights_stay_until_they_are_unpinned() -> None:
    """Pinned weights stay, whatever the limit is. After they are unpinned, they leave."""
    driver = Driver()
    driver.add(program("a", idle_seconds=LIMIT, pinned=True))
    assert evicted(driver, LIMIT) == []
    driver.send(Pinned("a", False))

    assert evicted(driver, 2 * LIMIT + 1.0) == ["a"]


def test_weights_that_only_commands_move_stay() -> None:
    """In explicit mode, weights do not leave for idleness. When weights load on demand again, the limit applies."""
    driver = Driver(SchedulerSettings(on_demand=False))
    driver.send(ModelAdded(program("a", idle_seconds=LIMIT), resident=True))
    driver.send(Prefetch("a"))
    assert evicted(driver, 2 * LIMIT) == []

    driver.change(on_demand=True)

    assert driver.resident == set()


def test_a_limit_changes_while_the_scheduler_runs(driver: Driver) -> None:
    """A limit can be changed while the scheduler runs, as when rsrv.yaml was read again."""
    driver.send(PolicyChanged("b", idle_seconds=2.0), after=5.0)
    assert evicted(driver, 7.0) == ["b"]
    driver.send(PolicyChanged("a", idle_seconds=inf))

    assert evicted(driver, 100.0) == []


def test_a_limit_of_zero_evicts_at_once_and_does_not_spin(driver: Driver) -> None:
    """With a limit of zero, weights are evicted at the first check after their use.

    While they are in use, they are checked only at intervals.
    """
    driver.arrive(driver.request("a"))
    driver.send(PolicyChanged("a", idle_seconds=0.0))
    assert driver.scheduler.next_wakeup() == IDLE_CHECK_S

    driver.finish(seconds=0.01)

    assert evicted(driver, IDLE_CHECK_S) == ["a"]


def test_a_limit_below_zero_is_refused() -> None:
    """A limit below zero, or one that is not a number, is refused."""
    for limit in (-1.0, float("nan")):
        with pytest.raises(CallerError, match="idle_seconds must be at least 0"):
            Driver().add(program("a", idle_seconds=limit))

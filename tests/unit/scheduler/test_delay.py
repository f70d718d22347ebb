"""`max_delay`: a model may hold requests back, for a bounded time, so that others share their execution."""

from __future__ import annotations

import itertools

import pytest

from rsrv.scheduler.events import Outcome
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import COSTS, every_discipline, program


def delayed(discipline: str = "fair", delay: float = 0.005) -> Device:
    device = Device(SchedulerSettings(discipline=discipline), validate_every=1)
    device.model(program("a", COSTS, max_delay=delay))
    return device


@every_discipline
def test_a_lonely_request_starts_after_the_delay(discipline: str) -> None:
    """A request that waits for others starts 5 ms after its arrival, at a tick that the scheduler has asked for."""
    device = delayed(discipline)
    request = device.request()
    device.arrive(request)

    assert device.scheduler.next_wakeup() == 0.005
    device.run(1.0)
    assert device.started(request) == 0.005


def test_without_a_delay_nothing_is_held_back() -> None:
    """By default the device never waits for more work."""
    device = delayed(delay=0.0)
    request = device.request()
    device.arrive(request)

    assert device.started(request) == 0.0


@every_discipline
def test_a_full_batch_does_not_wait(discipline: str) -> None:
    """When the 32nd row arrives, the cheapest size is full, and the execution starts without further delay."""
    device = delayed(discipline)
    device.arrive(*device.requests_of(31))
    assert not device.executed
    device.tick(0.002)
    device.arrive(device.request())

    [(start, _, execute)] = device.executed
    assert (start, execute.rows) == (0.002, 32)


def test_the_delay_counts_from_the_first_arrival() -> None:
    """The delay begins with the first request.

    A request that arrives 1 ms before the end of the delay shares the execution, or has its own delay.
    """
    device = delayed()
    first = device.request()
    device.arrive(first)
    device.run(0.004)
    second = device.request()
    device.arrive(second)
    device.run(1.0)

    assert device.started(first) == 0.005
    assert device.started(second) in (0.005, pytest.approx(0.009))


def test_others_use_the_device_during_a_delay() -> None:
    """A model that holds its requests back delays no other model."""
    device = delayed()
    device.model(program("b"))
    held, other = device.request("a"), device.request("b")
    device.arrive(held)
    device.arrive(other)

    assert device.started(other) == 0.0
    assert device.started(held) is None


@every_discipline
def test_a_deadline_shortens_the_delay(discipline: str) -> None:
    """A request with a deadline in 3 ms that costs 1 ms is delayed for 2 ms at most, and answered in time."""
    device = delayed(discipline)
    request = device.request(deadline=0.003)
    device.arrive(request)
    device.run(1.0)

    assert device.answered(request) == pytest.approx(0.003)


def test_committed_requests_are_not_held_back() -> None:
    """The sub-call of a run in progress starts at once, even if other requests of its model are delayed."""
    device = delayed()
    device.arrive(device.request())
    committed = device.request(run=1)
    device.arrive(committed)

    assert device.started(committed) == 0.0


def test_cancelling_ends_the_wait() -> None:
    """When the last waiting request is cancelled, the scheduler asks for no tick."""
    device = delayed()
    request = device.request()
    device.arrive(request)
    device.cancel(request)

    assert device.scheduler.next_wakeup() is None
    assert device.outcome(request) is Outcome.CANCELLED


def test_removal_ends_the_wait() -> None:
    """When a model is removed, the scheduler asks for no tick because of its delayed requests."""
    device = delayed()
    device.arrive(device.request())
    device.remove("a")

    assert device.scheduler.next_wakeup() is None


@every_discipline
def test_the_deadline_of_one_behind_the_front_shortens_the_delay(discipline: str) -> None:
    """The deadline of a request that is not the first one also limits the delay.

    Otherwise the deadline would pass while the device is idle.
    """
    device = delayed(discipline, delay=1.0)
    front, dated = device.request(priority=1), device.request(deadline=0.5)
    device.arrive(front, dated)
    device.run(2.0)

    assert device.outcome(dated) is Outcome.ANSWERED
    assert device.ended_at[dated.id] <= 0.5 + 1e-5


@every_discipline
def test_a_request_is_held_back_no_longer_than_it_can_run_whole(discipline: str) -> None:
    """The delay of a request of four rows ends early enough to execute all rows in one execution before the deadline.

    This execution takes 20 ms. Four executions of one row would take only 4 ms.
    """
    device = Device(SchedulerSettings(discipline=discipline))
    device.model(program("a", {(0, 1): 0.001, (0, 8): 0.020, (0, 64): 0.040}, max_delay=1.0))
    request = device.request(rows=4, deadline=0.5)
    device.arrive(request)
    device.run(2.0)

    assert device.outcome(request) is Outcome.ANSWERED
    assert device.ended_at[request.id] <= 0.5 + 1e-5


@pytest.mark.parametrize("delay", [0.5, 2.0])
def test_a_model_that_was_held_back_saves_no_credit(delay: float) -> None:
    """A model whose requests were delayed gets no credit for this time, so no other model waits longer afterwards."""
    device = Device(SchedulerSettings())
    device.model(program("x", {(0, 1): 0.01}))
    device.model(program("y", {(0, 1): 0.01, (0, 100): 0.0999}, max_delay=delay, max_queue_depth=2000))
    device.saturate("x")
    device.run(1.0)
    device.arrive(device.request("y"))
    device.run(1.0 + delay - 0.001)
    device.arrive(*device.requests_of(2000, "y"))
    device.run(10.0)
    starts = [start for start, _, execute in device.executed if execute.model == "x"]

    assert max(after - before for before, after in itertools.pairwise(starts)) <= 0.11

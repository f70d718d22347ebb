"""More than one execution on the device: when executions are launched, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rsrv.scheduler.events import SettingsChanged
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import program


def pipelined(depth: int = 2, ahead_ms: float = 2.0, discipline: str = "fair") -> Device:
    return Device(
        SchedulerSettings(depth=depth, launch_ahead_ms=ahead_ms, discipline=discipline), validate_every=1
    )


def test_the_next_execution_is_launched_shortly_before_the_end() -> None:
    """An execution takes 10 ms. The scheduler requests a wake-up 2 ms before its end, and then launches the next execution."""
    device = pipelined()
    device.model(program("a", {(0, 1): 0.010}))
    device.arrive(*device.requests_of(2))

    assert len(device.executing) == 1
    assert device.scheduler.next_wakeup() == pytest.approx(0.008)
    device.tick(0.0079)
    assert len(device.executing) == 1
    device.tick(0.008)
    assert len(device.executing) == 2


def test_the_device_never_pauses_between_executions() -> None:
    """Each of a hundred executions starts at the end of the one before."""
    device = pipelined()
    device.model(program("a", {(0, 1): 0.010}))
    device.arrive(*device.requests_of(100))
    device.run(2.0)

    ends = [end for _, end, _ in device.executed]
    assert [start for start, _, _ in device.executed[1:]] == ends[:-1]


def test_arrivals_join_until_the_launch() -> None:
    """Requests that arrive during an execution share the next one, until 2 ms before the end."""
    device = pipelined()
    device.model(program("long", {(0, 1): 0.010}))
    device.model(program("a"))
    device.arrive(device.request("long"))
    for _ in range(7):
        device.run(device.now + 0.001)
        device.arrive(device.request())
    device.run(1.0)

    assert [execute.rows for _, _, execute in device.executed] == [1, 7]


def test_a_model_that_feeds_back_is_not_launched_beside_itself() -> None:
    """A model that feeds back has only one execution at a time, because the next one needs its results."""
    device = pipelined()
    device.model(replace(program("a", {(0, 1): 0.010, (0, 4): 0.010}), feeds_back=True))
    device.arrive(device.request())
    device.arrive(device.request())
    device.tick(0.009)
    assert len(device.executing) == 1
    assert device.scheduler.next_wakeup() is None
    device.arrive(device.request())
    device.run(1.0)
    assert [execute.rows for _, _, execute in device.executed] == [1, 2]


def test_short_executions_are_launched_up_to_the_depth() -> None:
    """Three executions of 0.5 ms are launched at once, because they take less than 2 ms together. The depth is 3."""
    device = pipelined(depth=3)
    device.model(program("a", {(0, 1): 0.0005}))
    device.arrive(*device.requests_of(10))

    assert len(device.executing) == 3


def test_an_overrun_launches_the_next_and_no_more() -> None:
    """If an execution takes ten times as long as expected, a second one is launched behind it, but no third one."""
    device = pipelined()
    device.model(program("a", {(0, 1): 0.010}))
    device.slower = lambda execute: 10.0 if execute.number == 1 else 1.0
    device.arrive(*device.requests_of(5))
    device.run(0.099)

    assert len(device.executing) == 2
    assert device.ticks <= 2


@pytest.mark.parametrize("depth", [2, 3])
def test_shares_are_fair_at_a_depth(depth: int) -> None:
    """Models with executions of 0.5 ms and 80 ms and weights 1 and 2 get one and two thirds of the device, at any depth."""
    device = Device(SchedulerSettings(depth=depth), validate_every=50)
    device.model(program("cheap", {(0, 1): 0.0005}))
    device.model(program("dear", {(0, 1): 0.080}, weight=2.0))
    device.saturate(["cheap", "dear"])
    device.run(5.0)

    assert device.got["cheap"] / sum(device.got.values()) == pytest.approx(1 / 3, abs=0.02)


def test_an_urgent_arrival_waits_for_what_is_launched_only() -> None:
    """A sub-call waits only for the running execution and the already launched one, and not for queued requests."""
    device = pipelined(ahead_ms=100.0)
    device.model(program("a", {(0, 1): 0.010}))
    device.arrive(*device.requests_of(20))
    urgent = device.request(run=1)
    device.arrive(urgent)
    device.run(1.0)

    assert device.started(urgent) == pytest.approx(0.020)


def test_an_overrun_does_not_ask_for_ticks_without_end() -> None:
    """An execution takes far too long, and a second one with an expected duration of 2.01 ms is launched behind it.

    Although the depth would allow a third one, the scheduler requests only a few wake-ups.
    """
    device = Device(SchedulerSettings(depth=3, launch_ahead_ms=2.0), validate_every=1000)
    device.model(program("a", {(0, 1): 0.00201}))
    device.slower = lambda execute: 1000.0 if execute.number == 1 else 1.0
    device.arrive(*device.requests_of(5))
    device.run(0.5)

    assert device.ticks <= 5


def test_an_execution_of_another_discipline_ends_beside_one_of_this() -> None:
    """Two executions of a model are in flight, one from before a change of discipline. Both end normally."""
    device = pipelined(ahead_ms=100.0, discipline="fifo")
    device.model(program("a"))
    device.arrive(device.request())
    device.send(SettingsChanged(SchedulerSettings(depth=2, launch_ahead_ms=100.0)))
    device.arrive(*device.requests_of(28))
    device.run(1.0)

    assert len(device.ended) == 29


def test_the_batch_of_a_deadline_counts_what_runs_before_it() -> None:
    """The running execution ends in 10 ms, and the deadline of the next request is 2 ms after that.

    The request executes alone in 1 ms, because it would be late in a batch of 8 ms.
    """
    device = pipelined(ahead_ms=100.0, discipline="edf")
    device.model(program("long", {(0, 1): 0.010}))
    device.model(program("a", {(0, 1): 0.001, (0, 32): 0.008}))
    device.arrive(device.request("long", deadline=0.0105))
    urgent = device.request("a", deadline=0.012)
    device.arrive(urgent, *(device.request("a", deadline=1.0) for _ in range(20)))
    device.run(1.0)

    assert device.ended_at[urgent.id] <= 0.012

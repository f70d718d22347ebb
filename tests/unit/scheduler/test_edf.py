"""Earliest deadline first: which requests are shed, and which are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import Outcome, RequestsArrived
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import executions, ids, program

#: Rounding error in seconds that the scheduler tolerates, so the tests tolerate it as well.
SLACK = 4e-6


def edf() -> Device:
    return Device(SchedulerSettings(discipline="edf"))


def test_what_cannot_be_met_even_alone_is_shed_on_arrival() -> None:
    """A request of 10 ms with a deadline in 5 ms is shed at once. One with a deadline in 11 ms is answered in time."""
    device = edf()
    device.model(program("a", {(0, 1): 0.010}))
    late, well = device.request(deadline=0.005), device.request(deadline=0.011)
    device.arrive(late, well)
    device.run(1.0)

    assert (device.outcome(late), device.ended_at[late.id]) == (Outcome.SHED, 0.0)
    assert device.answered(well) == pytest.approx(0.010)


def test_what_runs_counts_against_a_deadline() -> None:
    """While an execution has 80 ms to run, a request of 10 ms with a deadline in 85 ms is shed at once.

    One in 95 ms is in time.
    """
    device = edf()
    device.model(program("long", {(0, 1): 0.080}))
    device.model(program("a", {(0, 1): 0.010}))
    late, well = device.request(deadline=0.085), device.request(deadline=0.095)
    device.arrive(device.request("long"))
    device.arrive(late, well)
    device.run(1.0)

    assert (device.outcome(late), device.ended_at[late.id]) == (Outcome.SHED, 0.0)
    assert device.answered(well) == pytest.approx(0.090)


def test_what_became_certain_to_be_late_ends_when_its_rival_starts() -> None:
    """Two requests of 10 ms have a deadline in 15 ms. When one starts, the other one is shed at once."""
    device = edf()
    device.model(program("a", {(0, 1): 0.010}))
    device.model(program("b", {(0, 1): 0.010}))
    first, second = device.request("a", deadline=0.015), device.request("b", deadline=0.015)
    device.arrive(first, second)
    device.run(1.0)

    assert device.answered(first) == pytest.approx(0.010)
    assert (device.outcome(second), device.ended_at[second.id]) == (Outcome.SHED, 0.0)


def test_the_load_of_cold_weights_counts_against_a_deadline() -> None:
    """If a load takes 1 s, a request with a deadline in 0.9 s is shed on arrival. One in 1.1 s is in time."""
    device = edf()
    device.model(program("a", {(0, 1): 0.010}, weight_bytes=100), load=1.0, resident=False)
    late, well = device.request(deadline=0.9), device.request(deadline=1.1)
    device.arrive(late, well)
    device.run(2.0)

    assert (device.outcome(late), device.ended_at[late.id]) == (Outcome.SHED, 0.0)
    assert device.answered(well) == pytest.approx(1.010)


def test_the_load_under_way_counts_before_the_next_one() -> None:
    """While a load of 1 s is in progress, a request that needs another load of 1 s is shed if its deadline is in 1.9 s.

    With a deadline in 2.1 s, it is in time.
    """
    device = edf()
    for name in "ab":
        device.model(program(name, {(0, 1): 0.010}, weight_bytes=100), load=1.0, resident=False)
    device.arrive(device.request("a"))
    late, well = device.request("b", deadline=1.9), device.request("b", deadline=2.1)
    device.arrive(late, well)
    device.run(3.0)

    assert (device.outcome(late), device.ended_at[late.id]) == (Outcome.SHED, 0.0)
    assert device.answered(well) == pytest.approx(2.010)


def test_a_full_batch_does_not_make_the_front_late() -> None:
    """A batch of 32 costs least per row, but takes 8 ms. A first request with 5 ms left executes at size 4."""
    device = edf()
    device.model(program("a", {(0, 1): 0.001, (0, 4): 0.003, (0, 32): 0.008}))
    urgent = device.request(deadline=0.005)
    device.arrive(urgent, *(device.request(deadline=1.0) for _ in range(31)))

    assert device.executed[0][2].size == 4
    assert urgent.id in device.executed[0][2].requests


def test_the_urgent_request_deep_in_a_queue_is_not_shed() -> None:
    """An urgent request that arrives after 500 others of its model and 500 of another one is the next to execute."""
    device = edf()
    device.model(program("a", {(0, 1): 0.010}))
    device.model(program("b", {(0, 1): 0.010}))
    relaxed = [device.request(name, deadline=100.0) for name in "ab" for _ in range(500)]
    urgent = device.request("a", deadline=0.0205)
    device.arrive(*relaxed)
    device.arrive(urgent)

    [second] = executions(device.finish())

    assert second.requests == ids([urgent])


def test_committed_requests_are_never_shed() -> None:
    """A sub-call of a run in progress is never shed. It executes even if it ends after its deadline."""
    device = edf()
    device.model(program("a", {(0, 1): 0.010}))
    late = device.request(deadline=0.005, run=1)
    device.arrive(late)
    device.run(1.0)

    assert device.answered(late) == pytest.approx(0.010)


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_other_disciplines_do_not_shed(discipline: str) -> None:
    """Under other disciplines, a request is not shed, and executes if its deadline has not passed yet."""
    device = Device(SchedulerSettings(discipline=discipline))
    device.model(program("a", {(0, 1): 0.010}))
    late = device.request(deadline=0.005)
    device.arrive(late)
    device.run(1.0)

    assert device.outcome(late) is Outcome.ANSWERED


costs = st.sampled_from([0.0005, 0.003, 0.020, 0.080])
arrivals = st.lists(
    st.tuples(
        st.integers(0, 4),  # model
        st.sampled_from([0.0, 0.0, 0.0004, 0.01, 0.05]),  # seconds since the request before
        st.sampled_from([None, 0.0006, 0.004, 0.03, 0.1, 0.5]),  # seconds until the deadline
        st.sampled_from([0, 0, 0, 1, 9]),  # priority
    ),
    min_size=1,
    max_size=40,
)


@given(models=st.lists(costs, min_size=1, max_size=5), arrivals=arrivals)
def test_shed_exactly_when_it_could_not_be_met(
    models: list[float], arrivals: list[tuple[int, float, float | None, int]]
) -> None:
    """A shed request would be late even if it were the next one. An answered request is in time."""
    device = edf()
    for number, cost in enumerate(models):
        device.model(program(f"m{number}", {(0, 1): cost}))
    at = 0.0
    for number, pause, deadline, priority in arrivals:
        at += pause
        request = device.request(
            f"m{number % len(models)}",
            deadline=None if deadline is None else at + deadline,
            priority=priority,
        )
        device.later(at, RequestsArrived((request,)))
    device.run(10.0)

    assert device.ended.keys() == device.requests.keys()
    for request in device.requests.values():
        if request.deadline is None:
            assert device.outcome(request) is Outcome.ANSWERED
        elif device.outcome(request) is Outcome.ANSWERED:
            assert device.ended_at[request.id] <= request.deadline + SLACK
        else:
            then = device.ended_at[request.id]
            # Executions that were launched by the same event that ended the request count as well.
            free = max((end for start, end, _ in device.executed if start <= then), default=then)
            cost = device.programs[request.model].costs[0, 1]
            assert max(then, free) + cost > request.deadline - SLACK


def test_a_deadline_that_just_fits_gets_the_size_that_fits() -> None:
    """A request of 1 ms with 1 ms left executes alone, and not in a batch of 8 ms, however sums are rounded."""
    for step in range(50):
        device = edf()
        device.model(program("a", {(0, 1): 0.001, (0, 32): 0.008}))
        device.tick(step * 0.1)
        front = device.request(deadline=device.now + 0.001)
        device.arrive(front, *(device.request(deadline=device.now + 1.0) for _ in range(20)))

        assert device.executed[0][2].size == 1, device.now


def test_a_request_whose_load_comes_too_late_ends_when_that_is_certain() -> None:
    """The link is busy for longer than expected. A request is shed when its load can no longer start early enough."""
    device = edf()
    device.model(program("a", weight_bytes=100), load=1.5, expected=1.0, resident=False)
    device.model(program("b", weight_bytes=100), load=1.0, resident=False)
    device.arrive(device.request("a"))
    late = device.request("b", deadline=2.3)
    device.arrive(late)
    device.run(5.0)

    assert device.outcome(late) is Outcome.SHED
    assert device.ended_at[late.id] <= 1.51

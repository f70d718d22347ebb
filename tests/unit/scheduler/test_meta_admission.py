"""Runs of meta models: how many run at once, which wait, and which are refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import nan

import pytest

from rsrv.scheduler import invariants
from rsrv.scheduler.events import (
    Admit,
    CallerError,
    Finish,
    Instruction,
    Outcome,
    Pause,
    Reason,
    RequestsArrived,
    RequestsCancelled,
    Run,
    RunsAsked,
    SettingsChanged,
)
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import MetaSnapshot
from tests.unit.scheduler.driver import Driver, every_discipline, program


def admission(discipline: str = "fair", concurrency: int = 1) -> Driver:
    return Driver(SchedulerSettings(discipline=discipline, meta_concurrency=concurrency))


def change(driver: Driver, **changes: int | str) -> list[Instruction]:
    settings = replace(driver.settings, **changes)  # type: ignore[arg-type]
    return driver.send(SettingsChanged(settings))


def admitted(instructions: Iterable[Instruction]) -> list[int]:
    return [instruction.run for instruction in instructions if isinstance(instruction, Admit)]


def order(driver: Driver) -> list[int]:
    """End the runs one after another, the oldest first. Return the order in which waiting runs are admitted."""
    order = []
    while driver.under_way:
        order += admitted(driver.end(min(driver.under_way.values(), key=lambda run: run.id)))
    return order


# --- admission
# -----------------------------------------------------------------------------------------------


@every_discipline
def test_as_many_as_may_run_are_admitted_at_once(discipline: str) -> None:
    """With two places, two of three runs are admitted, and the third one when the first has ended."""
    driver = admission(discipline, concurrency=2)
    first, second, third = (driver.run_of() for _ in range(3))

    assert driver.ask(first, second, third) == [Admit(first.id), Admit(second.id)]
    assert driver.end(first) == [Admit(third.id)]
    assert driver.end(second) == driver.end(third) == []


def test_two_are_admitted_unless_the_settings_say_otherwise() -> None:
    """By default, two runs are in progress, so that one can compute while the other one waits for a call."""
    driver = Driver()
    driver.ask(*(driver.run_of() for _ in range(5)))

    assert len(driver.under_way) == 2


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_runs_begin_by_priority_and_arrival(discipline: str) -> None:
    """Runs are admitted in the order of the priorities 1, 4, none and 9, and then of arrival, whatever their meta models are."""
    driver = admission(discipline)
    driver.ask(driver.run_of())
    runs = [driver.run_of(f"m{p}", priority=p, deadline=100.0 - n) for n, p in enumerate((9, 0, 4, 1, 0))]
    driver.ask(*runs[:2])
    driver.ask(*runs[2:])

    assert order(driver) == [runs[n].id for n in (3, 2, 1, 4, 0)]


def test_edf_lets_the_soonest_deadline_in() -> None:
    """Under `edf`, runs of equal priority are admitted in the order of their deadlines.

    Runs without one are last, by arrival.
    """
    driver = admission("edf")
    driver.ask(driver.run_of())
    never, late, soon, also, urgent = (
        driver.run_of(deadline=deadline, priority=priority)
        for deadline, priority in ((None, 0), (9.0, 0), (5.0, 0), (None, 0), (99.0, 1))
    )
    driver.ask(never, late, soon)
    driver.ask(also, urgent)

    assert order(driver) == [run.id for run in (urgent, soon, late, never, also)]


def test_runs_that_ask_together_begin_in_the_order_of_the_discipline() -> None:
    """If two runs arrive in one event and there is one place, the run with the earlier deadline is admitted."""
    driver = admission("edf")
    late, soon = driver.run_of(deadline=9.0), driver.run_of(deadline=5.0)
    driver.ask(late, soon)

    assert list(driver.under_way) == [soon.id]


def test_a_change_of_discipline_changes_who_is_next() -> None:
    """Runs arrive under `fifo`. After a change to `edf`, they are admitted by deadline.

    After a change back to `fifo`, the remaining runs are admitted by arrival.
    """
    driver = admission("fifo")
    driver.ask(driver.run_of())
    late, soon, later = (driver.run_of(deadline=deadline) for deadline in (8.0, 5.0, 9.0))
    driver.ask(late, soon, later)
    change(driver, discipline="edf")
    driver.end(next(iter(driver.under_way.values())))

    assert list(driver.under_way) == [soon.id]
    change(driver, discipline="fifo")
    assert order(driver) == [late.id, later.id]


@every_discipline
def test_runs_do_not_hold_each_other_up_for_ever(discipline: str) -> None:
    """However many runs with earlier deadlines arrive, a waiting run is admitted, or ends at its deadline."""
    driver = admission(discipline)
    driver.ask(driver.run_of())
    patient = driver.run_of(deadline=50.0)
    driver.ask(patient)
    for n in range(100):
        driver.ask(driver.run_of(deadline=n + 1.5))
        driver.now = float(n)
        driver.end(min(driver.under_way.values(), key=lambda run: run.id))

    assert patient.id in driver.left_waiting


# --- runs that call a model which is held --------------------------------------------------------------------


@every_discipline
def test_runs_that_call_a_held_model_leave_the_gate_to_others(discipline: str) -> None:
    """If a waiting run calls a held model, runs of another meta model are admitted before it.

    When the held model continues, the waiting run is next.
    """
    driver = admission(discipline)
    driver.add(program("a"), program("b"))
    driver.pause(Pause.HOLD, "a")
    held = driver.run_of("m", models=("a", "b"))
    first, second = (driver.run_of("n", models=("b",)) for _ in range(2))

    assert admitted(driver.ask(held, first, second)) == [first.id]
    assert admitted(driver.end(first)) == [second.id]
    assert driver.pause(None, "a") == []
    assert admitted(driver.end(second)) == [held.id]


def test_runs_under_way_that_call_a_held_model_take_no_place() -> None:
    """While its callee is held, a run in progress takes no place, so another run begins.

    When the callee continues, both end before a further run begins.
    """
    driver = admission()
    driver.add(program("a"))
    stalled, other, late = driver.run_of("m", models=("a",)), driver.run_of("n"), driver.run_of("n")
    driver.ask(stalled, other, late)

    assert admitted(driver.pause(Pause.HOLD, "a")) == [other.id]
    assert driver.pause(None, "a") == []
    assert driver.end(stalled) == []
    assert admitted(driver.end(other)) == [late.id]


def test_a_run_that_ends_while_its_model_is_held_makes_room_for_no_other() -> None:
    """If a run ends while its callee is held, this frees no place, because the run took none."""
    driver = admission()
    driver.add(program("a"))
    stalled, other, late = driver.run_of("m", models=("a",)), driver.run_of("n"), driver.run_of("n")
    driver.ask(stalled, other, late)
    driver.pause(Pause.HOLD, "a")

    assert driver.end(stalled) == []
    assert admitted(driver.end(other)) == [late.id]


def test_a_held_model_that_is_removed_delays_no_run() -> None:
    """If a held model is removed, waiting runs that call it are admitted. Their code must handle the missing model."""
    driver = admission()
    driver.add(program("a"))
    driver.pause(Pause.HOLD, "a")
    run = driver.run_of(models=("a",))
    assert driver.ask(run) == []

    assert admitted(driver.remove("a")) == [run.id]


# --- more and fewer places ---------------------------------------------------------------------------------


def test_more_places_are_taken_at_once() -> None:
    """If the number of places rises from one to three, two waiting runs begin at once."""
    driver = admission()
    runs = [driver.run_of() for _ in range(4)]
    driver.ask(*runs)

    assert admitted(change(driver, meta_concurrency=3)) == [runs[1].id, runs[2].id]


def test_fewer_places_let_those_that_run_finish() -> None:
    """If the number of places falls from three to one, the three runs in progress end before another one begins."""
    driver = admission(concurrency=3)
    runs = [driver.run_of() for _ in range(5)]
    driver.ask(*runs)
    change(driver, meta_concurrency=1)

    assert [admitted(driver.end(run)) for run in runs] == [[], [], [runs[3].id], [runs[4].id], []]


def test_places_that_went_and_came_back_are_used() -> None:
    """The number of places falls from three to one, one of three runs ends, and the number rises to two.

    Two runs are still in progress, so a further run begins only when another one ends.
    """
    driver = admission(concurrency=3)
    runs = [driver.run_of() for _ in range(5)]
    driver.ask(*runs)
    change(driver, meta_concurrency=1)
    driver.end(runs[0])

    assert change(driver, meta_concurrency=2) == []
    assert admitted(driver.end(runs[1])) == [runs[3].id]


def test_a_limit_below_one_is_refused() -> None:
    """A number of places below one is refused, because no run could begin."""
    with pytest.raises(ValueError, match="meta_concurrency must be at least 1, not 0"):
        SchedulerSettings(meta_concurrency=0)


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", [-1.0, 0.0, nan])
def test_a_run_that_comes_too_late_does_not_begin(deadline: float) -> None:
    """A run whose deadline is now, in the past, or NaN expires at once, even if there is a place."""
    driver = admission()
    late = Run(1, "m", deadline)

    assert driver.scheduler.handle(RunsAsked((late,)), 0.0) == [Finish(1, Outcome.EXPIRED)]
    invariants.check(driver.scheduler)


def test_a_run_waits_until_its_deadline() -> None:
    """A waiting run expires at its deadline, for which the scheduler asks for a tick.

    The next waiting run takes its turn.
    """
    driver = admission("fifo")
    driver.ask(first := driver.run_of())
    soon, later = driver.run_of(deadline=2.0), driver.run_of(deadline=3.0)
    driver.ask(soon, later)

    assert driver.scheduler.next_wakeup() == 2.0
    assert driver.tick(2.0) == [Finish(soon.id, Outcome.EXPIRED)]
    assert driver.scheduler.next_wakeup() == 3.0
    assert driver.end(first) == [Admit(later.id)]
    assert driver.scheduler.next_wakeup() is None


def test_a_place_that_comes_at_the_deadline_comes_too_late() -> None:
    """If a place becomes free exactly at the deadline of the first waiting run, that run expires and the next one begins."""
    driver = admission("fifo")
    driver.ask(first := driver.run_of())
    due, other = driver.run_of(deadline=2.0), driver.run_of()
    driver.ask(due, other)
    driver.now = 2.0

    assert driver.end(first) == [Finish(due.id, Outcome.EXPIRED), Admit(other.id)]


def test_a_run_under_way_has_no_deadline_here() -> None:
    """A run in progress keeps its place until it ends, whatever its deadline is."""
    driver = admission()
    driver.ask(driver.run_of(deadline=1.0), other := driver.run_of())

    assert driver.scheduler.next_wakeup() is None
    assert driver.tick(5.0) == []
    assert list(driver.waiting_runs) == [other.id]


def test_so_many_of_a_meta_may_wait() -> None:
    """If two runs of a meta model may wait, a third one is refused. Runs of another meta model may wait."""
    driver = admission()
    driver.ask(driver.run_of())
    driver.ask(driver.run_of(max_waiting=2), driver.run_of(max_waiting=2))
    third, other = driver.run_of(max_waiting=2), driver.run_of("n", max_waiting=2)

    assert driver.ask(third, other) == [Finish(third.id, Outcome.REFUSED, Reason.QUEUE_FULL)]


def test_those_that_begin_at_once_do_not_wait() -> None:
    """Runs that begin at once do not count as waiting.

    With two places and a limit of one waiting run, the last of four runs is refused.
    """
    driver = admission(concurrency=2)
    runs = [driver.run_of(max_waiting=1) for _ in range(4)]

    assert driver.ask(*runs) == [
        Admit(runs[0].id),
        Admit(runs[1].id),
        Finish(runs[3].id, Outcome.REFUSED, Reason.QUEUE_FULL),
    ]


def test_an_expired_run_frees_its_place_in_line() -> None:
    """Only one run may wait. If the waiting run has expired when another run arrives, the other run is not refused."""
    driver = admission()
    driver.ask(driver.run_of())
    driver.ask(due := driver.run_of(deadline=1.0, max_waiting=1))
    driver.now = 1.0

    assert driver.ask(driver.run_of(max_waiting=1)) == [Finish(due.id, Outcome.EXPIRED)]


def test_a_run_that_waits_can_be_withdrawn() -> None:
    """A waiting run can be withdrawn: it gets no answer, never begins, and causes no tick at its deadline."""
    driver = admission()
    driver.ask(first := driver.run_of())
    driver.ask(gone := driver.run_of(deadline=1.0), other := driver.run_of())

    assert driver.end(gone) == []
    assert driver.scheduler.next_wakeup() is None
    assert driver.end(first) == [Admit(other.id)]


def test_the_end_of_an_unknown_run_is_ignored() -> None:
    """The end of a run that has ended, or that never existed, frees no place."""
    driver = admission()
    driver.ask(first := driver.run_of(), second := driver.run_of(max_waiting=5))
    driver.end(first)

    assert driver.end(first) == driver.end(driver.run_of()) == []
    assert list(driver.under_way) == [second.id]


# --- runs and requests -------------------------------------------------------------------------------------


def test_the_end_of_a_run_leaves_its_requests_alone() -> None:
    """After the end of a run, its requests still execute, even requests that arrive later.

    They execute in the order of arrival, and before an urgent request of a client.
    """
    driver = admission()
    driver.add(program("a", {(0, 1): 0.001}))
    driver.arrive(driver.request())
    driver.ask(run := driver.run_of())
    urgent = driver.request(priority=1)
    first, second = driver.request(run=run.id), driver.request(run=run.id)
    driver.arrive(urgent, first, second)
    driver.end(run)
    driver.finish()
    driver.arrive(third := driver.request(run=run.id))
    started = [execute.requests[0] for execute in driver.finish_all()]

    assert started == [first.id, second.id, third.id, urgent.id]


def test_a_run_is_no_request() -> None:
    """A cancellation of a request with the id of a run does nothing."""
    driver = admission()
    driver.ask(driver.run_of(), waits := driver.run_of())
    driver.send(RequestsCancelled((waits.id,)))

    assert list(driver.waiting_runs) == [waits.id]


def test_runs_and_requests_share_their_ids() -> None:
    """An id that a run or a request uses is refused for another run or request. So is an id that occurs twice in one event.

    The refused event changes nothing.
    """
    driver = admission()
    driver.add(program("a"))
    driver.arrive(request := driver.request(deadline=10.0))
    running, waiting = driver.run_of(), driver.run_of()
    driver.ask(running, waiting)
    before = driver.scheduler.snapshot()
    handle = driver.scheduler.handle

    for run in (running, waiting):
        with pytest.raises(CallerError, match=rf"ids that are in use already.*\[{run.id}\]"):
            handle(RequestsArrived((request._replace(id=run.id),)), 0.0)
    for id in (request.id, running.id, waiting.id):
        with pytest.raises(CallerError, match=f"id {id} is in use already"):
            handle(RunsAsked((Run(id, "m"),)), 0.0)
    with pytest.raises(CallerError, match="id 99 is in use already, or twice in one event"):
        handle(RunsAsked((Run(99, "m"), Run(99, "n"))), 0.0)
    assert driver.scheduler.snapshot() == before


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (Run(0, "m"), "0 is not an id of a run"),
        (Run(1, "m", priority=-1), "run 1 has priority -1; 1 is the highest"),
        (Run(1, "m", max_waiting=-1), "run 1 has max_waiting -1"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(run: Run, problem: str) -> None:
    """An impossible run is refused with an error about the wrong value."""
    with pytest.raises(CallerError, match=problem):
        admission().scheduler.handle(RunsAsked((run,)), 0.0)


def test_what_became_of_runs_is_counted() -> None:
    """The outcomes of runs are counted by meta model, from the beginning on."""
    driver = admission(concurrency=2)
    driver.ask(ending := driver.run_of(), driver.run_of(), driver.run_of("n"))
    driver.ask(driver.run_of(deadline=1.0), gone := driver.run_of())
    driver.ask(driver.run_of(max_waiting=2))
    driver.end(gone)
    driver.tick(1.0)
    driver.ask(driver.run_of(), driver.run_of())
    driver.end(ending)

    assert driver.scheduler.snapshot().metas == {
        "m": MetaSnapshot(waiting=2, running=1, admitted=2, expired=1, refused=1, withdrawn=1),
        "n": MetaSnapshot(waiting=0, running=1, admitted=1, expired=0, refused=0, withdrawn=0),
    }


def test_a_place_is_expected_after_the_runs_that_are_ahead() -> None:
    """The expected wait for a place is the time of all waiting runs plus half the time of the runs in progress.

    This sum is divided by the number of places.
    """
    driver = admission(concurrency=2)
    assert driver.scheduler.admission_seconds() == 0.0
    slow, fast = driver.run_of("slow"), driver.run_of("fast")
    driver.ask(slow, fast)
    driver.tick(1.0)
    driver.end(fast)
    driver.tick(8.0)
    driver.end(slow)

    runs = [driver.run_of(meta) for meta in ("slow", "fast", "slow", "slow", "fast")]
    driver.ask(runs[0])
    assert driver.scheduler.admission_seconds() == 0.0
    driver.ask(*runs[1:])
    assert driver.scheduler.admission_seconds() == (8.0 / 2 + 1.0 / 2 + 8.0 + 8.0 + 1.0) / 2
    for run in runs[:4]:
        driver.end(run)
    assert driver.scheduler.admission_seconds() == 0.0

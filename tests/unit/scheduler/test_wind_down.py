"""A scheduler that comes to rest for the next runtime: what ends before, what waits, and what goes on if it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rsrv.scheduler.events import Admit, Finish, Outcome, Pause, Prefetch, RunsAsked, WoundDown
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, executions, ids, program

SINGLE = {(0, 1): 0.010}
AT_REST = WoundDown(runs=0, executions=0)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(SchedulerSettings(depth=2, meta_concurrency=1))
    driver.add(program("a", SINGLE))
    return driver


def test_an_idle_device_is_at_rest_at_once(driver: Driver) -> None:
    """The answer comes with the command, once; no later event repeats it."""
    assert driver.wind_down(30) == [AT_REST]
    assert driver.arrive(driver.request()) == []


def test_what_executes_ends_and_what_is_queued_waits(driver: Driver) -> None:
    """The execution in flight is answered, nothing else starts, and no wake-up is due but for the bound of the wait."""
    first, second = driver.request(), driver.request()
    driver.arrive(first)
    driver.wind_down(30)
    assert driver.arrive(second) == []
    assert driver.scheduler.next_wakeup() == driver.now + 30

    out = driver.finish()

    assert out == [Finish(first.id, Outcome.ANSWERED), AT_REST]
    assert driver.waiting.keys() == {second.id}
    assert driver.scheduler.next_wakeup() is None


def test_runs_in_progress_end_first(driver: Driver) -> None:
    """A run's calls and other requests execute until the run has ended; a run that came later is not admitted."""
    run, later = driver.run_of(), driver.run_of()
    driver.ask(run)
    driver.wind_down(30)
    assert driver.send(RunsAsked((later,))) == []
    call = driver.request(run=run.id)
    assert [one.requests for one in executions(driver.arrive(call))] == [ids([call])]
    plain = driver.request()
    assert executions(driver.finish()) == []
    assert [one.requests for one in executions(driver.arrive(plain))] == [ids([plain])]

    assert driver.end(run) == []
    assert driver.finish()[-1] == AT_REST
    assert driver.waiting_runs.keys() == {later.id}


def test_generations_in_progress_end_first(driver: Driver) -> None:
    """The next step of each comes before the end of the one before; the device rests when none comes any more."""
    driver.add(replace(program("steps", SINGLE), feeds_back=True))
    driver.arrive(driver.request("steps"))
    driver.wind_down(30)
    driver.arrive(driver.request("steps", accepted=True))
    assert len(executions(driver.finish())) == 1
    assert driver.finish()[-1] == AT_REST


def test_a_held_generation_is_counted_when_the_time_is_over(driver: Driver) -> None:
    """Nothing executes, and yet the device is not at rest: an operator holds the model."""
    driver.add(replace(program("steps", SINGLE), feeds_back=True))
    driver.pause(Pause.HOLD, "steps")
    driver.arrive(driver.request("steps"))
    assert driver.wind_down(0.005) == []
    assert driver.tick(driver.now + 0.005) == [WoundDown(0, 0, steps=1)]


def test_an_execution_that_waits_for_its_second_try_is_in_progress(driver: Driver) -> None:
    """It found no memory while other weights load: the device rests when its retry has ended, not before."""
    driver.add(program("b"), resident=False)
    driver.send(Prefetch("b"))
    request = driver.request()
    driver.arrive(request)
    driver.wind_down(30)
    assert driver.finish(out_of_memory=True) == []

    (again,) = executions(driver.load("b"))

    assert again.again
    assert driver.finish() == [Finish(request.id, Outcome.ANSWERED), AT_REST]


def test_a_second_try_that_waits_is_counted_when_the_time_is_over(driver: Driver) -> None:
    """The load before it takes too long."""
    driver.add(program("b"), resident=False)
    driver.send(Prefetch("b"))
    driver.arrive(driver.request())
    driver.wind_down(0.015)
    assert driver.finish(out_of_memory=True) == []

    assert driver.tick(driver.now + 0.005) == [WoundDown(runs=0, executions=1)]


def test_all_goes_on_if_it_takes_too_long(driver: Driver) -> None:
    """When the time is over, the answer counts what has not ended; queued requests execute, and waiting runs begin."""
    run, later = driver.run_of(), driver.run_of()
    driver.ask(run)
    driver.arrive(driver.request())
    driver.wind_down(0.005)
    driver.ask(later)

    out = driver.tick(driver.now + 0.005)

    assert out == [WoundDown(runs=1, executions=1)]
    assert driver.end(run) == [Admit(later.id)]
    assert len(executions(driver.arrive(driver.request()))) == 0
    assert len(executions(driver.finish())) == 1


def test_a_waiting_run_begins_when_the_time_is_over(driver: Driver) -> None:
    """A run that finds a free slot does not wait for the next event."""
    later = driver.run_of()
    driver.arrive(driver.request())
    driver.wind_down(0.005)
    assert driver.ask(later) == []

    assert driver.tick(driver.now + 0.005) == [WoundDown(runs=0, executions=1), Admit(later.id)]


def test_a_withdrawn_command_leaves_no_trace(driver: Driver) -> None:
    """Queued requests execute at once, also if the device had come to rest."""
    assert driver.wind_down(30) == [AT_REST]
    waiting = driver.request()
    driver.arrive(waiting)

    assert [one.requests for one in executions(driver.wind_down(None))] == [ids([waiting])]


def test_deadlines_hold_meanwhile(driver: Driver) -> None:
    """A queued request whose deadline passes ends as usual."""
    driver.arrive(driver.request())
    driver.wind_down(30)
    late = driver.request(deadline=driver.now + 0.001)
    driver.arrive(late)

    assert driver.tick(driver.now + 0.001) == [Finish(late.id, Outcome.EXPIRED)]

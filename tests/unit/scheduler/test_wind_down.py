"""A scheduler winds down before the next runtime takes over: which work ends first, which work waits, and the time limit."""

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
    """If the device is idle, the scheduler reports at once that it is at rest. It reports this only once."""
    assert driver.wind_down(30) == [AT_REST]
    assert driver.arrive(driver.request()) == []


def test_what_executes_ends_and_what_is_queued_waits(driver: Driver) -> None:
    """The execution in flight is answered, and no other one starts. The only wake-up is at the limit of the wait."""
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
    """Until a run in progress has ended, its calls and other requests execute. A later run is not admitted."""
    run, later = driver.run_of(), driver.run_of()
    driver.ask(run)
    driver.wind_down(30)
    assert driver.send(RunsAsked((later,))) == []
    call = driver.request(run=run.id)
    assert [execution.requests for execution in executions(driver.arrive(call))] == [ids([call])]
    plain = driver.request()
    assert executions(driver.finish()) == []
    assert [execution.requests for execution in executions(driver.arrive(plain))] == [ids([plain])]

    assert driver.end(run) == []
    assert driver.finish()[-1] == AT_REST
    assert driver.waiting_runs.keys() == {later.id}


def test_generations_in_progress_end_first(driver: Driver) -> None:
    """A generation in progress executes its next steps. The device is at rest after the last one."""
    driver.add(replace(program("steps", SINGLE), feeds_back=True))
    driver.arrive(driver.request("steps"))
    driver.wind_down(30)
    driver.arrive(driver.request("steps", accepted=True))
    assert len(executions(driver.finish())) == 1
    assert driver.finish()[-1] == AT_REST


def test_a_held_generation_is_counted_when_the_time_is_over(driver: Driver) -> None:
    """A generation of a held model is still in progress at the time limit, so the device is not at rest."""
    driver.add(replace(program("steps", SINGLE), feeds_back=True))
    driver.pause(Pause.HOLD, "steps")
    driver.arrive(driver.request("steps"))
    assert driver.wind_down(0.005) == []
    assert driver.tick(driver.now + 0.005) == [WoundDown(0, 0, steps=1)]


def test_an_execution_that_waits_for_its_second_try_is_in_progress(driver: Driver) -> None:
    """If an execution finds no memory, the device is at rest only after its retry, which waits for a load."""
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
    """If a retry still waits for a load when the time is over, its execution is counted as in progress."""
    driver.add(program("b"), resident=False)
    driver.send(Prefetch("b"))
    driver.arrive(driver.request())
    driver.wind_down(0.015)
    assert driver.finish(out_of_memory=True) == []

    assert driver.tick(driver.now + 0.005) == [WoundDown(runs=0, executions=1)]


def test_all_goes_on_if_it_takes_too_long(driver: Driver) -> None:
    """At the time limit, the scheduler reports the numbers of runs and executions that have not ended.

    Then it continues: queued requests execute, and waiting runs begin.
    """
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
    """When the time limit has passed, a waiting run begins at once if fewer runs than allowed are in progress."""
    later = driver.run_of()
    driver.arrive(driver.request())
    driver.wind_down(0.005)
    assert driver.ask(later) == []

    assert driver.tick(driver.now + 0.005) == [WoundDown(runs=0, executions=1), Admit(later.id)]


def test_a_withdrawn_command_leaves_no_trace(driver: Driver) -> None:
    """If the command to wind down is withdrawn, queued requests execute at once, even if the device was already at rest."""
    assert driver.wind_down(30) == [AT_REST]
    waiting = driver.request()
    driver.arrive(waiting)

    assert [execution.requests for execution in executions(driver.wind_down(None))] == [ids([waiting])]


def test_deadlines_hold_meanwhile(driver: Driver) -> None:
    """While the scheduler winds down, a queued request expires at its deadline."""
    driver.arrive(driver.request())
    driver.wind_down(30)
    late = driver.request(deadline=driver.now + 0.001)
    driver.arrive(late)

    assert driver.tick(driver.now + 0.001) == [Finish(late.id, Outcome.EXPIRED)]

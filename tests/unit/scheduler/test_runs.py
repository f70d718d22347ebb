"""Requests of meta models' runs: one request of each run is committed and executes before requests without a run.

When this request has executed or ended, the next request of the run is committed.
"""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import Outcome, Reason, SettingsChanged
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, every_discipline, executions, ids, program


def busy(discipline: str, names: str = "ab") -> Driver:
    """Return a driver with models of one row per execution, and an executing request of `a`."""
    driver = Driver(SchedulerSettings(discipline=discipline))
    driver.add(*(program(name, {(0, 1): 0.001}) for name in names))
    driver.arrive(driver.request("a", deadline=10.0))
    return driver


def order(driver: Driver) -> list[int]:
    """Let all executions end. For each one after the first, return the id of its first request, in order."""
    return [execute.requests[0] for execute in driver.finish_all()[1:]]


@every_discipline
def test_runs_take_turns(discipline: str) -> None:
    """Three runs take turns: the second request of a run waits until each other run has executed its first request."""
    driver = busy(discipline)
    a, b, c = (driver.request("b", run=1, deadline=10.0) for _ in range(3))
    d = driver.request("b", run=2, deadline=10.0)
    driver.arrive(a, b, c, d)

    [first] = executions(driver.finish())
    driver.arrive(e := driver.request("b", run=3, deadline=10.0))

    assert first.requests == ids([a])
    assert tuple(order(driver)) == ids([d, b, e, c])


@every_discipline
def test_only_one_of_a_run_goes_first(discipline: str) -> None:
    """Only the first request of a run is committed. Its second request executes after an urgent request that has no run."""
    driver = Driver(SchedulerSettings(discipline=discipline))
    driver.add(program("a", {(0, 1): 0.001, (0, 2): 0.001}))
    driver.arrive(driver.request(deadline=10.0))
    first, second = (driver.request(run=1, deadline=10.0) for _ in range(2))
    urgent = driver.request(priority=1, deadline=5.0)
    driver.arrive(first, second, urgent)

    [earlier, later] = driver.finish_all()[1:]

    assert earlier.requests == ids([first, urgent])
    assert later.requests == ids([second])


@every_discipline
@pytest.mark.parametrize("how", ["cancelled", "expired", "unloaded", "load failed", "coalesced"])
def test_the_next_of_a_run_takes_the_place_of_one_that_left(discipline: str, how: str) -> None:
    """When a run's first request ends in any way, its second one executes before an urgent request that is older."""
    driver = busy(discipline, "abc")
    driver.add(program("cold"), resident=False)
    model = {"unloaded": "c", "load failed": "cold"}.get(how, "b")
    urgent = driver.request("b", priority=1, deadline=5.0)
    first = driver.request(model, run=1, deadline=0.0005 if how == "expired" else 8.0)
    second = driver.request("b", run=1, deadline=9.0)
    driver.arrive(urgent, first, second)
    outcome: Outcome | Reason | None = None
    match how:
        case "cancelled":
            driver.cancel(first)
            outcome = Outcome.CANCELLED
        case "expired":
            driver.tick(0.0005)
            outcome = Outcome.EXPIRED
        case "unloaded":
            driver.remove("c")
            outcome = Reason.UNLOADED
        case "load failed":
            driver.fail_load("cold")
            outcome = Outcome.FAILED
        case _:
            assert executions(driver.finish())[0].requests == ids([first])

    assert driver.outcome(first) == outcome
    assert executions(driver.finish())[0].requests == ids([second])
    driver.finish_all()
    assert driver.outcome(urgent) is Outcome.ANSWERED


@every_discipline
def test_a_committed_request_pulls_others_along(discipline: str) -> None:
    """The execution of a committed request also takes other requests of its model.

    The run's next request executes after it.
    """
    driver = Driver(SchedulerSettings(discipline=discipline))
    driver.add(program("a", {(0, 1): 0.001, (0, 4): 0.001}), program("b", {(0, 1): 0.001}))
    driver.arrive(driver.request("b", deadline=9.0))
    old = driver.request("a", deadline=7.0)
    waits = driver.request("b", priority=1, deadline=5.0)
    first, second, third = (driver.request(name, run=1, deadline=8.0) for name in "aba")
    driver.arrive(old, waits, first, second, third)

    [execution] = executions(driver.finish())
    [two] = executions(driver.finish())

    assert execution.requests == ids([first, old, third])
    assert two.requests == ids([second])


@every_discipline
def test_one_execution_takes_the_first_of_two_runs(discipline: str) -> None:
    """One execution has the first requests of two runs. After it, the next request of each run is committed.

    If one run's next request is cancelled, the request after it is committed.
    """
    driver = Driver(SchedulerSettings(discipline=discipline))
    driver.add(program("a", {(0, 1): 0.001, (0, 2): 0.001}))
    driver.arrive(driver.request(deadline=9.0))
    requests = [driver.request(run=run, deadline=9.0) for run in (1, 2, 2, 1, 1, 2)]
    driver.arrive(*requests)

    [execution] = executions(driver.finish())
    driver.cancel(requests[2])
    [two] = executions(driver.finish())

    assert execution.requests == ids(requests[:2])
    assert two.requests == ids([requests[3], requests[5]])


def test_the_next_of_a_run_is_of_another_variant() -> None:
    """The next request of a run has another variant. It executes before an urgent request of that variant."""
    driver = Driver()
    costs = {(variant, 1): 0.001 for variant in (0, 1)}
    driver.add(program("a", costs))
    driver.arrive(driver.request())
    urgent = driver.request(variant=1, priority=1)
    first, second = driver.request(run=1), driver.request(run=1, variant=1)
    driver.arrive(urgent, first, second)

    assert tuple(order(driver)) == ids([first, second, urgent])


@every_discipline
def test_runs_keep_their_turns_under_another_discipline(discipline: str) -> None:
    """If the discipline changes, the oldest request of each run still executes first, even if a younger one is due earlier."""
    driver = busy("fifo", "ab")
    urgent = driver.request("b", priority=1, deadline=5.0)
    first = driver.request("b", run=1, deadline=9.0)
    second = driver.request("b", run=1, deadline=8.0)
    driver.arrive(urgent, first, second)
    driver.send(SettingsChanged(SchedulerSettings(discipline=discipline)))

    assert tuple(order(driver)) == ids([first, second, urgent])


def test_no_request_of_a_run_is_shed() -> None:
    """Under `edf`, no request of a run is shed. It executes late, or ends at its deadline."""
    device = Device(SchedulerSettings(discipline="edf"))
    device.model(program("a", {(0, 1): 0.010}))
    own = [device.request(deadline=deadline, run=1) for deadline in (0.005, 0.015, 0.016)]
    stranger = device.request(deadline=0.017)
    device.arrive(*own, stranger)
    device.run(1.0)

    assert [device.outcome(request) for request in own] == [
        Outcome.ANSWERED,
        Outcome.ANSWERED,
        Outcome.EXPIRED,
    ]
    assert device.ended_at[own[2].id] == 0.016
    assert (device.outcome(stranger), device.ended_at[stranger.id]) == (Outcome.SHED, 0.0)


def test_no_request_of_a_run_is_shed_after_a_change_to_edf() -> None:
    """Requests of a run that are late after a change to `edf` are not shed. They end at their deadlines."""
    device = Device(SchedulerSettings(discipline="fifo"))
    device.model(program("a", {(0, 1): 0.010}))
    device.arrive(device.request())
    device.arrive(*(own := [device.request(deadline=0.009, run=1) for _ in range(2)]))
    device.send(SettingsChanged(SchedulerSettings(discipline="edf")))
    device.run(1.0)

    assert [(device.outcome(request), device.ended_at[request.id]) for request in own] == [
        (Outcome.EXPIRED, 0.009)
    ] * 2


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_the_link_is_used_at_once_for_a_request_that_is_committed_now(discipline: str) -> None:
    """When the second sub-call of a run becomes committed, its model is loaded at once. This may evict a model with requests."""
    driver = Driver(SchedulerSettings(discipline=discipline, weight_budget_bytes=200))
    driver.add(program("a"), program("b"))
    driver.add(program("c"), resident=False)
    driver.arrive(driver.request("b"))
    driver.arrive(driver.request("b"), first := driver.request("a", run=1))
    driver.arrive(driver.request("c", run=1))
    driver.finish()

    assert [execution.requests for execution in driver.executing.values()] == [ids([first])]
    assert driver.loading.keys() == {"c"}
    assert driver.resident == {"a"}

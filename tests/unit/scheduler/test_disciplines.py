"""Order of models by arrival and by deadline; test_fair has fair shares."""

from __future__ import annotations

from typing import get_args

from rsrv.scheduler.disciplines import DISCIPLINES
from rsrv.scheduler.events import DEFAULT_PRIORITY
from rsrv.scheduler.settings import DisciplineName, SchedulerSettings
from tests.unit.scheduler.driver import Driver, every_discipline, executions, program


def machine(discipline: str) -> Driver:
    driver = Driver(SchedulerSettings(discipline=discipline))
    one_by_one = {(0, 1): 0.010}
    driver.add(*(program(name, one_by_one) for name in ("busy", "a", "b", "c")))
    driver.arrive(driver.request("busy"))
    return driver


def order(driver: Driver) -> str:
    """Return the models of all executions after the first one, in order."""
    return "".join(execute.model for execute in driver.finish_all()[1:])


def test_the_settings_have_the_name_of_each_discipline() -> None:
    """The names of the disciplines in the settings are those of the scheduler."""
    assert sorted(get_args(DisciplineName)) == sorted(DISCIPLINES)


def test_fifo_goes_by_arrival() -> None:
    """Under fifo, the model with the oldest request executes."""
    driver = machine("fifo")
    for name in "bcab":
        driver.arrive(driver.request(name))

    assert order(driver) == "bcab"


def test_edf_goes_by_deadline() -> None:
    """Under edf, the model with the earliest deadline executes.

    Requests without a deadline are last, in the order of arrival.
    """
    driver = machine("edf")
    driver.arrive(driver.request("a"), driver.request("b", deadline=0.5), driver.request("c", deadline=0.2))
    driver.arrive(driver.request("b"), driver.request("a", deadline=0.3))

    assert order(driver) == "cabab"


def test_edf_orders_by_the_time_at_which_a_request_is_due() -> None:
    """Under edf, a request's `due` is used in place of its deadline, before and after a change of discipline.

    A request that is overdue still executes.
    """
    driver = machine("fifo")
    for discipline in ("fifo", "edf"):
        driver.change(discipline=discipline)
        driver.arrive(driver.request("c", deadline=0.5), driver.request("b", deadline=9.0, due=-1.0))
        driver.arrive(driver.request("a", due=0.7), driver.request("a"))

    assert order(driver) == "bbccaaaa"


@every_discipline
def test_committed_requests_go_first(discipline: str) -> None:
    """Under each discipline, a sub-call of a run in progress is executed before all other requests."""
    driver = machine(discipline)
    driver.arrive(
        driver.request("a", deadline=0.1, priority=1),
        driver.request("b", deadline=0.1),
        driver.request("c", run=1),
    )

    assert order(driver)[0] == "c"


@every_discipline
def test_priorities_go_in_order(discipline: str) -> None:
    """Requests execute in the order of the priorities 1, 4, none and 9.

    Under `fair`, this holds within a model and between models that were not served yet.
    """
    driver = machine(discipline)
    priorities = (9, 0, 4, 1)
    for name in "abc":
        driver.arrive(*(driver.request(name, priority=p) for p in priorities))
    levels = [
        driver.requests[request].priority or DEFAULT_PRIORITY
        for execute in driver.finish_all()[1:]
        for request in execute.requests
    ]

    if discipline == "fair":
        assert levels[:3] == [1, 1, 1]
    else:
        assert levels == [1, 1, 1, 4, 4, 4, 5, 5, 5, 9, 9, 9]


def test_disciplines_change_while_requests_wait() -> None:
    """After a change of discipline, waiting requests are served in the new order, and none is lost."""
    from rsrv.scheduler.events import SettingsChanged

    driver = machine("fifo")
    for deadline, name in ((0.9, "a"), (0.8, "b"), (0.7, "c"), (0.6, "a")):
        driver.arrive(driver.request(name, deadline=deadline))
    driver.send(SettingsChanged(SchedulerSettings(discipline="edf")))
    driver.finish()
    driver.finish()
    driver.send(SettingsChanged(SchedulerSettings(discipline="fair")))
    driver.send(SettingsChanged(SchedulerSettings(discipline="fifo")))
    driver.finish_all()

    started = [e.model for out in driver.instructions for e in executions(out)]
    assert started == ["busy", "a", "c", "a", "b"]
    assert [e.requests for out in driver.instructions for e in executions(out)][1] == (5,)

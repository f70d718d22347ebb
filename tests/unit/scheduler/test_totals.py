"""Totals of a model: missed deadlines by the stage of the request, evictions by cause, and waiting times."""

from dataclasses import replace

import pytest

from rsrv.scheduler.events import Compact, ModelRemoved, Outcome
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.statistics import Cause, Stage, Totals
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, program

ONE = {(0, 1): 0.010}


def budgeted(budget: int, discipline: str = "fifo") -> Device:
    return Device(SchedulerSettings(discipline=discipline, weight_budget_bytes=budget))


def totals(device: Driver, name: str = "a") -> Totals:
    return device.scheduler.totals()[name]


def test_a_wait_is_from_arrival_to_execution() -> None:
    """The waiting time of a request is from its arrival to its execution."""
    device = Device()
    device.model(program("a", ONE))
    device.arrive(*(device.request() for _ in range(3)))
    device.run(1.0)

    model_totals = totals(device)
    assert model_totals.queue_wait.sum == pytest.approx(0.010 + 0.020)
    assert model_totals.execute.sum == model_totals.device_seconds == pytest.approx(0.030)
    assert (sum(model_totals.rows.counts), model_totals.rows.sum, model_totals.padding.sum) == (3, 3.0, 0)


def test_a_missed_deadline_is_counted_where_the_request_was() -> None:
    """A missed deadline is counted by the stage of its request: arrival, queue, load or execution."""
    device = Device(SchedulerSettings(discipline="fifo"))
    device.model(program("a", {(0, 1): 0.100}))
    device.model(program("b", ONE), load=1.0, resident=False)
    device.arrive(
        device.request("a", deadline=0.0),
        device.request("a", deadline=0.05),
        device.request("a", deadline=0.05),
        device.request("b", deadline=0.5),
    )
    device.run(2.0)

    assert totals(device, "a").missed == {Stage.ARRIVAL: 1, Stage.QUEUE: 1, Stage.EXECUTE: 1}
    assert totals(device, "a").counts.answered == 1
    assert totals(device, "b").missed == {Stage.LOAD: 1}


def test_what_is_shed_has_missed_its_deadline_where_it_was() -> None:
    """Under `edf`, a shed request counts as a missed deadline, in the stage `load` or `queue` in which it was shed."""
    device = Device(SchedulerSettings(discipline="edf"))
    device.model(program("a", ONE), load=1.0, resident=False)
    device.model(program("b", {(0, 1): 0.1}))
    device.arrive(device.request("a", deadline=0.9), device.request("b"))
    device.arrive(device.request("b", deadline=0.15))
    device.run(2.0)

    assert totals(device, "a").missed == {Stage.LOAD: 1}
    assert totals(device, "b").missed == {Stage.QUEUE: 1}


def test_weights_that_leave_say_why() -> None:
    """Evictions are counted by their causes: room, command, budget and compaction."""
    device = budgeted(200)
    for name in "abc":
        device.model(program(name, ONE, weight_bytes=100), load=0.1, resident=name != "c")
    device.arrive(device.request("c"))
    device.run(1.0)
    assert totals(device, "a").evictions == {Cause.ROOM: 1}
    assert sum(totals(device, "c").load.counts) == 1

    device.evict("c")
    assert totals(device, "c").evictions == {Cause.ASKED: 1}

    device.send(Compact())
    device.run(2.0)
    assert totals(device, "b").evictions == {Cause.COMPACTION: 1}

    device.change(weight_budget_bytes=0)
    device.run(3.0)
    assert (
        sum(
            model_totals.evictions.get(Cause.BUDGET, 0) for model_totals in device.scheduler.totals().values()
        )
        <= 1
    )


def test_versions_of_one_model_count_together() -> None:
    """Versions of a model are counted together, until all of them are gone."""
    device = Driver()
    for key in ("m@1", "m@2"):
        device.add(replace(program(key), name="m"))
        request = device.request(key)
        device.arrive(request)
        device.finish_all()
        assert device.outcome(request) is Outcome.ANSWERED
    assert totals(device, "m").counts.answered == 2

    device.send(ModelRemoved("m@1"))
    assert totals(device, "m").counts.answered == 2
    device.send(ModelRemoved("m@2"))
    assert device.scheduler.totals() == {}
    device.add(replace(program("m@1"), name="m"))
    assert totals(device, "m").counts.answered == 0

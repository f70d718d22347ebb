"""Why weights are not on the device: the text that says what their load waits for."""

from __future__ import annotations

from rsrv.scheduler.events import Compact, Pinned, Prefetch
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, program

MB = 1_000_000


def machine_of(budget_mb: int, **sizes_mb: int) -> Driver:
    """Return a driver with absent models of these sizes in MB."""
    machine = Driver(SchedulerSettings(discipline="fifo", weight_budget_bytes=budget_mb * MB))
    for name, size in sizes_mb.items():
        machine.add(program(name, weight_bytes=size * MB), resident=False)
    return machine


def obstacle(machine: Driver, model: str) -> str:
    return machine.scheduler.obstacle(model, machine.now)


def test_a_load_that_finds_no_room_tells_who_holds_it() -> None:
    """The first load in line waits for room. The text has the missing bytes, the executing models and the pinned bytes."""
    machine = machine_of(35, dogs=25, fixed=10, cats=25)
    machine.send(Pinned("fixed", True))
    machine.load("fixed")
    machine.arrive(machine.request("dogs"))
    machine.load("dogs")
    machine.arrive(machine.request("cats"))

    expected = "queued (demand): waits for 25 MB: in use by dogs, pinned 10 MB"
    assert obstacle(machine, "cats") == expected
    assert obstacle(machine, "dogs") == ""
    machine.finish()
    assert obstacle(machine, "cats") == ""


def test_a_load_behind_others_names_them() -> None:
    """A load waits for the load in progress, and then for the first load in line.

    In both cases, the text names the model that is waited for.
    """
    machine = machine_of(25, dogs=25, cats=25, owls=25)
    for name in ("dogs", "cats", "owls"):
        machine.arrive(machine.request(name))

    assert obstacle(machine, "owls") == "queued (demand): waits for the load of dogs"
    machine.load("dogs")
    assert obstacle(machine, "owls") == (
        "queued (demand): waits for the load of cats, which is first in line"
    )


def test_a_prefetch_waits_for_weights_that_requests_need() -> None:
    """A prefetch waits for weights that requests need, and the text names their model.

    For a failed load of pinned weights, the text has the time until the retry.
    """
    machine = machine_of(25, dogs=25, cats=25)
    machine.arrive(machine.request("dogs"))
    machine.load("dogs", seconds=1.0)
    machine.arrive(machine.request("dogs"))
    machine.send(Prefetch("cats"))

    assert obstacle(machine, "cats") == "queued (prefetch): waits for 25 MB: in use by dogs"
    machine.finish_all()
    expected = "queued (prefetch): waits for 25 MB: kept for requests of dogs"
    assert obstacle(machine, "cats") == expected
    machine.tick(machine.now + 5.0)
    machine.send(Pinned("cats", True))
    machine.fail_load("cats")
    assert obstacle(machine, "cats") == "backoff: the load is retried in 1 s"


def test_weights_that_found_no_memory_twice_are_not_loaded_for_a_while() -> None:
    """After two loads without memory, there is no load for a while.

    After this time, there is no obstacle, but a request must cause the load.
    """
    machine = machine_of(25, dogs=25)
    machine.arrive(machine.request("dogs"))
    for _ in range(2):
        machine.fail_load("dogs", out_of_memory=True)

    assert obstacle(machine, "dogs") == "backoff: no load for 1 s"
    machine.tick(machine.now + 1.0)
    assert obstacle(machine, "dogs") == ""


def test_a_load_waits_for_a_compaction() -> None:
    """A load waits for a compaction, which waits for the executing model. The compaction frees the memory of that model."""
    machine = machine_of(25, dogs=25, cats=25)
    machine.arrive(machine.request("dogs"))
    machine.load("dogs")
    machine.send(Compact())
    machine.arrive(machine.request("cats"))
    assert obstacle(machine, "cats") == "queued (demand): waits for a compaction of the device's memory"

    machine.finish()
    assert obstacle(machine, "cats") == ""


def test_a_load_waits_for_a_request_that_executes_alone() -> None:
    """A load waits for a request that executes alone, although there is room."""
    machine = machine_of(50, dogs=25, cats=25)
    machine.arrive(machine.request("dogs", exclusive=True))
    machine.load("dogs")
    machine.arrive(machine.request("cats"))
    assert obstacle(machine, "cats") == "queued (demand): waits for a request that executes alone"

    machine.finish()
    assert obstacle(machine, "cats") == ""


def test_restored_weights_wait_for_a_second_try() -> None:
    """Weights that a compaction evicted wait for the retry of an execution before they are loaded again.

    If they do not fit, the text names no obstacle, because they use only free memory and do not wait for it.
    """
    machine = machine_of(40, owls=10, dogs=15, cats=15)
    machine.send(Pinned("owls", True))
    machine.load("owls")
    for name in ("cats", "dogs"):
        machine.arrive(machine.request(name))
        machine.load(name)
    machine.finish()
    machine.send(Compact())
    machine.finish(out_of_memory=True)
    assert obstacle(machine, "cats") == "queued (restore): waits for the retry of dogs"

    machine.change(weight_budget_bytes=30 * MB)
    machine.finish()
    assert obstacle(machine, "cats") == ""
    assert not machine.loading


def test_the_history_has_the_reasons_of_loads_and_evictions() -> None:
    """The history has each change of the weights' state with its reason.

    For an eviction, it names the model that got the room.
    """
    machine = machine_of(25, dogs=25, cats=25)
    machine.send(Prefetch("dogs"))
    machine.load("dogs")
    machine.arrive(machine.request("cats"))
    machine.load("cats")

    history = machine.scheduler.history("dogs")
    assert [(what, details["why"]) for _, what, details in history if what.startswith("weights")] == [
        ("weights queued", "prefetch"),
        ("weights loading", "prefetch"),
        ("weights resident", "loaded"),
        ("weights absent", "room"),
    ]
    assert (history[-1].details["model"], history[-1].details["bytes"]) == ("cats", 25 * MB)

"""Models are added and removed: their weights, and their executions in flight."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import (
    AbandonLoad,
    CallerError,
    EvictWeights,
    Finish,
    LoadFailed,
    LoadWeights,
    ModelAdded,
    Outcome,
    Reason,
    WeightsLoaded,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, executions, program

# --- weights ----------------------------------------------------------------------------------------------


def test_weights_are_loaded_on_demand_one_after_another(machine: Driver) -> None:
    """No weights are loaded before the first request.

    Then one model is loaded after another, in the order of the discipline.
    """
    for name in "abc":
        machine.add(program(name), resident=False)

    assert machine.instructions == [[], [], []]
    assert machine.arrive(machine.request("b"), machine.request("a")) == [LoadWeights("b", 1)]
    assert LoadWeights("a", 2) in machine.load("b")


def test_model_that_loads_does_not_block_the_device(machine: Driver) -> None:
    """While the oldest request waits for its weights, a later one of a resident model executes."""
    machine.add(program("cold"), resident=False)
    machine.add(program("warm"))
    cold, warm = machine.request("cold"), machine.request("warm")
    machine.arrive(cold)

    assert executions(machine.arrive(warm))[0].model == "warm"

    machine.load("cold")
    assert executions(machine.finish())[0].requests == (cold.id,)


def test_requests_after_a_failed_load_get_its_error_until_the_back_off_ends(machine: Driver) -> None:
    """After a failed load, requests get its error until the back-off ends. The first request after that causes a load.

    Each back-off is twice as long as the one before, up to a minute.
    """
    machine.add(program("a"), resident=False)
    rests = []
    for number in range(1, 9):
        waiting, early = machine.request(), machine.request()
        assert machine.arrive(waiting) == [LoadWeights("a", number)]
        (finish,) = machine.fail_load("a", "disk error")
        assert isinstance(finish, Finish)
        assert finish.retry_after is not None
        assert finish == _not_loaded(waiting.id, finish.retry_after)
        assert machine.arrive(early) == [_not_loaded(early.id, finish.retry_after)]
        rests.append(round(finish.retry_after))
        machine.tick(machine.now + finish.retry_after)
    last = machine.request()
    machine.arrive(last)

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    assert executions(machine.load("a"))[0].requests == (last.id,)


def _not_loaded(request: int, retry_after: float) -> Finish:
    return Finish(request, Outcome.FAILED, Reason.NOT_LOADED, retry_after, "disk error")


def test_late_end_of_an_older_load_is_ignored(machine: Driver) -> None:
    """A late message about a load that has already ended or failed does not change the state of the model."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request())
    machine.fail_load("a")
    machine.tick(machine.now + 1.0)
    machine.arrive(machine.request())

    assert machine.send(WeightsLoaded("a", 1, 0.1)) == []
    assert machine.send(LoadFailed("a", 1, "late")) == []
    assert executions(machine.send(WeightsLoaded("a", 2, 0.1))) != []
    assert machine.send(WeightsLoaded("a", 2, 9.9)) == []
    assert machine.send(LoadFailed("a", 2, "after all")) == []
    a = machine.scheduler.snapshot().models["a"]
    assert (a.residency, a.loads, a.load_seconds) == ("resident", 1, 0.1)


def test_epochs_never_repeat(machine: Driver) -> None:
    """A model that is added again under its old name gets a new epoch."""
    machine.add(program("a"))
    assert machine.remove("a") == [EvictWeights("a", 1)]

    machine.add(program("a"), resident=False)
    assert machine.arrive(machine.request()) == [LoadWeights("a", 2)]
    assert machine.send(WeightsLoaded("a", 1, 0.1)) == []


def test_bytes_are_counted_from_the_start_of_the_load(machine: Driver) -> None:
    """Weights take their bytes from the start of the load. A failed load and an eviction free them."""
    machine.add(program("a", weight_bytes=10), program("b", weight_bytes=5), resident=False)
    machine.arrive(machine.request("a"), machine.request("b"))
    held = [machine.scheduler.snapshot().weight_bytes]
    machine.fail_load("a")
    held.append(machine.scheduler.snapshot().weight_bytes)
    machine.load("b")
    machine.finish()
    machine.remove("b")
    held.append(machine.scheduler.snapshot().weight_bytes)

    assert held == [10, 5, 0]


# --- removing ---------------------------------------------------------------------------------------------


def test_removal_refuses_what_waits_and_lets_run_what_runs(machine: Driver) -> None:
    """When a model is removed, waiting requests are refused, the executing one is answered, and then the weights are evicted."""
    machine.add(program("a"))
    running, waiting = machine.request(), machine.request()
    machine.arrive(running)
    machine.arrive(waiting)

    assert machine.remove("a") == [Finish(waiting.id, Outcome.REFUSED, Reason.UNLOADED)]
    assert machine.scheduler.snapshot().models["a"].draining
    assert machine.scheduler.knows("a")
    assert machine.finish() == [Finish(running.id, Outcome.ANSWERED), EvictWeights("a", 1)]
    assert machine.scheduler.snapshot().models == {}
    assert not machine.scheduler.knows("a")


def test_a_model_may_be_limited_to_one_row_per_execution(machine: Driver) -> None:
    """A model may be limited to one row per execution."""
    machine.add(program("a", max_batch_rows=1))
    machine.arrive(*machine.requests_of(3))

    assert [execute.rows for execute in machine.finish_all()] == [1, 1, 1]


def test_draining_model_is_unknown_to_requests_and_keeps_its_name(machine: Driver) -> None:
    """While a removed model drains, its requests are refused, and no model can be added under its name."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    machine.remove("a")
    late = machine.request()
    machine.arrive(late)

    assert machine.outcome(late) is Reason.UNKNOWN_MODEL
    with pytest.raises(CallerError, match="draining"):
        machine.send(ModelAdded(program("a")))

    machine.finish()
    machine.add(program("a"))


@pytest.mark.parametrize("good", [True, False])
def test_removal_during_the_load_waits_for_its_end(machine: Driver, good: bool) -> None:
    """If a model is removed during its load, its weights are evicted after the load's end, because they are being written."""
    machine.add(program("a"), resident=False)
    request = machine.request()
    machine.arrive(request)

    assert machine.remove("a") == [
        Finish(request.id, Outcome.REFUSED, Reason.UNLOADED),
        AbandonLoad("a", 1),
    ]
    assert (machine.load("a") if good else machine.fail_load("a")) == ([EvictWeights("a", 1)] if good else [])
    assert machine.scheduler.snapshot().models == {}


def test_removal_without_weights_is_immediate(machine: Driver) -> None:
    """A model without weights, as after a failed load, is removed at once."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request())
    machine.fail_load("a")

    assert machine.remove("a") == []
    assert machine.scheduler.snapshot().models == {}


# --- depth ------------------------------------------------------------------------------------------------


def test_depth_two_keeps_the_next_execution_ready() -> None:
    """With depth 2, a second execution is launched when the first will end soon. A third request waits."""
    machine = Driver(SchedulerSettings(depth=2))
    machine.add(program("a", {(0, 1): 0.001}))
    requests = machine.requests_of(3)

    assert [execution.requests for execution in executions(machine.arrive(*requests))] == [(1,), (2,)]
    [third] = executions(machine.finish(2))

    assert third.requests == (3,)
    assert machine.outcome(requests[1]) is Outcome.ANSWERED
    assert machine.outcome(requests[0]) is None

"""Prefetches and evictions that an operator commands, while other weights load on demand."""

from __future__ import annotations

from math import inf

import pytest

from rsrv.scheduler.events import (
    AbandonLoad,
    CallerError,
    Compact,
    Event,
    Evict,
    EvictWeights,
    GiveUp,
    LoadWeights,
    ModelAdded,
    Outcome,
    Pause,
    Pinned,
    Prefetch,
    Reason,
    WarmUp,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, executions, program

COST = {(0, 1): 0.010}
SINGLE = {(0, 1): 0.001}


def budgeted(budget: int, **settings: int | str) -> Driver:
    return Driver(SchedulerSettings(weight_budget_bytes=budget, **settings))  # type: ignore[arg-type]


# --- after an earlier runtime ------------------------------------------------------------------------------


def test_weights_of_an_earlier_runtime_return_into_free_room_after_those_with_requests() -> None:
    """Four models were resident in an earlier runtime. A model with a request is loaded before the others.

    The others are loaded in the order of their `restore` numbers, while the budget has room for them.
    """
    machine = budgeted(3)
    for name, place in {"a": 3, "b": 2, "c": 4, "d": 1}.items():
        machine.send(ModelAdded(program(name, weight_bytes=1), restore=place))
    assert machine.loading.keys() == {"a"}
    machine.arrive(machine.request("c"))
    machine.load("a")
    assert machine.loading.keys() == {"c"}
    machine.load("c")
    assert machine.loading.keys() == {"d"}

    machine.load("d")

    assert machine.resident == {"a", "c", "d"}
    assert not machine.loading


def test_weights_evicted_by_a_compaction_return_before_those_of_an_earlier_runtime() -> None:
    """Weights that a compaction evicted are loaded before weights that only an earlier runtime had."""
    machine = budgeted(10)
    machine.add(program("used", weight_bytes=1))
    for place, name in enumerate(("first", "second")):
        machine.send(ModelAdded(program(name, weight_bytes=1), restore=place))
    machine.send(Compact())
    machine.load("first")

    order: list[str] = []
    while machine.loading:
        order += machine.loading
        machine.load(order[-1])
    assert order[-1] == "second"
    assert machine.resident == {"used", "first", "second"}


def test_weights_of_an_earlier_runtime_do_not_return_unless_they_load_on_demand() -> None:
    """In explicit mode, weights of an earlier runtime are not loaded by themselves. An operator must load them."""
    machine = budgeted(2, on_demand=False)
    assert machine.send(ModelAdded(program("a", weight_bytes=1), restore=0)) == []


# --- prefetching -------------------------------------------------------------------------------------------


def test_prefetched_weights_load_without_requests(machine: Driver) -> None:
    """A prefetch loads weights without requests, and a repeated one changes nothing."""
    machine.add(program("a"), resident=False)
    assert machine.send(Prefetch("a")) == [LoadWeights("a", 1)]
    assert machine.send(Prefetch("a")) == []
    assert machine.load("a") == []
    assert machine.send(Prefetch("a")) == []

    assert machine.resident == {"a"}


def test_waiting_requests_come_before_prefetches(machine: Driver) -> None:
    """When the link is free, a model with a request is loaded before a prefetched one, even if the request came later."""
    machine.add(program("x"), program("a"), program("b"), resident=False)
    machine.arrive(machine.request("x"))
    machine.send(Prefetch("a"))
    machine.arrive(machine.request("b"))
    machine.load("x")
    assert machine.loading.keys() == {"b"}

    machine.load("b")
    assert machine.loading.keys() == {"a"}


def test_weights_with_work_are_not_evicted_for_prefetched_ones() -> None:
    """A prefetch does not evict the resident model while it has work. The prefetch waits."""
    device = Device(SchedulerSettings(weight_budget_bytes=100))
    device.model(program("a", COST), load=0.001)
    device.model(program("b", COST), load=0.001, resident=False)
    device.saturate("a")
    device.send(Prefetch("b"))
    device.run(1.0)
    assert device.resident == {"a"}

    device.stop()
    device.run(2.0)
    assert device.resident == {"b"}


def test_prefetching_in_turns_does_not_thrash() -> None:
    """Two models are prefetched alternately, and the budget is enough for one.

    Each stays for at least four times the duration of its load.
    """
    device = Device(SchedulerSettings(weight_budget_bytes=100, residency_factor=4.0))
    for name in "ab":
        device.model(program(name, COST), load=0.1, resident=False)
    for step in range(1000):
        device.run(step * 0.01)
        device.send(Prefetch("ab"[step % 2]))

    assert device.loads["a"] + device.loads["b"] == pytest.approx(10.0 / 0.5, abs=2)


def test_prefetched_weights_are_evicted_for_waiting_requests() -> None:
    """Prefetched weights that were never used are evicted at once for a request."""
    driver = budgeted(100)
    driver.add(program("a"), program("b"), resident=False)
    driver.send(Prefetch("a"))
    driver.load("a", 0.1)

    assert driver.arrive(driver.request("b")) == [EvictWeights("a", 1), LoadWeights("b", 2)]


def test_what_was_prefetched_counts_as_used_when_it_came() -> None:
    """Prefetched weights were last used when their load ended, so they are not the first to be evicted."""
    driver = budgeted(200)
    driver.add(program("a"))
    driver.add(program("b"), program("c"), resident=False)
    driver.arrive(driver.request("a"))
    driver.finish_all()
    driver.send(Prefetch("b"))
    driver.load("b", 0.1)

    assert driver.arrive(driver.request("c")) == [EvictWeights("a", 1), LoadWeights("c", 3)]


def test_a_prefetch_under_way_is_not_given_up(machine: Driver) -> None:
    """A prefetch in progress is not abandoned for a waiting request."""
    machine.add(program("a"), program("b"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.arrive(machine.request("b")) == []

    assert machine.load("a") == [LoadWeights("b", 2)]


def test_a_prefetch_that_fails_is_told_and_not_tried_again(machine: Driver) -> None:
    """A failed prefetch is reported and not retried. The next prefetch loads the model."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.fail_load("a") == [GiveUp("a", "no such file")]
    assert not machine.loading

    assert machine.send(Prefetch("a")) == [LoadWeights("a", 2)]


def test_a_prefetch_that_finds_no_memory_is_tried_once_more(machine: Driver) -> None:
    """A prefetch without memory is retried once."""
    machine.add(program("a"), resident=False)
    machine.add(program("b"))
    machine.send(Prefetch("a"))

    assert machine.fail_load("a", out_of_memory=True) == [EvictWeights("b", 1), LoadWeights("a", 3)]
    assert machine.fail_load("a", "none left", out_of_memory=True) == [GiveUp("a", "none left")]
    assert not machine.loading


def test_a_load_that_fails_again_and_again_is_not_started_without_requests() -> None:
    """Under `edf`, a request is shed because its model's load takes too long. The load begins all the same.

    If this load fails, it is not repeated without end.
    """
    driver = Driver(SchedulerSettings(discipline="edf"))
    driver.add(program("x"), program("a"), resident=False)
    driver.arrive(driver.request("x"))
    driver.load("x", 1.0)
    driver.finish_all()
    request = driver.request("a", deadline=driver.now + 0.5)
    driver.arrive(request)
    if driver.outcome(request) is None:
        driver.tick(driver.now + 0.5)
    while driver.loading:
        assert driver.loading["a"] < 10
        driver.fail_load("a")


def test_a_prefetch_is_forgotten_with_its_model() -> None:
    """If a model is removed while its prefetch waits for room, the prefetch is withdrawn.

    A new model of this name is not loaded.
    """
    driver = budgeted(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.arrive(driver.request("a"))
    driver.send(Prefetch("b"))
    driver.remove("b")
    driver.remove("a")
    driver.finish_all()
    driver.add(program("b"), resident=False)

    assert not driver.loading


def test_a_prefetch_waits_for_a_larger_budget() -> None:
    """A prefetch without room loads when the budget grows."""
    driver = budgeted(100)
    driver.add(program("a", pinned=True))
    driver.arrive(driver.request("a"))
    driver.add(program("b"), resident=False)
    driver.add(program("c"))
    driver.arrive(driver.request("c"))
    driver.send(Prefetch("b"))
    assert not driver.loading

    assert driver.change(weight_budget_bytes=300) == [LoadWeights("b", 3)]


# --- evicting ----------------------------------------------------------------------------------------------


def test_weights_are_evicted_on_command(machine: Driver) -> None:
    """An eviction removes resident weights that are not pinned, and no others."""
    machine.add(program("a"), program("b"), program("pinned", pinned=True))
    machine.add(program("absent"), resident=False)

    assert machine.evict("a", "pinned", "absent") == [EvictWeights("a", 1)]
    assert machine.resident == {"b", "pinned"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_executes_is_evicted_when_it_is_over(depth: int) -> None:
    """A model with executions in flight is evicted after them. It is then loaded again for its waiting requests."""
    driver = Driver(SchedulerSettings(depth=depth))
    driver.add(program("a", SINGLE))
    requests = driver.requests_of(4)
    driver.arrive(requests[0])
    driver.arrive(*requests[1:])
    running = len(driver.executing)
    assert driver.evict("a") == []
    for _ in range(running - 1):
        assert not executions(driver.finish())
    out = driver.finish()

    assert out[1:] == [EvictWeights("a", 1), LoadWeights("a", 2)]
    driver.settle()
    assert all(driver.outcome(request) is Outcome.ANSWERED for request in requests)


def test_a_committed_request_executes_before_the_weights_go(machine: Driver) -> None:
    """Before its model is evicted, a committed request executes. Other requests wait for the next load."""
    machine.add(program("a", SINGLE))
    first, other, call = machine.request(), machine.request(), machine.request(run=3)
    machine.arrive(first)
    machine.arrive(other, call)
    machine.evict("a")
    assert [execution.requests for execution in executions(machine.finish())] == [(call.id,)]

    assert machine.finish()[1:] == [EvictWeights("a", 1), LoadWeights("a", 2)]
    machine.settle()
    assert machine.outcome(other) is Outcome.ANSWERED


def test_a_model_that_is_evicted_again_and_again_is_served() -> None:
    """A model that is evicted without end still executes once after each load."""
    device = Device(validate_every=3)
    device.model(program("a", COST), load=0.005)
    device.model(program("b", COST), load=0.005)
    device.saturate("ab")
    for step in range(1000):
        device.run(step * 0.001)
        device.evict("a")

    assert device.got["a"] >= 0.010 * (device.loads["a"] - 1) > 0.3
    assert device.got["b"] > 0.4


def test_a_load_without_requests_is_abandoned_by_an_eviction(machine: Driver) -> None:
    """An eviction abandons a load without requests, even if a prefetch has caused it."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.evict("a") == [AbandonLoad("a", 1)]
    assert machine.evict("a") == []
    assert machine.abandon_load("a") == []

    assert not machine.loading


def test_a_load_that_is_as_good_as_done_leaves_when_it_is(machine: Driver) -> None:
    """If a load succeeds while it is being abandoned, its weights are evicted at once."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    machine.evict("a")

    assert machine.load("a") == [EvictWeights("a", 1)]


def test_a_load_that_requests_wait_for_goes_on(machine: Driver) -> None:
    """If requests wait for a load, an eviction does not abandon it. The weights are evicted after the requests."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request("a"))
    assert machine.evict("a") == []
    assert executions(machine.load("a"))

    assert machine.finish()[1:] == [EvictWeights("a", 1)]


def test_a_request_that_comes_while_a_load_is_given_up_has_its_weights(machine: Driver) -> None:
    """A request arrives while the load of its model is being abandoned.

    If the load still succeeds, the request executes. Otherwise the model is loaded again.
    """
    for well in (True, False):
        machine.add(program("a"), resident=False)
        machine.send(Prefetch("a"))
        machine.evict("a")
        machine.arrive(machine.request("a"))
        if well:
            assert executions(machine.load("a"))
            machine.settle()
            machine.remove("a")
        else:
            assert [type(instruction) for instruction in machine.abandon_load("a")] == [LoadWeights]


def test_a_load_for_a_held_model_is_given_up_too(machine: Driver) -> None:
    """An eviction abandons the load of a held model, even if a request waits for it."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request("a"))
    machine.pause(Pause.HOLD, "a")

    assert machine.evict("a") == [AbandonLoad("a", 1)]


def test_asking_again_for_what_is_given_up_brings_it() -> None:
    """If a model is prefetched or pinned while its load is being abandoned, it is loaded again."""
    wishes: list[Event] = [Prefetch("a"), Pinned("a", True)]
    for wish in wishes:
        driver = Driver()
        driver.add(program("a"), resident=False)
        driver.send(Prefetch("a"))
        driver.evict("a")
        driver.send(wish)

        assert driver.abandon_load("a") == [LoadWeights("a", 2)]
        assert driver.load("a") == []
        assert driver.resident == {"a"}


def test_asking_again_for_what_is_to_go_keeps_it(machine: Driver) -> None:
    """If a model is prefetched or pinned while it waits for its eviction, it is not evicted."""
    wishes: list[Event] = [Prefetch("a"), Pinned("a", True)]
    machine.add(program("a", SINGLE))
    for wish in wishes:
        machine.arrive(machine.request())
        machine.evict("a")
        machine.send(wish)
        machine.finish_all()

        assert machine.resident == {"a"}


def test_evicting_withdraws_what_was_prefetched_or_would_come_back(machine: Driver) -> None:
    """After an eviction command, a prefetched model is not loaded, and a compaction does not load the model again."""
    machine.add(program("a"), program("b"), resident=False)
    machine.add(program("c"))
    machine.send(Prefetch("a"))
    machine.send(Prefetch("b"))
    machine.send(Compact())
    machine.load("a")
    machine.evict("a", "b", "c")
    machine.settle()

    assert not machine.resident


def test_what_is_to_go_does_not_come_back_from_a_compaction(machine: Driver) -> None:
    """A model that was to be evicted before a compaction is not loaded again after it."""
    machine.add(program("a", SINGLE), program("b", SINGLE))
    machine.arrive(machine.request("a"))
    machine.evict("a")
    machine.send(Compact())
    machine.finish()
    machine.settle()

    assert machine.resident == {"b"}


def test_a_model_that_is_added_warms_up_before_it_goes(machine: Driver) -> None:
    """If an operator evicts a new model before its warm-up, the model is still loaded and warmed up, and then evicted."""
    machine.add(program("a"), resident=False, warm_up=True)
    assert machine.evict("a") == []
    assert machine.load("a") == [WarmUp("a")]

    assert machine.warm_up_ends("a") == [EvictWeights("a", 1)]


def test_a_second_try_keeps_its_weights(machine: Driver) -> None:
    """If an execution finds no memory, it is retried before its model is evicted."""
    machine.add(program("a", SINGLE))
    request = machine.request()
    machine.arrive(request)
    machine.evict("a")
    assert not any(
        isinstance(instruction, EvictWeights) for instruction in machine.finish(out_of_memory=True)
    )

    assert machine.finish()[1:] == [EvictWeights("a", 1)]
    assert machine.outcome(request) is Outcome.ANSWERED


def test_wishes_for_unknown_models_are_refused(machine: Driver) -> None:
    """A command with an unknown model is refused with the model's name, and has no effect on known models."""
    machine.add(program("a"))
    for event in (Prefetch("b"), Evict(("a", "b"))):
        with pytest.raises(CallerError, match="there is no model 'b'"):
            machine.scheduler.handle(event, 0.0)

    assert machine.evict() == []
    assert machine.scheduler.snapshot().weight_bytes == 100


def test_what_waits_is_not_refused_on_demand(machine: Driver) -> None:
    """If weights load on demand, a request for an evicted model waits for a load."""
    machine.add(program("a"))
    machine.evict("a")
    request = machine.request()
    machine.arrive(request)
    machine.settle()

    assert machine.outcome(request) is Outcome.ANSWERED
    assert Reason.NOT_RESIDENT not in machine.scheduler.snapshot().refused


def test_weights_in_use_or_on_the_way_have_no_time_of_last_use() -> None:
    """Weights have no time of last use while requests wait for them, and while they load or execute.

    The time of last use decides which host copies are dropped.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=100))
    driver.send(ModelAdded(program("a")), after=1.0)
    assert driver.scheduler.idle_since("a") == 1.0
    driver.arrive(driver.request("a"))
    assert driver.scheduler.idle_since("a") == inf
    driver.load("a", 0.5)
    assert driver.scheduler.idle_since("a") == inf
    driver.finish(seconds=0.5)
    assert driver.scheduler.idle_since("a") == 2.0
    assert driver.scheduler.idle_since("nobody") == inf


def test_a_model_whose_requests_are_expected_soon_keeps_its_weights_for_twice_its_usual_pause() -> None:
    """A model that gets a request every 100 ms keeps its weights for 200 ms after its latest execution.

    After that, its weights may be evicted for another model.
    """
    machine = budgeted(1)
    machine.add(program("a", SINGLE, weight_bytes=1), program("b", SINGLE, weight_bytes=1), resident=False)
    machine.arrive(machine.request("a"))
    machine.load("a", seconds=1.0)
    machine.finish()
    for _ in range(20):
        machine.tick(machine.now + 0.1)
        machine.arrive(machine.request("a"))
        machine.finish()
    used = machine.now
    machine.arrive(machine.request("b"))
    machine.tick(used + 0.19)
    assert machine.resident == {"a"}

    machine.tick(used + 0.21)

    assert machine.loading.keys() == {"b"}

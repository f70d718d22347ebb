"""Weights that come and go because an operator says so, while those of others come and go on demand."""

from __future__ import annotations

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


# --- prefetching -------------------------------------------------------------------------------------------


def test_prefetched_weights_load_without_requests(machine: Driver) -> None:
    """Once they are on their way, or there, asking again changes nothing."""
    machine.add(program("a"), resident=False)
    assert machine.send(Prefetch("a")) == [LoadWeights("a", 1)]
    assert machine.send(Prefetch("a")) == []
    assert machine.load("a") == []
    assert machine.send(Prefetch("a")) == []

    assert machine.resident == {"a"}


def test_who_waits_comes_before_what_is_prefetched(machine: Driver) -> None:
    """Of two that want the link next, the one with a request has it, though it came later."""
    machine.add(program("x"), program("a"), program("b"), resident=False)
    machine.arrive(machine.request("x"))
    machine.send(Prefetch("a"))
    machine.arrive(machine.request("b"))
    machine.load("x")
    assert machine.loading.keys() == {"b"}

    machine.load("b")
    assert machine.loading.keys() == {"a"}


def test_weights_with_work_are_not_evicted_for_prefetched_ones() -> None:
    """It comes when the one that it shares room with has nothing to do any more."""
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
    """Two take each other's place: each stays four times as long as its load took, and the scheduler wakes for it."""
    device = Device(SchedulerSettings(weight_budget_bytes=100, residency_factor=4.0))
    for name in "ab":
        device.model(program(name, COST), load=0.1, resident=False)
    for step in range(1000):
        device.run(step * 0.01)
        device.send(Prefetch("ab"[step % 2]))

    assert device.loads["a"] + device.loads["b"] == pytest.approx(10.0 / 0.5, abs=2)


def test_what_was_prefetched_gives_way_to_who_waits() -> None:
    """At once: it was never used."""
    driver = budgeted(100)
    driver.add(program("a"), program("b"), resident=False)
    driver.send(Prefetch("a"))
    driver.load("a", 0.1)

    assert driver.arrive(driver.request("b")) == [EvictWeights("a", 1), LoadWeights("b", 2)]


def test_what_was_prefetched_counts_as_used_when_it_came() -> None:
    """The model that was used before that is evicted first."""
    driver = budgeted(200)
    driver.add(program("a"))
    driver.add(program("b"), program("c"), resident=False)
    driver.arrive(driver.request("a"))
    driver.finish_all()
    driver.send(Prefetch("b"))
    driver.load("b", 0.1)

    assert driver.arrive(driver.request("c")) == [EvictWeights("a", 1), LoadWeights("c", 3)]


def test_a_prefetch_under_way_is_not_given_up(machine: Driver) -> None:
    """Other loads wait for its end, as for that of any load."""
    machine.add(program("a"), program("b"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.arrive(machine.request("b")) == []

    assert machine.load("a") == [LoadWeights("b", 2)]


def test_a_prefetch_that_fails_is_told_and_not_tried_again(machine: Driver) -> None:
    """The next command or request asks for it again."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.fail_load("a") == [GiveUp("a", "no such file")]
    assert not machine.loading

    assert machine.send(Prefetch("a")) == [LoadWeights("a", 2)]


def test_a_prefetch_that_finds_no_memory_is_tried_once_more(machine: Driver) -> None:
    """After that it is given up."""
    machine.add(program("a"), resident=False)
    machine.add(program("b"))
    machine.send(Prefetch("a"))

    assert machine.fail_load("a", out_of_memory=True) == [EvictWeights("b", 1), LoadWeights("a", 3)]
    assert machine.fail_load("a", "none left", out_of_memory=True) == [GiveUp("a", "none left")]
    assert not machine.loading


def test_a_load_that_fails_again_and_again_is_not_started_without_requests() -> None:
    """Under edf a request was shed because of its model's load, which then fails: that is all that happens."""
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
    """It was waiting for room; a model of the same name that is added later is not loaded."""
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
    """It comes as soon as there is room, without anybody asking again."""
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


def test_weights_are_evicted_when_an_operator_says_so(machine: Driver) -> None:
    """Those that are there and not pinned; the others are left alone."""
    machine.add(program("a"), program("b"), program("pinned", pinned=True))
    machine.add(program("absent"), resident=False)

    assert machine.evict("a", "pinned", "absent") == [EvictWeights("a", 1)]
    assert machine.resident == {"b", "pinned"}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_executes_is_evicted_when_it_is_over(depth: int) -> None:
    """Nothing else of it starts meanwhile, though more waits: that is executed when the weights are back."""
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
    assert all(driver.outcome(one) is Outcome.ANSWERED for one in requests)


def test_a_committed_request_executes_before_the_weights_go(machine: Driver) -> None:
    """The call of a running meta model is not made to wait for a load; another request is."""
    machine.add(program("a", SINGLE))
    first, other, call = machine.request(), machine.request(), machine.request(run=3)
    machine.arrive(first)
    machine.arrive(other, call)
    machine.evict("a")
    assert [one.requests for one in executions(machine.finish())] == [(call.id,)]

    assert machine.finish()[1:] == [EvictWeights("a", 1), LoadWeights("a", 2)]
    machine.settle()
    assert machine.outcome(other) is Outcome.ANSWERED


def test_a_model_that_is_evicted_again_and_again_is_served() -> None:
    """What came for its requests executes once before it goes, so that many operators only make it slow."""
    device = Device(validate_every=3)
    device.model(program("a", COST), load=0.005)
    device.model(program("b", COST), load=0.005)
    device.saturate("ab")
    for step in range(1000):
        device.run(step * 0.001)
        device.evict("a")

    assert device.got["a"] >= 0.010 * (device.loads["a"] - 1) > 0.3
    assert device.got["b"] > 0.4


def test_a_load_without_requests_is_given_up_when_it_is_to_leave(machine: Driver) -> None:
    """Also if a command had asked for it before."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    assert machine.evict("a") == [AbandonLoad("a", 1)]
    assert machine.evict("a") == []
    assert machine.abandon_load("a") == []

    assert not machine.loading


def test_a_load_that_is_as_good_as_done_leaves_when_it_is(machine: Driver) -> None:
    """It was to be given up, and comes all the same."""
    machine.add(program("a"), resident=False)
    machine.send(Prefetch("a"))
    machine.evict("a")

    assert machine.load("a") == [EvictWeights("a", 1)]


def test_a_load_that_requests_wait_for_goes_on(machine: Driver) -> None:
    """It would only begin again; the weights go when these requests have been executed."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request("a"))
    assert machine.evict("a") == []
    assert executions(machine.load("a"))

    assert machine.finish()[1:] == [EvictWeights("a", 1)]


def test_a_request_that_comes_while_a_load_is_given_up_has_its_weights(machine: Driver) -> None:
    """If the load ends well after all it executes before they go; if not they are loaded again."""
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
            assert [type(one) for one in machine.abandon_load("a")] == [LoadWeights]


def test_a_load_for_a_held_model_is_given_up_too(machine: Driver) -> None:
    """What is held does not count as waiting."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request("a"))
    machine.pause(Pause.HOLD, "a")

    assert machine.evict("a") == [AbandonLoad("a", 1)]


def test_asking_again_for_what_is_given_up_brings_it() -> None:
    """Prefetched or pinned while its load is being abandoned, it is loaded again."""
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
    """While an execution keeps it there, a command keeps it."""
    wishes: list[Event] = [Prefetch("a"), Pinned("a", True)]
    machine.add(program("a", SINGLE))
    for wish in wishes:
        machine.arrive(machine.request())
        machine.evict("a")
        machine.send(wish)
        machine.finish_all()

        assert machine.resident == {"a"}


def test_evicting_withdraws_what_was_prefetched_or_would_come_back(machine: Driver) -> None:
    """One waits for its turn on the link, one was compacted away: neither comes."""
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
    """The device is cleared in the moment in which it goes, and of those that come back it is none."""
    machine.add(program("a", SINGLE), program("b", SINGLE))
    machine.arrive(machine.request("a"))
    machine.evict("a")
    machine.send(Compact())
    machine.finish()
    machine.settle()

    assert machine.resident == {"b"}


def test_a_model_that_is_added_warms_up_before_it_goes(machine: Driver) -> None:
    """Neither its load nor its warm-up is disturbed."""
    machine.add(program("a"), resident=False, warm_up=True)
    assert machine.evict("a") == []
    assert machine.load("a") == [WarmUp("a")]

    assert machine.warm_up_ends("a") == [EvictWeights("a", 1)]


def test_a_second_try_keeps_its_weights(machine: Driver) -> None:
    """An execution found no memory, and its model is to go: it executes once more before."""
    machine.add(program("a", SINGLE))
    request = machine.request()
    machine.arrive(request)
    machine.evict("a")
    assert not any(isinstance(one, EvictWeights) for one in machine.finish(out_of_memory=True))

    assert machine.finish()[1:] == [EvictWeights("a", 1)]
    assert machine.outcome(request) is Outcome.ANSWERED


def test_wishes_for_unknown_models_are_refused(machine: Driver) -> None:
    """The message names the model, and nothing happens to the known one."""
    machine.add(program("a"))
    for event in (Prefetch("b"), Evict(("a", "b"))):
        with pytest.raises(CallerError, match="there is no model 'b'"):
            machine.scheduler.handle(event, 0.0)

    assert machine.evict() == []
    assert machine.scheduler.snapshot().weight_bytes == 100


def test_what_waits_is_not_refused_on_demand(machine: Driver) -> None:
    """Only if weights do not load on demand is a request for absent ones refused."""
    machine.add(program("a"))
    machine.evict("a")
    request = machine.request()
    machine.arrive(request)
    machine.settle()

    assert machine.outcome(request) is Outcome.ANSWERED
    assert Reason.NOT_RESIDENT not in machine.scheduler.snapshot().refused

"""Weights that only commands load and evict: requests cause no load and no eviction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rsrv.scheduler.events import (
    AbandonLoad,
    Compact,
    EvictWeights,
    Execute,
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
from tests.unit.scheduler.driver import Driver, executions, program

SINGLE = {(0, 1): 0.001}


def explicit(budget: int | None = None, **settings: Any) -> Driver:
    return Driver(SchedulerSettings(on_demand=False, weight_budget_bytes=budget, **settings))


def bring(driver: Driver, *names: str) -> None:
    for name in names:
        driver.send(Prefetch(name))
        driver.load(name)


# --- requests and residency --------------------------------------------------------------------------------


def test_a_request_for_absent_weights_is_refused() -> None:
    """A request for absent weights is refused and loads none."""
    driver = explicit()
    driver.add(program("a"), resident=False)
    request = driver.request()
    driver.arrive(request)

    assert driver.outcome(request) is Reason.NOT_RESIDENT
    assert not driver.loading
    assert driver.scheduler.snapshot().models["a"].refused == {Reason.NOT_RESIDENT: 1}


@pytest.mark.parametrize("wish", [Prefetch("a"), Pinned("a", True)])
def test_requests_wait_for_prefetched_weights(wish: Prefetch | Pinned) -> None:
    """Requests wait while prefetched or pinned weights are in line for the link, or are loading."""
    driver = explicit()
    driver.add(program("x"), program("a", SINGLE), resident=False)
    driver.send(Prefetch("x"))
    driver.send(wish)
    requests = driver.requests_of(3)
    driver.arrive(requests[0])
    driver.load("x")
    driver.arrive(requests[1])
    driver.load("a")
    driver.arrive(requests[2])
    driver.finish_all()

    assert [driver.outcome(request) for request in requests] == [Outcome.ANSWERED] * 3


def test_a_prefetch_that_fails_fails_its_requests() -> None:
    """If the load fails, waiting requests fail, and new ones are refused until the next command."""
    driver = explicit()
    driver.add(program("a", pinned=True), resident=False)
    waiting, late, later = driver.requests_of(3)
    driver.arrive(waiting)
    assert GiveUp("a", "no such file") in driver.fail_load("a")
    driver.arrive(late)
    assert (driver.outcome(waiting), driver.outcome(late)) == (Outcome.FAILED, Reason.NOT_RESIDENT)

    assert driver.send(Pinned("a", True)) == [LoadWeights("a", 2)]
    driver.arrive(later)
    driver.settle()
    assert driver.outcome(later) is Outcome.ANSWERED


def test_requests_evict_no_model() -> None:
    """If only one of two models fits on the device, the resident one stays, despite requests for the other one."""
    driver = explicit(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    for _ in range(10):
        driver.arrive(driver.request("b"))
        driver.tick(driver.now + 1.0)

    assert driver.resident == {"a"}


# --- what was prefetched has the room that is free -----------------------------------------------------------


def test_a_prefetch_that_does_not_fit_is_turned_down() -> None:
    """A prefetch that does not fit is given up, and evicts no prefetched model."""
    driver = explicit(200)
    driver.add(program("a"), program("b"))
    driver.add(program("c"), resident=False)
    (given_up,) = driver.send(Prefetch("c"))

    assert isinstance(given_up, GiveUp)
    assert "100 bytes do not fit in addition to the 200" in given_up.error
    assert driver.resident == {"a", "b"}


def test_a_prefetch_waits_for_room_that_is_being_made() -> None:
    """A prefetch waits until an executing model can be evicted and frees enough memory. Then the waiting request executes."""
    driver = explicit(100)
    driver.add(program("a", SINGLE))
    driver.add(program("b", SINGLE), resident=False)
    driver.arrive(driver.request("a"))
    driver.evict("a")
    assert driver.send(Prefetch("b")) == []
    request = driver.request("b")
    driver.arrive(request)

    assert driver.finish()[1:] == [EvictWeights("a", 1), LoadWeights("b", 2)]
    driver.settle()
    assert driver.outcome(request) is Outcome.ANSWERED


def test_a_prefetch_waits_for_a_model_that_is_being_removed() -> None:
    """A prefetch waits for the room of a model that is removed after its last execution."""
    driver = explicit(100)
    driver.add(program("old", SINGLE))
    driver.add(program("new", SINGLE), resident=False)
    driver.arrive(driver.request("old"))
    driver.remove("old")
    assert driver.send(Prefetch("new")) == []

    assert driver.finish()[1:] == [EvictWeights("old", 1), LoadWeights("new", 2)]


def test_one_that_does_not_fit_does_not_keep_others_out() -> None:
    """If one of three prefetches does not fit, it is refused with its requests, and the others are loaded."""
    driver = explicit(300)
    driver.add(program("x"), resident=False)
    driver.add(program("large", weight_bytes=250), program("a"), program("b"), resident=False)
    for name in ("x", "large", "a", "b"):
        driver.send(Prefetch(name))
    request = driver.request("large")
    driver.arrive(request)
    driver.settle()

    assert driver.resident == {"x", "a", "b"}
    assert driver.outcome(request) is Reason.NOT_RESIDENT
    assert driver.given_up == ["large"]


def test_a_prefetch_larger_than_the_budget_is_there_alone() -> None:
    """A prefetched model may exceed the budget if only pinned weights are on the device besides it."""
    driver = explicit(100)
    driver.add(program("pinned", weight_bytes=80, pinned=True))
    driver.add(program("a", weight_bytes=500), program("b", weight_bytes=10), resident=False)
    bring(driver, "a")
    driver.send(Prefetch("b"))

    assert driver.resident == {"pinned", "a"}
    assert driver.given_up == ["b"]


# --- pinning -----------------------------------------------------------------------------------------------


def test_pinned_weights_evict_unpinned_ones() -> None:
    """A pin evicts the least recently used model that is not pinned, and refuses its requests."""
    driver = explicit(200)
    driver.add(program("a", SINGLE), program("b", SINGLE))
    driver.add(program("c"), resident=False)
    driver.arrive(driver.request("b"))
    requests = driver.requests_of(2, "a")
    driver.arrive(*requests)

    out = driver.send(Pinned("c", True))
    assert (out[0], out[-1]) == (EvictWeights("a", 1), LoadWeights("c", 3))
    assert {driver.outcome(request) for request in requests} == {Reason.NOT_RESIDENT}


def test_unpinning_frees_the_weights_at_once() -> None:
    """Unpinned weights are evicted after the execution in progress.

    New requests are refused at once. Waiting requests are refused when the weights are evicted.
    """
    driver = explicit()
    driver.add(program("a", SINGLE, pinned=True), program("idle", pinned=True))
    assert driver.send(Pinned("idle", False)) == [EvictWeights("idle", 2)]
    running, waiting, late = driver.requests_of(3)
    driver.arrive(running)
    driver.arrive(waiting)
    assert driver.send(Pinned("a", False)) == []
    driver.arrive(late)
    assert driver.outcome(late) is Reason.NOT_RESIDENT
    driver.finish_all()

    assert not driver.resident
    assert driver.outcome(running) is Outcome.ANSWERED
    assert driver.outcome(waiting) is Reason.NOT_RESIDENT


def test_unpinning_what_is_not_pinned_changes_nothing() -> None:
    """If a model was not pinned, unpinning it leaves its prefetched weights in place."""
    driver = explicit()
    driver.add(program("a"), resident=False)
    bring(driver, "a")

    assert driver.send(Pinned("a", False)) == []
    assert driver.resident == {"a"}


def test_unpinning_a_loading_model_abandons_its_load() -> None:
    """If a loading model is unpinned, its load is abandoned, and its waiting requests are refused at once."""
    driver = explicit()
    driver.add(program("a", pinned=True), resident=False)
    request = driver.request()
    driver.arrive(request)
    out = driver.send(Pinned("a", False))

    assert AbandonLoad("a", 1) in out
    assert driver.outcome(request) is Reason.NOT_RESIDENT


# --- evicting ----------------------------------------------------------------------------------------------


def test_what_waits_for_an_evicted_model_is_refused() -> None:
    """An eviction refuses the waiting requests of its model. The executing request and a committed one are answered."""
    driver = explicit()
    driver.add(program("a", SINGLE))
    first, other, call = driver.request(), driver.request(), driver.request(run=3)
    driver.arrive(first)
    driver.arrive(other, call)
    driver.evict("a")
    driver.finish_all()

    assert not driver.resident
    assert [driver.outcome(request) for request in (first, call, other)] == [
        Outcome.ANSWERED,
        Outcome.ANSWERED,
        Reason.NOT_RESIDENT,
    ]


def test_new_calls_do_not_keep_what_is_to_go() -> None:
    """A new sub-call of a model that is to be evicted is refused. Otherwise the eviction might never happen."""
    driver = explicit()
    driver.add(program("a", SINGLE))
    driver.arrive(driver.request())
    driver.evict("a")
    call = driver.request(run=3)
    driver.arrive(call)

    assert driver.outcome(call) is Reason.NOT_RESIDENT


def test_evicting_a_loading_model_refuses_its_requests() -> None:
    """An eviction during the load refuses the waiting requests."""
    driver = explicit()
    driver.add(program("a"), resident=False)
    driver.send(Prefetch("a"))
    request = driver.request()
    driver.arrive(request)
    out = driver.evict("a")

    assert AbandonLoad("a", 1) in out
    assert driver.outcome(request) is Reason.NOT_RESIDENT
    assert driver.load("a") == [EvictWeights("a", 1)]


def test_evicting_a_queued_model_refuses_its_requests() -> None:
    """If a model in line for the link is evicted, its load is withdrawn, and its requests are refused."""
    driver = explicit()
    driver.add(program("x"), program("a"), resident=False)
    driver.send(Prefetch("x"))
    driver.send(Prefetch("a"))
    request = driver.request("a")
    driver.arrive(request)
    driver.evict("a")
    assert driver.outcome(request) is Reason.NOT_RESIDENT

    assert driver.load("x") == []


def test_a_held_model_that_is_evicted_refuses_what_it_held() -> None:
    """If a held model is evicted, its waiting requests are refused at once."""
    driver = explicit()
    driver.add(program("a"))
    driver.pause(Pause.HOLD, "a")
    request = driver.request()
    driver.arrive(request)
    driver.evict("a")

    assert driver.outcome(request) is Reason.NOT_RESIDENT


def test_a_budget_that_falls_sends_the_unpinned_away() -> None:
    """A smaller budget evicts an unpinned model and refuses its requests. A larger budget does not load it again."""
    driver = explicit(200)
    driver.add(program("a"), program("b"))
    driver.pause(Pause.HOLD, "a")
    request = driver.request("a")
    driver.arrive(request)
    assert EvictWeights("a", 1) in driver.change(weight_budget_bytes=100)
    driver.change(weight_budget_bytes=1000)

    assert driver.outcome(request) is Reason.NOT_RESIDENT
    assert driver.resident == {"b"}
    assert not driver.loading


def test_what_came_for_requests_goes_before_these_execute() -> None:
    """If a prefetched model is evicted while its requests still wait for the device, these requests are refused."""
    driver = explicit()
    driver.add(program("b", SINGLE))
    driver.add(program("a", SINGLE), resident=False)
    driver.arrive(driver.request("b"))
    driver.send(Prefetch("a"))
    request = driver.request("a")
    driver.arrive(request)
    driver.load("a")
    driver.evict("a")

    assert driver.outcome(request) is Reason.NOT_RESIDENT
    assert driver.resident == {"b"}


# --- models that are added ---------------------------------------------------------------------------------


def test_a_new_model_is_warmed_up_and_leaves() -> None:
    """A new model is loaded and warmed up to measure its costs, and then leaves."""
    driver = explicit()
    driver.add(program("a"), resident=False, warm_up=True)
    assert driver.load("a") == [WarmUp("a")]
    early = driver.request()
    driver.arrive(early)

    assert driver.warm_up_ends("a") == [EvictWeights("a", 1)]
    assert driver.outcome(early) is Reason.NOT_RESIDENT


def test_a_new_model_that_is_pinned_stays_after_its_warm_up() -> None:
    """A new pinned model stays after its warm-up."""
    driver = explicit()
    driver.add(program("a", pinned=True), resident=False, warm_up=True)
    driver.load("a")

    assert driver.warm_up_ends("a") == []
    assert driver.resident == {"a"}


def _prefetch(driver: Driver) -> None:
    driver.send(Prefetch("a"))


def _pin(driver: Driver) -> None:
    driver.send(Pinned("a", True))


def _prefetch_and_evict(driver: Driver) -> None:
    driver.send(Prefetch("a"))
    driver.evict("a")


def _pin_and_unpin(driver: Driver) -> None:
    driver.send(Pinned("a", True))
    driver.send(Pinned("a", False))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    ("wish", "stays"),
    [(_prefetch, True), (_pin, True), (_prefetch_and_evict, False), (_pin_and_unpin, False)],
)
def test_what_is_wished_during_a_warm_up_holds_after_it(
    wish: Callable[[Driver], None], stays: bool, loaded: bool
) -> None:
    """A command that arrives before the end of a warm-up applies after the warm-up."""
    driver = explicit()
    driver.add(program("a"), resident=False, warm_up=True)
    if loaded:
        driver.load("a")
        wish(driver)
    else:
        wish(driver)
        driver.load("a")
    driver.warm_up_ends("a")

    assert driver.resident == ({"a"} if stays else set())


def test_what_is_to_be_warmed_up_is_not_turned_down() -> None:
    """A prefetched model that must warm up waits for room and is not refused."""
    driver = explicit(100)
    driver.add(program("a", SINGLE))
    driver.arrive(driver.request("a"))
    driver.add(program("new"), resident=False, warm_up=True)
    driver.send(Prefetch("new"))
    request = driver.request("new")
    driver.arrive(request)
    assert not driver.given_up
    driver.finish()
    driver.load("new")
    driver.warm_up_ends("new")
    driver.finish_all()

    assert driver.resident == {"new"}
    assert driver.outcome(request) is Outcome.ANSWERED
    assert driver.given_up == ["a"]


def test_a_model_evicted_for_a_warm_up_comes_back() -> None:
    """On a full device, a warm-up evicts a model. Requests for this model wait, and it is loaded again after the warm-up."""
    driver = explicit(100)
    driver.add(program("a", SINGLE))
    driver.add(program("new"), resident=False, warm_up=True)
    assert driver.loading.keys() == {"new"}
    request = driver.request("a")
    driver.arrive(request)
    driver.load("new")
    assert not driver.loading

    assert driver.warm_up_ends("new") == [EvictWeights("new", 2), LoadWeights("a", 3)]
    driver.settle()
    assert driver.outcome(request) is Outcome.ANSWERED
    assert driver.resident == {"a"}


# --- memory ------------------------------------------------------------------------------------------------


def test_compaction_brings_all_back() -> None:
    """After a compaction, all models are loaded again, the latest used one first. No request is refused."""
    driver = explicit()
    driver.add(program("a"), program("b"), program("c", SINGLE))
    driver.arrive(driver.request("c"))
    driver.finish_all()
    driver.send(Compact())
    assert driver.loading.keys() == {"c"}
    requests = [driver.request(name) for name in "ab"]
    driver.arrive(*requests)
    driver.settle()

    assert driver.resident == {"a", "b", "c"}
    assert all(driver.outcome(request) is Outcome.ANSWERED for request in requests)


def test_what_leaves_because_memory_ran_out_comes_back() -> None:
    """Models that were evicted for lack of memory are loaded again, because a command had loaded them before."""
    driver = explicit()
    driver.add(program("a", SINGLE), program("b", SINGLE))
    request = driver.request("a")
    driver.arrive(request)
    out = driver.finish(out_of_memory=True)
    assert [type(instruction) for instruction in out] == [EvictWeights, Execute]
    driver.settle()

    assert driver.outcome(request) is Outcome.ANSWERED
    assert driver.resident == {"a", "b"}


# --- while it runs -----------------------------------------------------------------------------------------


def test_what_is_there_stays_when_a_control_plane_takes_over() -> None:
    """If the mode becomes explicit, resident and loading models stay and answer their requests.

    Other requests are refused.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=200))
    driver.add(program("a"))
    driver.add(program("b"), program("c"), resident=False)
    there, coming, absent = (driver.request(name) for name in "abc")
    driver.pause(Pause.HOLD, "a")
    driver.arrive(there, coming)
    driver.arrive(absent)
    driver.change(on_demand=False)
    assert driver.outcome(absent) is Reason.NOT_RESIDENT
    driver.pause(None, "a")
    driver.settle()

    assert [driver.outcome(request) for request in (there, coming)] == [Outcome.ANSWERED] * 2
    assert driver.resident == {"a", "b"}


def test_what_warms_up_when_a_control_plane_takes_over_leaves() -> None:
    """A model that warms up when the mode becomes explicit leaves after its warm-up."""
    driver = Driver()
    driver.add(program("a"), program("b"), resident=False, warm_up=True)
    driver.load("a")
    driver.change(on_demand=False)
    driver.warm_up_ends("a")
    driver.load("b")
    driver.warm_up_ends("b")

    assert not driver.resident


def test_what_is_to_go_when_a_control_plane_takes_over_goes() -> None:
    """A model that is to be evicted when the mode becomes explicit executes its sub-call and refuses other requests."""
    driver = Driver()
    driver.add(program("a", SINGLE))
    first, other, call = driver.request(), driver.request(), driver.request(run=3)
    driver.arrive(first)
    driver.evict("a")
    driver.arrive(call, other)
    driver.change(on_demand=False)
    driver.finish_all()

    assert not driver.resident
    assert driver.outcome(call) is Outcome.ANSWERED
    assert driver.outcome(other) is Reason.NOT_RESIDENT


def test_what_would_come_for_the_next_request_does_not_when_a_control_plane_takes_over() -> None:
    """A load that waits for room for the model's next request is withdrawn when the mode becomes explicit."""
    driver = Driver(SchedulerSettings(discipline="edf", weight_budget_bytes=100, residency_factor=4.0))
    driver.add(program("a"), program("b"), resident=False)
    for name in "ab":
        driver.arrive(driver.request(name))
        driver.load(name, 1.0)
        driver.finish_all()
    late = driver.request("a", deadline=driver.now + 0.5)
    driver.arrive(late)
    assert driver.outcome(late) is Outcome.SHED
    driver.change(on_demand=False)
    driver.change(weight_budget_bytes=1000)

    assert not driver.loading
    assert not driver.given_up


def test_what_was_compacted_away_comes_back_to_a_control_plane() -> None:
    """A model that a compaction evicted is loaded again, even if the mode becomes explicit meanwhile."""
    driver = Driver()
    driver.add(program("a"), program("b"), program("c"))
    driver.send(Compact())
    driver.change(on_demand=False)
    driver.settle()

    assert driver.resident == {"a", "b", "c"}


def test_a_load_that_is_given_up_while_a_control_plane_takes_over_is_repeated() -> None:
    """If a request waits for a load that is being abandoned when the mode becomes explicit, the load is repeated."""
    driver = Driver()
    driver.add(program("a"), program("b"), resident=False)
    gone, other = driver.request("a"), driver.request("b")
    driver.arrive(gone)
    driver.arrive(other)
    driver.cancel(gone)
    assert driver.abandoning == {"a"}
    request = driver.request("a")
    driver.arrive(request)
    driver.change(on_demand=False)
    assert driver.outcome(other) is Reason.NOT_RESIDENT

    assert driver.abandon_load("a") == [LoadWeights("a", 2)]
    driver.settle()
    assert driver.outcome(request) is Outcome.ANSWERED


def test_weights_come_on_demand_again_when_the_control_plane_lets_them() -> None:
    """When the mode is no longer explicit, requests cause loads and evictions again."""
    driver = explicit(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.change(on_demand=True)

    assert driver.arrive(driver.request("b")) == [EvictWeights("a", 1), LoadWeights("b", 2)]


def test_nothing_of_what_is_to_go_starts() -> None:
    """While a model is to be evicted, none of its requests starts, even if the device has a free place."""
    driver = explicit(depth=2, launch_ahead_ms=0.0)
    driver.add(program("a", SINGLE))
    driver.arrive(*driver.requests_of(2))
    driver.evict("a")
    wakeup = driver.scheduler.next_wakeup()

    assert wakeup is None
    assert len(driver.executing) == 1
    assert not executions(driver.finish())

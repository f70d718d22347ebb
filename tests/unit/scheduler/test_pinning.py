"""Pinned weights, also beyond the budget, and what the budget means for other weights."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rsrv.scheduler.events import (
    CallerError,
    EvictWeights,
    GiveUp,
    LoadWeights,
    Outcome,
    Pinned,
    SettingsChanged,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, program


def budgeted(budget: int, *, depth: int = 1) -> Driver:
    return Driver(SchedulerSettings(weight_budget_bytes=budget, depth=depth))


def held(driver: Driver) -> tuple[int, int]:
    """Return the bytes of weights on the device or loading, and the pinned bytes."""
    snapshot = driver.scheduler.snapshot()
    return snapshot.weight_bytes, snapshot.pinned_bytes


def test_a_pinned_model_is_loaded_before_its_first_request() -> None:
    """Pinned weights load when the model is added, and stay when another model needs room."""
    driver = budgeted(200)
    driver.add(program("a", pinned=True), resident=False)
    assert driver.loading.keys() == {"a"}
    driver.load("a")
    driver.add(program("b"))
    driver.add(program("c"), resident=False)
    driver.arrive(driver.request("c"))

    assert driver.resident == {"a"}
    assert driver.loading.keys() == {"c"}


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_pinned_model_whose_load_fails_is_tried_again_by_itself(on_demand: bool) -> None:
    """If the load of a pinned model fails, it is retried after 1 s, 2 s, and so on up to a minute, until it succeeds."""
    driver = budgeted(200)
    driver.change(on_demand=on_demand)
    driver.add(program("a", pinned=True), resident=False)
    rests = []
    for _ in range(8):
        assert GiveUp("a", "no such file") in driver.fail_load("a")
        assert not driver.loading
        wakeup = driver.scheduler.next_wakeup()
        assert wakeup is not None
        rests.append(round(wakeup - driver.now))
        driver.tick(wakeup)
        assert driver.loading.keys() == {"a"}
    driver.load("a")

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    driver.tick(driver.now + 100)
    assert driver.resident == {"a"}
    assert driver.scheduler.next_wakeup() is None


def test_pinned_models_go_beyond_the_budget() -> None:
    """Two pinned models of 100 bytes each are resident despite a budget of 50 bytes.

    In addition, one unpinned model at a time is loaded and served.
    """
    driver = budgeted(50)
    driver.add(program("a", pinned=True), program("b", pinned=True), resident=False)
    driver.load("a")
    driver.load("b")
    driver.add(program("c"), program("d"), resident=False)
    for name in "cd":
        request = driver.request(name)
        driver.arrive(request)
        driver.load(name)
        driver.finish_all()

        assert driver.outcome(request) is Outcome.ANSWERED
        assert driver.resident == {"a", "b", name}
    assert held(driver) == (300, 200)


def test_what_is_pinned_while_it_is_there_stays() -> None:
    """If a resident model is pinned, it stays. Another model is evicted in its place, even if it was used later."""
    driver = budgeted(200)
    driver.add(program("a"), program("b"))
    driver.add(program("c"), resident=False)
    driver.arrive(driver.request("b"))
    driver.finish_all()

    assert driver.send(Pinned("a", True)) == []
    assert driver.arrive(driver.request("c")) == [EvictWeights("b", 2), LoadWeights("c", 3)]


def test_an_unpinned_model_is_evicted_again() -> None:
    """After unpinning, the least recently used model is evicted, pinned before or not."""
    driver = budgeted(200)
    driver.add(program("a", pinned=True), program("b"))
    driver.add(program("c"), resident=False)

    assert driver.send(Pinned("a", False)) == []
    assert driver.arrive(driver.request("c")) == [EvictWeights("a", 1), LoadWeights("c", 3)]


def test_unpinning_what_is_above_the_budget_evicts_a_model() -> None:
    """Two pinned models are resident, and the budget is enough for one. When both are unpinned, one is evicted at once."""
    driver = budgeted(100)
    driver.add(program("a", pinned=True), program("b", pinned=True))

    assert driver.send(Pinned("a", False)) == []
    assert driver.send(Pinned("b", False)) == [EvictWeights("a", 1)]
    assert held(driver) == (100, 0)


def test_pinning_twice_is_pinning_once() -> None:
    """A second pin of the same model changes nothing. One event unpins it."""
    driver = budgeted(100)
    driver.add(program("a"))
    for pinned in (True, True, False, False):
        assert driver.send(Pinned("a", pinned)) == []

    assert held(driver) == (100, 0)


def test_pinning_an_absent_model_makes_room_for_it() -> None:
    """A pin evicts even models with requests. An executing model is evicted after its execution, and then the load begins."""
    driver = budgeted(200)
    driver.add(program("a"), program("b"))
    driver.add(program("c", weight_bytes=200), resident=False)
    driver.arrive(driver.request("a"), driver.request("b"))

    assert driver.send(Pinned("c", True)) == []
    running = next(iter(driver.executing.values())).model
    assert driver.resident == {"a", "b"}
    driver.finish()

    assert driver.loading.keys() == {"c"}
    assert running not in driver.resident


def test_pinning_while_the_load_is_under_way_keeps_it_under_way() -> None:
    """If a model is pinned during its load, the load is not abandoned, even if its client leaves and another model waits."""
    driver = budgeted(100)
    driver.add(program("a"), program("b"), resident=False)
    request = driver.request("a")
    driver.arrive(request)
    driver.send(Pinned("a", True))
    driver.cancel(request)
    driver.arrive(driver.request("b"))

    assert driver.abandoning == set()
    driver.load("a")
    assert driver.resident == {"a"}
    assert held(driver) == (200, 100)


def test_unpinning_while_the_load_is_under_way_lets_it_go() -> None:
    """If a model is unpinned during its load, and no request waits for it, the load is abandoned for a waiting model."""
    driver = budgeted(100)
    driver.add(program("a", pinned=True), program("b"), resident=False)
    driver.arrive(driver.request("b"))
    driver.send(Pinned("a", False))

    assert driver.abandoning == {"a"}
    driver.abandon_load("a")
    assert driver.loading.keys() == {"b"}
    assert held(driver) == (100, 0)


def test_unpinning_what_still_waits_for_room_withdraws_the_wish() -> None:
    """If a pinned model is unpinned while its load still waits for free memory, it is not loaded."""
    driver = budgeted(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.arrive(driver.request("a"))
    driver.send(Pinned("b", True))
    driver.send(Pinned("b", False))
    driver.finish_all()

    assert driver.resident == {"a"}
    assert not driver.loading


def test_pinning_while_it_executes_and_unpinning_after() -> None:
    """Pinned bytes are correct when a model is pinned and unpinned during its execution. Weights in use are not evicted."""
    driver = budgeted(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.arrive(driver.request("a"))
    driver.send(Pinned("a", True))
    driver.arrive(driver.request("b"))
    assert driver.resident == {"a"}
    assert driver.loading.keys() == {"b"}
    driver.send(Pinned("a", False))
    driver.load("b")
    driver.finish_all()
    driver.load("b")
    driver.finish_all()

    assert driver.resident == {"b"}
    assert held(driver) == (100, 0)


def test_an_unpinned_twin_keeps_what_is_pinned_out_of_the_count() -> None:
    """An unpinned model takes no bytes of the budget if a pinned model has the same tensors. So another model can be loaded."""
    driver = budgeted(0)
    driver.add(program("a", tensors={"t": 100}, pinned=True), program("b", tensors={"t": 100}))
    driver.add(program("c", weight_bytes=10), resident=False)
    driver.arrive(driver.request("c"))

    assert "a" in driver.resident
    assert driver.loading.keys() == {"c"}


def test_pins_of_unknown_models_are_refused() -> None:
    """A pin of an unknown model is refused, and the error names it."""
    driver = Driver()

    with pytest.raises(CallerError, match="there is no model 'x'"):
        driver.send(Pinned("x", True))


def test_a_pinned_model_whose_load_fails_is_given_up() -> None:
    """If the load of a pinned model fails, this is reported once.

    A request does not cause a load before the back-off ends.
    """
    driver = budgeted(100)
    driver.add(program("a", pinned=True), resident=False)
    driver.fail_load("a")

    assert driver.given_up == ["a"]
    driver.arrive(driver.request("a"))
    assert not driver.loading
    driver.tick(1.0)
    assert driver.loading.keys() == {"a"}


# --- warm-up -----------------------------------------------------------------------------------------------


def test_a_model_that_warms_up_keeps_its_weights() -> None:
    """A model that warms up keeps its weights until the warm-up has ended, even if another model is pinned."""
    driver = budgeted(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False, warm_up=True)
    driver.load("b")
    assert driver.warming == {"b"}
    driver.arrive(driver.request("a"))
    driver.send(Pinned("a", True))
    assert driver.resident == {"b"}

    driver.warm_up_ends("b")

    assert driver.loading.keys() == {"a"}


def test_models_that_are_added_at_once_never_take_more_than_the_budget() -> None:
    """Three models are added, and the budget is enough for one. Each is loaded, warmed up, and evicted for the next one."""
    driver = budgeted(100)
    driver.add(program("a"), program("b"), program("c"), resident=False, warm_up=True)
    seen: list[str] = []
    while driver.loading or driver.warming:
        assert held(driver)[0] <= 100
        if driver.loading:
            seen.append(*driver.loading)
            driver.load(seen[-1])
        else:
            driver.warm_up_ends(seen[-1])

    assert seen == ["a", "b", "c"]


def test_a_model_that_is_removed_while_it_warms_up_leaves_afterwards() -> None:
    """If a model is removed during its warm-up, its weights stay until the warm-up has ended."""
    driver = budgeted(100)
    driver.add(program("a"), resident=False, warm_up=True)
    driver.load("a")
    assert driver.remove("a") == []
    assert driver.scheduler.knows("a")

    assert driver.warm_up_ends("a") == [EvictWeights("a", 1)]
    assert not driver.scheduler.knows("a")


def test_a_model_that_is_removed_while_it_loads_ends_the_load() -> None:
    """If a model is removed during its load, the load is abandoned.

    If it still succeeds, the weights are evicted at its end.
    """
    for late in (True, False):
        driver = budgeted(100)
        driver.add(program("a"), resident=False, warm_up=True)
        driver.remove("a")
        assert driver.abandoning == {"a"}
        if late:
            assert driver.load("a") == [EvictWeights("a", 1)]
        else:
            assert driver.abandon_load("a") == []
        assert not driver.scheduler.knows("a")
        assert held(driver) == (0, 0)


def test_unpinning_does_not_withdraw_a_warm_up() -> None:
    """If a model is unpinned before there is room for its warm-up, it is still loaded and warmed up later."""
    driver = budgeted(100)
    driver.add(program("a"))
    driver.arrive(driver.request("a"))
    driver.add(program("b", pinned=True), resident=False, warm_up=True)
    driver.send(Pinned("b", False))
    driver.finish_all()

    assert driver.loading.keys() == {"b"}


def test_pinned_models_come_before_those_with_waiting_requests() -> None:
    """When the link is free, a pinned model is loaded before a model with an older request."""
    driver = budgeted(300)
    driver.add(program("a"), program("b"), program("c"), resident=False)
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b"))
    driver.send(Pinned("c", True))
    driver.load("a")

    assert driver.loading.keys() == {"c"}


# --- the budget changes ------------------------------------------------------------------------------------


def shrink(driver: Driver, budget: int) -> None:
    driver.send(SettingsChanged(replace(driver.settings, weight_budget_bytes=budget)))


def test_a_smaller_budget_holds_at_once() -> None:
    """If the budget falls, the least recently used models are evicted at once, until the others fit."""
    driver = budgeted(300)
    driver.add(program("a"), program("b"), program("c"))
    shrink(driver, 150)

    assert driver.resident == {"c"}


def test_what_executes_leaves_for_a_smaller_budget_when_it_has_ended() -> None:
    """If the budget falls, an executing model stays until its execution has ended. Idle models are evicted at once."""
    driver = budgeted(300)
    driver.add(program("a"), program("b", weight_bytes=200))
    driver.arrive(driver.request("b"))
    shrink(driver, 100)
    assert driver.resident == {"b"}
    driver.finish_all()

    # A model that exceeds the budget may stay while no other model is resident.
    assert driver.resident == {"b"}
    driver.arrive(driver.request("a"))
    assert driver.resident == set()


def test_a_smaller_budget_spares_those_with_work() -> None:
    """If the budget falls, an idle model is evicted before one with waiting requests, even if it was used later."""
    driver = budgeted(300)
    driver.add(program("a"), program("b"), program("c"))
    driver.arrive(driver.request("b"))
    driver.finish_all()
    driver.arrive(driver.request("c"))
    driver.arrive(driver.request("a"))
    shrink(driver, 200)

    assert driver.resident == {"a", "c"}


def test_a_smaller_budget_evicts_only_models_that_free_bytes() -> None:
    """If the budget falls, the least recently used model stays if another resident model has all of its tensors."""
    driver = budgeted(200)
    driver.add(program("a", tensors={"t": 100}), program("b", weight_bytes=100))
    driver.add(program("c", tensors={"t": 100}))
    driver.arrive(driver.request("c"))
    shrink(driver, 100)

    assert driver.resident == {"a", "c"}


def test_a_model_that_is_evicted_with_work_comes_back_at_once() -> None:
    """If a resident model is added beside a model that exceeds the budget, both are evicted.

    The model that exceeds the budget has requests, so it is loaded again at once.
    """
    driver = budgeted(100)
    driver.add(program("small", weight_bytes=0), program("large", weight_bytes=300))
    driver.arrive(driver.request("small"))
    driver.arrive(driver.request("large"))
    driver.add(program("new"))

    assert driver.resident == {"small"}
    assert driver.loading.keys() == {"large"}


def test_what_a_newcomer_pins_makes_room() -> None:
    """Resident tensors exceed the budget, so a model waits for its load.

    When a pinned model with these tensors is added, the tensors no longer count against the budget, and the load begins at once.
    """
    driver = budgeted(0)
    driver.add(program("a", tensors={"t": 100}))
    driver.add(program("b", weight_bytes=0), resident=False)
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b"))
    assert not driver.loading
    driver.add(program("c", tensors={"t": 100}, pinned=True))

    assert driver.loading.keys() == {"b"}


def test_a_larger_budget_is_used_at_once() -> None:
    """A model that waits for room is loaded at once when the budget rises."""
    driver = budgeted(100)
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b"))
    assert not driver.loading
    shrink(driver, 200)

    assert driver.loading.keys() == {"b"}
    assert driver.scheduler.snapshot().models["b"].residency == "loading"


@pytest.mark.parametrize("fits", [2, 3, 5])
def test_traffic_goes_on_while_many_models_are_added(fits: int) -> None:
    """While fifty models are added and warmed up, four saturated models are served, with room for only a few."""
    device = Device(SchedulerSettings(weight_budget_bytes=100 * fits), validate_every=100)
    for name in "abcd":
        device.model(program(name, {(0, 1): 0.01}), load=0.1, resident=False)
    device.saturate("abcd")
    device.run(2.0)
    for number in range(50):
        device.model(program(f"new{number}"), load=0.1, resident=False, warm_up=True)
    before = dict(device.got)
    while any(device.loads[f"new{number}"] == 0 for number in range(50)):
        device.run(device.now + 1.0)
        assert device.now < 100.0

    during = {name: device.got[name] - before[name] for name in "abcd"}
    assert min(during.values()) > 0.2 * max(during.values())
    assert sum(during.values()) > 0.5 * (device.now - 2.0)


def test_models_are_added_though_those_with_work_find_no_room() -> None:
    """A new model is loaded for its warm-up, even if a model of low priority waits forever because no memory becomes free."""
    device = Device(SchedulerSettings(weight_budget_bytes=200, discipline="fifo"), validate_every=100)
    device.model(program("high", {(0, 1): 0.01}), load=0.01)
    device.model(program("also", {(0, 1): 0.01}), load=0.01)
    device.model(program("low", {(0, 1): 0.01}), load=0.01, resident=False)
    device.saturate(["high", "also"], priority=1)
    device.arrive(device.request("low", priority=9))
    for name in ("new", "newer"):
        device.model(program(name), load=0.01, resident=False, warm_up=True)
    device.run(5.0)

    assert device.loads["new"] == device.loads["newer"] == 1

"""Loads and evictions under a budget, and their cost."""

from __future__ import annotations

import itertools

import pytest

from rsrv.scheduler.events import EvictWeights, LoadWeights, Outcome, RequestsArrived
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import every_discipline, program

COST = {(0, 1): 0.010}


def budgeted(budget: int, discipline: str = "fair", *, factor: float = 4.0, depth: int = 1) -> Device:
    return Device(
        SchedulerSettings(
            discipline=discipline, weight_budget_bytes=budget, residency_factor=factor, depth=depth
        )
    )


def add(device: Device, names: str, *, fits: int, load: float = 0.1, weight: float = 1.0) -> None:
    """Add models of 100 bytes; the first `fits` are resident."""
    for number, name in enumerate(names):
        model = program(name, COST, weight_bytes=100, weight=weight)
        device.model(model, load=load, resident=number < fits)


def test_a_model_larger_than_the_budget_is_served_alone() -> None:
    """A model larger than the budget evicts all others. It stays until another model needs the room."""
    device = budgeted(100)
    add(device, "a", fits=1)
    device.model(program("big", COST, weight_bytes=101), resident=False)
    requests = [device.request("big"), device.request("big")]
    for request in requests:
        device.arrive(request)
        device.run(device.now + 1.0)

        assert device.outcome(request) is Outcome.ANSWERED
        assert device.resident == {"big"}
    device.arrive(device.request("a"))
    device.run(device.now + 1.0)

    assert device.resident == {"a"}


def test_the_least_recently_used_is_evicted_first() -> None:
    """Of three idle models, the one with the oldest last execution is evicted."""
    device = budgeted(300)
    add(device, "abcd", fits=3)
    for name in "bca":
        device.arrive(device.request(name))
        device.run(device.now + 0.1)

    assert device.arrive(device.request("d"))[:2] == [EvictWeights("b", 2), LoadWeights("d", 4)]


def test_no_model_is_evicted_in_vain() -> None:
    """For 60 bytes, only the model of 100 bytes is evicted, because the older one of 50 bytes would be evicted in vain."""
    device = budgeted(150)
    device.model(program("small", COST, weight_bytes=50))
    device.model(program("large", COST, weight_bytes=100))
    device.model(program("new", COST, weight_bytes=60), resident=False)
    device.arrive(device.request("new"))

    assert device.resident == {"small"}


def test_idle_models_are_evicted_before_those_with_work() -> None:
    """A model with waiting requests stays while an idle one can be evicted, even if that was used more recently."""
    device = budgeted(300)
    add(device, "abcd", fits=3)
    device.arrive(device.request("c"))
    device.run(0.2)
    device.arrive(*device.requests_of(3, "a"), *device.requests_of(3, "b"))
    device.arrive(device.request("d"))

    assert device.evictions == {"c": 1}


@every_discipline
def test_a_load_runs_beside_executions(discipline: str) -> None:
    """While a load takes 1 s, the device executes resident models without a pause."""
    device = budgeted(200, discipline)
    add(device, "ab", fits=1, load=1.0)
    device.saturate("a")
    device.arrive(device.request("b"))
    device.run(1.0)

    assert device.got["a"] >= 0.99


@every_discipline
def test_no_model_starves_while_half_of_the_models_fit(discipline: str) -> None:
    """Six models are saturated, and three of them fit on the device.

    Each gets a sixth of the device's time, and the device never pauses.
    """
    device = budgeted(300, discipline)
    add(device, "abcdef", fits=3)
    device.saturate("abcdef")
    device.run(15.0)

    assert sum(device.got.values()) >= 14.9
    assert [device.got[name] for name in "abcdef"] == pytest.approx([2.5] * 6, rel=0.15)


def test_shares_follow_weights_while_models_swap() -> None:
    """Two models of weight 10 and four models of weight 1 share a device on which three of them fit.

    They get time by weight, and all are served.
    """
    device = budgeted(300)
    add(device, "AB", fits=2, weight=10.0)
    add(device, "cdef", fits=1)
    device.saturate("ABcdef")
    device.run(30.0)

    light = [device.got[name] for name in "cdef"]
    assert min(light) > 0.0
    assert (device.got["A"] + device.got["B"]) / sum(light) == pytest.approx(5.0, rel=0.3)


@every_discipline
def test_weights_stay_for_a_multiple_of_their_load(discipline: str) -> None:
    """With a factor of 4, no model with work is evicted within four load times after its load. The device is rarely idle."""
    device = budgeted(300, discipline)
    add(device, "abcdef", fits=3, load=0.5)
    device.saturate("abcdef")
    since: dict[str, float] = {}
    stays: list[float] = []
    for _ in range(1500):
        before = set(device.resident)
        device.run(device.now + 0.01)
        for name in device.resident - before:
            since[name] = device.now
        stays += [device.now - since[name] for name in before - device.resident if name in since]

    assert len(stays) > 10
    assert min(stays) >= 4 * 0.5 - 0.02
    assert sum(device.got.values()) >= 0.95 * device.now


@every_discipline
def test_a_large_model_is_not_overtaken_on_the_link(discipline: str) -> None:
    """While the first model in line for the link does not fit on the device, a smaller model after it is not loaded first."""
    device = budgeted(100, discipline)
    device.model(program("busy", {(0, 1): 1.0}, weight_bytes=60))
    device.model(program("large", COST, weight_bytes=80), load=0.1, resident=False)
    device.model(program("small", COST, weight_bytes=40), load=0.1, resident=False)
    large, small = device.request("large"), device.request("small")
    device.arrive(device.request("busy"))
    device.arrive(large)
    device.arrive(small)
    device.run(5.0)

    first, second = device.started(large), device.started(small)
    assert first is not None
    assert second is not None
    assert 1.0 < first < second


def test_weights_that_committed_requests_wait_for_stay() -> None:
    """A model with a waiting sub-call stays on the device, even if another model needs its room."""
    device = budgeted(200)
    add(device, "abc", fits=2)
    device.arrive(device.request("a"))
    device.arrive(device.request("b", run=1), device.request("c"))
    device.tick(0.001)

    assert device.resident == {"a", "b"}
    device.run(2.0)
    assert all(finish.outcome is Outcome.ANSWERED for finish in device.ended.values())


def test_loads_that_take_no_time_do_not_loop() -> None:
    """If loads take no time and the residency factor is 0, models replace each other, and time passes."""
    device = budgeted(300, factor=0.0)
    add(device, "abcdef", fits=3, load=0.0)
    device.saturate("abcdef")
    device.run(5.0)

    assert sum(device.loads.values()) <= 2 * len(device.executed)
    assert [device.got[name] for name in "abcdef"] == pytest.approx([5 / 6] * 6, rel=0.15)


@pytest.mark.parametrize("budget", [100, 200, 300])
def test_everything_is_answered_when_load_ends(budget: int) -> None:
    """Six models get requests at once, and the device has room for some. All requests are answered."""
    device = budgeted(budget)
    add(device, "abcdef", fits=budget // 100)
    device.arrive(*(device.request(name) for name in "abcdef" for _ in range(20)))
    device.run(60.0)

    assert {finish.outcome for finish in device.ended.values()} == {Outcome.ANSWERED}
    assert len(device.ended) == 120


@every_discipline
def test_a_model_that_always_has_work_is_evicted_in_turn(discipline: str) -> None:
    """Two models are saturated, and one of them fits on the device. Both are served."""
    device = budgeted(100, discipline)
    add(device, "ab", fits=1)
    device.saturate("ab")
    device.run(10.0)

    assert device.got["b"] >= 2.0


@pytest.mark.parametrize("depth", [1, 2])
def test_all_models_are_served_if_one_more_fits_than_executes(depth: int) -> None:
    """If there is room for one more model than executions in flight, all models are served."""
    settings = SchedulerSettings(weight_budget_bytes=100 * (depth + 1), depth=depth, launch_ahead_ms=15.0)
    device = Device(settings)
    add(device, "abcdef", fits=depth + 1)
    device.saturate("abcdef")
    device.run(15.0)

    assert min(device.got.values()) >= 0.5


@every_discipline
@pytest.mark.parametrize("small", [1, 4])
def test_a_large_model_gets_its_room_from_busy_small_ones(discipline: str, small: int) -> None:
    """A large model fits only if all small models are evicted, including the executing models. It is served nevertheless."""
    device = budgeted(100, discipline)
    for number in range(small):
        device.model(program(f"s{number}", COST, weight_bytes=100 // small), load=0.1)
    device.model(program("large", COST, weight_bytes=100), load=0.5, resident=False)
    device.saturate(device.programs)
    device.run(20.0)

    assert device.got["large"] > 0.0


def test_a_priority_does_not_lock_cold_models_out() -> None:
    """Under `fair`, requests of a higher priority use up the share of their own model, so a cold model is served as well."""
    device = budgeted(300)
    add(device, "abcd", fits=3)
    device.saturate("abc", priority=4)
    device.saturate("d")
    device.run(20.0)

    assert device.got["d"] >= 2.0


def test_a_priority_does_not_lock_others_out_of_the_link() -> None:
    """Of four saturated models of priority 1, three fit on the device. A fifth model of default priority is loaded as well."""
    device = budgeted(300)
    add(device, "abcde", fits=3)
    device.saturate("abcd", priority=1)
    device.saturate("e")
    device.run(20.0)

    assert device.got["e"] >= 1.0


def test_a_client_that_thinks_does_not_cost_its_model_the_weights() -> None:
    """Three models share a device on which two of them fit. Each has one client that pauses for 1 ms after an answer.

    During this pause, the model has no work, but keeps its weights.
    """
    device = budgeted(200)
    add(device, "abc", fits=2)
    device.clients("abc", think=0.001)
    device.run(20.0)

    # Each of the two places on the device may spend 1 / (1 + residency_factor) of its time on loads, and a little more.
    assert sum(device.loads.values()) * 0.1 <= 2 * 0.21 * device.now


# --- found by random tests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@every_discipline
def test_launching_ahead_does_not_keep_a_model_on_the_device_for_ever(discipline: str, depth: int) -> None:
    """A resident model always has an execution in flight. It is evicted nevertheless when another model must be loaded."""
    device = budgeted(100, discipline=discipline, depth=depth)
    add(device, "xy", fits=1)
    device.saturate("x")
    device.run(1.0)
    late = device.request("y")
    device.arrive(late)
    device.run(3.0)

    assert device.answered(late) is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_large_model_gets_the_places_of_small_ones_at_any_depth(depth: int) -> None:
    """Four small models always have work. A large model that needs all their room is served within two seconds."""
    device = budgeted(400, depth=depth)
    add(device, "abcd", fits=4)
    device.model(program("large", weight_bytes=400), load=0.1, resident=False)
    device.saturate("abcd")
    device.run(1.0)
    late = device.request("large")
    device.arrive(late)
    device.run(3.0)

    assert device.answered(late) is not None


@pytest.mark.parametrize("seconds", [1.0, 10.0])
def test_a_long_load_into_free_room_is_no_claim_on_the_device(seconds: float) -> None:
    """After a long load into free room, a model gets equal shares. It gets no extra time for the duration of its load."""
    device = Device(SchedulerSettings())
    device.model(program("x", {(0, 1): 0.01}), load=seconds)
    device.model(program("y", {(0, 1): 0.01}), load=seconds, resident=False)
    device.saturate("xy")
    device.run(2 * seconds)
    starts = [start for start, _, execute in device.executed if execute.model == "x"]

    assert max(after - before for before, after in itertools.pairwise(starts)) <= 0.05


def test_room_that_a_shed_request_leaves_is_used_at_once() -> None:
    """When an execution starts, the first request in line for the link can no longer be in time, and is shed.

    The weights that are next in line are loaded at once.
    """
    device = budgeted(100, discipline="edf")
    device.model(program("x", {(0, 1): 1.5}, weight_bytes=50), load=0.05)
    device.model(program("big", {(0, 1): 0.1}, weight_bytes=100), load=0.01, resident=False)
    device.model(program("small", {(0, 1): 0.01}, weight_bytes=50), load=0.05, resident=False)
    device.arrive(device.request("x"))
    device.run(0.1)
    device.arrive(
        device.request("x", deadline=3.02), device.request("big", deadline=3.05), device.request("small")
    )
    device.run(1.6)

    assert device.loads == {"small": 1}


def test_a_model_that_found_no_room_for_the_next_request_is_loaded_when_there_is_some() -> None:
    """A request is shed because the device is busy. Afterwards, its model's weights are loaded for the next request."""
    device = budgeted(100, discipline="edf")
    device.model(program("a", {(0, 1): 0.03}, weight_bytes=100), load=0.1)
    device.model(program("b", weight_bytes=100), load=0.1, resident=False)
    device.arrive(device.request("a"))
    device.run(0.01)
    device.arrive(device.request("b", deadline=0.06))
    device.run(1.0)
    again = device.request("b", deadline=1.05)
    device.arrive(again)
    device.run(2.0)

    assert device.outcome(again) is Outcome.ANSWERED


@pytest.mark.parametrize("period", [0.1, 0.2, 0.5])
def test_models_whose_deadlines_are_shorter_than_loads_take_turns(period: float) -> None:
    """Two models have deadlines that are shorter than a load, and only one of the models fits on the device.

    Each stays for some requests before it is replaced.
    """
    device = budgeted(100, discipline="edf")
    for name in "ab":
        device.model(program(name, weight_bytes=100), load=0.1, resident=False)
    for number in range(int(30.0 / period)):
        at = period * number
        device.later(at, RequestsArrived((device.request("a", deadline=at + 0.05),)))
        at += period / 2
        device.later(at, RequestsArrived((device.request("b", deadline=at + 0.05),)))
    device.run(40.0)

    for name in "ab":
        own = [request for request in device.requests.values() if request.model == name]
        answered = [request for request in own if device.answered(request) is not None]
        assert len(answered) >= 0.2 * len(own)


def test_one_long_pause_does_not_end_the_protection_of_short_ones() -> None:
    """Two models share a device on which one fits. Each has a client that pauses for 10 ms after an answer.

    An hour without requests does not make later loads more frequent than before.
    """
    device = budgeted(100)
    add(device, "ab", fits=1)
    device.clients("ab", think=0.01)
    device.run(20.0)
    before = sum(device.loads.values())
    device.stop()
    device.run(3600.0)
    device.clients("ab", think=0.01)
    device.run(3620.0)

    assert sum(device.loads.values()) - before <= 1.25 * before


def test_a_model_that_waited_for_room_may_be_shed_while_executions_are_launched() -> None:
    """At depth 3, the second launch makes a deadline unreachable for a request that waited for room."""
    device = Device(
        SchedulerSettings(discipline="edf", weight_budget_bytes=300, depth=3, launch_ahead_ms=10_000.0)
    )
    for name, cost in (("a", 0.3), ("b", 0.3), ("c", 0.01)):
        device.model(program(name, {(0, 1): cost}, weight_bytes=100), load=1.0)
    device.model(program("cold", {(0, 1): 0.2}, weight_bytes=100), load=0.0, resident=False)
    late = device.request("cold", deadline=0.7)
    device.arrive(
        device.request("a", deadline=0.5),
        device.request("b", deadline=0.65),
        device.request("c", deadline=0.69),
        late,
    )
    device.run(1.0)

    assert device.outcome(late) is Outcome.SHED
    assert [execute.model for _, _, execute in device.executed] == ["a", "b", "c"]

"""Eviction: the orders of the policies, and the room that evictions make."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import EvictWeights, SettingsChanged
from rsrv.scheduler.eviction import (
    POLICIES,
    Resident,
    choose_victims,
    cost,
    lru,
    rate,
)
from rsrv.scheduler.settings import Eviction, SchedulerSettings
from rsrv.scheduler.weights import Arrivals, SharedTensorGroup, remember_arrivals
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import program

NOW = 1000.0


def asked(*times: float) -> Arrivals:
    arrivals: Arrivals = ()
    for t in times:
        arrivals = remember_arrivals(arrivals, 1, t)
    return arrivals


def every(gap: float, *, until: float = NOW, count: int = 100) -> Arrivals:
    """Return regular requests, the last of them `gap` before `until`."""
    return asked(*(until - gap * number for number in range(count, 0, -1)))


def own(size: int) -> SharedTensorGroup:
    """Return device tensors that no other model has."""
    group = SharedTensorGroup({}, size, [])
    group.users = 1
    return group


def idle(
    name: str, arrivals: Arrivals, *, size: int = 100, load: float = 0.01, used: float = 0.0
) -> Resident:
    return Resident(name, [own(size)], used, None, load, arrivals)


def order(*residents: Resident, now: float = NOW, policy: Eviction = "cost") -> str:
    """Return their names in order of eviction."""
    ranked = sorted(residents, key=lambda one: POLICIES[policy](one, now))
    return "".join(one.model for one in ranked)


# --- cost ----------------------------------------------------------------------------------------------------


def test_the_popular_stay_though_others_were_used_later() -> None:
    """Under cost, a model with ten requests a second outlives one with a single recent request."""
    popular, once = idle("p", every(0.1, until=NOW - 0.2), used=1.0), idle("o", asked(NOW - 0.15), used=2.0)

    assert order(popular, once) == "op"
    assert order(popular, once, policy="lru") == "po"


def test_a_newcomer_outlives_a_model_with_fewer_requests() -> None:
    """One request 2 s ago counts more than one every 20 s."""
    assert order(idle("n", asked(NOW - 2.0)), idle("o", every(20.0))) == "on"


def test_popularity_ages() -> None:
    """Ten requests a second an hour ago count less than one every 100 s until now."""
    yesterday = every(0.1, until=NOW)

    assert order(idle("y", yesterday), idle("n", every(100.0, until=NOW)), now=NOW) == "ny"
    assert order(idle("y", yesterday), idle("n", every(100.0, until=NOW + 3600)), now=NOW + 3600) == "yn"


def test_a_long_silence_is_forgotten_after_few_requests() -> None:
    """After years of one request a day, eight requests within seconds decide the rate."""
    arrivals = every(86400.0)
    for second in range(8):
        arrivals = remember_arrivals(arrivals, 1, NOW + second)

    assert arrivals == asked(*(NOW + second for second in range(8)))


def test_dear_loads_stay_and_large_weights_go() -> None:
    """With equal requests, the load seconds that a byte saves decide."""
    arrivals = every(1.0)

    assert order(idle("d", arrivals, load=0.1), idle("c", arrivals, load=0.01)) == "cd"
    assert order(idle("s", arrivals, size=10), idle("l", arrivals, size=1000)) == "ls"


def test_equal_values_go_by_the_latest_use() -> None:
    """Weights that load at once, or have no requests, have no value, and are ordered by their latest use."""
    free = idle("f", every(1.0), load=0.0, used=2.0), idle("g", asked(1.0), load=0.0, used=1.0)
    never = idle("n", (), used=4.0), idle("m", (), used=3.0)

    assert order(*free, *never) == "gfmn"


@given(st.lists(st.integers(1, 12), max_size=12))
def test_requests_that_come_together_are_as_many(batches: list[int]) -> None:
    """One event of several requests, or as many events at one moment: the memory is the same."""
    together: Arrivals = ()
    for moment, requests in enumerate(batches):
        together = remember_arrivals(together, requests, moment)

    assert together == asked(*(moment for moment, requests in enumerate(batches) for _ in range(requests)))


_times = st.lists(st.floats(0.0, NOW), max_size=12).map(sorted)


@given(_times, st.floats(1e-6, 100.0), st.floats(0.0, 1e6))
def test_any_history_gives_a_rate(times: list[float], grain: float, later: float) -> None:
    """For any history, the rate falls without requests, and is at most that of all requests within one grain."""
    arrivals = asked(*times)

    assert 0.0 <= rate(arrivals, NOW, grain) <= len(arrivals) / grain * 1.001
    assert rate(arrivals, NOW + later, grain) <= rate(arrivals, NOW, grain)
    assert (rate(arrivals, NOW, grain) > 0.0) == bool(times)


@given(_times, _times, st.sampled_from([1e-3, 60.0, 1e4]))
def test_time_has_no_unit(one: list[float], other: list[float], unit: float) -> None:
    """Slower requests and loads by the same factor leave the order unchanged."""
    for times in (one, other):
        slow = rate(asked(*(t * unit for t in times)), NOW * unit, 0.01 * unit)
        assert slow * unit == pytest.approx(rate(asked(*times), NOW, 0.01))


# --- any policy ----------------------------------------------------------------------------------------------

_resident = st.builds(
    lambda size, used, rank, load, arrivals: ([own(size)], used, rank, load, asked(*sorted(arrivals))),
    st.integers(0, 100),
    st.floats(0.0, NOW),
    st.none() | st.integers(0, 10),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.lists(st.floats(0.0, NOW), max_size=12),
)
_residents = st.lists(_resident, max_size=12).map(
    lambda several: [Resident(f"m{number}", *one) for number, one in enumerate(several)]
)


@given(_residents, st.integers(-10, 600), st.sampled_from(sorted(POLICIES)))
def test_room_is_made_exactly(residents: list[Resident], missing: int, policy: Eviction) -> None:
    """Enough if there is enough, none in vain, and none with work while idle ones are enough."""
    chosen = choose_victims(missing, residents, (), NOW, POLICIES[policy])

    if chosen is None:
        assert sum(one.bytes for one in residents) < missing
        return
    bytes_of = {one.model: one.bytes for one in residents}
    freed = [bytes_of[name] for name in chosen]
    assert len(set(chosen)) == len(chosen)
    assert sum(freed) >= missing
    assert all(sum(freed) - one < missing for one in freed)
    working = {one.model for one in residents if one.rank is not None}
    if sum(one.bytes for one in residents if one.rank is None) >= missing:
        assert not working & {*chosen}


@given(_residents, st.integers(0, 600))
def test_policies_order_only_idle_weights(residents: list[Resident], missing: int) -> None:
    """If all models have work, the discipline alone decides."""
    working = [one for one in residents if one.rank is not None]

    assert choose_victims(missing, working, (), NOW, cost) == choose_victims(missing, working, (), NOW, lru)


@given(_residents, st.randoms(use_true_random=False), st.sampled_from(sorted(POLICIES)))
def test_the_choice_does_not_depend_on_the_order_of_asking(
    residents: list[Resident], random: Random, policy: Eviction
) -> None:
    """Ties go by name: equal states give equal decisions."""
    some = [one for one in residents if one.rank is None]
    mixed = list(some)
    random.shuffle(mixed)

    assert choose_victims(150, some, (), NOW, POLICIES[policy]) == choose_victims(
        150, mixed, (), NOW, POLICIES[policy]
    )


# --- in the scheduler ----------------------------------------------------------------------------------------


def popular_and_latest(eviction: Eviction) -> Device:
    """Return a device with room for two of three: `p` had ten requests, and then `q` one."""
    device = Device(SchedulerSettings(weight_budget_bytes=200, eviction=eviction))
    for name in "pqr":
        one = program(name, {(0, 1): 0.01}, weight_bytes=100)
        device.model(one, load=0.1, resident=name != "r")
    for name in "ppppppppppq":
        device.arrive(device.request(name))
        device.run(device.now + 1.0)
    return device


def test_the_setting_decides() -> None:
    """lru evicts the popular model, cost the one with a single request."""
    gone = {}
    policies: tuple[Eviction, ...] = ("lru", "cost")
    for eviction in policies:
        device = popular_and_latest(eviction)
        out = device.arrive(device.request("r"))
        gone[eviction] = [one.model for one in out if isinstance(one, EvictWeights)]

    assert gone == {"lru": ["p"], "cost": ["q"]}


def test_popularity_is_known_when_the_policy_changes() -> None:
    """Requests are counted under lru, too."""
    device = popular_and_latest("lru")
    device.send(SettingsChanged(SchedulerSettings(weight_budget_bytes=200, eviction="cost")))
    device.arrive(device.request("r"))

    assert device.evictions == {"q": 1}


def test_popularity_outlives_eviction() -> None:
    """A popular model that was evicted for a large one stays after its return."""
    device = popular_and_latest("cost")
    device.model(program("large", {(0, 1): 0.01}, weight_bytes=200), load=0.1, resident=False)
    for name in ("large", "p", "q"):
        device.arrive(device.request(name))
        device.run(device.now + 2.0)
    assert device.resident == {"p", "q"}
    device.arrive(device.request("r"))
    device.run(device.now + 1.0)

    assert device.resident == {"p", "r"}


def test_an_unknown_policy_is_refused() -> None:
    """An unknown policy is refused by name with the known ones."""
    with pytest.raises(ValueError, match=r"eviction must be one of \['cost', 'lru'\], not 'random'"):
        SchedulerSettings(eviction="random")  # type: ignore[arg-type]

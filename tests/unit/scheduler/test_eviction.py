"""Eviction: the order of idle weights, and the room that evictions make."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import EvictWeights
from rsrv.scheduler.eviction import Resident, choose_victims
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.weights import SharedTensorGroup
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import program


def own(size: int) -> SharedTensorGroup:
    """Return a group of device tensors that only one model has."""
    group = SharedTensorGroup({}, size, [])
    group.users = 1
    return group


_resident = st.tuples(
    st.integers(0, 100).map(lambda size: [own(size)]),
    # Ties are frequent.
    st.sampled_from((0.0, 1.0, 1000.0)),
    st.none() | st.integers(0, 10),
)
_residents = st.lists(_resident, max_size=12).map(
    lambda several: [Resident(f"m{number}", *fields) for number, fields in enumerate(several)]
)


@given(_residents, st.integers(-10, 600))
def test_room_is_made_exactly(residents: list[Resident], missing: int) -> None:
    """The choice frees enough bytes, if that is possible.

    No chosen model could be left out. No model with work is chosen if idle models are enough.
    """
    chosen = choose_victims(missing, residents)

    if chosen is None:
        assert sum(resident.bytes for resident in residents) < missing
        return
    bytes_of = {resident.model: resident.bytes for resident in residents}
    freed = [bytes_of[name] for name in chosen]
    assert len(set(chosen)) == len(chosen)
    assert sum(freed) >= missing
    assert all(sum(freed) - size < missing for size in freed)
    working = {resident.model for resident in residents if resident.rank is not None}
    if sum(resident.bytes for resident in residents if resident.rank is None) >= missing:
        assert not working & {*chosen}


@given(_residents, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_asking(residents: list[Resident], random: Random) -> None:
    """Models with equal ranks are chosen by name, so the choice does not depend on the order of the models."""
    some = [resident for resident in residents if resident.rank is None]
    mixed = list(some)
    random.shuffle(mixed)

    assert choose_victims(150, some) == choose_victims(150, mixed)


def test_the_least_recently_used_weights_go_first() -> None:
    """The model that was used least recently is evicted first, even if it had more requests."""
    device = Device(SchedulerSettings(weight_budget_bytes=200))
    for name in "pqr":
        model = program(name, {(0, 1): 0.01}, weight_bytes=100)
        device.model(model, load=0.1, resident=name != "r")
    for name in "ppppppppppq":
        device.arrive(device.request(name))
        device.run(device.now + 1.0)

    out = device.arrive(device.request("r"))

    assert [instruction.model for instruction in out if isinstance(instruction, EvictWeights)] == ["p"]

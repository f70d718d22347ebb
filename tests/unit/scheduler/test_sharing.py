"""Models with equal tensors: a tensor is on the device once, and evictions count the bytes that they really free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import (
    CallerError,
    Event,
    EvictWeights,
    LoadWeights,
    Outcome,
    Program,
    WeightsLoaded,
)
from rsrv.scheduler.eviction import Resident, choose_victims, in_eviction_order
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.weight_states import WeightState
from rsrv.scheduler.weights import SharedTensorGroup, WeightAccounts
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, program

COST = {(0, 1): 0.010}
BASE = {"base": 100}


def tuned(name: str, own: int = 10) -> Program:
    """Return a model with the 100 bytes of the base and a tensor of its own."""
    return program(name, COST, tensors={**BASE, name: own})


def physical(driver: Driver) -> int:
    return driver.scheduler.snapshot().weight_bytes


def logical(driver: Driver) -> int:
    return driver.scheduler.snapshot().logical_bytes


def test_equal_tensors_are_counted_once() -> None:
    """Three models share a base of 100 bytes. The physical bytes count the base once, and the logical bytes three times."""
    driver = Driver()
    driver.add(tuned("a"), tuned("b"), tuned("c"))

    assert (physical(driver), logical(driver)) == (130, 330)


def test_equal_models_cost_nothing_more() -> None:
    """A second model with the same tensors takes no bytes. When one of the two models is evicted, no bytes are freed."""
    driver = Driver()
    driver.add(program("a", tensors=BASE), program("b", tensors=BASE))

    assert physical(driver) == 100
    assert driver.remove("a") == [EvictWeights("a", 1)]
    assert physical(driver) == 100
    driver.remove("b")
    assert physical(driver) == 0


def test_a_load_beside_its_relative_needs_room_for_what_differs() -> None:
    """With 10 bytes free, a model of 110 bytes is loaded without an eviction if 100 of its bytes are on the device."""
    driver = Driver(SchedulerSettings(weight_budget_bytes=120))
    driver.add(tuned("a"))
    driver.add(tuned("b"), resident=False)

    assert driver.arrive(driver.request("b")) == [LoadWeights("b", 2)]
    assert physical(driver) == 120


def test_a_newcomer_keeps_the_tensors_that_it_shares_with_the_evicted_model() -> None:
    """A model is evicted because 10 bytes are missing for a new one. Tensors that both models have stay on the device."""
    driver = Driver(SchedulerSettings(weight_budget_bytes=110))
    driver.add(tuned("a"))
    driver.add(tuned("b"), resident=False)

    assert driver.arrive(driver.request("b")) == [EvictWeights("a", 1), LoadWeights("b", 2)]
    assert physical(driver) == 110


def test_no_model_is_evicted_if_a_relative_keeps_its_bytes() -> None:
    """A new model needs 50 bytes. The least recently used model `a` is not evicted, because `b` has the same tensors.

    The model `c` is evicted, although it was used later than `a`.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=150))
    driver.add(program("a", tensors=BASE), program("b", tensors=BASE), program("c", weight_bytes=50))
    driver.add(program("new", weight_bytes=50), resident=False)
    execution = driver.arrive(driver.request("b"))
    assert execution

    driver.arrive(driver.request("new"))

    assert driver.resident == {"a", "b"}
    assert driver.loading.keys() == {"new"}


def test_no_model_is_evicted_for_bytes_that_the_newcomer_has_too() -> None:
    """The older model `a` is not evicted, because the new model needs all of its tensors. `c` is evicted."""
    driver = Driver(SchedulerSettings(weight_budget_bytes=150))
    driver.add(program("a", tensors=BASE), program("c", weight_bytes=50))
    driver.add(tuned("b", 50), resident=False)
    driver.arrive(driver.request("b"))

    assert driver.resident == {"a"}
    assert driver.loading.keys() == {"b"}


def test_weights_with_work_are_evicted_if_idle_ones_have_only_what_the_newcomer_needs() -> None:
    """A new model needs all tensors of the idle model `a`, so evicting `a` would free nothing.

    The model `c`, which has less urgent requests, is evicted.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=150, discipline="fifo"))
    driver.add(program("busy", weight_bytes=0), program("a", tensors=BASE), program("c", weight_bytes=50))
    driver.add(tuned("b", 50), resident=False)
    driver.arrive(driver.request("busy"))
    driver.arrive(driver.request("c", priority=9))
    driver.arrive(driver.request("b"))

    assert driver.resident == {"busy", "a"}
    assert driver.loading.keys() == {"b"}


def test_twins_go_together_when_one_does_not_free_enough() -> None:
    """If a new model needs the bytes of tensors that two models share, both models are evicted."""
    driver = Driver(SchedulerSettings(weight_budget_bytes=100))
    driver.add(program("a", tensors=BASE), program("b", tensors=BASE))
    driver.add(program("new", weight_bytes=100), resident=False)

    out = driver.arrive(driver.request("new"))

    assert out == [EvictWeights("a", 1), EvictWeights("b", 2), LoadWeights("new", 3)]


def test_work_that_waits_is_not_evicted_for_bytes_that_a_relative_keeps() -> None:
    """A new model needs the bytes of tensors that an executing model and an idle model share.

    Neither of the two is evicted before the execution has ended.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=100))
    driver.add(program("a", tensors=BASE), program("b", tensors=BASE))
    driver.add(program("new", weight_bytes=100), resident=False)
    driver.arrive(driver.request("b"))

    assert driver.arrive(driver.request("new")) == []
    driver.finish()

    assert driver.loading.keys() == {"new"}
    assert driver.resident == set()


def test_a_load_of_what_differs_tells_nothing_of_a_whole_one() -> None:
    """A load of only the missing tensors does not change the expected duration of a whole load."""
    driver = Driver()
    driver.add(tuned("a"))
    driver.add(tuned("b"), resident=False)
    driver.arrive(driver.request("b"))
    driver.load("b", 1.0)
    driver.finish_all()

    assert driver.scheduler.snapshot().models["b"].load_seconds == 0.0


def test_more_than_half_of_the_bytes_tell_of_the_whole() -> None:
    """A load that moves more than half of a model's bytes is used to estimate a whole load.

    Here, 60 of 100 bytes took 3 s, so a whole load is expected to take 5 s.
    """
    driver = Driver()
    driver.add(program("a", tensors={"base": 40}))
    driver.add(program("b", tensors={"base": 40, "b": 60}), resident=False)
    driver.arrive(driver.request("b"))
    driver.load("b", 3.0)

    assert driver.scheduler.snapshot().models["b"].load_seconds == pytest.approx(5.0)


def test_what_is_there_shortens_the_expected_wait() -> None:
    """Under `edf`, a request is not shed if the missing part of its model's weights can be loaded before the deadline.

    Nine tenths of the bytes are already on the device. A load of all bytes would take too long.
    """
    device = Device(SchedulerSettings(discipline="edf"))
    device.model(program("a", COST, tensors={"base": 90}))
    device.model(program("b", COST, tensors={"base": 90, "b": 10}), load=0.1, resident=False, expected=1.0)
    request = device.request("b", deadline=0.5)
    device.arrive(request)
    device.run(1.0)

    assert device.outcome(request) is Outcome.ANSWERED


def test_a_model_that_shares_all_with_a_larger_one_does_not_send_it_away() -> None:
    """A model that exceeds the budget may stay beside a smaller model if it contains all tensors of the smaller one.

    Both together take no more bytes than the larger model alone.
    """
    driver = Driver(SchedulerSettings(weight_budget_bytes=100))
    driver.add(program("part", tensors={"t": 60}))
    driver.add(program("big", tensors={"t": 60, "u": 60}), resident=False)
    driver.arrive(driver.request("part"))
    driver.arrive(driver.request("big"))
    driver.load("big")

    assert driver.resident == {"part", "big"}
    driver.finish_all()
    assert driver.resident == {"part", "big"}
    assert {finish.outcome for finish in driver.ended.values()} == {Outcome.ANSWERED}


def test_a_tensor_of_another_size_is_refused() -> None:
    """If a tensor has another size than the tensor with the same key, its model is refused, and the error names the tensor."""
    driver = Driver()
    driver.add(program("a", tensors=BASE))

    with pytest.raises(CallerError, match="tensor 'base' has 99 bytes here and 100 elsewhere"):
        driver.add(program("b", tensors={"base": 99}))
    assert list(driver.scheduler.snapshot().models) == ["a"]


def test_tensors_are_forgotten_with_their_last_model() -> None:
    """When the last model with a tensor is removed, another tensor with its key may have another size."""
    driver = Driver()
    driver.add(program("a", tensors=BASE), program("b", tensors=BASE), resident=False)
    driver.remove("a")
    driver.remove("b")
    driver.add(program("c", tensors={"base": 99}))

    assert physical(driver) == 99


def test_a_relative_that_comes_later_divides_what_is_there() -> None:
    """Models are added that share some tensors with a resident model. A tensor is freed when its last model is removed."""
    driver = Driver()
    driver.add(program("a", tensors={"t": 1, "u": 2, "v": 4}))
    driver.add(program("b", tensors={"u": 2, "v": 4, "w": 8}), program("c", tensors={"v": 4}))

    assert (physical(driver), logical(driver)) == (15, 25)
    for name, nbytes in (("a", 14), ("b", 4), ("c", 0)):
        driver.remove(name)
        assert physical(driver) == nbytes


def test_shared_tensors_are_pinned_by_each_of_their_models() -> None:
    """If two pinned models share tensors, the pinned bytes count these tensors once."""
    driver = Driver()
    driver.add(program("a", tensors={**BASE, "a": 1}, pinned=True))
    driver.add(program("b", tensors={**BASE, "b": 2}, pinned=True))

    assert driver.scheduler.snapshot().pinned_bytes == 103


# --- the choice of victims: a pure function ------------------------------------------------------------------

ranks = st.none() | st.tuples(st.integers(0, 3), st.integers(0, 3))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, set[int]], list[int], list[Resident], set[int]]:
    """Draw resident models with random tensors, and a new model that needs some of these tensors.

    Returns the tensors of each model, the size of each tensor, the evictable models, and the tensors that the new model needs.
    """
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    tensors = st.sets(st.integers(0, len(sizes) - 1))
    models = draw(st.lists(tensors, min_size=1, max_size=6))
    staying = draw(st.sets(st.integers(0, len(models) - 1)))
    keep = draw(tensors)
    groups = [SharedTensorGroup({number: size}, size, []) for number, size in enumerate(sizes)]
    for model in models:
        for number in model:
            groups[number].users += 1
    residents = [
        Resident(
            f"m{index}", [groups[n] for n in sorted(model)], draw(st.sampled_from([0.0, 1.0])), draw(ranks)
        )
        for index, model in enumerate(models)
        if index not in staying
    ]
    return {f"m{index}": model for index, model in enumerate(models)}, sizes, residents, keep


def freed(models: Mapping[str, set[int]], sizes: list[int], gone: Iterable[str], keep: set[int]) -> int:
    """Return how many bytes are freed if the models `gone` are evicted and the tensors `keep` stay."""
    gone = set(gone)
    stay = set().union(keep, *(tensors for name, tensors in models.items() if name not in gone))
    went = set().union(*(models[name] for name in gone))
    return sum(sizes[number] for number in went - stay)


@given(crowds(), st.integers(-3, 30))
def test_room_is_made_by_as_few_as_possible_in_order(
    crowd: tuple[dict[str, set[int]], list[int], list[Resident], set[int]], missing: int
) -> None:
    """The chosen victims are in the eviction order and free enough bytes. Without any one of them, the bytes are not enough.

    `choose_victims` returns None only if evicting all models would not free enough.
    """
    models, sizes, residents, keep = crowd
    groups = [group for resident in residents for group in resident.groups if set(group.tensors) <= keep]
    order = [resident.model for resident in in_eviction_order(residents)]

    victims = choose_victims(missing, residents, groups)

    if victims is None:
        assert freed(models, sizes, order, keep) < missing
        return
    if missing <= 0:
        assert victims == []
        return
    assert freed(models, sizes, victims, keep) >= missing
    for spared in victims:
        assert freed(models, sizes, [victim for victim in victims if victim != spared], keep) < missing
    assert victims == [model for model in order if model in victims]
    # The models before the last victim in the order do not free enough, so no later model than needed is chosen.
    before = order[: order.index(victims[-1])]
    assert freed(models, sizes, before, keep) < missing


models_of_tensors = st.dictionaries(
    st.sampled_from("abcdef"),
    st.sets(st.sampled_from("tuvwxyz")),
    max_size=6,
)


@given(models_of_tensors, st.data())
def test_groups_are_the_tensors_that_the_same_models_have(
    models: dict[str, set[str]], data: st.DataObject
) -> None:
    """For any order of changes, the bytes on the device are those of the union of the resident models' tensors."""
    size = {key: 2**number for number, key in enumerate("tuvwxyz")}
    weights = WeightAccounts(None)
    here = {}
    for name, keys in models.items():
        own = weights.add(program(name, tensors={key: size[key] for key in keys}))
        if data.draw(st.booleans()):
            weights.adopt(own)
        here[name] = own
        if data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(here)))
            if here[gone].state is WeightState.RESIDENT:
                weights.evict(here[gone])
            weights.groups.leave(here.pop(gone))
        present = set().union(*(models[model] for model, own in here.items() if own.epoch))
        assert weights.bytes == sum(size[key] for key in present)
        for other, own in here.items():
            assert own.bytes == sum(size[key] for key in models[other])
            assert own.absent_bytes == sum(size[key] for key in models[other] - present)


# --- how long loads take -----------------------------------------------------------------------------------


class _Paced(Device):
    """A device whose loads take 1 ms for each byte that they move."""

    def later(self, at: float, event: Event) -> None:
        if isinstance(event, WeightsLoaded):
            seconds = 0.001 * self.scheduler._models[event.model].weights.load_bytes
            at, event = self.now + seconds, WeightsLoaded(event.model, event.epoch, seconds)
        super().later(at, event)


@pytest.mark.parametrize("expected", [0.0, 0.11])
def test_relatives_take_turns_as_fast_as_what_differs_loads(expected: float) -> None:
    """Four models share the base, and the budget is enough for the base and two further tensors.

    No model waits as long as a load with the base would take.
    """
    device = _Paced(SchedulerSettings(weight_budget_bytes=102), validate_every=100)
    for name in "abcd":
        device.model(tuned(name, own=1), load=0.0, resident=False, expected=expected)
    device.saturate("abcd")
    device.run(5.0)

    for name in "abcd":
        starts = [start for start, _, execute in device.executed if execute.model == name and start > 1.0]
        assert max(after - before for before, after in pairwise(starts)) < 0.1
    assert sum(device.got.values()) > 0.8 * 5.0


def test_a_model_that_only_loaded_the_difference_estimates_a_whole_load() -> None:
    """If a model has only loaded its missing tensors, its whole load is estimated by the time per byte of another model."""
    device = _Paced(SchedulerSettings(weight_budget_bytes=1000))
    for name in "ab":
        device.model(tuned(name), load=0.0, resident=False)
        device.arrive(device.request(name))
        device.run(device.now + 1.0)

    models = device.scheduler.snapshot().models
    assert models["a"].load_seconds == pytest.approx(0.110)
    assert models["b"].load_seconds == pytest.approx(0.110)

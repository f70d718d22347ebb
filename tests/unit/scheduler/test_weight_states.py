"""The table of weight states. The tests take random steps in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.events import InvariantError
from rsrv.scheduler.weight_states import ON_DEVICE, TAKING_BYTES, TRANSITIONS, WeightEvent, WeightState
from rsrv.scheduler.weights import WeightAccounts
from tests.unit.scheduler.driver import program

#: Tensors of two models, which share "base".
TENSORS = {"a": {"base": 10, "a": 1}, "b": {"base": 10, "b": 2}}


@given(st.lists(st.tuples(st.sampled_from(sorted(TENSORS)), st.sampled_from(WeightEvent)), max_size=200))
def test_bytes_follow_the_table(events: list[tuple[str, WeightEvent]]) -> None:
    """Only events that the table allows in a state change the state and the bytes. Any other event raises an error."""
    accounts = WeightAccounts(None)
    models = {name: accounts.add(program(name, tensors=tensors)) for name, tensors in TENSORS.items()}
    for name, event in events:
        weights = models[name]
        before = weights.state
        after = TRANSITIONS.get((before, event))
        if after is None:
            with pytest.raises(InvariantError, match=f"{before.value} cannot take the event"):
                accounts.move(weights, event)
        else:
            accounts.move(weights, event)

        assert weights.state is (after or before)
        present = [TENSORS[model] for model, own in models.items() if own.state in TAKING_BYTES]
        assert accounts.bytes == sum(
            {key: size for tensor_sizes in present for key, size in tensor_sizes.items()}.values()
        )
        assert accounts.reserved == sum(account.state is WeightState.RESERVED for account in models.values())


def test_an_illegal_change_tells_the_history() -> None:
    """An event that is illegal in the present state, here an eviction, raises an error with the model's history."""
    weights = WeightAccounts(None).add(program("a"))
    weights.history.add(1.5, "added")

    with pytest.raises(InvariantError) as raised:
        WeightAccounts(None).move(weights, WeightEvent.EVICT)

    assert raised.value.model == "a"
    assert raised.value.history == ("t=1.500000 added",)


def test_weights_come_to_the_device_by_a_load_or_with_their_model() -> None:
    """Weights come to the device only by a load, or together with their new model. They leave it only by an eviction."""
    arrives = {event for (state, event), after in TRANSITIONS.items() if after in ON_DEVICE - {state}}
    leaves = {
        event
        for (state, event), after in TRANSITIONS.items()
        if state in ON_DEVICE and after not in ON_DEVICE
    }

    assert {event for event in arrives if (WeightState.ABSENT, event) in TRANSITIONS} == {WeightEvent.ADOPT}
    assert {event for event in arrives if (WeightState.LOADING, event) in TRANSITIONS} == {WeightEvent.LOADED}
    assert leaves == {WeightEvent.EVICT}

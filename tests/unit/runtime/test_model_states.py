"""The states of a model in the runtime."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.catalog import Catalog, FeedEntry, StateFeed
from rsrv.runtime.model_states import (
    BUILDING,
    ENDING,
    TRANSITIONS,
    LifecycleError,
    LifecycleEvent,
    LifecycleState,
)
from rsrv.runtime.policy import Policy
from rsrv.settings import load_settings
from rsrv.wire.memory import BOARD_SLOTS


class Feed:
    """A fake feed that has the entries of all keys."""

    def __init__(self) -> None:
        self.entries: dict[str, FeedEntry] = {}

    def put(self, key: str, entry: FeedEntry) -> None:
        self.entries[key] = entry

    def gone(self, key: str) -> None:
        self.entries.pop(key, None)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(LifecycleEvent)), max_size=30))
def test_a_life_goes_on_by_the_table_or_not_at_all(events: list[tuple[str, LifecycleEvent]]) -> None:
    """A model's state changes only with the events of the transition table. All other events raise an error.

    The catalog's sets of keys follow the states.
    """
    feed: Any = Feed()
    catalog = Catalog(Policy(load_settings()), cast(StateFeed, feed))
    states: dict[str, LifecycleState] = {}
    for key, event in events:
        if key not in states:
            states[key] = catalog.add(key, key, "digest").state
        following = TRANSITIONS.get((states[key], event))
        if following is None:
            with pytest.raises(LifecycleError, match=f"model {key} is {states[key]}"):
                catalog.advance(key, event)
        elif following is LifecycleState.GONE:
            catalog.advance(key, event)
            del states[key]
        else:
            catalog.advance(key, event)
            states[key] = following
        assert {key: entry.state for key, entry in catalog.entries.items()} == states
        assert catalog.building == {key for key, state in states.items() if state in BUILDING}
        assert catalog.ending == {key for key, state in states.items() if state in ENDING}
        assert feed.entries.keys() <= states.keys()


def test_an_illegal_event_raises_with_the_models_history() -> None:
    """The error for an illegal event lists the earlier events of the model."""
    feed: Any = Feed()
    catalog = Catalog(Policy(load_settings()), cast(StateFeed, feed))
    catalog.add("a@1", "a", "digest")
    catalog.advance("a@1", LifecycleEvent.MODULES_READ)
    history = "\n  t=.* model reading why=registered\n  t=.* model compiling why=modules read"
    with pytest.raises(LifecycleError, match=f"a@1 is compiling, and cannot be released now{history}"):
        catalog.advance("a@1", LifecycleEvent.RELEASED)


def test_a_model_that_is_gone_gives_its_slot_to_another() -> None:
    """A slot on the board is reused after its model has gone, so that thousands of models can follow one another."""
    feed: Any = Feed()
    catalog = Catalog(Policy(load_settings()), cast(StateFeed, feed))
    others = {catalog.add(f"{name}@1", name, "digest").slot for name in "ab"}
    for _ in range(BOARD_SLOTS):
        slot = catalog.add("c@1", "c", "digest").slot
        assert slot not in {0, *others}
        catalog.advance("c@1", LifecycleEvent.FAILED)
        catalog.advance("c@1", LifecycleEvent.RELEASED)

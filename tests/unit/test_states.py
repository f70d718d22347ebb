"""The diagrams on the page about states show the tables of transitions in the code."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from importlib import import_module

import pytest

import state_diagrams as tool


def test_the_page_is_current() -> None:
    """The diagrams on the page are made from the current tables. `make pages` draws them again."""
    page = tool.PAGE.read_text(encoding="utf-8")

    assert tool.rewrite(page) == page


@pytest.mark.parametrize(
    "module",
    [
        *tool.TABLES.values(),
        "rsrv.control.bundle_states",
        "rsrv.runtime.sequences",
        "rsrv.runtime.generations",
    ],
)
def test_every_state_is_reached_and_every_event_is_used(module: str) -> None:
    """The table reaches every state and uses every event. Any other state or event could never occur."""
    transitions: Mapping[tuple[StrEnum, StrEnum], StrEnum] = import_module(module).TRANSITIONS
    (first, event), *_ = transitions
    states, events = list(type(first)), list(type(event))

    assert {first, *transitions.values()} == set(states)
    assert {event for _, event in transitions} == set(events)


def test_a_page_without_markers_is_refused() -> None:
    """A page without markers for the diagrams is refused, because its old diagrams would never be replaced."""
    with pytest.raises(ValueError, match="<!-- weights -->"):
        tool.rewrite("")

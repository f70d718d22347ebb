"""The most hits that anybody could have."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.eviction import POLICIES, Resident, make_room
from rsrv.scheduler.settings import Eviction
from rsrv.scheduler.weights import SharedTensorGroup, Uses, remember
from rsrv.sim.belady import most_hits


def tried(requests: str, room: int, resident: str) -> int:
    """The most hits of all ways to evict."""

    @cache
    def best(index: int, there: frozenset[str]) -> int:
        if index == len(requests):
            return 0
        name = requests[index]
        if name in there:
            return 1 + best(index + 1, there)
        if len(there) < room:
            return best(index + 1, there | {name})
        return max(best(index + 1, there - {victim} | {name}) for victim in there)

    return best(0, frozenset(resident))


def _own() -> SharedTensorGroup:
    """A byte on the device that nobody else has."""
    group = SharedTensorGroup({}, 1, [])
    group.users = 1
    return group


def had(requests: str, room: int, policy: Eviction) -> int:
    """The hits of a policy that loads at once, a second between two requests."""
    uses: dict[str, Uses] = {}
    there: dict[str, float] = {}
    hits = 0
    for now, name in enumerate(requests):
        if name in there:
            hits += 1
        else:
            idle = [Resident(one, [_own()], used, None, 0.01, uses[one]) for one, used in there.items()]
            for victim in make_room(len(there) + 1 - room, idle, (), now, POLICIES[policy]) or ():
                del there[victim]
        there[name] = now
        uses[name] = remember(uses.get(name, ()), 1, now)
    return hits


def test_the_furthest_gives_way() -> None:
    """A worked example: room for two, and c comes while a is asked for next. b goes; lru would have let a go."""
    assert most_hits("abcabc", 2) == 2
    assert had("abcabc", 2, "lru") == 0


def test_what_is_there_at_first_counts() -> None:
    """And what is never asked for goes first."""
    assert most_hits("aba", 2, "ax") == 2
    assert most_hits("", 1) == 0


@given(st.text("abcde", max_size=9), st.integers(1, 4), st.sets(st.sampled_from("abx")))
def test_nothing_that_can_be_tried_is_better(requests: str, room: int, resident: set[str]) -> None:
    """Against all ways to evict."""
    several = "".join(sorted(resident))[:room]

    assert most_hits(requests, room, several) == tried(requests, room, several)


@given(st.text("abcdefgh", max_size=60), st.integers(1, 6), st.sampled_from(sorted(POLICIES)))
def test_no_policy_has_more(requests: str, room: int, policy: Eviction) -> None:
    """Those of the scheduler, where they load at once."""
    assert had(requests, room, policy) <= most_hits(requests, room)


@given(st.text("abcdefgh", max_size=60), st.integers(1, 6))
def test_room_never_hurts(requests: str, room: int) -> None:
    """More room, no fewer hits; with room for all, only each model's first request misses."""
    assert most_hits(requests, room) <= most_hits(requests, room + 1)
    assert most_hits(requests, 8) == len(requests) - len(set(requests))


@pytest.mark.parametrize(("room", "resident"), [(0, ""), (1, "ab")])
def test_room_that_is_none_is_refused(room: int, resident: str) -> None:
    """Not even for what is there."""
    with pytest.raises(ValueError, match="room must be for at least"):
        most_hits("a", room, resident)

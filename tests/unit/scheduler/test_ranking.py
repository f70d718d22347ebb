"""The index behind every choice among models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.ranking import Ranking


def test_nobody_is_first_among_nobody() -> None:
    """An empty ranking has no first name."""
    assert Ranking().first() is None


def test_a_changed_rank_counts_at_once() -> None:
    """The rank that was set last decides, in both directions."""
    ranking = Ranking()
    ranking.set("a", 1)
    ranking.set("b", 2)
    ranking.set("a", 3)

    assert ranking.first() == "b"
    ranking.set("a", 1)
    assert ranking.first() == "a"


def test_a_discarded_name_is_out() -> None:
    """It is not first any more, and discarding it again or discarding strangers does nothing."""
    ranking = Ranking()
    ranking.set("a", 1)
    ranking.set("b", 2)
    ranking.discard("a")
    ranking.discard("a")
    ranking.discard("stranger")

    assert (ranking.first(), list(ranking), "a" in ranking, len(ranking)) == ("b", ["b"], False, 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 1000)), max_size=300))
def test_first_is_the_smallest(changes: list[tuple[int, int | None]]) -> None:
    """After any changes the first name has the minimal rank, and the index stays small."""
    ranking = Ranking()
    ranks: dict[str, int] = {}
    for number, rank in changes:
        name = f"m{number}"
        if rank is None:
            ranking.discard(name)
            ranks.pop(name, None)
        else:
            ranking.set(name, rank)
            ranks[name] = rank

        assert ranking.first() == (min(ranks, key=lambda n: (ranks[n], n)) if ranks else None)
        assert len(ranking._heap) <= 80

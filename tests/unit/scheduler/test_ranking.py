"""The index behind every choice among models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.ranking import Ranking


def test_an_empty_ranking_has_no_first_name() -> None:
    """An empty ranking has no first name."""
    assert Ranking[str]().first() is None


def test_a_changed_rank_counts_at_once() -> None:
    """The rank that was set last decides, in both directions."""
    ranking: Ranking[str] = Ranking()
    ranking.set("a", 1)
    ranking.set("b", 2)
    ranking.set("a", 3)

    assert ranking.first() == "b"
    ranking.set("a", 1)
    assert ranking.first() == "a"


def test_a_deleted_name_is_not_first() -> None:
    """A deleted name is skipped, although its entry is still in the heap."""
    ranking: Ranking[str] = Ranking()
    ranking.set("a", 1)
    ranking.set("b", 2)
    del ranking["a"]

    assert (ranking.first(), list(ranking), "a" in ranking, len(ranking)) == ("b", ["b"], False, 1)


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 1000)), max_size=300))
def test_first_is_the_smallest(changes: list[tuple[int, int | None]]) -> None:
    """After any changes the first name has the minimal rank, and the index stays small."""
    ranking: Ranking[str] = Ranking()
    ranks: dict[str, int] = {}
    for number, rank in changes:
        name = f"m{number}"
        if rank is None:
            ranking.pop(name, None)
            ranks.pop(name, None)
        else:
            ranking.set(name, rank)
            ranks[name] = rank

        assert ranking.first() == (min(ranks, key=lambda n: (ranks[n], n)) if ranks else None)
        assert len(ranking._heap) <= 80

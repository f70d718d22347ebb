"""The index behind every choice among models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.ranking import Ranking


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
        assert (set(ranking), len(ranking)) == (set(ranks), len(ranks))
        assert (name in ranking) is (name in ranks)
        assert len(ranking._heap) <= 80

"""The index that each choice among models uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.scheduler.ranking import Ranking


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 1000)), max_size=300))
def test_first_is_the_smallest(changes: list[tuple[int, int | None]]) -> None:
    """After any changes, the first name is the one with the smallest rank, and the index stays small."""
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


def test_names_leave_in_order_after_many_changes() -> None:
    """Each of 50 names changes its rank nine times, so the index drops stale entries.

    Names leave in the order of their latest ranks.
    """
    ranking: Ranking[str] = Ranking()
    for turn in range(10):
        for number in range(50):
            ranking.set(f"m{number}", (number * 37 + turn * 11) % 101)
    expected = sorted(ranking, key=lambda name: (ranking[name], name))

    order = []
    while (first := ranking.first()) is not None:
        order.append(first)
        del ranking[first]

    assert order == expected

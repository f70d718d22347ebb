"""Names in order of a rank that changes: the index behind every choice among models."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

#: anything that compares with the ranks of the same index, smaller is first.
Rank = Any

#: what is ranked: models by their keys, or runs by their ids.
Name = TypeVar("Name", str, int)

#: below this many the heap is never cleaned.
_SMALL = 64


class Ranking(Generic[Name]):
    """A heap in which a changed rank is pushed again, and what it was before is dropped when it surfaces.

    Setting costs O(log n), everything else O(1) amortised; memory stays in proportion to the names. Equal
    ranks go by name.
    """

    __slots__ = ("_heap", "_ranks")

    def __init__(self) -> None:
        #: every name's current rank. What the heap says beyond that is stale.
        self._ranks: dict[Name, Rank] = {}
        self._heap: list[tuple[Rank, Name]] = []

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, name: Name) -> bool:
        return name in self._ranks

    def __iter__(self) -> Iterator[Name]:
        """All names, in no order."""
        return iter(self._ranks)

    def rank(self, name: Name) -> Rank:
        """Its current rank. Raises KeyError for a name that has none."""
        return self._ranks[name]

    def set(self, name: Name, rank: Rank) -> None:
        """Add a name, or give it another rank."""
        if self._ranks.get(name) == rank:
            return
        self._ranks[name] = rank
        heappush(self._heap, (rank, name))
        if len(self._heap) > _SMALL + 2 * len(self._ranks):
            self._heap = [(rank, name) for name, rank in self._ranks.items()]
            heapify(self._heap)

    def discard(self, name: Name) -> None:
        """Forget a name, if it is known."""
        self._ranks.pop(name, None)

    def clear(self) -> None:
        """Forget all."""
        self._ranks.clear()
        self._heap.clear()

    def first(self) -> Name | None:
        """The name of the smallest rank; None if there is none."""
        heap, ranks = self._heap, self._ranks
        while heap:
            rank, name = heap[0]
            if ranks.get(name) == rank:
                return name
            heappop(heap)
        return None

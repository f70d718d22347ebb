"""Names in order of a rank that changes: the index behind every choice among models."""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, TypeVar

#: Anything that compares with the ranks of the same index. Smaller ranks come first.
Rank = Any

#: Key of an index: models by name, or runs by id.
Name = TypeVar("Name", str, int)

#: With fewer entries than this, the heap keeps stale ones.
_MIN_CLEANED = 64


class Ranking(dict[Name, Rank]):
    """Ranks by name, and the name of the smallest.

    Read it and delete from it as from any dictionary; change a rank by `set` only. A changed rank is pushed to a heap
    again, and the stale entry is dropped when it surfaces. Setting costs O(log n), everything else O(1) amortised; memory
    stays in proportion to the names. Equal ranks go by name.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        super().__init__()
        #: Entries that differ from the dictionary are stale.
        self._heap: list[tuple[Rank, Name]] = []

    def set(self, name: Name, rank: Rank) -> None:
        """Add a name, or change its rank."""
        if self.get(name) == rank:
            return
        self[name] = rank
        if self._heap and self._heap[0][1] == name:
            heapreplace(self._heap, (rank, name))
            return
        heappush(self._heap, (rank, name))
        if len(self._heap) > _MIN_CLEANED + 2 * len(self):
            self._heap = [(rank, name) for name, rank in self.items()]
            heapify(self._heap)

    def clear(self) -> None:
        """Remove all names."""
        super().clear()
        self._heap.clear()

    def first(self) -> Name | None:
        """Return the name of the smallest rank; None if there is none."""
        heap = self._heap
        while heap:
            rank, name = heap[0]
            if self.get(name) == rank:
                return name
            heappop(heap)
        return None

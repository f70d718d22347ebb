"""Names sorted by a rank that changes. Every choice among models uses such an index."""

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, TypeVar

#: Anything that compares with the ranks of the same index. Smaller ranks come first.
Rank = Any

#: Key of an index: models by name, or runs by id.
Name = TypeVar("Name", str, int)

#: A heap is cleaned when it has more entries than this number plus twice the number of names.
_MIN_CLEANED = 64


class Ranking(dict[Name, Rank]):
    """Ranks by name, and the name with the smallest rank. Equal ranks are ordered by name.

    Entries are read and deleted as in any dictionary. Only `set` may change a rank. It pushes the changed rank to a heap. The
    stale entry is dropped when it reaches the top. Setting costs O(log n), everything else O(1) amortised. The memory is
    proportional to the number of names.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        super().__init__()
        #: Heap of the ranks. Entries that differ from the dictionary are stale.
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
        """Return the name with the smallest rank. None: there are no names."""
        heap = self._heap
        while heap:
            rank, name = heap[0]
            if self.get(name) == rank:
                return name
            heappop(heap)
        return None

"""When something about queued requests is due: their deadlines, and the latest useful starts."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from rsrv.scheduler.waiting import Entry, Lane

#: below this many the heap is never cleaned.
_SMALL = 64


class Deadlines:
    """A heap of times of queued requests, one each.

    Requests that left the queue otherwise stay in the heap until they surface or until they outnumber
    the queued ones: removal costs nothing, and memory stays in proportion to the queues.
    """

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: Entry, at: float) -> None:
        heappush(self._heap, (at, entry.place[2], entry))

    def clean(self, queued: int) -> None:
        """Forget those that left, if they are too many. `queued` is the number of requests that wait."""
        if len(self._heap) > _SMALL + 2 * queued:
            self._heap = [item for item in self._heap if item[2].lane is not None]
            heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()

    def due(self, now: float) -> Iterator[tuple[Entry, Lane]]:
        """The queued requests whose time is `now` or earlier, soonest first, and where they wait.

        They leave the heap.
        """
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heappop(heap)[2]
            if entry.lane is not None:
                yield entry, entry.lane

    def next(self) -> float | None:
        """The soonest time of a queued request."""
        heap = self._heap
        while heap and heap[0][2].lane is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def entries(self) -> Iterator[Entry]:
        """The queued requests that have a time here, in no order."""
        return (entry for _, _, entry in self._heap if entry.lane is not None)

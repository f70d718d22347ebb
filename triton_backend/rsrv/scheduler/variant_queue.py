"""The waiting requests of one variant, and heaps of the times at which queued requests are due."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import takewhile
from math import inf
from operator import attrgetter

from rsrv.scheduler.batching import VariantCosts
from rsrv.scheduler.discipline import Place
from rsrv.scheduler.events import Request

_place = attrgetter("place")
_rows = attrgetter("rows")


class LiveRequest:
    """A request that has not ended. It is queued while it has a queue. Afterwards it executes, or waits for its retry."""

    __slots__ = ("arrived", "place", "queue", "request", "rows")

    def __init__(self, request: Request, place: Place, queue: "VariantQueue", now: float) -> None:
        self.request = request
        self.rows = request.rows
        self.place = place
        self.queue: VariantQueue | None = queue
        self.arrived = now


class VariantQueue:
    """The waiting requests of one variant, in the order of service.

    Requests of one queue may share an execution. Requests of different queues share an execution only if their model has a
    padded axis. Each queue has its own order, so a batch may execute before older requests of other variants without changing
    the order of those requests.
    """

    __slots__ = ("costs", "entries", "exclusive", "rows", "variant")

    def __init__(self, variant: int, costs: VariantCosts) -> None:
        self.variant = variant
        self.costs = costs
        # This is a sorted list, because most requests are appended, any request may leave, and the front requests leave
        # together. Moving the remaining ones takes less than a microsecond for a thousand requests.
        self.entries: list[LiveRequest] = []
        #: Sum of the waiting rows.
        self.rows = 0
        #: Number of waiting requests that are exclusive.
        self.exclusive = 0

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, entry: LiveRequest) -> None:
        """Insert a request at its place."""
        entries = self.entries
        if not entries or entries[-1].place < entry.place:
            entries.append(entry)
        else:
            insort(entries, entry, key=_place)
        self.rows += entry.rows
        self.exclusive += entry.request.exclusive

    def remove(self, entry: LiveRequest) -> None:
        """Remove one request. Places are unique, because they end with the arrival's number."""
        del self.entries[bisect_left(self.entries, entry.place, key=_place)]
        self.rows -= entry.rows
        self.exclusive -= entry.request.exclusive
        entry.queue = None

    def move(self, entry: LiveRequest, place: Place) -> None:
        """Move a queued request to another place."""
        self.remove(entry)
        entry.queue, entry.place = self, place
        self.push(entry)

    def take(self, count: int) -> list[LiveRequest]:
        """Remove the first `count` requests, and return them in order."""
        taken = self.entries[:count]
        for entry in taken:
            entry.queue = None
        self.rows -= sum(map(_rows, taken))
        if self.exclusive:
            self.exclusive -= sum(entry.request.exclusive for entry in taken)
        del self.entries[:count]
        return taken

    def reorder(self) -> None:
        """Sort again after the places of requests have changed."""
        self.entries.sort(key=_place)

    @property
    def front_exclusive(self) -> bool:
        """True if the first request is exclusive."""
        return self.exclusive > 0 and self.entries[0].request.exclusive

    def waiting_rows(self) -> Iterable[int]:
        """Return the rows of each waiting request that may share the next execution, in the order of service."""
        if not self.exclusive:
            return map(_rows, self.entries)
        if self.front_exclusive:
            return (self.entries[0].rows,)
        return map(_rows, takewhile(lambda entry: not entry.request.exclusive, self.entries))

    def seconds(self, *, coalesce: bool) -> float:
        """Expected device time of all waiting requests.

        With `coalesce`, it is `VariantCosts.drain_seconds` of all rows together, and at least one execution. Otherwise, there
        is one execution per request, each at the size for the average request.
        """
        count = len(self.entries)
        if not count:
            return 0.0
        if not coalesce:
            return count * self.costs.smallest_fit_seconds(-(-self.rows // count))
        return self.costs.drain_seconds(self.rows) if self.rows else self.costs.seconds[0]


#: A heap is cleaned when it has more entries than this number plus twice the number of queued requests.
_MIN_CLEANED = 64


class Deadlines:
    """A heap of times, one for each queued request.

    A request that leaves its queue stays in the heap until it reaches the top, or until such requests outnumber the queued
    ones. So removal costs nothing, and the memory is proportional to the queues.
    """

    __slots__ = ("heap",)

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, LiveRequest]] = []

    def __len__(self) -> int:
        return len(self.heap)

    def push(self, entry: LiveRequest, at: float) -> None:
        """Add the time of a queued request."""
        heappush(self.heap, (at, entry.place[2], entry))

    def clean(self, queued: int) -> None:
        """Drop the requests that have left their queues, if there are too many. `queued`: number of waiting requests."""
        if len(self.heap) > _MIN_CLEANED + 2 * queued:
            self.heap = [item for item in self.heap if item[2].queue is not None]
            heapify(self.heap)

    def clear(self) -> None:
        self.heap.clear()

    def due(self, now: float) -> Iterator[tuple[LiveRequest, VariantQueue]]:
        """Remove and yield the queued requests whose time is `now` or earlier, soonest first, each with its queue."""
        heap = self.heap
        while heap and heap[0][0] <= now:
            entry = heappop(heap)[2]
            if entry.queue is not None:
                yield entry, entry.queue

    def next(self) -> float:
        """Return the soonest time of a queued request. inf: there is none."""
        heap = self.heap
        while heap and heap[0][2].queue is None:
            heappop(heap)
        return heap[0][0] if heap else inf

    def entries(self) -> Iterator[LiveRequest]:
        """Return the queued requests that have a time here, in no order."""
        return (entry for _, _, entry in self.heap if entry.queue is not None)

"""The requests of one variant that wait, and when something about queued requests is due."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter

from rsrv.scheduler.batching import VariantCosts
from rsrv.scheduler.discipline import Place
from rsrv.scheduler.events import Request

_place = attrgetter("place")
_rows = attrgetter("rows")


class Entry:
    """A request in flight: queued while it has a queue, executing from then on."""

    __slots__ = ("arrived", "place", "queue", "request", "rows")

    def __init__(self, request: Request, place: Place, queue: "VariantQueue", now: float) -> None:
        self.request = request
        self.rows = request.rows
        self.place = place
        self.queue: VariantQueue | None = queue
        self.arrived = now


class VariantQueue:
    """The waiting requests of one variant, in the order of service.

    Requests of one queue may share an execution; those of different queues never do. Each queue keeps its
    own order, so a batch passes over older requests of other variants without disturbing anybody's turn.
    """

    __slots__ = ("costs", "entries", "rows", "variant")

    def __init__(self, variant: int, costs: VariantCosts) -> None:
        self.variant = variant
        self.costs = costs
        # A sorted list: most requests are appended, any may leave, and the front ones leave together.
        # Moving what is behind them costs less than a microsecond for a thousand requests.
        self.entries: list[Entry] = []
        #: sum of the rows that wait.
        self.rows = 0

    def __len__(self) -> int:
        return len(self.entries)

    def push(self, entry: Entry) -> None:
        entries = self.entries
        if not entries or entries[-1].place < entry.place:
            entries.append(entry)
        else:
            insort(entries, entry, key=_place)
        self.rows += entry.rows

    def remove(self, entry: Entry) -> None:
        # Places are unique: they end with the arrival's number.
        del self.entries[bisect_left(self.entries, entry.place, key=_place)]
        self.rows -= entry.rows
        entry.queue = None

    def move(self, entry: Entry, place: Place) -> None:
        """Put one that waits here in another place."""
        self.remove(entry)
        entry.queue, entry.place = self, place
        self.push(entry)

    def take(self, count: int) -> tuple[int, ...]:
        """Take the first `count` requests out of the queue; their ids, in order."""
        ids = []
        for entry in islice(self.entries, count):
            entry.queue = None
            self.rows -= entry.rows
            ids.append(entry.request.id)
        del self.entries[:count]
        return tuple(ids)

    def reorder(self) -> None:
        """The places of its requests have changed."""
        self.entries.sort(key=_place)

    def place(self) -> Place | None:
        """Where the front request stands; None if nothing waits."""
        return self.entries[0].place if self.entries else None

    def waiting_rows(self) -> Iterable[int]:
        """The rows of all that wait, in the order of service."""
        return map(_rows, self.entries)

    def seconds(self, *, coalesce: bool) -> float:
        """Expected device time of all that waits here.

        Coalesced: `VariantCosts.drain` of the rows together, at least one execution. Alone: one execution
        per request, each at the size for the average request.
        """
        count = len(self.entries)
        if not count:
            return 0.0
        if not coalesce:
            return count * self.costs.fit(-(-self.rows // count))
        return self.costs.drain(self.rows) if self.rows else self.costs.seconds[0]


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
            self._heap = [item for item in self._heap if item[2].queue is not None]
            heapify(self._heap)

    def clear(self) -> None:
        self._heap.clear()

    def due(self, now: float) -> Iterator[tuple[Entry, VariantQueue]]:
        """The queued requests whose time is `now` or earlier, soonest first, and where they wait.

        They leave the heap.
        """
        heap = self._heap
        while heap and heap[0][0] <= now:
            entry = heappop(heap)[2]
            if entry.queue is not None:
                yield entry, entry.queue

    def next(self) -> float | None:
        """The soonest time of a queued request."""
        heap = self._heap
        while heap and heap[0][2].queue is None:
            heappop(heap)
        return heap[0][0] if heap else None

    def entries(self) -> Iterator[Entry]:
        """The queued requests that have a time here, in no order."""
        return (entry for _, _, entry in self._heap if entry.queue is not None)

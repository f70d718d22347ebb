"""Requests that wait: one lane for each variant of each model."""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

from rsrv.runtime.scheduler.costs import VariantCosts
from rsrv.runtime.scheduler.events import Request

#: where a request stands in the order of service: (level, arrival sequence), smaller is first.
#: Level 0 are committed requests, level 1 all others.
Place = tuple[int, int]

_rows = attrgetter("rows")


class Entry:
    """A request in flight: queued while it has a lane, executing from then on."""

    __slots__ = ("lane", "request", "rows", "sequence")

    def __init__(self, request: Request, sequence: int, lane: "Lane") -> None:
        self.request = request
        self.rows = request.rows
        #: position in the order of all arrivals.
        self.sequence = sequence
        self.lane: Lane | None = lane


class Lane:
    """The waiting requests of one variant, committed ones first, each level in order of arrival.

    Requests of one lane may share an execution; those of different lanes never do. Each lane keeps its
    own order, so a batch passes over older requests of other variants without disturbing anybody's turn.
    """

    __slots__ = ("committed", "costs", "ordinary", "rows", "variant")

    def __init__(self, variant: int, costs: VariantCosts) -> None:
        self.variant = variant
        self.costs = costs
        # Ordered dictionaries because a request leaves from the front (executed) or from anywhere
        # (cancelled, expired), each in constant time.
        self.committed: OrderedDict[int, Entry] = OrderedDict()
        self.ordinary: OrderedDict[int, Entry] = OrderedDict()
        #: sum of the rows that wait.
        self.rows = 0

    def __len__(self) -> int:
        return len(self.committed) + len(self.ordinary)

    def push(self, entry: Entry) -> None:
        request = entry.request
        (self.committed if request.committed else self.ordinary)[request.id] = entry
        self.rows += entry.rows

    def remove(self, entry: Entry) -> None:
        request = entry.request
        del (self.committed if request.committed else self.ordinary)[request.id]
        self.rows -= entry.rows
        entry.lane = None

    def take(self, count: int) -> tuple[int, ...]:
        """Take the first `count` requests out of the lane; their ids, in order."""
        ids = []
        level = self.committed
        for _ in range(count):
            if not level:
                level = self.ordinary
            request, entry = level.popitem(last=False)
            entry.lane = None
            self.rows -= entry.rows
            ids.append(request)
        return tuple(ids)

    def place(self) -> Place | None:
        """Where the front request stands; None if nothing waits."""
        if self.committed:
            return (0, next(iter(self.committed.values())).sequence)
        if self.ordinary:
            return (1, next(iter(self.ordinary.values())).sequence)
        return None

    def entries(self) -> Iterable[Entry]:
        """All that wait, in the order of service."""
        if self.committed:
            return chain(self.committed.values(), self.ordinary.values())
        return self.ordinary.values()

    def waiting_rows(self) -> Iterable[int]:
        """The rows of all that wait, in the order of service."""
        return map(_rows, self.entries())

    def seconds(self, *, coalesce: bool) -> float:
        """Expected device time of all that waits here.

        Coalesced: `VariantCosts.drain` of the rows together, at least one execution. Alone: one execution
        per request, each at the size for the average request.
        """
        count = len(self.committed) + len(self.ordinary)
        if not count:
            return 0.0
        if not coalesce:
            return count * self.costs.fit(-(-self.rows // count))
        return self.costs.drain(self.rows) if self.rows else self.costs.seconds[0]

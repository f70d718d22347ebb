"""The slowest requests of one model in the last hour, each with what its time went to.

Every request that ends is compared with the fastest of those that are kept. All else is computed for those that enter.
"""

from heapq import heapify, heappush, heapreplace
from math import inf
from typing import NamedTuple

from rsrv.scheduler.events import Execute, Outcome, Request
from rsrv.scheduler.history import HistoryRecord

#: requests kept of each model, and seconds after which they are dropped.
KEPT, WINDOW_S = 100, 3600.0


class Wait(NamedTuple):
    """One request's time from its arrival, in parts."""

    arrived: float
    seconds: float
    #: while its model was held by an operator.
    paused: float
    #: until its model's weights were on the device and warmed up.
    weights: float
    #: held back for other requests to join its execution (`Program.max_delay`).
    peers: float
    #: on the device; 0 if it never executed.
    executing: float

    @property
    def others(self) -> float:
        """Seconds for which the device had other work."""
        return max(0.0, self.seconds - self.paused - self.weights - self.peers - self.executing)


class SlowRequest(NamedTuple):
    """A request that took long, or still does; ordered by its time."""

    seconds: float
    #: makes entries of equal time distinct.
    number: int
    request: Request
    wait: Wait
    #: None: in progress.
    outcome: Outcome | None
    #: its execution, if there was one.
    execute: Execute | None
    #: names of the models that executed while it waited, the one with the most time first.
    behind: tuple[str, ...]
    #: the latest eviction of the weights that it waited for.
    evicted: HistoryRecord | None
    #: seconds in its front before it arrived here, and after it ended; None: not known.
    front: tuple[float, float] | None = None


class SlowestRequests:
    """At most `KEPT` requests that ended in the last hour; each was slower than all that were not kept."""

    __slots__ = ("_added", "_heap", "floor", "review_at")

    def __init__(self) -> None:
        self._heap: list[SlowRequest] = []
        self._added = 0
        #: seconds that a request has to exceed to be kept.
        self.floor = -1.0
        #: when the oldest one is dropped.
        self.review_at = inf

    def latest_arrival(self, now: float) -> float:
        """Return the time before which a request arrived if it is kept, should it end now."""
        return now - self.floor if now < self.review_at else inf

    def add(
        self,
        request: Request,
        wait: Wait,
        outcome: Outcome,
        execute: Execute | None,
        behind: tuple[str, ...],
        evicted: HistoryRecord | None,
    ) -> None:
        ended = wait.arrived + wait.seconds
        if ended >= self.review_at:
            self._drop_old(ended)
        if wait.seconds <= self.floor:
            return
        self._added += 1
        slow = SlowRequest(wait.seconds, self._added, request, wait, outcome, execute, behind, evicted)
        if len(self._heap) < KEPT:
            heappush(self._heap, slow)
        else:
            heapreplace(self._heap, slow)
        self.review_at = min(self.review_at, ended + WINDOW_S)
        if len(self._heap) == KEPT:
            self.floor = self._heap[0].seconds

    def add_front(self, slow: SlowRequest, before: float, after: float) -> None:
        """Note the time that one of the requests had in its front."""
        self._heap[self._heap.index(slow)] = slow._replace(front=(before, after))

    def read(self, now: float) -> list[SlowRequest]:
        """Return the requests, the slowest first."""
        if now >= self.review_at:
            self._drop_old(now)
        return sorted(self._heap, reverse=True)

    def find(self, tag: int, id: int | None, now: float) -> list[SlowRequest]:
        """Return the requests with a client's tag, if it is not 0, or with this id."""
        old = now - WINDOW_S
        return [
            one
            for one in self._heap
            if ((one.request.tag == tag and tag) or one.request.id == id)
            and one.wait.arrived + one.seconds > old
        ]

    def _drop_old(self, now: float) -> None:
        ends = [one.wait.arrived + one.seconds + WINDOW_S for one in self._heap]
        self._heap = [one for one, end in zip(self._heap, ends, strict=True) if end > now]
        heapify(self._heap)
        self.review_at = min((end for end in ends if end > now), default=inf)
        self.floor = -1.0 if len(self._heap) < KEPT else self._heap[0].seconds

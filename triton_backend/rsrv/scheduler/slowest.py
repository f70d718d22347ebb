"""The slowest requests of one model in the last hour, each with the parts of its time.

Every request that ends is compared with the fastest kept request. Facts that are not available later are stored at once, in
one `Ending` for all slow requests of an execution. New requests are ranked once there are `MAX_SLOWEST` of them, or when a reader
asks. The parts of their time are computed only for a reader.
"""

from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import NamedTuple

from rsrv.scheduler.events import Execute, Outcome, Request
from rsrv.scheduler.history import HistoryRecord
from rsrv.scheduler.variant_queue import LiveRequest

#: Maximum number of stored requests per model.
MAX_SLOWEST = 100
#: Seconds after which a stored request is dropped.
WINDOW_S = 3600.0

#: Beginning and end of each period.
Periods = Collection[tuple[float, float]]


class Wait(NamedTuple):
    """One request's time from its arrival, in parts."""

    arrived: float
    seconds: float
    #: Seconds while an operator held the model.
    paused: float
    #: Seconds until the model's weights were on the device and warmed up.
    weights: float
    #: Seconds of delay for other requests to join the execution (`Program.max_delay`).
    peers: float
    #: Seconds on the device. 0: the request never executed.
    executing: float
    #: Latest eviction of the weights that the request waited for. None if it did not wait for weights, or if none is known.
    evicted: HistoryRecord | None

    @property
    def others(self) -> float:
        """Seconds for which the device had other work."""
        return max(0.0, self.seconds - self.paused - self.weights - self.peers - self.executing)


class Ending(NamedTuple):
    """How requests have spent their time. One record serves all requests that ended together."""

    #: Time when the requests ended. For requests in progress, the current time.
    at: float
    #: Time until which the requests waited: the start of their execution, if there was one.
    started: float
    #: Seconds of their execution on the device. inf: the whole time since `started`.
    seconds: float
    #: Time until which the requests were delayed so that others could join. -inf: they were not delayed.
    held_until: float
    #: Periods in which their model's weights were not usable.
    absences: Periods
    #: Periods in which their model was held.
    holds: Periods
    #: Outcome of the requests, or None while they are in progress.
    outcome: Outcome | None
    #: Their execution, or None if they never executed.
    execute: Execute | None
    #: Names of the models that executed while the request waited, the one with the most time first.
    behind: tuple[str, ...]
    #: Latest eviction that began one of the `absences`, or None.
    evicted: HistoryRecord | None


class SlowRequest(NamedTuple):
    """A request that took long, or has been in progress for long. Requests are ordered by their seconds."""

    #: Seconds since the request arrived, until it ended or until now.
    seconds: float
    #: Number that makes entries of equal time distinct.
    number: int
    request: Request
    arrived: float
    ending: Ending
    #: Seconds that the request spent in its front before it arrived here, and after it ended here. None if unknown.
    front: tuple[float, float] | None = None

    @property
    def wait(self) -> Wait:
        """The parts of the request's time."""
        end, arrived = self.ending, self.arrived
        # Time in which the model is held and its weights are absent counts only as paused.
        both = [(max(a, c), min(b, d)) for a, b in end.absences for c, d in end.holds]
        paused = _overlap(end.holds, arrived, end.started)
        weights = _overlap(end.absences, arrived, end.started) - _overlap(both, arrived, end.started)
        peers = max(0.0, min(end.held_until, end.started) - arrived - paused - weights)
        executing = min(end.seconds, end.at - end.started)
        evicted = end.evicted if weights else None
        return Wait(arrived, self.seconds, paused, weights, peers, executing, evicted)


def _overlap(periods: Periods, since: float, until: float) -> float:
    """Return the number of seconds of the interval from `since` to `until` that are in the periods."""
    return sum([max(0.0, min(end, until) - max(begin, since)) for begin, end in periods])


class SlowestRequests:
    """The slowest requests of the last hour, at most `MAX_SLOWEST`."""

    __slots__ = ("_added", "_kept", "_new", "_new_count", "floor", "review_at")

    def __init__(self) -> None:
        #: Ranked requests, the slowest first.
        self._kept: list[SlowRequest] = []
        #: Slow requests of each execution since the latest ranking.
        self._new: list[tuple[list[LiveRequest], Ending]] = []
        #: Number of requests in `_new`.
        self._new_count = 0
        self._added = 0
        #: A request must take more than this many seconds to be kept.
        self.floor = -1.0
        #: Time at which the next request is dropped, because it is older than the window.
        self.review_at = inf

    def latest_arrival(self, now: float) -> float:
        """Return the latest arrival time of a request that would be kept if it ended now."""
        return now - self.floor if now < self.review_at else inf

    def add(self, entries: Iterable[LiveRequest], ending: Ending) -> None:
        """Keep the requests that are slow enough. They are ranked later, together with other new requests."""
        at = ending.at
        if at >= self.review_at:
            self._drop_old(at)
        latest = at - self.floor
        slow = [entry for entry in entries if entry.arrived < latest]
        if not slow:
            return
        self._new.append((slow, ending))
        self._new_count += len(slow)
        self.review_at = min(self.review_at, at + WINDOW_S)
        if self._new_count >= MAX_SLOWEST:
            self._rank()

    def add_front(self, slow: SlowRequest, before: float, after: float) -> None:
        """Record the seconds that one of the requests spent in its front, before it arrived here and after it ended here."""
        self._kept[self._kept.index(slow)] = slow._replace(front=(before, after))

    def read(self, now: float) -> list[SlowRequest]:
        """Return the requests, the slowest first."""
        if now >= self.review_at:
            self._drop_old(now)
        self._rank()
        return [*self._kept]

    def find(self, matches: Callable[[Request], bool], now: float) -> list[SlowRequest]:
        """Return the requests that match."""
        self._rank()
        old = now - WINDOW_S
        return [slow for slow in self._kept if matches(slow.request) and slow.ending.at > old]

    def _rank(self) -> None:
        """Rank the new requests among the others, and drop the fastest."""
        for entries, ending in self._new:
            for entry in entries:
                self._added += 1
                seconds = ending.at - entry.arrived
                self._kept.append(SlowRequest(seconds, self._added, entry.request, entry.arrived, ending))
        self._new.clear()
        self._new_count = 0
        self._kept.sort(reverse=True)
        del self._kept[MAX_SLOWEST:]
        self.floor = -1.0 if len(self._kept) < MAX_SLOWEST else self._kept[-1].seconds

    def _drop_old(self, now: float) -> None:
        self._rank()
        ends = [slow.ending.at + WINDOW_S for slow in self._kept]
        self._kept = [slow for slow, end in zip(self._kept, ends, strict=True) if end > now]
        self.review_at = min((end for end in ends if end > now), default=inf)
        self._rank()

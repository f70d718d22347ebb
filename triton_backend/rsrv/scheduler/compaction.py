"""Freeing all evictable weights at once, so that the device's allocator finds its memory in one piece again.

While a compaction is due nothing new starts on the device. Once nothing executes, loads or warms up, all
weights that are not pinned are evicted; then everything goes on. There are two reasons for one:

- somebody asked for it, or `compaction_interval` loads have passed since the last: what was there comes back;
- an execution, a load or a warm-up found no memory: it gets a second try, with the device to itself.
"""

from collections import deque

from rsrv.scheduler.inflight import Running
from rsrv.scheduler.model import ModelState


class Compaction:
    """Whether one is due, and for whom."""

    __slots__ = ("_mark", "asked", "reload", "retries", "retrying", "warm_ups", "warming")

    def __init__(self) -> None:
        #: `Weights.loads` from which the interval is counted.
        self._mark = 0
        self.asked = False
        #: whether what it evicts comes back.
        self.reload = False
        #: executions that found no memory, in their order. Their requests are in flight still.
        self.retries: deque[Running] = deque()
        #: models whose warm-up found none. They count as warming up still.
        self.warm_ups: deque[ModelState] = deque()
        #: whether one of the executions is being tried again; and whose warm-up is.
        self.retrying = False
        self.warming: ModelState | None = None

    @property
    def due(self) -> bool:
        return self.asked or bool(self.retries) or bool(self.warm_ups)

    @property
    def pauses(self) -> bool:
        """Whether nothing else may start on the device."""
        return self.due or self.retrying or self.warming is not None

    def ask(self, *, reload: bool) -> None:
        self.asked = True
        self.reload = self.reload or reload

    def count(self, loads: int, interval: int) -> None:
        """A load ended, the `loads`-th; ask for a compaction at regular numbers of them."""
        if interval and loads - self._mark >= interval:
            self.ask(reload=True)

    def done(self, loads: int, evicted: int) -> bool:
        """It is carried out, and evicted so many models; returns whether they come back."""
        # Loads that bring them back do not lead to the next one: that would go on for ever.
        self._mark = loads + evicted
        reload = self.reload
        self.asked = self.reload = False
        return reload

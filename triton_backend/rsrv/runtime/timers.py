"""Actions that the loop calls at set times."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

#: An action gets the time, in seconds on the loop's clock, and returns the time when it is due next. inf: not before its
#: time is set again.
Action = Callable[[float], float]


class Timers:
    """A heap of actions. Each action has at most one time."""

    def __init__(self) -> None:
        self._times: dict[Action, float] = {}
        #: Heap of the times. Entries that differ from `_times` are stale.
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def set(self, action: Action, at: float) -> None:
        """Set the time when an action is due, in place of its earlier time."""
        if self._times.get(action) != at:
            self._times[action] = at
            heappush(self._heap, (at, next(self._numbers), action))

    def advance(self, action: Action, at: float) -> None:
        """Set the time when an action is due, unless it is due earlier."""
        if at < self._times.get(action, inf):
            self.set(action, at)

    def next(self) -> float:
        """Return the time when the next action is due. inf: there is none."""
        while self._heap and self._times.get(self._heap[0][2]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else inf

    def call(self, now: float) -> None:
        """Call once each action that is due."""
        due = []
        while self.next() <= now:
            due.append(heappop(self._heap)[2])
            del self._times[due[-1]]
        for action in due:
            self.advance(action, action(now))

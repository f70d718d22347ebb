"""Actions that the loop calls at set times."""

from collections.abc import Callable
from math import inf

#: Function that gets the present time, in seconds on the loop's clock, and returns the time when it is due next. inf: it is not
#: due until its time is set again.
Action = Callable[[float], float]


class Timers:
    """A few actions, each with at most one time when it is due."""

    def __init__(self) -> None:
        self._times: dict[Action, float] = {}

    def set(self, action: Action, at: float) -> None:
        """Set the time when an action is due, in place of its earlier time."""
        self._times[action] = at

    def advance(self, action: Action, at: float) -> None:
        """Set the time when an action is due, unless it is due earlier."""
        self._times[action] = min(at, self._times.get(action, inf))

    def next(self) -> float:
        """Return the time when the next action is due. inf: there is none."""
        return min(self._times.values(), default=inf)

    def call(self, now: float) -> None:
        """Call once each action that is due, in the order of their times."""
        due = [action for action, at in self._times.items() if at <= now]
        due.sort(key=self._times.__getitem__)
        for action in due:
            self._times[action] = inf
        for action in due:
            self.advance(action, action(now))

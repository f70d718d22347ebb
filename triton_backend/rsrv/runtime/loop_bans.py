"""Bans of models from the loop: their executions there took far longer than predicted.

Some models' costs depend on their inputs, and while the loop executes, it notices no deadline, cancellation or arrival.
But a descheduled CPU makes any single execution slow. So what counts is for how long a model's slow executions blocked
the loop of late: one that takes a tenth of a second is evidence enough, one of 30 ms is not. And a ban expires.
"""

from collections import deque

#: seconds of wall time above which an execution on the loop is slow: forty times what the loop expects at most
SLOW_S = 0.02
#: seconds that a model's slow executions may take together within WINDOW_S seconds; more ban it for BAN_S seconds
BLOCKED_S = 0.1
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        #: bans since the start, of all models
        self.count = 0
        #: by the model's key: when its latest slow executions ended, and how long they took; and when its ban ends
        self._slow: dict[str, deque[tuple[float, float]]] = {}
        self._until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self._until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Note an execution on the loop; return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque())
        slow.append((now, seconds))
        while now - slow[0][0] > WINDOW_S:
            slow.popleft()
        if sum(took for _, took in slow) < BLOCKED_S:
            return False
        del self._slow[model]
        self._until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self._until.pop(model, None)

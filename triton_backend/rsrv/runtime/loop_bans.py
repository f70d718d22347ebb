"""Bans of models from the loop: their executions there took far longer than predicted.

Some models' costs depend on their inputs, and while the loop executes, it notices no deadline, cancellation or arrival.
But a descheduled CPU makes any single execution slow. So a ban takes repeated evidence, and it expires.
"""

from collections import deque

#: seconds of wall time above which an execution on the loop is slow: forty times what the loop expects at most
SLOW_S = 0.02
#: slow executions of a model within WINDOW_S seconds that ban it for BAN_S seconds
STRIKES = 3
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Times are in seconds of one monotonic clock."""

    def __init__(self) -> None:
        #: bans since the start, of all models
        self.count = 0
        #: by the model's key: when its last slow executions ended, and when its ban ends
        self._slow: dict[str, deque[float]] = {}
        self._until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self._until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Note an execution on the loop; return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque(maxlen=STRIKES))
        slow.append(now)
        if len(slow) < STRIKES or now - slow[0] > WINDOW_S:
            return False
        del self._slow[model]
        self._until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self._until.pop(model, None)

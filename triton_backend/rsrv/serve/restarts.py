"""Whether and when a process that ended is started again. Pure: times are arguments."""

from __future__ import annotations

#: seconds of life after which earlier restarts no longer count
STABLE_S = 60.0
#: longest pause, seconds
_LONGEST = 30.0


class Restarts:
    """Those of one process.

    Args:
        most: restarts in a row after which it is given up; 0: it never is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        #: in a row
        self.count = 0

    def ended(self, lived_s: float) -> float | None:
        """Seconds until it is started again: 1, 2, 4, and so on, at most 30. None: it has used up its restarts."""
        if lived_s >= STABLE_S:
            self.count = 0
        self.count += 1
        if self._most and self.count > self._most:
            return None
        return float(min(2.0 ** min(self.count - 1, 10), _LONGEST))

"""A limit of requests in flight that adapts to the server. It is a pure state machine: the time is an argument.

The limit doubles from round to round while the throughput grows, and then holds. It tries a larger limit from time to
time, and halves when the server's queue is full.
"""

from enum import Enum
from typing import Final

#: Initial limit of the requests in flight.
FIRST = 4
#: Highest limit of the requests in flight.
MOST = 256
#: A larger limit is worth it if the throughput grows by this factor.
GAIN: Final = 1.08
#: A round ends after this many answers per request in flight, and after `ROUND_S` at the earliest.
ROUND_ANSWERS = 3
#: Shortest duration of a round.
ROUND_S = 0.1
#: Rounds until a larger limit is tried again.
HOLD_ROUNDS: Final = 20


class State(Enum):
    """What the limit does."""

    #: The limit was just raised. The round shows whether that was worth it.
    GROWING = "growing"
    #: The limit stays for a number of rounds.
    HOLDING = "holding"
    #: The caller has set the limit. A full queue still halves it for a time.
    FIXED = "fixed"


class InFlightLimit:
    """The limit of requests in flight of one data set."""

    def __init__(self, now: float, fixed: int | None = None) -> None:
        #: How many requests may be in flight.
        self.limit: int = fixed or FIRST
        self.state = State.FIXED if fixed else State.GROWING
        self._fixed = fixed
        #: Rows per second at the best limit so far.
        self._best = 0.0
        #: The best limit so far.
        self._best_limit = self.limit
        self._rounds = 0
        self._refused_at = -1.0
        #: Time at which the round began.
        self._start = now
        #: Numbers of answers and of their rows in this round.
        self._answers = self._rows = 0
        #: True once all requests that were sent under the previous limit are answered.
        self._settled = False

    def answered(self, rows: int, now: float) -> None:
        """Count an answer."""
        self._answers += 1
        # Do not count answers to requests that were sent under the previous limit.
        if self._answers <= self.limit and not self._settled:
            if self._answers == self.limit:
                self._settled, self._answers, self._start = True, 0, now
            return
        self._rows += rows
        seconds = now - self._start
        if self._answers >= ROUND_ANSWERS * self.limit and seconds >= ROUND_S:
            self._end(self._rows / seconds, now)

    def refused(self, now: float) -> None:
        """Count an answer that reports a full queue of the server. Refusals of the same moment count once."""
        if now - self._refused_at < ROUND_S:
            return
        self._refused_at = now
        self.limit = self._best_limit = max(1, self.limit // 2)
        self._hold(now)

    def _end(self, throughput: float, now: float) -> None:
        """End a round."""
        self._rounds += 1
        if self.state is State.GROWING:
            if throughput >= self._best * GAIN:
                self._best, self._best_limit = throughput, self.limit
                self._raise(now)
            else:
                self.limit = self._best_limit
                self._hold(now)
        elif self._rounds >= HOLD_ROUNDS:
            # The load of the server may have changed, so compare with its present throughput.
            self._best, self._best_limit = throughput, self.limit
            self._raise(now)
        else:
            self._begin(now)

    def _raise(self, now: float) -> None:
        self._rounds = 0
        self.limit = min(self._fixed or MOST, self.limit * 2)
        self.state = State.GROWING
        if self.limit == self._best_limit:
            self._hold(now)
        else:
            self._begin(now)

    def _hold(self, now: float) -> None:
        self.state = State.FIXED if self.limit == self._fixed else State.HOLDING
        self._rounds = 0
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._start = now
        self._answers = self._rows = 0
        self._settled = False

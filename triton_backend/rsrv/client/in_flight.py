"""A limit of requests in flight that adapts to the server. It is a pure state machine: the time is an argument.

The limit doubles from round to round while the throughput grows, and then holds. It tries a larger limit from time to
time, and halves when the server's queue is full.
"""

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
#: Number of rounds in which the limit is kept before a larger one is tried again.
HOLD_ROUNDS: Final = 20


class InFlightLimit:
    """The limit of requests in flight of one data set."""

    def __init__(self, now: float, fixed: int | None = None) -> None:
        """`fixed` is the caller's limit. A full queue of the server halves even this limit for a time."""
        #: Maximum number of requests in flight.
        self.limit: int = fixed or FIRST
        self._most = fixed or MOST
        #: Rows per second at the best limit so far.
        self._best = 0.0
        #: The best limit so far.
        self._best_limit = self.limit
        #: Number of rounds until a larger limit is tried. 0: the limit was raised for this round, and the throughput of the round
        #: decides whether the larger limit is kept.
        self._hold = 0
        self._refused_at = -1.0
        self._begin(now)

    def answered(self, rows: int, now: float) -> None:
        """Count an answer."""
        self._answers += 1
        if self._answers <= 0:
            self._start = now
            return
        self._rows += rows
        seconds = now - self._start
        if self._answers >= ROUND_ANSWERS * self.limit and seconds >= ROUND_S:
            self._end(self._rows / seconds)
            self._begin(now)

    def refused(self, now: float) -> None:
        """Halve the limit, because the server's queue is full. Ignore further refusals within `ROUND_S`."""
        if now - self._refused_at < ROUND_S:
            return
        self._refused_at = now
        self.limit = self._best_limit = max(1, self.limit // 2)
        self._hold = HOLD_ROUNDS
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin a round."""
        self._start = now
        self._rows: int = 0
        #: Number of answers in this round. It begins below 0, because the first answers belong to requests that were sent before
        #: the round, and do not count.
        self._answers: int = -self.limit

    def _end(self, throughput: float) -> None:
        """End a round. Choose the limit of the next round by the throughput of this round, in rows per second."""
        if self._hold > 1:
            self._hold -= 1
        elif self._hold == 0 and throughput < self._best * GAIN:
            self.limit = self._best_limit
            self._hold = HOLD_ROUNDS
        else:
            # The throughput has grown, or a hold ends. The load of the server may have changed during a hold, so this round's
            # throughput becomes the new reference.
            self._best, self._best_limit = throughput, self.limit
            self.limit = min(self._most, self.limit * 2)
            self._hold = 0 if self.limit > self._best_limit else HOLD_ROUNDS

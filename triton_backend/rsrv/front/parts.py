"""The parts of a request with more rows than the largest compiled size. Pure.

For the runtime and for `Front`, each part is a separate request. Only a few parts of a request are submitted at a time. So a
large request takes only a small share of its model's queue, requests of other clients execute between its parts, and only the
submitted parts need shared memory.
"""

from typing import NamedTuple

from rsrv.front.rules import MAX_PARTS


class RowRange(NamedTuple):
    """Rows of a large request."""

    first: int
    rows: int


class Parts:
    """The parts of one request, which ends with its last part, or with the first part that fails."""

    def __init__(self, rows: int, largest: int) -> None:
        """`largest` is the largest compiled size."""
        self._rows = rows
        self._largest = largest
        #: First row that was not submitted.
        self._next = 0
        #: Number of parts that are submitted and have no answer yet.
        self._submitted = 0
        #: True if the request has ended. Its parts without an answer must be cancelled.
        self.ended = False

    def take(self) -> list[RowRange]:
        """Return the parts that must be submitted now. They count as submitted."""
        taken: list[RowRange] = []
        while not self.ended and self._next < self._rows and self._submitted < MAX_PARTS:
            part = RowRange(self._next, min(self._largest, self._rows - self._next))
            self._next += part.rows
            self._submitted += 1
            taken.append(part)
        return taken

    def end(self, *, answered: bool) -> bool:
        """Record the end of a submitted part. Return True if the request ends with this part."""
        self._submitted -= 1
        if self.ended or (answered and (self._submitted or self._next < self._rows)):
            return False
        self.ended = True
        return True

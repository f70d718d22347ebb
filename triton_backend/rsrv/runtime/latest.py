"""What there was of late, numbered, for readers who come back for more."""

from collections import deque
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """The latest `length` of all that were ever added."""

    def __init__(self, length: int) -> None:
        self._kept: deque[T] = deque(maxlen=length)
        #: how many there ever were: the number of the next one
        self.next = 0

    def add(self, one: T) -> None:
        self._kept.append(one)
        self.next += 1

    def since(self, number: int, most: int) -> tuple[int, list[T]]:
        """Those from this number on, oldest first and at most so many, and the number of the first of them.

        That is more than `number` where older ones are forgotten.
        """
        oldest = self.next - len(self._kept)
        first = min(max(number, oldest), self.next)
        return first, list(islice(self._kept, first - oldest, first - oldest + most))

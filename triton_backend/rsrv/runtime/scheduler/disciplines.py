"""Which model goes next, among those that have work and whose weights are resident.

A discipline keeps its own index of the candidates. The scheduler tells it about each change, once per
model and event, and asks for a choice each time the device can take work. So a decision costs what the
index costs (a heap: O(log n)), and models without work cost nothing.

A new discipline is one class in a file of its own and one line in `DISCIPLINES`.
"""

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Protocol

from rsrv.runtime.scheduler.waiting import Place

#: below this many the heap is never cleaned.
_SMALL = 64


class Candidate(Protocol):
    """What a discipline may ask about a model."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float:
        """Its share of device time relative to other models."""

    @property
    def place(self) -> Place | None:
        """Where its first request stands in the order of all; not None for a candidate."""

    @property
    def turn_seconds(self) -> float:
        """Expected cost of its next execution."""


class Discipline(Protocol):
    """The order in which models get the device.

    A committed request (level 0 of its `Place`) goes before all others in every discipline.
    """

    def update(self, candidate: Candidate, now: float) -> None:
        """A model became a candidate, or the work or the cost of one changed."""

    def remove(self, name: str) -> None:
        """A model is no candidate (any more)."""

    def charge(self, name: str, seconds: float, now: float) -> None:
        """An execution of a loaded model took `seconds` of device time."""

    def choose(self, now: float) -> str | None:
        """The candidate that goes next; None if there is none. Asking changes no later answer."""


class Fifo:
    """Global order of arrival: the model whose first request is the oldest, committed ones before all.

    Arrivals are numbered, so there are no ties.
    """

    __slots__ = ("_heap", "_places")

    def __init__(self) -> None:
        #: every candidate's current place. What the heap says beyond that is stale.
        self._places: dict[str, Place] = {}
        self._heap: list[tuple[Place, str]] = []

    def update(self, candidate: Candidate, now: float) -> None:
        name, place = candidate.name, candidate.place
        if place is None:
            self.remove(name)
        elif self._places.get(name) != place:
            self._places[name] = place
            heappush(self._heap, (place, name))
            if len(self._heap) > _SMALL + 2 * len(self._places):
                self._heap = [(place, name) for name, place in self._places.items()]
                heapify(self._heap)

    def remove(self, name: str) -> None:
        self._places.pop(name, None)

    def charge(self, name: str, seconds: float, now: float) -> None:
        """Nothing: device time used does not matter to arrival order."""

    def choose(self, now: float) -> str | None:
        heap, places = self._heap, self._places
        while heap:
            place, name = heap[0]
            if places.get(name) == place:
                return name
            heappop(heap)
        return None


DISCIPLINES: Mapping[str, Callable[[], Discipline]] = {"fifo": Fifo}

"""What a discipline is: the order in which models that have work get the device.

A discipline keeps its own index of the candidates. The scheduler tells it about each change, once per
model and event, and asks for a choice each time the device can take work. So a decision costs what the
index costs (a heap: O(log n)), and models without work cost nothing.

In every discipline the level of a request comes first: committed sub-calls of running metas (level 0),
then by priority. What differs is the order within a level, and `fair` lets a priority only use up a
model's own share.

A new discipline is one class and one line in `disciplines.DISCIPLINES`.
"""

from typing import Protocol

from rsrv.scheduler.ranking import Rank

#: where a request stands in the order of service: (level, urgency, arrival sequence), smaller is first.
#: The discipline says what urgency is.
Place = tuple[int, float, int]

#: committed requests are before every priority.
COMMITTED_LEVEL = 0


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
    def batch_seconds(self) -> float:
        """Expected cost of an execution of the size that costs least per row when it is full."""


class Discipline(Protocol):
    """The order in which models get the device."""

    @property
    def sheds(self) -> bool:
        """Whether a request whose deadline cannot be met any more ends at once, and batches heed deadlines."""

    def place(self, level: int, deadline: float | None, sequence: int) -> Place:
        """Where a request stands; its model's requests of one variant execute in this order."""

    def advance(self, now: float) -> None:
        """It is `now`; told before anything else that happens then."""

    def update(self, candidate: Candidate) -> None:
        """A model became a candidate, or the work or the cost of one changed."""

    def wait(self, candidate: Candidate, *, claims: bool) -> None:
        """A model has work, but cannot execute for now. It keeps its place.

        `claims`: it waits for its weights, and may make up for what it misses; else it waits for company.
        """

    def hold(self, name: str) -> None:
        """A model has work, but it does not count until the model is told of again. It claims nothing meanwhile."""

    def link(self, filling: bool) -> None:
        """A load starts for which nobody has to give way; or it, or any other, ends."""

    def remove(self, name: str) -> None:
        """A model has no work (any more)."""

    def forget(self, name: str) -> None:
        """A model without work is gone for good."""

    def start(self, dispatch: int, name: str, expected: float) -> None:
        """An execution of a candidate starts, and is expected to take that many seconds."""

    def end(self, dispatch: int, seconds: float) -> None:
        """An execution ended, after `seconds`. It may have started under another discipline."""

    def rank(self, candidate: Candidate) -> Rank:
        """Orders models with work for the place on the device; smaller is sooner. They were told of before."""

    def choose(self) -> str | None:
        """The candidate that goes next; None if there is none. Asking changes no later answer."""

"""The protocol of a discipline: the order in which models with work get the device.

A discipline keeps its own index of the candidates. The scheduler reports each change of a model to it, and asks for a
choice whenever the device can take work. So a decision costs one operation on the index (a heap: O(log n)), and models
without work cost nothing.

In every discipline, the level of a request comes first. Committed sub-calls of admitted runs of meta models have level 0. Other
requests have the level of their priority. Disciplines differ in the order within a level. In `fair`, a priority does not give a
model more than its share.

CONTRIBUTING.md lists what a new discipline needs.
"""

from typing import Protocol

from rsrv.scheduler.ranking import Rank

#: Place of a request in the order of service: (level, urgency, arrival sequence). Smaller places come first. The discipline
#: defines urgency.
Place = tuple[int, float, int]

#: Level of committed requests, before every priority.
COMMITTED_LEVEL = 0


class Candidate(Protocol):
    """A model with work, as a discipline sees it."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float:
        """Share of device time relative to other models."""

    @property
    def place(self) -> Place | None:
        """Place of the model's first request in the order of all requests. Not None for a candidate."""

    @property
    def batch_seconds(self) -> float:
        """Expected cost of an execution of the size that costs least per row when it is full."""


class Discipline(Protocol):
    """The order in which models get the device."""

    @property
    def sheds(self) -> bool:
        """True if requests whose deadline can no longer be met end at once, and batches are chosen to meet deadlines."""

    def place(self, level: int, deadline: float | None, sequence: int) -> Place:
        """Return the place of a request. Requests of one variant execute in the order of their places.

        `deadline`: time when the client wants the answer. It is `Request.due`, or if that is None, the request's deadline.
        """

    def advance(self, now: float) -> None:
        """Advance to `now`. The scheduler calls this before any other change at that time."""

    def update(self, candidate: Candidate) -> None:
        """Add a candidate, or record a change of its work or cost."""

    def wait(self, candidate: Candidate, *, claims: bool) -> None:
        """Record that a model with work cannot execute for now. The model keeps its place.

        If `claims`, the model waits for its weights, and may later make up for the device time that it loses. Otherwise it
        waits for a warm-up or for more requests.
        """

    def hold(self, name: str) -> None:
        """Ignore a model's work until the next `update` or `wait`. The model may not make up for this time later."""

    def set_filling(self, filling: bool) -> None:
        """Record whether a load into free memory is running, that is, a load for which nothing was evicted."""

    def end_work(self, name: str) -> None:
        """Remove a model whose work has ended from the candidates."""

    def remove(self, name: str) -> None:
        """Remove a model that was removed from the scheduler."""

    def start(self, number: int, name: str, expected: float) -> None:
        """Record that an execution of a candidate starts, with its expected seconds."""

    def end(self, number: int, seconds: float) -> None:
        """Record that an execution ended after `seconds` on the device.

        The execution may have started under another discipline.

        Before or after this call, the caller calls `update`, `wait`, `hold`, `end_work` or `remove` for the execution's model.
        """

    def rank(self, candidate: Candidate) -> Rank:
        """Return the rank of a known model with work in the order of loads. The smallest rank loads first."""

    def choose(self) -> str | None:
        """Return the candidate that executes next, or None. A call changes nothing."""

"""Naive disciplines, for comparison with the scheduler's own; not for serving.

Both take a model's requests in order of arrival, and know nothing of cost.
"""

from collections.abc import Callable, Mapping

from rsrv.scheduler.discipline import Candidate, Discipline
from rsrv.scheduler.disciplines import Fifo
from rsrv.scheduler.ranking import Rank


class StaticPriority(Fifo):
    """The model with work and the greatest weight executes, equal ones by arrival. The others starve."""

    __slots__ = ()

    def update(self, candidate: Candidate) -> None:
        self._ranking.set(candidate.name, self.rank(candidate))

    def rank(self, candidate: Candidate) -> Rank:
        place = candidate.place
        assert place is not None
        return (-candidate.weight, place)


class RoundRobin(Fifo):
    """One execution of each model with work in turn, however long it takes.

    The model whose latest execution started longest ago goes next; models without any execution go first.
    """

    __slots__ = ("_started", "_turns")

    def __init__(self) -> None:
        super().__init__()
        self._started = 0
        #: Number of each model's latest execution.
        self._turns: dict[str, int] = {}

    def update(self, candidate: Candidate) -> None:
        self._ranking.set(candidate.name, self.rank(candidate))

    def start(self, number: int, name: str, expected: float) -> None:
        self._started += 1
        self._turns[name] = self._started

    def remove(self, name: str) -> None:
        super().remove(name)
        self._turns.pop(name, None)

    def rank(self, candidate: Candidate) -> Rank:
        place = candidate.place
        assert place is not None
        return (self._turns.get(candidate.name, 0), place)


NAIVE: Mapping[str, Callable[[], Discipline]] = {
    "round_robin": RoundRobin,
    "static_priority": StaticPriority,
}

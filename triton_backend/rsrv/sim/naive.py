"""Naive disciplines. They are for comparison with the scheduler's own disciplines, not for serving.

Both take a model's requests in the order of arrival, and ignore the cost of executions.
"""

from collections.abc import Callable, Mapping

from rsrv.scheduler.discipline import Candidate, Discipline
from rsrv.scheduler.disciplines import Fifo
from rsrv.scheduler.ranking import Rank


class StaticPriority(Fifo):
    """Execute the model with the greatest weight that has work. Models of equal weight follow the order of arrival.

    Models of smaller weight starve.
    """

    __slots__ = ()

    def update(self, candidate: Candidate) -> None:
        self._ranking.set(candidate.name, self.rank(candidate))

    def rank(self, candidate: Candidate) -> Rank:
        place = candidate.place
        assert place is not None
        return (-candidate.weight, place)


class RoundRobin(Fifo):
    """Execute each model with work once in turn, however long the executions take.

    The next model is the one whose latest execution started longest ago. Models without any execution come first.
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

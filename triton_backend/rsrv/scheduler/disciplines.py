"""The disciplines: in order of arrival, by deadline, or by fair shares (`fair`)."""

from collections.abc import Callable, Mapping
from math import inf

from rsrv.scheduler.discipline import Candidate, Discipline, Place
from rsrv.scheduler.fair import Fair
from rsrv.scheduler.ranking import Rank, Ranking


class Fifo:
    """First in, first out: the model with the oldest request of the most urgent level executes next.

    Arrivals are numbered, so there are no ties.
    """

    __slots__ = ("_ranking",)

    sheds = False

    def __init__(self) -> None:
        self._ranking: Ranking[str] = Ranking()

    def place(self, level: int, deadline: float | None, sequence: int) -> Place:
        return (level, 0.0, sequence)

    def update(self, candidate: Candidate) -> None:
        self._ranking.set(candidate.name, candidate.place)

    def wait(self, candidate: Candidate, *, claims: bool) -> None:
        self._ranking.pop(candidate.name, None)

    def hold(self, name: str) -> None:
        self._ranking.pop(name, None)

    def set_filling(self, filling: bool) -> None:
        """Do nothing."""

    def end_work(self, name: str) -> None:
        self._ranking.pop(name, None)

    def remove(self, name: str) -> None:
        self._ranking.pop(name, None)

    def advance(self, now: float) -> None:
        """Do nothing: neither time nor device time matters to the order of requests."""

    def start(self, number: int, name: str, expected: float) -> None:
        """Do nothing."""

    def end(self, number: int, seconds: float) -> None:
        """Do nothing."""

    def rank(self, candidate: Candidate) -> Rank:
        return candidate.place

    def choose(self) -> str | None:
        return self._ranking.first()


class Edf(Fifo):
    """Earliest deadline first: the model with the soonest deadline among the requests of the most urgent level executes next.

    The same order holds within a model. Equal deadlines, and requests without a deadline, are ordered by arrival.
    """

    __slots__ = ()

    sheds = True

    def place(self, level: int, deadline: float | None, sequence: int) -> Place:
        return (level, inf if deadline is None else deadline, sequence)


DISCIPLINES: Mapping[str, Callable[[], Discipline]] = {"fair": Fair, "fifo": Fifo, "edf": Edf}

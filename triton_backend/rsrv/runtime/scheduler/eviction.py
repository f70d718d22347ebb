"""Who gives way when weights need room: a pure question over those that may."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from rsrv.runtime.scheduler.ranking import Rank

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that may be evicted."""

    model: str
    bytes: int
    #: when they were last of use.
    used: float
    #: the discipline's rank of the model's work; None if nobody waits for it.
    rank: Rank | None = None


def make_room(missing: int, residents: Iterable[Resident]) -> list[str] | None:
    """Who gives way for `missing` bytes: all of them together, in this order, or nobody (None).

    First those for which nobody waits, the least recently used before others: nobody knows when they are
    needed next. Then those with waiting work, the last in the discipline's order before others: they are
    needed latest. Nobody goes whose bytes the others make unnecessary.
    """
    if missing <= 0:
        return []
    every = list(residents)
    idle = sorted((one for one in every if one.rank is None), key=lambda one: (one.used, one.model))
    working = [one for one in every if one.rank is not None]
    working.sort(key=_rank, reverse=True)
    chosen: list[Resident] = []
    for one in (*idle, *working):
        if missing <= 0:
            break
        if one.bytes:
            chosen.append(one)
            missing -= one.bytes
    if missing > 0:
        return None
    for one in reversed(chosen):
        if one.bytes <= -missing:
            chosen.remove(one)
            missing += one.bytes
    return [one.model for one in chosen]

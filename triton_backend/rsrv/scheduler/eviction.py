"""Who gives way when weights need room: a pure question over those that may.

Among models that nobody waits for a *policy* decides, one of `POLICIES`; among those with waiting work the
discipline does.

`lru` goes by the latest use alone. `cost` keeps what would cost the most to miss, for the room it takes:

    value = rate * load_seconds / bytes

as GreedyDual-Size-Frequency does (L. Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
Caching Policy, HPL-98-69R1, 1998; after P. Cao and S. Irani: Cost-Aware WWW Proxy Caching Algorithms, USITS 1997).
That one counts uses and ages them by evictions; here it is the `rate` that ages, and the value is taken when room is
needed, as in hyperbolic caching (A. Blankstein, S. Sen, M. Freedman: Hyperbolic Caching, USENIX ATC 2017).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import attrgetter
from typing import Any

from rsrv.scheduler.ranking import Rank
from rsrv.scheduler.settings import Eviction
from rsrv.scheduler.weights import SharedTensorGroup, Uses

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that may be evicted."""

    model: str
    #: all of its bytes. One comes free when no other model uses it.
    groups: Sequence[SharedTensorGroup]
    #: when they were last of use.
    used: float
    #: the discipline's rank of the model's work; None if nobody waits for it.
    rank: Rank | None = None
    #: how long it would take to bring all of them back.
    load_seconds: float = 0.0
    #: the requests that came for the model.
    uses: Uses = ()

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


def rate(uses: Uses, now: float, grain: float) -> float:
    """Requests per second to be expected, but for a factor that is the same for all.

        (sum over uses of age ** -1/2) ** 2 / number of uses,          age = now - use + grain

    The less time has passed since something was asked for, the likelier it is asked for again: by a power of that
    time (J. Anderson and L. Schooler: Reflections of the Environment in Memory, Psychological Science 2, 1991); -1/2
    is the usual one (J. Anderson and C. Lebiere: The Atomic Components of Thought, 1998). It is a weight as in LRFU (D. Lee et al.: IEEE Trans. Computers 50, 2001), but without a unit of time: if
    everything took twice as long, the order would be the same. To remember a few uses, and also of what is
    not resident, is LRU-K's (E. O'Neil, P. O'Neil, G. Weikum: SIGMOD 1993).

    `grain`, in seconds, above 0: how far apart two moments must be to matter.
    """
    if not uses:
        return 0.0
    return sum([1.0 / sqrt(now - use + grain) for use in uses]) ** 2 / len(uses)


#: the order in which models that nobody waits for give way at a moment: the smallest first.
Policy = Callable[[Resident, float], Any]


def lru(one: Resident, now: float) -> tuple[float, str]:
    """The least recently used before others. It costs nothing and knows nothing but the last use."""
    return (one.used, one.model)


def cost(one: Resident, now: float) -> tuple[float, float, str]:
    """Those first whose bytes save the fewest seconds of loading, per second (see the module).

    A load is the grain of time: requests that come within one share it. Weights that come back at once are worth
    nothing, and what is worth the same goes by `lru`.
    """
    value = 0.0
    if one.load_seconds:
        value = rate(one.uses, now, one.load_seconds) * one.load_seconds / max(1, one.bytes)
    return (value, *lru(one, now))


POLICIES: Mapping[Eviction, Policy] = {"lru": lru, "cost": cost}


class _Room:
    """What comes free while one after the other is chosen; `keep`: what stays, because who comes has it too."""

    def __init__(self, keep: Collection[SharedTensorGroup]) -> None:
        self._users: dict[SharedTensorGroup, int] = dict.fromkeys(keep, -1)

    def choose(self, one: Resident) -> int:
        """Bytes that come free if it goes too."""
        freed = 0
        for group in one.groups:
            users = self._users.get(group, group.users) - 1
            self._users[group] = users
            freed += group.bytes if users == 0 else 0
        return freed

    def spare(self, one: Resident) -> int:
        """Bytes that do not come free if it stays after all."""
        kept = 0
        for group in one.groups:
            kept += group.bytes if self._users[group] == 0 else 0
            self._users[group] += 1
        return kept


def make_room(
    missing: int,
    residents: Iterable[Resident],
    keep: Collection[SharedTensorGroup] = (),
    now: float = 0.0,
    policy: Policy = lru,
) -> list[str] | None:
    """Who gives way for `missing` bytes: all of them together, in this order, or nobody (None).

    They go in the order of `in_order`. Nobody goes whose bytes the others make unnecessary, or who would free
    nothing: all that it has is used by models that stay, or belongs to `keep`, which whoever comes has too.
    """
    if missing <= 0:
        return []
    chosen: list[Resident] = []
    room = _Room(keep)
    for one in in_order(residents, now, policy):
        if missing <= 0:
            break
        chosen.append(one)
        missing -= room.choose(one)
    if missing > 0:
        return None
    for one in reversed(chosen.copy()):
        kept = room.spare(one)
        if kept <= -missing:
            chosen.remove(one)
            missing += kept
        else:
            room.choose(one)
    return [one.model for one in chosen]


def freed_by_all(residents: Iterable[Resident], keep: Collection[SharedTensorGroup] = ()) -> int:
    """Bytes that come free if all of them go."""
    room = _Room(keep)
    return sum(room.choose(one) for one in residents)


def in_order(residents: Iterable[Resident], now: float, policy: Policy) -> list[Resident]:
    """Those first that are needed latest, as far as anybody knows.

    First those for which nobody waits, in the policy's order: nobody knows when they are needed next. Then
    those with waiting work, the last in the discipline's order before others.
    """
    every = list(residents)
    idle = sorted((one for one in every if one.rank is None), key=lambda one: policy(one, now))
    working = [one for one in every if one.rank is not None]
    working.sort(key=_rank, reverse=True)
    return [*idle, *working]

"""The choice of weights to evict when others need room: a pure function of the candidates.

Among models without waiting requests a *policy* decides, one of `POLICIES`; among models with waiting requests the
discipline does.

`lru` goes by the latest use alone. `cost` keeps the weights that would cost the most to miss, for the room they take:

    value = rate * load_seconds / bytes

as GreedyDual-Size-Frequency does (L. Cherkasova: Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency
Caching Policy, HPL-98-69R1, 1998; after P. Cao and S. Irani: Cost-Aware WWW Proxy Caching Algorithms, USITS 1997).
GreedyDual-Size-Frequency counts uses and ages the counts by evictions; here the `rate` ages, and the value is computed
when room is needed, as in hyperbolic caching (A. Blankstein, S. Sen, M. Freedman: Hyperbolic Caching, USENIX ATC 2017).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from operator import attrgetter
from typing import Any

from rsrv.scheduler.ranking import Rank
from rsrv.scheduler.settings import Eviction
from rsrv.scheduler.weights import Arrivals, SharedTensorGroup

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that may be evicted."""

    model: str
    #: all of its bytes. A group is freed when no other model uses it.
    groups: Sequence[SharedTensorGroup]
    #: when they were last used.
    last_used: float
    #: the discipline's rank of the model's work; None if no request waits.
    rank: Rank | None = None
    #: seconds that a load of all of them would take.
    load_seconds: float = 0.0
    #: when requests arrived for the model.
    arrivals: Arrivals = ()

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


def rate(arrivals: Arrivals, now: float, grain: float) -> float:
    """Expected requests per second, up to a factor that is the same for all models.

        (sum over arrivals of age ** -1/2) ** 2 / number of arrivals,          age = now - arrival + grain

    The less time has passed since an arrival, the likelier is the next one: by a power of that time (J. Anderson and
    L. Schooler: Reflections of the Environment in Memory, Psychological Science 2, 1991); -1/2 is the usual one
    (J. Anderson and C. Lebiere: The Atomic Components of Thought, 1998). It is a weight as in LRFU (D. Lee et al.: IEEE
    Trans. Computers 50, 2001), but without a unit of time: if everything took twice as long, the order would be the same.
    Remembering a few arrivals, also of absent models, comes from LRU-K (E. O'Neil, P. O'Neil, G. Weikum: SIGMOD 1993).

    `grain`, in seconds, above 0: the distance below which two times count as one.
    """
    if not arrivals:
        return 0.0
    return sum([1.0 / sqrt(now - arrival + grain) for arrival in arrivals]) ** 2 / len(arrivals)


#: the order in which idle weights are evicted at a time: the smallest first.
Policy = Callable[[Resident, float], Any]


def lru(one: Resident, now: float) -> tuple[float, str]:
    """Evict the least recently used weights first."""
    return (one.last_used, one.model)


def cost(one: Resident, now: float) -> tuple[float, float, str]:
    """Order weights by the loading time that each of their bytes saves per second, the least first (see the module).

    The grain of time is a load: requests that arrive within one share it. Weights that load at once have no value; equal
    values go by `lru`.
    """
    value = 0.0
    if one.load_seconds:
        value = rate(one.arrivals, now, one.load_seconds) * one.load_seconds / max(1, one.bytes)
    return (value, *lru(one, now))


POLICIES: Mapping[Eviction, Policy] = {"lru": lru, "cost": cost}


class _FreedBytes:
    """Bytes that are freed while victims are chosen one by one; `keep`: groups that stay, because the load has them too."""

    def __init__(self, keep: Collection[SharedTensorGroup]) -> None:
        self._users: dict[SharedTensorGroup, int] = dict.fromkeys(keep, -1)

    def choose(self, one: Resident) -> int:
        """Add a victim; return the bytes that it frees."""
        freed = 0
        for group in one.groups:
            users = self._users.get(group, group.users) - 1
            self._users[group] = users
            freed += group.bytes if users == 0 else 0
        return freed

    def spare(self, one: Resident) -> int:
        """Take a victim back; return the bytes that are not freed then."""
        kept = 0
        for group in one.groups:
            kept += group.bytes if self._users[group] == 0 else 0
            self._users[group] += 1
        return kept


def choose_victims(
    missing: int,
    residents: Iterable[Resident],
    keep: Collection[SharedTensorGroup] = (),
    now: float = 0.0,
    policy: Policy = lru,
) -> list[str] | None:
    """Choose victims that free `missing` bytes together, in order of eviction; None if all candidates are not enough.

    They are chosen by `in_eviction_order`. Weights stay if the other victims free enough, or if they would free nothing: all of
    their groups are used by models that stay, or belong to `keep`, the groups that the load has too.
    """
    if missing <= 0:
        return []
    chosen: list[Resident] = []
    room = _FreedBytes(keep)
    for one in in_eviction_order(residents, now, policy):
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


def freed_by_all(
    residents: Iterable[Resident], keep: Collection[SharedTensorGroup] = (), enough: float = inf
) -> int:
    """Return the bytes that are freed if all of these are evicted. Stops counting at `enough` bytes."""
    room, freed = _FreedBytes(keep), 0
    for one in residents:
        if freed >= enough:
            break
        freed += room.choose(one)
    return freed


def in_eviction_order(residents: Iterable[Resident], now: float, policy: Policy) -> list[Resident]:
    """Sort candidates by the time when they are likely needed next, the latest first.

    Idle ones come first, in the policy's order, because their next use is unknown. Ones with waiting requests follow,
    the last in the discipline's order first.
    """
    every = list(residents)
    idle = sorted((one for one in every if one.rank is None), key=lambda one: policy(one, now))
    working = [one for one in every if one.rank is not None]
    working.sort(key=_rank, reverse=True)
    return [*idle, *working]

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from operator import attrgetter
from typing import Any

from rsrv.runtime.scheduler.ranking import Rank

_rank = attrgetter("rank")

#: requests of a model that are remembered. More would tell the popular from the rest a little better where nothing
#: changes, and fewer would follow a change sooner.
_MEMORY = 8

#: when the latest requests for a model came, oldest first. A memory is as long as it takes the model's own
#: requests to come, not a number of seconds.
Uses = tuple[float, ...]


def remember(uses: Uses, requests: int, now: float) -> Uses:
    """The latest uses, after that many more at `now`."""
    return (uses + (now,) * min(requests, _MEMORY))[-_MEMORY:]


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


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that may be evicted."""

    model: str
    bytes: int
    #: when they were last of use.
    used: float
    #: the discipline's rank of the model's work; None if nobody waits for it.
    rank: Rank | None = None
    #: how long it would take to bring them back.
    load_seconds: float = 0.0
    #: the requests that came for the model.
    uses: Uses = ()


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


POLICIES: Mapping[str, Policy] = {"lru": lru, "cost": cost}


def make_room(
    missing: int, residents: Iterable[Resident], now: float = 0.0, policy: Policy = lru
) -> list[str] | None:
    """Who gives way for `missing` bytes: all of them together, in this order, or nobody (None).

    First those for which nobody waits, in the policy's order: nobody knows when they are needed next. Then
    those with waiting work, the last in the discipline's order before others: they are needed latest. Nobody
    goes whose bytes the others make unnecessary.
    """
    if missing <= 0:
        return []
    every = list(residents)
    idle = sorted((one for one in every if one.rank is None), key=lambda one: policy(one, now))
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

"""Chooses the weights to evict when other weights need room. The choice depends only on the candidates.

Models without waiting requests are evicted first, in the order of their last use. Models with waiting requests are evicted
in the reverse of the discipline's order.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

from rsrv.scheduler.ranking import Rank
from rsrv.scheduler.weights import SharedTensorGroup

_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class Resident:
    """Weights that may be evicted."""

    model: str
    #: Groups of all tensors of the weights. A group is freed when no other model uses it.
    groups: Sequence[SharedTensorGroup]
    #: Time of the last use.
    last_used: float
    #: The discipline's rank of the model's work, or None if no request waits.
    rank: Rank | None = None

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


class _FreedBytes:
    """Counts the bytes that are freed while victims are chosen one by one.

    The groups in `keep` are never freed, because the model that loads next also has them.
    """

    def __init__(self, keep: Collection[SharedTensorGroup]) -> None:
        self._users: dict[SharedTensorGroup, int] = dict.fromkeys(keep, -1)

    def choose(self, resident: Resident) -> int:
        """Add a victim. Return the bytes that it frees."""
        freed = 0
        for group in resident.groups:
            users = self._users.get(group, group.users) - 1
            self._users[group] = users
            freed += group.bytes if users == 0 else 0
        return freed

    def spare(self, resident: Resident) -> int:
        """Remove a victim. Return the bytes that stay on the device because of this."""
        bytes_kept = 0
        for group in resident.groups:
            bytes_kept += group.bytes if self._users[group] == 0 else 0
            self._users[group] += 1
        return bytes_kept


def choose_victims(
    missing: int,
    residents: Iterable[Resident],
    keep: Collection[SharedTensorGroup] = (),
) -> list[str] | None:
    """Return victims that together free `missing` bytes, in order of eviction. Return None if all candidates free too few bytes.

    Candidates are chosen in the order of `in_eviction_order`. A victim is removed from the result if the other victims free
    enough bytes without it. A group of a candidate is not freed if a model that stays on the device uses it, or if it is in
    `keep`. `keep` has the groups of the model that loads next.
    """
    if missing <= 0:
        return []
    chosen: list[Resident] = []
    room = _FreedBytes(keep)
    for resident in in_eviction_order(residents):
        if missing <= 0:
            break
        chosen.append(resident)
        missing -= room.choose(resident)
    if missing > 0:
        return None
    for resident in reversed(chosen.copy()):
        spared = room.spare(resident)
        if spared <= -missing:
            chosen.remove(resident)
            missing += spared
        else:
            room.choose(resident)
    return [resident.model for resident in chosen]


def freed_by_all(
    residents: Iterable[Resident], keep: Collection[SharedTensorGroup] = (), enough: float = inf
) -> int:
    """Return the bytes that are freed if all these weights are evicted. Stop counting at `enough` bytes."""
    room, freed = _FreedBytes(keep), 0
    for resident in residents:
        if freed >= enough:
            break
        freed += room.choose(resident)
    return freed


def in_eviction_order(residents: Iterable[Resident]) -> list[Resident]:
    """Sort candidates by the time when they are likely needed next, the latest time first.

    Idle models come first, in order of their last use, and then by name. Models with waiting requests follow, in the
    reverse of the discipline's order.
    """
    every = list(residents)
    idle = sorted(
        (resident for resident in every if resident.rank is None),
        key=lambda resident: (resident.last_used, resident.model),
    )
    working = [resident for resident in every if resident.rank is not None]
    working.sort(key=_rank, reverse=True)
    return [*idle, *working]

"""Cores for each worker."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores that this process may use."""

    #: logical cores; those of one physical core are neighbours, and so are those of one package
    numbers: tuple[int, ...]
    #: CPU time per time for all workers, in cores, if a container has a limit; None: no limit
    quota: float | None = None


@dataclass(frozen=True, slots=True)
class CoreShare:
    """Cores of one worker."""

    #: the only cores that it runs on; empty: all
    cores: tuple[int, ...]
    #: useful number of compute threads
    threads: int


def share(cores: Cores, near: Sequence[frozenset[int]]) -> list[CoreShare]:
    """Return a fair share for each worker, all of the same size if possible.

    Neighbouring cores stay together unless workers must overlap.

    Args:
        cores: the cores to share.
        near: for each worker, the cores close to its device; empty: all are alike. Workers share the cores close to
            their devices if no core then belongs to two sides.
    """
    count = len(near)
    if cores.quota is not None and cores.quota < len(cores.numbers):
        # The limit is on time. Several containers with the same limit would choose the same cores.
        return [CoreShare((), max(1, int(cores.quota / count)))] * count
    local = [tuple(n for n in cores.numbers if n in mine) or cores.numbers for mine in near]
    sides = set(local)
    if sum(map(len, sides)) > len(set().union(*sides)):
        local = [cores.numbers] * count
    shares = []
    for index, side in enumerate(local):
        mine = _part(side, local[:index].count(side), local.count(side))
        shares.append(CoreShare(tuple(sorted(mine)), len(mine)))
    return shares


def _part(cores: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    if len(cores) >= count:
        return cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return (cores[index % len(cores)],)


def look(root: Path = Path("/")) -> Cores:
    """Return the cores of this process as the kernel reports them."""
    allowed = os.sched_getaffinity(0)
    return Cores(tuple(sorted(allowed, key=lambda number: (*_place(root, number), number))), _quota(root))


def _place(root: Path, number: int) -> tuple[int, int]:
    """Return the package and the physical core of a logical core."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    try:
        package, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        return int(package), int(core)
    except (OSError, ValueError):
        return 0, number


def _quota(root: Path) -> float | None:
    """Return the container's quota; inside a container, its control group is the root."""
    groups = root / "sys/fs/cgroup"
    try:
        quota, period = (groups / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota, period = ((groups / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:
        return None  # max

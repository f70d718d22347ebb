"""Which cores each worker runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """What this process may run on."""

    #: logical cores, those of one physical core side by side, and those of one package
    numbers: tuple[int, ...]
    #: cores' worth of time that all may take together, where a container has less than all cores; None: no limit
    quota: float | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """One worker's part."""

    #: it runs on these only; empty: on all
    cores: tuple[int, ...]
    #: threads that are worth having for work that keeps a core busy
    threads: int


def share(cores: Cores, near: Sequence[frozenset[int]]) -> list[Share]:
    """A fair share for each worker, all of the same size where that can be; neighbours where it can't overlap.

    Args:
        cores: what there is to share.
        near: for each worker, the cores close to its device; empty: all are alike. Workers share what is close to
            them if that leaves no core to two sides.
    """
    count = len(near)
    if cores.quota is not None and cores.quota < len(cores.numbers):
        # The limit is on time. Others in their containers are told the same: on cores of our own choice we would meet.
        return [Share((), max(1, int(cores.quota / count)))] * count
    local = [tuple(n for n in cores.numbers if n in mine) or cores.numbers for mine in near]
    sides = set(local)
    if sum(map(len, sides)) > len(set().union(*sides)):
        local = [cores.numbers] * count
    shares = []
    for index, side in enumerate(local):
        mine = _part(side, local[:index].count(side), local.count(side))
        shares.append(Share(tuple(sorted(mine)), len(mine)))
    return shares


def _part(cores: tuple[int, ...], index: int, count: int) -> tuple[int, ...]:
    if len(cores) >= count:
        return cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return (cores[index % len(cores)],)


def look(root: Path = Path("/")) -> Cores:
    """Of this process, by the kernel's word."""
    allowed = os.sched_getaffinity(0)
    return Cores(tuple(sorted(allowed, key=lambda number: (*_place(root, number), number))), _quota(root))


def _place(root: Path, number: int) -> tuple[int, int]:
    """The package and the physical core of a logical one."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    try:
        package, core = ((topology / name).read_text() for name in ("physical_package_id", "core_id"))
        return int(package), int(core)
    except (OSError, ValueError):
        return 0, number


def _quota(root: Path) -> float | None:
    """Of the container: inside of one, its control group is the root."""
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

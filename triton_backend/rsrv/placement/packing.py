"""Which models' weights belong on which device: a pure function of their loads, their bytes and where they are.

docs/gateway.md says by which rules. What takes work is in fresh.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsrv.placement.packing_search import Assignment, Replica

#: a utilisation of 1 in whole numbers, which add up alike in any order
_ONE = 10**9


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """A model, or several that must be together."""

    name: str
    #: device seconds per second, of all replicas together
    utilisation: float
    #: of its weights
    bytes: int
    #: workers that share its work; fewer if fewer are allowed
    replicas: int = 1
    #: names of the workers where it may be; None: all
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """A device."""

    name: str
    #: bytes that weights may take; None: no limit
    budget_bytes: int | None


@dataclass(frozen=True)
class Packing:
    """Who is where."""

    #: workers of each load, by name; none if none of those allowed exists
    placed: Mapping[str, tuple[str, ...]]
    #: of each worker, in device seconds per second; each of k replicas makes a k-th
    utilisation: Mapping[str, float]
    #: of each worker; every replica takes all bytes of its load
    bytes: Mapping[str, int]
    #: loads that stayed where they were though a worker with less work has space for them
    held: tuple[str, ...]
    #: workers with more bytes than their budget
    oversubscribed: tuple[str, ...]


def pack(
    loads: Sequence[UnitLoad],
    workers: Sequence[WorkerBudget],
    *,
    previous: Mapping[str, Sequence[str]] | None = None,
    hysteresis: float = 0.0,
    forbid_oversubscription: bool = True,
) -> Packing:
    """Give each load its workers, so that the busiest worker is as little busy as can be and no budget is exceeded.

    Where no way is found to keep all budgets, the busiest loads have their bytes first, and the others are spread so
    that workers are alike in work and in over-subscription. With `forbid_oversubscription` false budgets count only among
    loads without work.

    `previous`, the workers of each load until now, are kept as long as the busiest worker and the worst over-subscription
    are within the fraction `hysteresis` of what a packing from nothing reaches, and no load has a worker that is busier
    by more than that fraction than another would be with it.
    """
    loads = sorted(loads, key=lambda load: load.name)
    workers = sorted(workers, key=lambda worker: worker.name)
    number = {worker.name: at for at, worker in enumerate(workers)}
    everywhere = frozenset(number.values())
    replicas: list[Replica] = []
    homes: dict[int, int] = {}
    for model, load in enumerate(loads):
        may = everywhere if load.allowed is None else everywhere & {number.get(name) for name in load.allowed}
        k = min(load.replicas, len(may))
        was = sorted(may & {number.get(name) for name in (previous or {}).get(load.name, ())})
        homes |= enumerate(was[:k], start=len(replicas))
        replicas += [Replica(round(load.utilisation / k * _ONE), load.bytes, model, may) for _ in range(k)]
    everything = max(1, sum(replica.bytes for replica in replicas))
    sizes = [everything if worker.budget_bytes is None else max(1, worker.budget_bytes) for worker in workers]
    limits = sizes if forbid_oversubscription else [everything for _ in workers]

    chosen, held = Assignment(replicas, sizes, limits), dict[str, None]()
    chosen.assign_all(1 + hysteresis)
    if homes:
        kept = Assignment(replicas, sizes, limits)
        if kept.keep_homes(homes, 1 + hysteresis, chosen):
            chosen, held = kept, {loads[replicas[at].model].name: None for at in kept.held(homes)}
    where: dict[str, list[str]] = {load.name: [] for load in loads}
    for worker, inside in zip(workers, chosen.inside, strict=True):
        for model in inside:
            where[loads[model].name].append(worker.name)
    return Packing(
        placed={name: tuple(found) for name, found in where.items()},
        utilisation={worker.name: load / _ONE for worker, load in zip(workers, chosen.load, strict=True)},
        bytes={worker.name: used for worker, used in zip(workers, chosen.used, strict=True)},
        held=tuple(held),
        oversubscribed=tuple(
            worker.name
            for worker, used in zip(workers, chosen.used, strict=True)
            if worker.budget_bytes is not None and used > worker.budget_bytes
        ),
    )

"""Assignment of models to workers: a pure function of their loads, their bytes and their current places.

docs/gateway.md explains the rules; packing_search.py has the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rsrv.placement.packing_search import Assignment, Replica

#: A utilisation of 1 as a whole number, because integer sums do not depend on their order.
_ONE = 10**9


@dataclass(frozen=True, slots=True)
class UnitLoad:
    """Load and bytes of one unit: a model, or several that belong together."""

    name: str
    #: Device seconds per second, summed over all replicas.
    utilisation: float
    #: Bytes of the unit's weights.
    bytes: int
    #: Number of workers that shall share the unit's load. If fewer workers are allowed, all of these share it.
    replicas: int = 1
    #: Names of the allowed workers, or None for all.
    allowed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class WorkerBudget:
    """A worker with its budget for weights."""

    name: str
    #: Bytes for weights, or None without a limit.
    budget_bytes: int | None
    #: Number of the worker's devices, which share its load.
    devices: int = 1


@dataclass(frozen=True)
class Packing:
    """Result of `pack`."""

    #: Names of the workers of each unit, by the unit's name. The tuple is empty if no allowed worker exists.
    placed: Mapping[str, tuple[str, ...]]
    #: Device seconds per second of each worker. Each of a unit's k replicas adds 1/k of the unit's utilisation.
    utilisation: Mapping[str, float]
    #: Bytes of each worker. Every replica adds all bytes of its unit.
    bytes: Mapping[str, int]
    #: Units that keep their worker although a less busy worker has space for them.
    held: tuple[str, ...]
    #: Workers with more bytes than their budget.
    oversubscribed: tuple[str, ...]


def pack(
    loads: Sequence[UnitLoad],
    workers: Sequence[WorkerBudget],
    *,
    previous: Mapping[str, Sequence[str]] | None = None,
    hysteresis: float = 0.0,
    forbid_oversubscription: bool = True,
) -> Packing:
    """Assign each unit to workers so that the busiest worker is as little busy as possible and no budget is exceeded.

    The devices of a worker share its load equally, so the worker is as busy as each of its devices.

    If no assignment within all budgets is found, the busiest units get their bytes first, and the others are spread so that
    workers are alike in load and in over-subscription. If `forbid_oversubscription` is false, budgets are no limits. They then
    mainly decide which worker gets a unit without load.

    The `previous` workers of each unit are kept under two conditions. First, the load of the busiest worker and the worst
    over-subscription exceed the figures of a packing from scratch by at most the fraction `hysteresis`. Second, no unit has
    a worker that is busier, by more than that fraction, than another worker would be with the unit.
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

    devices = [worker.devices for worker in workers]
    chosen, kept_loads = Assignment(replicas, sizes, limits, devices), dict[str, None]()
    chosen.assign_all(1 + hysteresis)
    if homes:
        present = Assignment(replicas, sizes, limits, devices)
        if present.keep_homes(homes, 1 + hysteresis, chosen):
            chosen, kept_loads = present, {loads[replicas[at].model].name: None for at in present.held(homes)}
    where: dict[str, list[str]] = {load.name: [] for load in loads}
    for worker, inside in zip(workers, chosen.inside, strict=True):
        for model in inside:
            where[loads[model].name].append(worker.name)
    return Packing(
        placed={name: tuple(devices_of) for name, devices_of in where.items()},
        utilisation={
            worker.name: sum(replicas[at].load for at in inside.values()) / _ONE
            for worker, inside in zip(workers, chosen.inside, strict=True)
        },
        bytes={worker.name: used for worker, used in zip(workers, chosen.used, strict=True)},
        held=tuple(kept_loads),
        oversubscribed=tuple(
            worker.name
            for worker, used in zip(workers, chosen.used, strict=True)
            if worker.budget_bytes is not None and used > worker.budget_bytes
        ),
    )

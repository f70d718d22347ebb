"""Decides the number and the places of replicas of models with `replicas: auto`, from the demand of the last second.

A unit gets another replica when its demand per replica exceeds GROW_AT of a device. One sample of the load suffices, so a hot
model has a second device after a second or two. A unit loses a replica when the remaining ones have needed at most SHRINK_AT of
a device each for COOL_S. The removal is slow because a load of weights is expensive, and an unneeded replica costs nothing. If
a worker is a whole server, its devices share the worker's part of the demand.

A new replica needs a worker with room for it in addition to all placed weights. With the new replica, this worker must be less
busy than the unit's busiest worker was before. So replicas never displace another model, and two busy models do not spread over
each other's devices.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from math import ceil

from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet, Unit

#: If the demand per replica, in device seconds per second, exceeds this value, the unit gets another replica.
GROW_AT = 0.8
#: A unit loses a replica if the demand per remaining replica would be at most this value for COOL_S.
SHRINK_AT = 0.5
#: Number of seconds for which the demand must be low before a unit loses a replica.
COOL_S = 60.0


class Replication:
    """Decides the replicas of units."""

    def __init__(self) -> None:
        #: Time at which each unit began to have more replicas than it needs, by the unit's name.
        self._quiet: dict[str, float] = {}

    def resize(
        self,
        units: list[Unit],
        home: Callable[[Unit], tuple[str, ...]],
        fleet: Fleet,
        costs: Costs,
        now: float,
    ) -> Iterator[tuple[Unit, tuple[str, ...]]]:
        """Yield the units whose replicas change, with their new workers.

        Args:
            units: the units with `replicas: auto`.
            home: returns the current workers of a unit.
            fleet: the workers' last views.
            costs: measured loads.
            now: the planner's time, seconds.
        """
        known = {unit.name for unit in units} if self._quiet else ()
        self._quiet = {name: at for name, at in self._quiet.items() if name in known}
        spare: dict[str, float] | None = None
        pressure: dict[str, float] = {}
        devices = {worker: view.devices for worker, view in fleet.views.items()}
        for unit in units:
            demand = sum(costs.demand(name) for name in unit.models)
            here = list(home(unit))
            # The demand that the unit would have if each of its workers had one device.
            alone = demand * len(here) / (sum(devices[worker] for worker in here) or 1)
            if alone <= GROW_AT and len(here) == 1:
                continue
            new_count = min(self._wanted(unit.name, alone, len(here), now), len(unit.allowed))
            if not here or new_count == len(here):
                continue
            if spare is None:
                spare = _spare(fleet, home)
                pressure = {worker: costs.pressure(worker) / count for worker, count in devices.items()}
            before = tuple(here)
            while len(here) < new_count:
                share, peak = demand / (len(here) + 1), max(pressure[worker] for worker in here)
                better = [
                    (pressure[worker], worker)
                    for worker in unit.allowed
                    if worker not in here
                    and spare[worker] >= unit.bytes
                    and pressure[worker] + share / devices[worker] < peak
                ]
                if not better:
                    break
                for worker in here:
                    pressure[worker] += (share - demand / len(here)) / devices[worker]
                least = min(better)[1]
                here.append(least)
                pressure[least] += share / devices[least]
                spare[least] -= unit.bytes
            if len(here) > new_count:
                here.remove(max(here, key=lambda worker: (pressure[worker], worker)))
            if tuple(here) != before:
                yield unit, tuple(sorted(here))

    def _wanted(self, unit: str, demand: float, present: int, now: float) -> int:
        count = max(1, ceil(demand / GROW_AT))
        if present <= 1 or demand > SHRINK_AT * (present - 1):
            self._quiet.pop(unit, None)
            return max(count, present)
        if now - self._quiet.setdefault(unit, now) < COOL_S:
            return present
        del self._quiet[unit]
        return present - 1


def _spare(fleet: Fleet, home: Callable[[Unit], tuple[str, ...]]) -> dict[str, float]:
    """Return, for each worker, the number of device bytes that no placed unit needs."""
    placed = Counter[str]()
    for unit in fleet.units:
        for worker in home(unit):
            placed[worker] += unit.bytes
    free = {worker: fleet.free_bytes(worker) for worker in fleet.views}
    return {worker: float("inf") if size is None else size - placed[worker] for worker, size in free.items()}

"""Placement of all models, decided again after every round of probes.

`plan` takes the last views of all workers and the time. It returns the whole routing table and the prefetches
and evictions to request now. It has no clock and no effects.

With `lpt_packing`, all models are repacked (`packing.pack`)

- when the devices have consumed `rebalance_device_s` since the last repack (work), or an operator asks;
- SETTLE_S after the last change of the models that workers serve (membership).

A model without a home, because it is new or its worker is gone, gets a home at once, while all other models keep theirs
(homes). If a worker only missed a probe, and returns before the next full repack, it gets its models back, because it still has
their weights. At the start, models that are resident on as many workers as they have replicas stay there (start). Until all
workers have answered, or nothing has changed for SETTLE_S, no model is placed, and the requests of each model go to every
worker where it is ready.

Several gateways share no state beyond the workers' views. So each repack begins with the places where models
have executed since the last repack, whichever gateway sent the requests. Gateways that disagreed before
therefore repack from the same places.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from rsrv.placement import packing
from rsrv.placement.contract import Routes, Table, WeightAction, WorkerView
from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet, Unit, survey
from rsrv.placement.moves import Moves
from rsrv.placement.options import ModelOptions, PlannerOptions
from rsrv.placement.packing import Packing, UnitLoad, WorkerBudget
from rsrv.placement.replication import Replication
from rsrv.placement.status import PlannerStatus, Repacks, Trigger, show_models, show_workers, warn
from rsrv.placement.tables import make_table
from rsrv.settings_fleet import Replicas

SETTLE_S = 3.0
#: A worker is one of a model's places if it has spent more than this share of the model's device seconds.
_PRESENT = 0.1


class Pack(Protocol):
    def __call__(
        self,
        loads: Sequence[UnitLoad],
        workers: Sequence[WorkerBudget],
        *,
        previous: Mapping[str, Sequence[str]],
        hysteresis: float,
        forbid_oversubscription: bool,
    ) -> Packing: ...


@dataclass(frozen=True, slots=True)
class Plan:
    #: Routing table. It is the same object as in the previous plan if nothing in it has changed.
    table: Table
    #: Prefetches and evictions to request now.
    steps: tuple[WeightAction, ...]
    #: True while a model is on its way to another worker.
    moving: bool = False
    #: True if the workers' models have changed, and a repack will follow after SETTLE_S without another change.
    settling: bool = False


class Planner:
    """Decides the placement. No method waits.

    A planner only reads its arguments and never changes its results, so `plan` may run in a thread. While it runs, no other
    method may run, but `options` may be read.
    """

    def __init__(self, options: PlannerOptions, *, pack: Pack = packing.pack) -> None:
        self.options = options
        self._pack = pack
        self._generation = 0
        self._costs = Costs(_halflife(options))
        self._moves = Moves()
        self._replication = Replication()
        #: The last view of each worker in which the worker was alive, or its first view if it was never alive.
        self._latest: dict[str, WorkerView] = {}
        self._table: dict[str, Routes] = {}
        self._started = False
        #: Names of the workers in `_fleet`. Empty if `_fleet` was made with other settings.
        self._surveyed: frozenset[str] = frozenset()
        #: Shape of the fleet: the allowed workers of each unit, by the unit's models.
        self._shape: dict[tuple[str, ...], tuple[str, ...]] | None = None
        #: Time when the shape last changed. None if the current shape is packed.
        self._changed_at: float | None = None
        #: Home that a model has lost since the last full repack, by model.
        self._lost: dict[str, tuple[str, ...]] = {}
        #: Pairs (unit, worker): the unit's weights would be evicted again after a load there.
        self._crowded: frozenset[tuple[str, str]] = frozenset()
        #: Workers whose placed weights exceed their budget.
        self._swapping: frozenset[str] = frozenset()
        #: Device seconds consumed since the last full repack.
        self._device_s = 0.0
        #: Number of repacks that operators have requested.
        self._asked = 0
        #: Number of requested repacks that are done.
        self._done = 0
        self._counts: dict[Trigger, int] = {}
        self._last: tuple[Trigger, float] | None = None
        self._packed = self._moved = self._held = 0
        #: Views of the last plan, for `status`.
        self._views: Mapping[str, WorkerView] = {}
        self._fleet: Fleet | None = None

    def change(self, options: PlannerOptions) -> None:
        """Use other settings, which must be valid. `mode` does not change.

        The thresholds in device seconds apply at once. `work_basis`, `fill`, `route`, `fill_factor` and the half-life apply
        from the next plan on. `replicas`, `hysteresis` and `forbid_memory_oversubscription` apply from the next repack on.
        """
        self.options = options.model_copy(update={"mode": self.options.mode})
        self._surveyed = frozenset()
        self._costs.halflife = _halflife(options)
        self._generation += 1

    def set_placement(
        self,
        model: str,
        *,
        replicas: Replicas | None = None,
        fill: Literal["least", "rr"] | None = None,
        fill_factor: float | None = None,
    ) -> None:
        """Replace the settings of one model except its devices. None stands for the general value.

        The model may be one that no worker serves yet.
        """
        own = self.options.models.get(model, ModelOptions())
        section = own.model_copy(update={"replicas": replicas, "fill": fill, "fill_factor": fill_factor})
        self.change(self.options.model_copy(update={"models": {**self.options.models, model: section}}))

    def resume(self, placed: Mapping[str, tuple[str, ...]], now: float) -> None:
        """Continue with the places that an earlier planner chose, by model. Call this before the first plan."""
        self._moves.resume(placed, now)

    def targets(self) -> Mapping[str, tuple[str, ...]]:
        """Return the target workers of each model: its current workers, or the workers to which it is moving."""
        return self._moves.targets

    def packed(self, views: Mapping[str, WorkerView], assumed: Mapping[str, float], now: float) -> "Planner":
        """Return a copy of this planner that has packed all models again with these views. This planner does not change.

        `assumed` has device seconds per second by model. These values replace the measured ones.
        """
        trial = deepcopy(self)
        trial._costs.assume(assumed)
        trial.repack()
        trial.plan(views, now)
        return trial

    def repack(self) -> int:
        """Repack with the next plan. Return the value of `PlannerStatus.repacks.done` after that repack."""
        self._asked += 1
        return self._asked

    def plan(self, views: Mapping[str, WorkerView], now: float) -> Plan:
        """Return the plan for the latest views of all workers, by name.

        `now` is in seconds of a monotonic clock.
        """
        self._remember(views)
        consumed = self._costs.observe(views, now)
        alive = {worker: self._latest[worker] for worker, view in views.items() if view.alive}
        absent = [view for worker, view in self._latest.items() if worker not in alive]
        before = self._fleet if self._surveyed == self._latest.keys() else None
        fleet = survey(alive, absent, self.options.pins, before)
        # Checks of thousands of models take long, so they run only if something about a model has changed.
        same = before is not None and fleet.models is before.models
        steps: list[WeightAction] = []
        if self.options.mode == "lpt_packing":
            self._device_s += consumed
            if not same:
                self._watch(fleet, now)
            trigger = self._trigger(views, fleet, now, homes=not (same and self._moves.at_rest))
            if trigger is not None:
                self._repack(fleet, trigger, now)
            if self._started:
                self._resize(fleet, now)
                same = same and self._moves.at_rest
                if not same:
                    steps, changed = self._moves.advance(
                        fleet, self._costs, self._crowded, self._swapping, now
                    )
                    for name in changed:
                        self._costs.where.pop(name, None)
        if not same or self.options.work_basis == "compute":
            table = make_table(self.options, fleet, self._moves.placed, self._costs, self._table)
            if table != self._table:
                self._table = table
        self._views, self._fleet, self._surveyed = views, fleet, frozenset(self._latest)
        moving = not self._moves.at_rest and not all(map(self._moves.settled, fleet.units))
        return Plan(self._table, tuple(steps), moving, self._changed_at is not None)

    # --- when to repack ------------------------------------------------------------------------------------

    def _remember(self, views: Mapping[str, WorkerView]) -> None:
        self._latest = {worker: view for worker, view in self._latest.items() if worker in views}
        for worker, view in views.items():
            before = self._latest.get(worker)
            if not view.alive:
                self._latest.setdefault(worker, view)
            elif view.instance is None and before is not None and before.instance is not None:
                # The worker answers, but its control service does not. The last figures stay until new ones arrive.
                self._latest[worker] = replace(before, alive=True, ready=view.ready, backlog_s=0.0)
            else:
                self._latest[worker] = view

    def _watch(self, fleet: Fleet, now: float) -> None:
        shape = {unit.models: unit.allowed for unit in fleet.units}
        if shape != self._shape:
            self._shape = shape
            self._changed_at = now

    def _settled(self, now: float) -> bool:
        return self._changed_at is not None and now - self._changed_at >= SETTLE_S

    def _trigger(
        self, views: Mapping[str, WorkerView], fleet: Fleet, now: float, *, homes: bool
    ) -> Trigger | None:
        """Return the reason for a repack now, or None. `homes`: check whether models lack a home."""
        if not fleet.units:
            return None
        if not self._started:
            whole = all(view.alive and view.instance is not None for view in views.values())
            return "start" if whole or self._settled(now) else None
        if self._asked > self._done:
            return "operator"
        if self._device_s >= self._threshold():
            return "work"
        if self._settled(now):
            return "membership"
        if not homes:
            return None
        homes_of_units = ((unit, self._moves.home(unit)) for unit in fleet.units)
        return (
            None
            if all(home and home == self._stays(unit, home) for unit, home in homes_of_units)
            else "homes"
        )

    def _threshold(self) -> float:
        options = self.options
        return options.rebalance_device_s if self._counts.get("work") else options.first_rebalance_device_s

    # --- choice of workers ---------------------------------------------------------------------------------

    def _repack(self, fleet: Fleet, trigger: Trigger, now: float) -> None:
        """Pack the units, and set the target of every unit."""
        self._moves.at_rest = False
        whole = trigger not in ("start", "homes")
        loads: list[UnitLoad] = []
        previous: dict[str, tuple[str, ...]] = {}
        shared: dict[tuple[str, ...], frozenset[str]] = {}
        for unit in fleet.units:
            count = self._replicas(unit)
            before = self._before(unit, fleet, count)
            stays: tuple[str, ...] = ()
            if trigger == "homes":
                stays = self._stays(unit, self._moves.home(unit))
            elif trigger == "start" and len(before) == count:
                stays = before
            allowed = stays or unit.allowed
            loads.append(
                UnitLoad(
                    unit.name,
                    sum(self._costs.measured(name).utilisation for name in unit.models),
                    unit.bytes,
                    len(stays) or count,
                    shared.setdefault(allowed, frozenset(allowed)),
                )
            )
            previous[unit.name] = before
        result = self._packed_onto(fleet, loads, previous)
        if result.oversubscribed and any(load.replicas > 1 for load in loads):
            # Additional automatic replicas only use memory that other units leave free. `_resize` adds such replicas again
            # where it finds free memory.
            auto = {unit.name for unit in self._automatic(fleet.units)}
            loads = [replace(load, replicas=1) if load.name in auto else load for load in loads]
            result = self._packed_onto(fleet, loads, previous)
        moved = 0
        for unit in fleet.units:
            home = self._moves.home(unit)
            if not home:
                for name in unit.models:
                    if name in self._moves.targets:
                        self._lost.setdefault(name, self._moves.targets[name])
            changed = self._moves.aim(unit, tuple(sorted(result.placed[unit.name])), now)
            moved += changed and bool(home)
        if trigger == "start":
            self._moves.start(fleet, now)
        self._crowded = _crowded(fleet, loads, result.placed)
        self._swapping = frozenset(worker for _, worker in self._crowded)
        self._started = True
        self._counts[trigger] = self._counts.get(trigger, 0) + 1
        self._last = (trigger, now)
        self._packed, self._moved, self._held = len(loads), moved, len(result.held)
        if whole:
            self._device_s = 0.0
            self._done = self._asked
            self._costs.where.clear()
            self._lost.clear()
        if trigger in ("start", "membership"):
            self._changed_at = None

    def _packed_onto(
        self, fleet: Fleet, loads: Sequence[UnitLoad], previous: Mapping[str, tuple[str, ...]]
    ) -> Packing:
        return self._pack(
            loads,
            [WorkerBudget(name, fleet.free_bytes(name), view.devices) for name, view in fleet.views.items()],
            previous=previous,
            hysteresis=self.options.hysteresis,
            forbid_oversubscription=self.options.forbid_memory_oversubscription,
        )

    def _resize(self, fleet: Fleet, now: float) -> None:
        """Change the number of replicas of units with automatic replicas. All other units stay."""
        # Only busy units and units with several replicas can change. Of thousands of units, these are few.
        demand, targets = self._costs.demand, self._moves.targets
        some = [u for u in fleet.units if len(targets.get(u.name, ())) > 1 or any(map(demand, u.models))]
        units = [unit for unit in self._automatic(some) if self._moves.settled(unit)]
        for unit, workers in self._replication.resize(units, self._moves.home, fleet, self._costs, now):
            self._moves.aim(unit, workers, now)

    def _automatic(self, units: Iterable[Unit]) -> list[Unit]:
        return [
            u for u in units if all(self.options.of_model(name, "replicas") == "auto" for name in u.models)
        ]

    def _replicas(self, unit: Unit) -> int:
        """Return the largest configured number of replicas of the unit's models, but at most the number of allowed workers."""
        present = len(self._moves.targets.get(unit.name, ())) or 1
        counts: dict[Replicas, int] = {"auto": present, "all": len(unit.allowed)}
        replicas: list[Replicas] = [self.options.of_model(name, "replicas") for name in unit.models]
        return min(len(unit.allowed), max(counts[n] if isinstance(n, str) else n for n in replicas))

    def _stays(self, unit: Unit, home: tuple[str, ...]) -> tuple[str, ...]:
        """Return the unit's place while only other units are packed.

        This is the home that the unit has lost, if all workers of that home are back, and otherwise `home`.
        """
        before = {self._lost.get(name, ()) for name in unit.models} if self._lost else set()
        back = before.pop() if len(before) == 1 else ()
        return back if back and set(back) <= set(unit.allowed) else home

    def _before(self, unit: Unit, fleet: Fleet, count: int) -> tuple[str, ...]:
        """Return at most `count` workers that are treated as the unit's earlier places."""
        target = self._moves.targets.get(unit.name, ())
        staying = [worker for worker in target if worker in unit.allowed]
        if not staying:
            started, warm = set(unit.allowed), set(unit.allowed if unit.bytes else ())
            for model in map(fleet.models.__getitem__, unit.models):
                started.difference_update(model.cold)
                if model.bytes:
                    warm.intersection_update(model.resident)
            # Weights may have left a device since the model started there. The device is still treated as a place.
            places = warm or started
            return tuple(sorted(places)) if len(places) <= count else ()
        used: dict[str, float] = {}
        if self._moves.settled(unit):
            for name in unit.models:
                for worker, seconds in self._costs.where.get(name, {}).items():
                    used[worker] = used.get(worker, 0.0) + seconds
        least = _PRESENT * sum(used.values())
        present = [worker for worker in unit.allowed if used.get(worker, 0.0) > least]
        return tuple(dict.fromkeys(present + staying))[:count]

    # --- status --------------------------------------------------------------------------------------------

    def status(self) -> PlannerStatus | None:
        """Return the state after the last plan, or None if there was no plan yet. The call takes as long as `plan`."""
        views, fleet = self._views, self._fleet
        if fleet is None:
            return None
        options, moves = self.options, self._moves
        effective = {name: self._replicas(unit) for unit in fleet.units for name in unit.models}
        workers = show_workers(views, fleet, moves.placed, self._costs)
        return PlannerStatus(
            mode=options.mode,
            generation=self._generation,
            models=show_models(options, fleet, self._table, moves.targets, effective, self._costs),
            workers=workers,
            repacks=self.repacks(),
            warnings=tuple(warn(options, views, fleet, workers, started=self._started)),
        )

    def repacks(self) -> Repacks:
        """Return the number of repacks so far and the figures of the last repack."""
        last, last_at = self._last or (None, None)
        return Repacks(
            counts=dict(self._counts),
            last=last,
            last_at=last_at,
            packed=self._packed,
            moved=self._moved,
            held=self._held,
            device_s=self._device_s,
            threshold_device_s=self._threshold(),
            done=self._done,
        )


def _halflife(options: PlannerOptions) -> float:
    return options.rebalance_device_s if options.halflife_device_s is None else options.halflife_device_s


def _crowded(
    fleet: Fleet, loads: Sequence[UnitLoad], placed: Mapping[str, tuple[str, ...]]
) -> frozenset[tuple[str, str]]:
    """Return pairs (unit, worker) where the unit's weights do not fit into the budget that busier units leave."""
    free = {worker: fleet.free_bytes(worker) for worker in fleet.views}
    crowded = set()
    for load in sorted(loads, key=lambda load: (-load.utilisation, load.bytes, load.name)):
        for worker in placed[load.name]:
            left = free[worker]
            if left is None:
                continue
            if load.bytes > left:
                crowded.add((load.name, worker))
            else:
                free[worker] = left - load.bytes
    return frozenset(crowded)

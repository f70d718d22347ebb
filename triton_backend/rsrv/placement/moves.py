"""Moves of models to their targets: first the weights, then the traffic, then the eviction at the old home.

The packing gives every unit a target. Requests stay at the old home until all weights of the unit are on the
device of a new home; then the table changes. The old home evicts the weights when it has no request of the
model left. On a worker with more weights than its budget, weights without requests are evicted at once: there
traffic does not wait. Each wait has a limit, because weights may never arrive, and another gateway may still
use the old home.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rsrv.placement.contract import Act, ModelView, WeightAction, WeightsView
from rsrv.placement.fleet import Fleet, Unit

#: after this time traffic moves to a new home without weights, and the old home is no longer awaited
MOVE_LIMIT_S = 60.0
#: pause between two prefetch requests for the same weights
ASK_AGAIN_S = 10.0


@dataclass(slots=True)
class _OldHome:
    """Weights of a model at a worker that it has moved away from."""

    since: float
    #: the model's last view there
    seen: ModelView


class Moves:
    """Places and targets of all models. Entries are kept while a worker serves the model, or served it before it fell silent."""

    def __init__(self) -> None:
        #: current and target workers of each model, by name
        self.placed: dict[str, tuple[str, ...]] = {}
        self.targets: dict[str, tuple[str, ...]] = {}
        #: time at which the target was set
        self._since: dict[str, float] = {}
        #: time of the last prefetch request by (model, worker), for the current target
        self._asked: dict[tuple[str, str], float] = {}
        self._leaving: dict[tuple[str, str], _OldHome] = {}

    def home(self, unit: Unit) -> tuple[str, ...]:
        """Return the target that all models of a unit share; empty if they have none, differ, or a worker of it is missing."""
        targets = {self.targets.get(name, ()) for name in unit.models}
        home = targets.pop()
        return home if not targets and set(home) <= set(unit.allowed) else ()

    def settled(self, unit: Unit) -> bool:
        return all(self.placed.get(name) == self.targets.get(name) for name in unit.models)

    def aim(self, unit: Unit, workers: tuple[str, ...], now: float) -> bool:
        """Set a unit's target. Return true if it has changed."""
        changed = False
        for name in unit.models:
            if self.targets.get(name) != workers:
                for worker in self.targets.get(name, ()):
                    self._asked.pop((name, worker), None)
                self.targets[name] = workers
                self._since[name] = now
                changed = True
        return changed

    def advance(
        self,
        fleet: Fleet,
        crowded: Collection[tuple[str, str]],
        swapping: Collection[str],
        now: float,
    ) -> tuple[list[WeightAction], list[str]]:
        """Advance every unit as far as possible.

        Args:
            fleet: the workers' last views.
            crowded: (unit, worker) whose weights would be evicted there again; they are not prefetched.
            swapping: workers whose weights are not awaited, because they stay only while requests come.
            now: the planner's time, seconds.

        Returns:
            The actions to request from the workers, and the models whose workers have changed.
        """
        steps: list[WeightAction] = []
        changed: list[str] = []
        for unit in fleet.units:
            target = self.home(unit)
            if not target:
                continue
            steps += self._fetch(unit, target, fleet, crowded, now)
            for name in unit.models:
                old = self.placed.get(name, ())
                new = self._place(unit, name, target, fleet, crowded, swapping, now)
                if new != old:
                    self.placed[name] = new
                    self._left(name, old, new, fleet, now)
                    changed.append(name)
        steps += self._free(fleet, now)
        self._forget(fleet.models)
        return steps, changed

    def _cold(
        self, unit: Unit, workers: Collection[str], fleet: Fleet, crowded: Collection[tuple[str, str]]
    ) -> list[str]:
        """Return the workers that lack weights worth waiting for."""
        return [w for w in workers if (unit.name, w) not in crowded and not fleet.warm(unit, w)]

    def _place(
        self,
        unit: Unit,
        name: str,
        target: tuple[str, ...],
        fleet: Fleet,
        crowded: Collection[tuple[str, str]],
        swapping: Collection[str],
        now: float,
    ) -> tuple[str, ...]:
        """Return the workers for a model's requests now."""
        here = [worker for worker in self.placed.get(name, ()) if worker in unit.allowed]
        gained = [worker for worker in target if worker not in here]
        waited_for = [worker for worker in gained if worker not in swapping]
        cold = self._cold(unit, waited_for, fleet, crowded)
        if not cold or now - self._since[name] >= MOVE_LIMIT_S:
            return target
        if not here:
            # Its home is gone and weights take a while to load: workers that have them serve meanwhile.
            here = [worker for worker in unit.allowed if fleet.warm(unit, worker)][: len(target)]
        return tuple(sorted({*here, *gained} - {*cold})) or target

    def _fetch(
        self,
        unit: Unit,
        target: tuple[str, ...],
        fleet: Fleet,
        crowded: Collection[tuple[str, str]],
        now: float,
    ) -> list[WeightAction]:
        """Return the prefetches that make the unit warm at its target."""
        steps = []
        for worker in self._cold(unit, target, fleet, crowded):
            for name in unit.models:
                view = fleet.views[worker].models.get(name)
                if view is None or view.weights is not WeightsView.ABSENT or view.bytes == 0:
                    continue
                asked = self._asked.get((name, worker))
                # Weights that are evicted at a home later come back with the next request.
                if asked is None or (now - asked >= ASK_AGAIN_S and worker not in self.placed.get(name, ())):
                    self._asked[name, worker] = now
                    steps.append(WeightAction(Act.PREFETCH, worker, name))
        return steps

    def _left(self, name: str, old: tuple[str, ...], new: tuple[str, ...], fleet: Fleet, now: float) -> None:
        for worker in new:
            self._leaving.pop((name, worker), None)
        for worker in old:
            view = fleet.views.get(worker)
            seen = None if view is None else view.models.get(name)
            if worker not in new and seen is not None:
                self._leaving[name, worker] = _OldHome(now, seen)

    def _free(self, fleet: Fleet, now: float) -> list[WeightAction]:
        """Evict weights at old homes without requests in flight."""
        steps = []
        for (name, worker), leaving in list(self._leaving.items()):
            view = fleet.views.get(worker)
            seen = None if view is None else view.models.get(name)
            if seen is None or seen.weights is WeightsView.ABSENT or seen.pinned:
                del self._leaving[name, worker]
                continue
            late = now - leaving.since >= MOVE_LIMIT_S
            if seen is leaving.seen and not late:
                continue
            still = seen.requests != leaving.seen.requests
            leaving.seen = seen
            if late or not (still or seen.queued or seen.executing):
                del self._leaving[name, worker]
                # Requests that keep coming are another gateway's, which will notice by itself.
                if not still:
                    steps.append(WeightAction(Act.EVICT, worker, name))
        return steps

    def _forget(self, models: Mapping[str, object]) -> None:
        for name in [name for name in self.targets if name not in models]:
            del self.targets[name], self._since[name]
            self.placed.pop(name, None)
        self._asked = {key: at for key, at in self._asked.items() if key[0] in models}
        self._leaving = {key: leaving for key, leaving in self._leaving.items() if key[0] in models}

"""From where models are to where they should be: weights first, then traffic, and then the old home is freed.

The packing gives every unit a target. Until all weights of the unit are on the device of a new home, requests stay where
they are; when they are, the table changes. The old home frees its weights when it has nothing of the model any more.
Where more is placed than has room, weights that nobody asks for give way at once: there traffic does not wait.
A limit ends each wait, for weights may never come, and another gateway may still send requests to the old home.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rsrv.placement.contract import Act, ModelView, WeightAction, WeightsView
from rsrv.placement.fleet import Fleet, Unit

#: after this time traffic goes to a new home whose weights have not come, and old homes are no longer waited for
MOVE_LIMIT_S = 60.0
#: after this time without the weights a worker is asked for them again
ASK_AGAIN_S = 10.0


@dataclass(slots=True)
class _OldHome:
    """A model's weights at a worker that it went from."""

    since: float
    #: what was seen of it there last
    seen: ModelView


class Moves:
    """Where every model is and goes. Kept while any member serves it, or did: its workers may come back."""

    def __init__(self) -> None:
        #: by model: where requests go, and where they should; workers by name
        self.placed: dict[str, tuple[str, ...]] = {}
        self.targets: dict[str, tuple[str, ...]] = {}
        #: when the target was set
        self._since: dict[str, float] = {}
        #: (model, worker): when it was last asked for the weights for this target
        self._asked: dict[tuple[str, str], float] = {}
        self._leaving: dict[tuple[str, str], _OldHome] = {}

    def home(self, unit: Unit) -> tuple[str, ...]:
        """The target that all of a unit have; empty: they have none, or not the same, or it is not all there."""
        targets = {self.targets.get(name, ()) for name in unit.models}
        home = targets.pop()
        return home if not targets and set(home) <= set(unit.allowed) else ()

    def settled(self, unit: Unit) -> bool:
        return all(self.placed.get(name) == self.targets.get(name) for name in unit.models)

    def aim(self, unit: Unit, workers: tuple[str, ...], now: float) -> bool:
        """Set a unit's target. Returns whether it is another than before."""
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
        """Take every unit as far as it can go now.

        crowded: (unit, worker) whose weights would not stay there; they are not asked for.
        swapping: workers where no weights are waited for, because they do not stay without requests.
        Returns what to ask of the workers, and the models whose place has changed.
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
        """Those workers whose weights are worth waiting for."""
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
        """Where a model's requests go now."""
        here = [worker for worker in self.placed.get(name, ()) if worker in unit.allowed]
        gained = [worker for worker in target if worker not in here]
        waited_for = [worker for worker in gained if worker not in swapping]
        cold = self._cold(unit, waited_for, fleet, crowded)
        if not cold or now - self._since[name] >= MOVE_LIMIT_S:
            return target
        if not here:
            # Its home is gone, and weights take a while: who has them serves meanwhile.
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
        """What to ask for, so that the unit becomes warm at its target."""
        steps = []
        for worker in self._cold(unit, target, fleet, crowded):
            for name in unit.models:
                view = fleet.views[worker].models.get(name)
                if view is None or view.weights is not WeightsView.ABSENT or view.bytes == 0:
                    continue
                asked = self._asked.get((name, worker))
                # What gave way later, at a home, comes back with the next request.
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
        """Old homes that have nothing under way any more."""
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
                # Requests that come all the time are another gateway's, which will find out by itself.
                if not still:
                    steps.append(WeightAction(Act.EVICT, worker, name))
        return steps

    def _forget(self, models: Mapping[str, object]) -> None:
        for name in [name for name in self.targets if name not in models]:
            del self.targets[name], self._since[name]
            self.placed.pop(name, None)
        self._asked = {key: at for key, at in self._asked.items() if key[0] in models}
        self._leaving = {key: leaving for key, leaving in self._leaving.items() if key[0] in models}

"""Moves models to their targets: the weights first, then the traffic. At the end, the old home evicts the weights.

The packing gives every unit a target. Requests stay at the old home until all weights of the unit are on the device of a new
home. Then the table changes. The old home evicts the weights when no request of the model is left there. If the weights that
are placed on a worker exceed its budget, the worker evicts weights that have no requests. So traffic to such a worker does not
wait until the weights are loaded.

A move makes no warm model cold. It begins when the new home has free memory for the weights. To free memory, the new home
evicts idle weights of models that are resident at their own homes on other workers. At most MOVES_AT_ONCE moves to one worker
are under way, so a worker that returns gets its models back a few at a time, the busiest first. A move that cannot begin, or
whose weights do not arrive, is cancelled after MOVE_LIMIT_S, and the model keeps its home. A model that is warm at no home does
not wait for the moves of other models.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rsrv.placement.contract import Act, ModelView, WeightAction, WeightsView
from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet, Unit

#: Maximum number of concurrent moves to one worker, because its link transfers weights one after the other.
MOVES_AT_ONCE = 2
#: Seconds after which a move is cancelled. After the same time, an old home is no longer watched for its last requests.
MOVE_LIMIT_S = 60.0
#: Seconds between two prefetch requests for the same weights.
ASK_AGAIN_S = 10.0


@dataclass(slots=True)
class _OldHome:
    """Weights of a model at a worker that the model has moved away from."""

    #: Time at which the model moved away.
    since: float
    #: Last view of the model on the worker.
    seen: ModelView
    #: Number of the worker's measurement to which that view belongs.
    measurement: int


class Moves:
    """Current places and targets of all models. The entries of a model are kept while the model is in `Fleet.models`."""

    def __init__(self) -> None:
        #: Current workers of each model, by the model's name.
        self.placed: dict[str, tuple[str, ...]] = {}
        #: Target workers of each model, by the model's name.
        self.targets: dict[str, tuple[str, ...]] = {}
        #: Time at which each model's target was set.
        self._since: dict[str, float] = {}
        #: Time of the last prefetch for the current target, by (model, worker). If the weights arrived without a prefetch, the
        #: time at which their arrival was noted.
        self._asked: dict[tuple[str, str], float] = {}
        #: Pairs (model, worker): the model's weights have been on the worker since the target was set.
        self._arrived: set[tuple[str, str]] = set()
        #: Time at which a unit's move to a worker began. The entry is removed once the unit is warm there.
        self._begun: dict[tuple[str, str], float] = {}
        #: Old homes whose weights are not evicted yet, by (model, worker).
        self._leaving: dict[tuple[str, str], _OldHome] = {}
        #: True if `advance` found no open move. It stays true until the models of the fleet or a target change.
        self.at_rest = False

    def resume(self, placed: Mapping[str, tuple[str, ...]], now: float) -> None:
        """Continue with the places of an earlier planner. They also become the targets."""
        self.placed, self.targets = dict(placed), dict(placed)
        self._since = dict.fromkeys(placed, now)

    def home(self, unit: Unit) -> tuple[str, ...]:
        """Return the target that all models of a unit share.

        It is empty if they have no target or different ones, or if a worker of the target is missing.
        """
        home, *other_homes = [self.targets.get(name, ()) for name in unit.models]
        same = all(other_home == home for other_home in other_homes)
        return home if same and all(worker in unit.allowed for worker in home) else ()

    def settled(self, unit: Unit) -> bool:
        return all(self.placed.get(name) == self.targets.get(name) for name in unit.models)

    def aim(self, unit: Unit, workers: tuple[str, ...], now: float) -> bool:
        """Set a unit's target. Return true if it has changed."""
        changed = False
        for name in unit.models:
            if self.targets.get(name) != workers:
                for worker in self.targets.get(name, ()):
                    self._asked.pop((name, worker), None)
                    self._arrived.discard((name, worker))
                self.targets[name] = workers
                self._since[name] = now
                self.at_rest = False
                changed = True
        return changed

    def start(self, fleet: Fleet, now: float) -> None:
        """Treat weights as arrived if their model has executed at its target, even if they have been evicted since then."""
        for unit in fleet.units:
            self._note_arrivals(unit, fleet, now, executed=True)

    def _note_arrivals(self, unit: Unit, fleet: Fleet, now: float, *, executed: bool = False) -> None:
        """Note which weights are at the unit's target, so that a later eviction there causes no prefetch."""
        for worker in self.home(unit):
            models = fleet.views[worker].models
            for name in unit.models:
                view = models.get(name)
                if view is not None and (
                    view.weights is WeightsView.RESIDENT or (executed and view.requests)
                ):
                    self._asked.setdefault((name, worker), now)
                    self._arrived.add((name, worker))

    def advance(
        self,
        fleet: Fleet,
        costs: Costs,
        crowded: Collection[tuple[str, str]],
        swapping: Collection[str],
        now: float,
    ) -> tuple[list[WeightAction], list[str]]:
        """Advance every unit as far as possible.

        Args:
            fleet: the workers' last views.
            costs: measured loads. The moves of the busiest models begin first.
            crowded: pairs (unit, worker). The unit's weights would be evicted there again, so they are not prefetched.
            swapping: workers that evict weights without requests. Traffic does not wait for weights there.
            now: the planner's time, seconds.

        Returns:
            The actions to request from the workers, and the models whose workers have changed.
        """
        changed: list[str] = []
        absent: list[tuple[Unit, str]] = []
        for unit in fleet.units:
            target = self.home(unit)
            if not target:
                continue
            absent += [(unit, worker) for worker in self._cold(unit, target, fleet, crowded)]
            self._note_arrivals(unit, fleet, now)
            for name in unit.models:
                old = self.placed.get(name, ())
                new = self._place(unit, name, target, fleet, crowded, swapping)
                if new != old:
                    self.placed[name] = new
                    self._left(name, old, new, fleet, now)
                    changed.append(name)
        absent.sort(
            key=lambda placed: (
                -sum(costs.measured(n).utilisation for n in placed[0].models),
                placed[0].models,
            )
        )
        steps = self._fetch(absent, fleet, swapping, now)
        steps += self._free(fleet, now)
        self._forget(fleet.models)
        open_moves = absent or changed or self._leaving or self._begun
        self.at_rest = not open_moves and all(map(self.settled, fleet.units))
        return steps, changed

    def _cold(
        self, unit: Unit, workers: Collection[str], fleet: Fleet, crowded: Collection[tuple[str, str]]
    ) -> list[str]:
        """Return the workers that lack the unit's weights on their device. Crowded workers are left out."""
        return [w for w in workers if (unit.name, w) not in crowded and not fleet.warm(unit, w)]

    def _place(
        self,
        unit: Unit,
        name: str,
        target: tuple[str, ...],
        fleet: Fleet,
        crowded: Collection[tuple[str, str]],
        swapping: Collection[str],
    ) -> tuple[str, ...]:
        """Return the workers that shall get a model's requests now."""
        here = [worker for worker in self.placed.get(name, ()) if worker in unit.allowed]
        gained = [worker for worker in target if worker not in here]
        waited_for = [worker for worker in gained if worker not in swapping]
        cold = self._cold(unit, waited_for, fleet, crowded)
        if not cold:
            return target
        if not here:
            # The model has no home, and its weights take time to load at the target. Until they are loaded, workers that
            # already have the weights serve the model.
            here = [worker for worker in unit.allowed if fleet.warm(unit, worker)][: len(target)]
        return tuple(sorted({*here, *gained} - {*cold})) or target

    def _fetch(
        self, absent: list[tuple[Unit, str]], fleet: Fleet, swapping: Collection[str], now: float
    ) -> list[WeightAction]:
        """Return the actions that bring absent weights to the units' targets, as far as they may begin now."""
        keys = {(unit.name, worker) for unit, worker in absent}
        # A move whose target has changed still occupies the link until its weights have arrived.
        self._begun = {key: at for key, at in self._begun.items() if key in keys or _loads(*key, fleet)}
        under_way = Counter(worker for _, worker in self._begun)
        #: Bytes of requested weights that the worker does not report yet.
        coming = Counter[str]()
        for unit, worker in absent:
            if (unit.name, worker) in self._begun:
                coming[worker] += sum(size for _, size in _missing(unit, worker, fleet))
        #: Weights that may be evicted to make room, by worker.
        spare: dict[str, list[tuple[int, str]]] = {}
        #: Bytes that are freed by the evictions of this call, by worker.
        freed = Counter[str]()
        steps: list[WeightAction] = []
        for unit, worker in absent:
            missing = _missing(unit, worker, fleet)
            begun = self._begun.get((unit.name, worker))
            if begun is not None:
                if now - begun >= MOVE_LIMIT_S:
                    del self._begun[unit.name, worker]
                    under_way[worker] -= 1
                    self._give_up(unit, now)
                    continue
            elif worker not in swapping:
                moves = any(w in fleet.views and fleet.warm(unit, w) for w in self.placed.get(unit.name, ()))
                if moves and under_way[worker] >= MOVES_AT_ONCE:
                    continue
                needed, room = sum(size for _, size in missing), fleet.room(worker)
                short = 0 if room is None else needed + coming[worker] - room
                if short > freed[worker] and worker not in spare:
                    spare[worker] = self._spare(worker, fleet)
                while short > freed[worker] and spare[worker]:
                    size, name = spare[worker].pop()
                    freed[worker] += size
                    steps.append(WeightAction(Act.EVICT, worker, name))
                if moves and short > 0:
                    if not under_way[worker] and now - self._since[unit.name] >= MOVE_LIMIT_S:
                        self._give_up(unit, now)
                    continue
                coming[worker] += needed
                if moves:
                    self._begun[unit.name, worker] = now
                    under_way[worker] += 1
            for name, _ in missing:
                key = name, worker
                # Do not prefetch weights that were evicted after their arrival: they return with the next request.
                evicted = key in self._arrived and worker in self.placed.get(name, ())
                if key not in self._asked or (now - self._asked[key] >= ASK_AGAIN_S and not evicted):
                    self._asked[key] = now
                    steps.append(WeightAction(Act.PREFETCH, worker, name))
        return steps

    def _spare(self, worker: str, fleet: Fleet) -> list[tuple[int, str]]:
        """Return pairs (bytes, model) of this worker's idle weights whose models are warm at homes elsewhere.

        The largest are last.
        """
        spare = []
        for name, view in fleet.views[worker].models.items():
            if view.weights is not WeightsView.RESIDENT or not view.bytes:
                continue
            if view.pinned or view.queued or view.executing or (name, worker) in self._leaving:
                continue
            placed = self.placed.get(name, ())
            if worker in placed or worker in self.targets.get(name, ()):
                continue
            homes = (fleet.views[home].models.get(name) for home in placed if home in fleet.views)
            if any(home is not None and home.weights is WeightsView.RESIDENT for home in homes):
                spare.append((view.bytes, name))
        return sorted(spare)

    def _give_up(self, unit: Unit, now: float) -> None:
        """Cancel a unit's move: set its target to the place where it is, or where most of its models are."""
        places = Counter(place for name in unit.models if (place := self.placed.get(name)))
        for place, _ in places.most_common(1):
            self.aim(unit, place, now)

    def _left(self, name: str, old: tuple[str, ...], new: tuple[str, ...], fleet: Fleet, now: float) -> None:
        for worker in new:
            self._leaving.pop((name, worker), None)
        for worker in old:
            view = fleet.views.get(worker)
            seen = None if view is None else view.models.get(name)
            if worker not in new and view is not None and seen is not None:
                self._leaving[name, worker] = _OldHome(now, seen, view.measurement)

    def _free(self, fleet: Fleet, now: float) -> list[WeightAction]:
        """Return the evictions of weights at old homes. An old home is skipped while it has requests of the model in flight."""
        steps = []
        for (name, worker), leaving in list(self._leaving.items()):
            view = fleet.views.get(worker)
            seen = None if view is None else view.models.get(name)
            if view is None or seen is None or seen.weights is WeightsView.ABSENT or seen.pinned:
                del self._leaving[name, worker]
                continue
            late = now - leaving.since >= MOVE_LIMIT_S
            if view.measurement == leaving.measurement and not late:
                continue
            still = seen.requests != leaving.seen.requests
            leaving.seen, leaving.measurement = seen, view.measurement
            if late or not (still or seen.queued or seen.executing):
                del self._leaving[name, worker]
                # If requests still arrive, another gateway sends them. Do not evict the weights then: that gateway will itself
                # notice the move.
                if not still:
                    steps.append(WeightAction(Act.EVICT, worker, name))
        return steps

    def _forget(self, models: Mapping[str, object]) -> None:
        for name in [name for name in self.targets if name not in models]:
            del self.targets[name], self._since[name]
            self.placed.pop(name, None)
        self._asked = {key: at for key, at in self._asked.items() if key[0] in models}
        self._arrived = {key for key in self._arrived if key[0] in models}
        self._leaving = {key: leaving for key, leaving in self._leaving.items() if key[0] in models}


def _missing(unit: Unit, worker: str, fleet: Fleet) -> list[tuple[str, int]]:
    """Return the models of a unit whose weights are neither on the worker's device nor being loaded, with their bytes."""
    models = fleet.views[worker].models
    views = [(name, models.get(name)) for name in unit.models]
    return [
        (name, view.bytes)
        for name, view in views
        if view is not None and view.weights is WeightsView.ABSENT and view.bytes
    ]


def _loads(name: str, worker: str, fleet: Fleet) -> bool:
    model = fleet.views[worker].models.get(name) if worker in fleet.views else None
    return model is not None and model.weights is WeightsView.LOADING

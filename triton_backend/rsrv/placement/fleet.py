"""All workers' views in one: what each model is, where it is ready, and which models must be together."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rsrv.placement.contract import ModelView, WeightsView, WorkerView


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model, over all workers that are alive."""

    #: where it is ready, by name
    ready: tuple[str, ...]
    #: where its weights are on the device, by name
    resident: tuple[str, ...] = ()
    #: device bytes that it takes where it is placed; 0: nobody says, or it is pinned wherever it is
    bytes: int = 0
    max_items: int = 0
    batch_input: tuple[str, int] | None = None
    #: of a meta model: the models that it calls
    calls: frozenset[str] = frozenset()
    #: whether its worker says more of it than that it is ready: others are not packed
    known: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """Models that go to the same workers: a meta model and all that it calls, or one model."""

    #: by name
    models: tuple[str, ...]
    #: where all of them are ready, by name; at least one
    allowed: tuple[str, ...]
    bytes: int

    @property
    def name(self) -> str:
        return self.models[0]


@dataclass(frozen=True, slots=True)
class Fleet:
    #: workers that are alive, by name
    views: Mapping[str, WorkerView]
    #: all models that a member serves, or served when it was last seen
    models: Mapping[str, FleetModel]
    #: what is packed, by name
    units: tuple[Unit, ...]
    #: meta models whose called models are not all ready on one worker
    torn: tuple[str, ...]

    def warm(self, unit: Unit, worker: str) -> bool:
        """Whether all weights that a unit needs are on this worker's device, as far as it says anything."""
        models = self.views[worker].models
        return all(
            view.weights is WeightsView.RESIDENT or view.bytes == 0
            for view in map(models.get, unit.models)
            if view is not None
        )

    def free_bytes(self, worker: str) -> int | None:
        """Bytes that packed models may take there: the budget without what is pinned. None: no limit."""
        view = self.views[worker]
        if view.budget_bytes is None:
            return None
        return max(view.budget_bytes - sum(m.bytes for m in view.models.values() if m.pinned), 0)


def survey(alive: Mapping[str, WorkerView], absent: Iterable[WorkerView]) -> Fleet:
    """Put all views together. `absent`: what members that do not answer served before."""
    views = {worker: alive[worker] for worker in sorted(alive)}
    models = _models(views)
    for view in absent:
        for name in view.ready:
            models.setdefault(name, FleetModel(ready=()))
    units, torn = _units(views, models)
    return Fleet(views, models, units, torn)


def _models(views: Mapping[str, WorkerView]) -> dict[str, FleetModel]:
    # Workers that serve the same are looked at together: a thousand of them have ten thousand models each.
    alike: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    shown: defaultdict[str, list[ModelView]] = defaultdict(list)
    resident: defaultdict[str, list[str]] = defaultdict(list)
    calls: dict[str, frozenset[str]] = {}
    for worker, view in views.items():
        alike[view.ready].append(worker)
        for name, seen in view.models.items():
            shown[name].append(seen)
            if seen.weights is WeightsView.RESIDENT:
                resident[name].append(worker)
        for name, called in view.calls.items():
            calls[name] = calls.get(name, frozenset()) | called
    #: by model: which of these groups serve it
    groups: dict[str, tuple[int, ...]] = {}
    for number, ready in enumerate(alike):
        for name in ready:
            groups[name] = (*groups.get(name, ()), number)
    members = list(alike.values())
    same: dict[tuple[int, ...], tuple[str, ...]] = {}
    models = {}
    # By name: sets have an order of their own in every process, and others decide by this one.
    for name in sorted({**groups, **shown, **calls}):
        serving = groups.get(name, ())
        if serving not in same:
            same[serving] = tuple(sorted(worker for number in serving for worker in members[number]))
        size = most = 0
        pinned = True
        batch_input = None
        for seen in shown.get(name, ()):
            size, most = max(size, seen.bytes), max(most, seen.max_items)
            pinned = pinned and seen.pinned
            batch_input = batch_input or seen.batch_input
        models[name] = FleetModel(
            ready=same[serving],
            resident=tuple(resident.get(name, ())),
            bytes=0 if pinned else size,
            max_items=most,
            batch_input=batch_input,
            calls=calls.get(name, frozenset()),
            known=name in shown or name in calls,
        )
    return models


def _units(
    views: Mapping[str, WorkerView], models: Mapping[str, FleetModel]
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    told = {worker for worker, view in views.items() if view.instance is not None}
    units = []
    torn: list[str] = []
    for group in _together(models):
        allowed = _allowed(group, models, told)
        if not allowed and len(group) > 1:
            torn += [name for name in group if models[name].calls]
        for members in [group] if allowed else [(name,) for name in group]:
            where = allowed or _allowed(members, models, told)
            if where:
                units.append(Unit(members, where, sum(models[name].bytes for name in members)))
    return tuple(sorted(units, key=lambda unit: unit.models)), tuple(sorted(torn))


def _allowed(group: tuple[str, ...], models: Mapping[str, FleetModel], told: set[str]) -> tuple[str, ...]:
    """Workers where all of them are ready that are; with a control service, where there is one."""
    places = [models[name].ready for name in group if models[name].ready]
    if not places:
        return ()
    common = places[0] if len(places) == 1 else tuple(sorted({*places[0]}.intersection(*places[1:])))
    if told.issuperset(common):
        return common
    return tuple([worker for worker in common if worker in told]) or common


def _together(models: Mapping[str, FleetModel]) -> list[tuple[str, ...]]:
    """The models that are packed, in groups that calls connect."""
    parent = {name: name for name, model in models.items() if model.known}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for name, model in models.items():
        for called in model.calls:
            if called in parent:
                first, second = sorted((root(name), root(called)))
                parent[second] = first
    groups: dict[str, list[str]] = {}
    for name in sorted(parent):
        groups.setdefault(root(name), []).append(name)
    return [tuple(group) for group in groups.values()]

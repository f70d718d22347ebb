"""Summary of all workers' views: the size and the places of each model, and the models that belong together."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from rsrv.placement.contract import Immutable, ModelView, WeightsView, WorkerView


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model, over all workers that are alive."""

    #: Names of the workers where the model is ready.
    ready: tuple[str, ...]
    #: Names of the workers of `ready` where the model is cold, if the runtime of another worker has the model. A request to a
    #: cold worker would wait until the model starts.
    cold: tuple[str, ...] = ()
    #: Names of the workers with the model's weights on the device.
    resident: tuple[str, ...] = ()
    #: Device bytes of the model's weights on each worker where it is placed. 0 if unknown, or if every worker has pinned the
    #: model.
    bytes: int = 0
    max_items: int = 0
    batch_input: tuple[str, int] | None = None
    #: Models that a meta model calls.
    calls: frozenset[str] = frozenset()
    #: The model that gets most of an alias's requests. Empty if this entry is not an alias.
    follows: str = ""
    #: True if a worker reports figures of the model. Models without figures are not packed.
    known: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """Models that are placed together: a meta model and all models that it calls, or one model.

    On one server, models whose pins have no device in common are placed one by one.
    """

    #: Sorted names of the models.
    models: tuple[str, ...]
    #: Names of the workers where all models of the unit are ready. There is at least one.
    allowed: tuple[str, ...]
    bytes: int

    @property
    def name(self) -> str:
        return self.models[0]


@dataclass(frozen=True, slots=True)
class Fleet(Immutable):
    #: Views of the workers that are alive, by name.
    views: Mapping[str, WorkerView]
    #: All models that a worker serves, or served when it last answered.
    models: Mapping[str, FleetModel]
    #: Units to pack, sorted by name.
    units: tuple[Unit, ...]
    #: Names of the meta models that no worker serves together with all models that they call.
    torn: tuple[str, ...]

    def warm(self, unit: Unit, worker: str) -> bool:
        """Return true if this worker's device has all weights of the unit.

        Models without reported figures are not checked. The result is false if a model of the unit is cold on the worker.
        """
        if any(worker in self.models[name].cold for name in unit.models):
            return False
        models = self.views[worker].models
        return all(
            view.weights is WeightsView.RESIDENT or view.bytes == 0
            for view in map(models.get, unit.models)
            if view is not None
        )

    def room(self, worker: str) -> int | None:
        """Return the device bytes that no weights occupy, or None if there is no limit."""
        view = self.views[worker]
        if view.free_bytes is not None or view.budget_bytes is None:
            return view.free_bytes
        used = sum(m.bytes for m in view.models.values() if m.weights is not WeightsView.ABSENT)
        return max(view.budget_bytes - used, 0)

    def free_bytes(self, worker: str) -> int | None:
        """Return the device bytes for packed models: the budget without pinned weights.

        The result is None if there is no limit.
        """
        view = self.views[worker]
        if view.budget_bytes is None:
            return None
        return max(view.budget_bytes - sum(m.bytes for m in view.models.values() if m.pinned), 0)


def survey(
    alive: Mapping[str, WorkerView],
    absent: Collection[WorkerView],
    pins: Mapping[str, Collection[int]] = {},
    before: Fleet | None = None,
) -> Fleet:
    """Combine all views.

    Args:
        alive: the views of the workers that answer, by name.
        absent: the last views of the workers that do not answer.
        pins: numbers of the devices that a model may use, by model. If none of these devices answers, the model may use any
            device.
        before: the last fleet of these workers with these pins. Its unchanged parts are reused.
    """
    views = {worker: alive[worker] for worker in sorted(alive)}
    changed = None if before is None else _changed_models(views, absent, before)
    if before is not None and changed is not None:
        models = {**before.models, **changed} if changed else before.models
        if all(before.models[name].bytes == model.bytes for name, model in changed.items()):
            return Fleet(views, models, before.units, before.torn)
    else:
        models = _models(views)
        for view in absent:
            for name in view.ready:
                models.setdefault(name, FleetModel(ready=()))
    units, torn = _units(views, models, pins)
    return Fleet(views, models, units, torn)


def _changed_models(
    views: Mapping[str, WorkerView], absent: Iterable[WorkerView], before: Fleet
) -> dict[str, FleetModel] | None:
    """Return the models whose figures differ from those in `before`.

    Return None if anything else has changed, or if the figures of more than half of the models have changed.
    """
    if views.keys() != before.views.keys() or not all(view.ready <= before.models.keys() for view in absent):
        return None
    touched: set[str] = set()
    for worker, view in views.items():
        old = before.views[worker]
        if (view.ready, view.calls, view.aliases, view.device, view.instance is None) != (
            old.ready,
            old.calls,
            old.aliases,
            old.device,
            old.instance is None,
        ):
            return None
        if view.models is not old.models:
            if view.models.keys() != old.models.keys():
                return None
            touched.update(name for name, seen in view.models.items() if seen is not old.models[name])
    if len(touched) * 2 > len(before.models):
        return None
    changed = {}
    for name in touched:
        shown = {
            worker: seen for worker, view in views.items() if (seen := view.models.get(name)) is not None
        }
        resident = [worker for worker, seen in shown.items() if seen.weights is WeightsView.RESIDENT]
        model = _with_figures(before.models[name], shown.values(), resident)
        if model != before.models[name]:
            changed[name] = model
    return changed


def _with_figures(model: FleetModel, shown: Iterable[ModelView], resident: Iterable[str]) -> FleetModel:
    """Return a model with the figures that the workers report."""
    size = most = 0
    pinned = True
    batch_input = None
    for seen in shown:
        size, most = max(size, seen.bytes), max(most, seen.max_items)
        pinned = pinned and seen.pinned
        batch_input = batch_input or seen.batch_input
    return replace(
        model,
        resident=tuple(resident),
        bytes=0 if pinned else size,
        max_items=most,
        batch_input=batch_input,
    )


def _models(views: Mapping[str, WorkerView]) -> dict[str, FleetModel]:
    # Workers with equal models are handled together: a fleet may have 1,000 workers with 10,000 models each.
    alike: defaultdict[frozenset[str], list[str]] = defaultdict(list)
    shown: defaultdict[str, list[ModelView]] = defaultdict(list)
    resident: defaultdict[str, list[str]] = defaultdict(list)
    calls: dict[str, frozenset[str]] = {}
    aliases: dict[str, str] = {}
    for worker, view in views.items():
        alike[view.ready].append(worker)
        for name, seen in view.models.items():
            shown[name].append(seen)
            if seen.weights is WeightsView.RESIDENT:
                resident[name].append(worker)
        for name, called in view.calls.items():
            calls[name] = calls.get(name, frozenset()) | called
        aliases |= view.aliases
    #: Indices of the groups that serve each model.
    groups: dict[str, tuple[int, ...]] = {}
    for number, ready in enumerate(alike):
        for name in ready:
            groups[name] = (*groups.get(name, ()), number)
    members = list(alike.values())
    same: dict[tuple[int, ...], tuple[str, ...]] = {}
    models = {}
    # The names are sorted because the order of sets differs between processes, and decisions depend on this order.
    for name in sorted({**groups, **shown, **calls}):
        serving = groups.get(name, ())
        if serving not in same:
            same[serving] = tuple(sorted(worker for number in serving for worker in members[number]))
        model = FleetModel(
            ready=same[serving],
            cold=_cold(name, same[serving], views) if len(shown.get(name, ())) < len(same[serving]) else (),
            calls=calls.get(name, frozenset()),
            follows=aliases.get(name, ""),
            known=name in shown or name in calls,
        )
        models[name] = _with_figures(model, shown.get(name, ()), resident.get(name, ()))
    return models


def _cold(name: str, ready: tuple[str, ...], views: Mapping[str, WorkerView]) -> tuple[str, ...]:
    """Return the workers of `ready` that must start the model before it serves: their control services do not list the model.

    If this holds for all workers of `ready`, return ().
    """
    cold = [
        worker
        for worker in ready
        if (view := views[worker]).instance is not None and name not in view.models and name not in view.calls
    ]
    return tuple(cold) if len(cold) < len(ready) else ()


def _units(
    views: Mapping[str, WorkerView], models: Mapping[str, FleetModel], pins: Mapping[str, Collection[int]]
) -> tuple[tuple[Unit, ...], tuple[str, ...]]:
    known = {worker for worker, view in views.items() if view.instance is not None}

    def pinned(group: tuple[str, ...], allowed: tuple[str, ...]) -> tuple[str, ...]:
        named = [pins[name] for name in group if name in pins]
        return tuple([w for w in allowed if all(views[w].device in devices for devices in named)]) or allowed

    # A run of a meta model can use all devices of one server, but not several servers. So only a single server can serve a
    # meta model whose models are pinned to different devices.
    several_servers = len({view.device for view in views.values()}) < len(views)
    units = []
    torn: list[str] = []
    for group in _together(models):
        allowed = _allowed(group, models, known)
        if not allowed and len(group) > 1:
            torn += [name for name in group if models[name].calls]
        together = allowed and (several_servers or have_common_device(group, pins))
        for members in [group] if together else [(name,) for name in group]:
            where = allowed or _allowed(members, models, known)
            if where:
                size = sum(models[name].bytes for name in members)
                units.append(Unit(members, pinned(members, where) if pins else where, size))
    return tuple(sorted(units, key=lambda unit: unit.models)), tuple(sorted(torn))


def have_common_device(group: tuple[str, ...], pins: Mapping[str, Collection[int]]) -> bool:
    """Return whether the pinned models of a group have a device in common, or at most one of them is pinned."""
    named = [{*pins[name]} for name in group if name in pins]
    return len(named) < 2 or bool(set.intersection(*named))


def _allowed(group: tuple[str, ...], models: Mapping[str, FleetModel], known: set[str]) -> tuple[str, ...]:
    """Return the workers on which all models of the group are ready. Models that are ready on no worker are ignored.

    If some of these workers have a control service, return only those.
    """
    places = [models[name].ready for name in group if models[name].ready]
    if not places:
        return ()
    common = places[0] if len(places) == 1 else tuple(sorted({*places[0]}.intersection(*places[1:])))
    if known.issuperset(common):
        return common
    return tuple([worker for worker in common if worker in known]) or common


def _together(models: Mapping[str, FleetModel]) -> list[tuple[str, ...]]:
    """Return the names of the models to pack. Models that are connected by calls are in one group."""
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

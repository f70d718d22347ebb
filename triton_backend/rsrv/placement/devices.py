"""Functions for the devices of servers and for the views of these devices. All functions are pure.

A device is named SERVER/NUMBER. The only device of a server is named SERVER.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

from rsrv.placement.contract import ModelView, Table, WeightsView, WorkerView


class ServerDevice(NamedTuple):
    """A device of a server."""

    server: str
    #: Position in the server's runtime.devices, or None for its only device.
    number: int | None
    #: Number of physical devices. It is more than 1 for a server that places models on its devices itself. Such a server is
    #: treated as one device.
    size: int = 1


#: Devices by name.
ServerDevices = Mapping[str, ServerDevice]
#: Numbers of the devices of one server that serve a model, by the model's name.
ModelDevices = Mapping[str, tuple[int, ...]]

_FROM_BEST = (WeightsView.RESIDENT, WeightsView.LOADING, WeightsView.ABSENT)


def devices_of(servers: Mapping[str, tuple[WorkerView, ...]]) -> dict[str, ServerDevice]:
    """Return the devices of these servers, given the views of each."""
    devices: dict[str, ServerDevice] = {}
    for server, views in servers.items():
        if len(views) == 1:
            devices[server] = ServerDevice(server, None, views[0].devices)
        else:
            devices |= {f"{server}/{view.device}": ServerDevice(server, view.device) for view in views}
    return devices


def taken_over(before: tuple[WorkerView, ...], now: tuple[WorkerView, ...]) -> tuple[WorkerView, ...]:
    """Return a server's current views.

    If its control service does not answer, return a view for each device of the earlier views.
    """
    if len(now) == 1 and now[0].instance is None:
        return tuple([replace(now[0], device=view.device, devices=view.devices) for view in before])
    return now


def told_apart(views: Sequence[WorkerView]) -> tuple[WorkerView, ...]:
    """Return the views of a server's devices with corrected `ready`.

    A server reports one `ready` for all its devices. If only other devices report figures of a model, the model has failed on
    this device, so it is removed from this device's `ready`.
    """
    known = frozenset[str]().union(*(view.models for view in views))

    def own(view: WorkerView) -> WorkerView:
        if not view.alive or len(view.models) == len(known):
            return view
        return replace(view, ready=view.ready - (known - view.models.keys()))

    return tuple(map(own, views))


def summed(views: tuple[WorkerView, ...]) -> WorkerView:
    """Return the view of a server.

    The server is alive if one of its devices is alive. Its models are not summed: see `as_one`.
    """
    live = [view for view in views if view.alive]
    if len(views) == 1 or not live:
        return views[0]
    return replace(live[0], backlog_s=sum(view.backlog_s for view in live), device=0, devices=len(live))


def as_one(
    views: tuple[WorkerView, ...], last: tuple[tuple[WorkerView, ...], WorkerView] | None = None
) -> WorkerView:
    """Return one view for all devices of a server that places models on its devices itself.

    `last` has earlier views of the devices, and the result of this function for these views. The figures of unchanged models
    are taken from this result.
    """
    live = [view for view in views if view.alive]
    if len(views) == 1 or not live:
        return views[0]
    return replace(
        summed(views),
        ready=frozenset().union(*{id(view.ready): view.ready for view in live}.values()),
        # If a device is added or lost, the sums of the counters jump. The instance then also changes, so that `Costs` does not
        # compare these sums with earlier ones.
        instance=" ".join(str(view.instance) for view in live),
        budget_bytes=_sum_or_none(view.budget_bytes for view in live),
        free_bytes=_sum_or_none(view.free_bytes for view in live),
        models=_models_of(live, *(last or ((), None))),
    )


def _models_of(
    live: Sequence[WorkerView], before: tuple[WorkerView, ...], whole: WorkerView | None
) -> Mapping[str, ModelView]:
    """Return the models of live devices, with one view per model. `whole` is the earlier result for the views `before`."""
    then = [view for view in before if view.alive]
    if whole is None or [view.device for view in then] != [view.device for view in live]:
        models: dict[str, ModelView] = {}
        changed = set[str]().union(*(view.models for view in live))
    else:
        changed = set()
        for now, old in zip(live, then, strict=True):
            if now.models is not old.models:
                known = old.models
                changed.update(name for name, model in now.models.items() if known.get(name) is not model)
                changed |= known.keys() - now.models.keys()
        if not changed:
            return whole.models
        models = dict(whole.models)
    for name in changed:
        shown = [view.models[name] for view in live if name in view.models]
        if shown:
            models[name] = shown[0] if len(shown) == 1 else _model_of(shown)
        else:
            del models[name]
    return models


def _model_of(shown: Sequence[ModelView]) -> ModelView:
    """Return one view of a model that several devices report."""
    costs = [view.item_s for view in shown if view.item_s is not None]
    weights = {view.weights for view in shown}
    return replace(
        shown[0],
        bytes=max(view.bytes for view in shown),
        weights=next(state for state in _FROM_BEST if state in weights),
        pinned=any(view.pinned for view in shown),
        item_s=min(costs) if costs else None,
        queued=sum(view.queued for view in shown),
        executing=sum(view.executing for view in shown),
        requests=sum(view.requests for view in shown),
        items=sum(view.items for view in shown),
        device_seconds=sum(view.device_seconds for view in shown),
    )


def _sum_or_none(figures: Iterable[int | None]) -> int | None:
    known = [*figures]
    return None if None in known else sum(number or 0 for number in known)


def routes_to_servers(table: Table, devices: ServerDevices) -> Table:
    """Return the table with servers in place of their devices. A server itself chooses among the devices of a model.

    The list of ready servers repeats each server in proportion to its number of devices. The list of placed servers repeats
    each server in proportion to the model's replicas on it.
    """
    if all(device.number is None and device.size == 1 for device in devices.values()):
        return table
    sizes: Counter[str] = Counter()
    for device in devices.values():
        sizes[device.server] += device.size
    unit = gcd(*sizes.values())
    known: dict[tuple[str, ...], tuple[str, ...]] = {}

    def ready(names: tuple[str, ...]) -> tuple[str, ...]:
        if names not in known:
            servers = dict.fromkeys(devices[name].server for name in names)
            known[names] = tuple([server for server in servers for _ in range(sizes[server] // unit)])
        return known[names]

    def placed(names: tuple[str, ...]) -> tuple[str, ...]:
        replicas: Counter[str] = Counter()
        for device in map(devices.__getitem__, names):
            replicas[device.server] += device.size
        fewest = gcd(*replicas.values())
        return tuple([server for server, count in replicas.items() for _ in range(count // fewest)])

    return {
        name: replace(routes, ready=ready(routes.ready), placed=placed(routes.placed))
        for name, routes in table.items()
    }


def placements(table: Table, devices: ServerDevices) -> dict[str, ModelDevices]:
    """Return the devices of each placed model, by server, for the servers with several devices."""
    devices_of: dict[str, dict[str, tuple[int, ...]]] = {
        device.server: {} for device in devices.values() if device.number is not None
    }
    for model, routes in table.items():
        for device in map(devices.__getitem__, routes.placed):
            if device.number is not None:
                mine = devices_of[device.server]
                mine[model] = (*mine.get(model, ()), device.number)
    return dict(devices_of)

"""The planner's state as operators see it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rsrv.placement.contract import Table, WorkerView
from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet, have_common_device
from rsrv.placement.options import PlannerOptions
from rsrv.settings_fleet import Replicas
from rsrv.text import amount

Trigger = Literal["start", "homes", "membership", "work", "operator"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    name: str
    #: Names of the workers where the model is ready.
    ready: tuple[str, ...]
    #: Names of the workers that get its requests. If empty, the model is not packed, and all of `ready` get them.
    placed: tuple[str, ...]
    #: Target of the model, if it differs from `placed`.
    moving_to: tuple[str, ...]
    #: Names of the other models of its unit, which are placed together with it.
    along: tuple[str, ...]
    #: Configured number of replicas.
    replicas: Replicas
    #: Number of replicas that the workers allow.
    effective_replicas: int
    #: Device seconds per second, summed over all workers.
    utilisation: float
    requests_s: float
    #: Device seconds per item, or None if the model was never executed.
    item_s: float | None
    bytes: int
    #: Reason for the model's place.
    reason: str
    #: Number of items sent to one replica before the next replica's turn.
    quantum: int
    fill: Literal["least", "rr"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    name: str
    alive: bool
    #: Number of models placed at the worker.
    models: int
    #: Device seconds per second that the models placed at the worker need.
    utilisation: float
    #: Device seconds per second that the worker spent recently.
    busy: float
    #: Bytes of the weights of the models placed at the worker.
    bytes: int
    #: Bytes that the placed models may take on the device. None without a limit, or if unknown.
    budget_bytes: int | None
    #: True if the weights of the placed models do not fit into the budget.
    oversubscribed: bool
    backlog_s: float


@dataclass(frozen=True, slots=True)
class Repacks:
    """Number of repacks, and progress towards the next one."""

    #: Number of repacks by trigger. `homes` packs only the models without a home.
    counts: dict[Trigger, int]
    #: Trigger of the last repack.
    last: Trigger | None
    #: Time of the last repack on the planner's clock.
    last_at: float | None
    #: Number of units in the last repack.
    packed: int
    #: Number of units that the last repack moved to a new home.
    moved: int
    #: Number of units that the last repack left at a busier worker because of the hysteresis.
    held: int
    #: Device seconds consumed since the last full repack.
    device_s: float
    #: Device seconds that trigger the next repack.
    threshold_device_s: float
    #: Number of finished repacks that operators requested.
    done: int


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    mode: str
    #: Counter that rises with every change of the policy.
    generation: int
    #: Models sorted by name.
    models: tuple[ModelStatus, ...]
    workers: tuple[WorkerStatus, ...]
    repacks: Repacks
    warnings: tuple[str, ...]


def show_models(
    options: PlannerOptions,
    fleet: Fleet,
    table: Table,
    targets: Mapping[str, tuple[str, ...]],
    effective: Mapping[str, int],
    costs: Costs,
) -> tuple[ModelStatus, ...]:
    along = {name: unit.models for unit in fleet.units for name in unit.models}
    shown = []
    for name in sorted(table):
        routes, measured = table[name], costs.measured(name)
        target = targets.get(name, ())
        neighbours = tuple(neighbour for neighbour in along.get(name, ()) if neighbour != name)
        model = fleet.models[name]
        reason = _reason(options, name, routes.placed, neighbours, costs.demand(name))
        shown.append(
            ModelStatus(
                name=name,
                ready=routes.ready,
                placed=routes.placed,
                moving_to=target if target != routes.placed else (),
                along=neighbours,
                replicas=options.of_model(name, "replicas"),
                effective_replicas=effective.get(name, len(routes.ready)),
                utilisation=measured.utilisation,
                requests_s=measured.requests_s,
                item_s=measured.item_s,
                bytes=model.bytes,
                reason=f"an alias, mainly of {model.follows}" if model.follows else reason,
                quantum=routes.quantum,
                fill=routes.fill,
            )
        )
    return tuple(shown)


def _reason(
    options: PlannerOptions, name: str, placed: Sequence[str], along: Sequence[str], demand: float
) -> str:
    own = options.models.get(name)
    if not placed:
        return "not placed: any device"
    reasons = []
    if own is not None and own.devices is not None:
        reasons.append(f"models.{name}.devices")
    if along:
        reasons.append(f"with {_names(along)}")
    if len(placed) > 1:
        replicas = options.of_model(name, "replicas")
        reasons.append(f"demand of {demand:.2g} devices" if replicas == "auto" else f"replicas: {replicas}")
    return ", ".join(reasons) or "least busy device with room"


def show_workers(
    views: Mapping[str, WorkerView], fleet: Fleet, placed: Mapping[str, tuple[str, ...]], costs: Costs
) -> tuple[WorkerStatus, ...]:
    models: dict[str, list[tuple[str, float]]] = {worker: [] for worker in views}
    for name in fleet.models:
        homes = placed.get(name, ())
        for worker in homes:
            if worker in models:
                models[worker].append((name, costs.measured(name).utilisation / len(homes)))
    shown = []
    for worker in sorted(views):
        used = sum(fleet.models[name].bytes for name, _ in models[worker])
        budget = fleet.free_bytes(worker) if worker in fleet.views else None
        shown.append(
            WorkerStatus(
                name=worker,
                alive=views[worker].alive,
                models=len(models[worker]),
                utilisation=sum(utilisation for _, utilisation in models[worker]),
                busy=costs.busy(worker),
                bytes=used,
                budget_bytes=budget,
                oversubscribed=budget is not None and used > budget,
                backlog_s=views[worker].backlog_s,
            )
        )
    return tuple(shown)


def warn(
    options: PlannerOptions,
    views: Mapping[str, WorkerView],
    fleet: Fleet,
    workers: Sequence[WorkerStatus],
    *,
    started: bool,
) -> Iterator[str]:
    """Yield warnings for the operator."""
    runtimes: dict[str, list[str]] = {}
    for name in sorted(views):
        instance = views[name].instance
        if instance is not None:
            runtimes.setdefault(instance, []).append(name)
    for names in runtimes.values():
        if len(names) > 1:
            yield (
                f"{_names(names)} are one server, or have the same `control`, so the server's device counts more than once: "
                "name the server once, by one address"
            )
    if options.mode != "lpt_packing":
        return
    if not started:
        yield "models are not packed onto workers yet, because not all workers have answered"
    silent = sorted(name for name, view in views.items() if view.alive and view.instance is None)
    if silent:
        yield (
            f"the control services of {_names(silent)} do not answer, so the costs and places of models there are "
            "unknown; see `control` of gateway.workers"
        )
    for name in fleet.torn:
        yield (
            f"no worker serves {name} together with all models that it calls, so they are packed one by one: "
            "serve them all on one worker"
        )
    crowded = [worker.name for worker in workers if worker.oversubscribed]
    if crowded:
        yield (
            f"{_names(crowded)} cannot hold all weights placed there, so weights will be swapped; "
            "add devices, or reduce replicas"
        )
    unknown = sorted(name for name in options.models if name not in fleet.models)
    if unknown:
        yield f"no worker serves {_names(unknown)}, which the key `models` names"
    yield from _warn_of_sizes(fleet)
    yield from _warn_of_wishes(options, views, fleet)


def _warn_of_sizes(fleet: Fleet) -> Iterator[str]:
    free = [fleet.free_bytes(worker) for worker in fleet.views]
    most = max((size for size in free if size is not None), default=0)
    for unit in fleet.units if free and None not in free else ():
        if unit.bytes > most:
            yield (
                f"{_names(unit.models)} {'need' if unit.models[1:] else 'needs'} {amount(unit.bytes)} of one "
                f"device, but no device has more than {amount(most)} for weights "
                "(runtime.weight_budget_bytes minus pinned weights)"
            )


def _warn_of_wishes(options: PlannerOptions, views: Mapping[str, WorkerView], fleet: Fleet) -> Iterator[str]:
    """Yield warnings about settings of models that these devices cannot fulfil."""
    numbers = {view.device + n for view in views.values() for n in range(view.devices)}
    last = max(numbers, default=0)
    for name in sorted(options.models.keys() & fleet.models.keys()):
        own = options.models[name]
        missing = [number for number in own.devices or () if number not in numbers]
        if missing:
            yield (
                f"models.{name}.devices names {_names([str(number) for number in missing])}, but the devices are 0 to {last}: "
                "correct the key; until then, the other devices of the list are used, or all devices if it has no others"
            )
    pins = options.pins
    for unit in fleet.units:
        # A server that places models itself follows the pins. It is one worker with several devices, so it gets no warning.
        if not have_common_device(unit.models, pins) and all(views[w].devices == 1 for w in unit.allowed):
            yield (
                f"models.NAME.devices of {_names([name for name in unit.models if name in pins])} have no device in common, "
                "but calls connect these models: with several servers, they are placed together on any device; name a common "
                "device"
            )
        for name in unit.models:
            replicas = options.of_model(name, "replicas")
            if isinstance(replicas, int) and replicas > len(unit.allowed):
                own_key = name in options.models and options.models[name].replicas is not None
                yield (
                    f"{f'models.{name}' if own_key else 'placement'}.replicas is {replicas}, but {name} can be on "
                    f"{len(unit.allowed)} devices"
                )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

"""What the planner shows of itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rsrv.placement.contract import Table, WorkerView
from rsrv.placement.costs import Costs
from rsrv.placement.fleet import Fleet
from rsrv.placement.tables import replicas
from rsrv.settings_fleet import GatewaySection, Replicas

Trigger = Literal["start", "homes", "membership", "work", "operator"]


@dataclass(frozen=True, slots=True)
class ModelStatus:
    name: str
    #: where it is ready, and where its requests go (all of `ready` where it is not packed); workers by name
    ready: tuple[str, ...]
    placed: tuple[str, ...]
    #: where it goes to, if that is not where it is
    moving_to: tuple[str, ...]
    #: models that go where it goes
    along: tuple[str, ...]
    #: as the settings have it, and as many as there can be
    replicas: Replicas
    effective_replicas: int
    #: seconds of device per second, all workers together
    utilisation: float
    requests_s: float
    #: device seconds; None: it never executed
    item_s: float | None
    bytes: int
    #: items
    quantum: int
    fill: Literal["least", "rr"]


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    name: str
    alive: bool
    #: number of models whose requests it gets because they are placed there
    models: int
    #: seconds of device per second that these ask of it, and that it spent just now
    utilisation: float
    busy: float
    #: of the weights of these, and what they may take; None: no limit, or not known
    bytes: int
    budget_bytes: int | None
    #: they do not fit all at once
    oversubscribed: bool
    backlog_s: float


@dataclass(frozen=True, slots=True)
class Repacks:
    """How often models were packed, and when they will be."""

    #: whole repacks by what asked for them; `homes` are not whole: only models without a home got one
    counts: dict[Trigger, int]
    last: Trigger | None
    #: the planner's clock
    last_at: float | None
    #: units (models that go together) in the last one: packed, that went elsewhere, that hysteresis held
    packed: int
    moved: int
    held: int
    #: device seconds since the last one, and at how many the next is due
    device_s: float
    threshold_device_s: float
    #: requests by operators, and how many of them are done
    asked: int
    done: int


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    mode: str
    #: rises with every change of the policy
    generation: int
    #: by name
    models: tuple[ModelStatus, ...]
    workers: tuple[WorkerStatus, ...]
    repacks: Repacks
    warnings: tuple[str, ...]


def show_models(
    options: GatewaySection,
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
        shown.append(
            ModelStatus(
                name=name,
                ready=routes.ready,
                placed=routes.placed,
                moving_to=target if target != routes.placed else (),
                along=tuple(other for other in along.get(name, ()) if other != name),
                replicas=replicas(options, name),
                effective_replicas=effective.get(name, len(routes.ready)),
                utilisation=measured.utilisation,
                requests_s=measured.requests_s,
                item_s=measured.item_s,
                bytes=fleet.models[name].bytes,
                quantum=routes.quantum,
                fill=routes.fill,
            )
        )
    return tuple(shown)


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
        held = sum(fleet.models[name].bytes for name, _ in models[worker])
        budget = fleet.free_bytes(worker) if worker in fleet.views else None
        shown.append(
            WorkerStatus(
                name=worker,
                alive=views[worker].alive,
                models=len(models[worker]),
                utilisation=sum(utilisation for _, utilisation in models[worker]),
                busy=costs.busy(worker),
                bytes=held,
                budget_bytes=budget,
                oversubscribed=budget is not None and held > budget,
                backlog_s=views[worker].backlog_s,
            )
        )
    return tuple(shown)


def warn(
    options: GatewaySection,
    views: Mapping[str, WorkerView],
    fleet: Fleet,
    workers: Sequence[WorkerStatus],
    *,
    started: bool,
) -> Iterator[str]:
    """What an operator should know."""
    runtimes: dict[str, list[str]] = {}
    for name in sorted(views):
        instance = views[name].instance
        if instance is not None:
            runtimes.setdefault(instance, []).append(name)
    for names in runtimes.values():
        if len(names) > 1:
            yield (
                f"{_names(names)} are one server, or have one `control`, so its device counts more than once: name it "
                "once, or by one address"
            )
    if options.mode != "lpt_packing":
        return
    if not started:
        yield "nothing is packed yet: not all workers have answered"
    silent = sorted(name for name, view in views.items() if view.alive and view.instance is None)
    if silent:
        yield (
            f"the control services of {_names(silent)} do not answer: what models cost there, and which are on the "
            "device, is not known; see `control` of gateway.workers"
        )
    for name in fleet.torn:
        yield (
            f"{name} and the models that it calls are ready together on no worker, so they are packed one by one: "
            "serve them all on one"
        )
    crowded = [worker.name for worker in workers if worker.oversubscribed]
    if crowded:
        yield (
            f"{_names(crowded)} cannot hold all models that are placed there at once: weights will be swapped; "
            "add workers, or take replicas away"
        )
    unknown = sorted(name for name in options.models if name not in fleet.models)
    if unknown:
        yield f"nobody serves {_names(unknown)}, which gateway.models names"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

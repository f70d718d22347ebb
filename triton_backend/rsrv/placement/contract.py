"""Types of placement: workers, their last views, routes, and actions on weights.

A worker is what models are placed on: a device of a server, or for a gateway a whole server. Workers are identified,
ordered and labelled by name. Times are seconds, memory is bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Self


class Immutable:
    """Base of values that a copy of the planner may share."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Worker:
    """A tritonserver that receives requests."""

    name: str
    #: HOST:PORT or unix:PATH
    grpc: str
    #: HOST:PORT; None: not served
    http: str | None = None
    metrics: str | None = None
    #: Address of the worker's control service, as `grpc`. None: the worker's weights and costs are unknown.
    control: str | None = None


class WeightsView(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ModelView(Immutable):
    """One model as its worker last reported it. Counters start when the model is loaded."""

    #: bytes of its weights on the device
    bytes: int
    weights: WeightsView
    #: the weights stay on the device even if the gateway asks for their eviction
    pinned: bool = False
    #: expected device seconds per item at the cheapest batch size; None: never executed
    item_s: float | None = None
    queued: int = 0
    executing: int = 0
    requests: int = 0
    items: int = 0
    device_seconds: float = 0.0
    #: items in its largest execution; 0: no batch axis
    max_items: int = 0
    #: an input with a batch axis, and the index of that axis; None: a request is one item
    batch_input: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class WorkerView(Immutable):
    """A worker as its last probe saw it."""

    #: the last probe was answered
    alive: bool
    #: names of the models and meta models that it serves now, rsrv's or not
    ready: frozenset[str] = frozenset()
    #: instance of its runtime, where counters begin at 0; None: no control service answers
    instance: str | None = None
    #: device bytes for weights; None: no limit, or unknown
    budget_bytes: int | None = None
    #: device seconds for the queued and executing requests
    backlog_s: float = 0.0
    models: Mapping[str, ModelView] = field(default_factory=dict)
    #: meta models and the models that they call; called models are placed with the meta model
    calls: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: aliases, each with the model that gets most of its requests
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Number of the device on its server.
    device: int = 0
    #: device bytes that no weights take; None: no limit, or unknown
    free_bytes: int | None = None
    #: Number of devices of the worker.
    devices: int = 1
    #: Number of the measurement. A view with the number of the previous one has no new counters.
    measurement: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Routes(Immutable):
    """Workers for the requests of one model. A worker with several devices is listed once for each device."""

    #: all workers where the model is ready, by name
    ready: tuple[str, ...]
    #: the workers of `ready` that the packing chose, by name; empty: not packed
    placed: tuple[str, ...] = ()
    #: items sent to one replica before the next replica's turn; 1: each request goes to the least loaded
    #: replica
    quantum: int = 1
    #: choice among the replicas with the fewest quanta in flight. least: the least loaded; rr: each in turn
    fill: Literal["least", "rr"] = "least"
    #: load of one item on a worker, or of one request if `per_item` is false
    charge: float = 1.0
    per_item: bool = True
    #: the input whose shape gives the number of items, and its axis; None: a request counts as one item
    batch_input: tuple[str, int] | None = None


#: routes by model; replaced as a whole
Table = Mapping[str, Routes]


class Act(Enum):
    #: load the model's weights onto the device ahead of its requests
    PREFETCH = "prefetch"
    #: evict them unless they are pinned or in use
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class WeightAction:
    """A prefetch or an eviction to request from a worker's control service."""

    act: Act
    worker: str
    model: str

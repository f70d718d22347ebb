"""Types of placement: workers, their last views, routes, and actions on weights.

Models are placed on workers. A worker is a device of a server; a gateway may also treat a whole server as one worker. Workers
are identified, ordered and labelled by name. Times are in seconds, memory is in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Self


class Immutable:
    """Base class of immutable values. A deep copy of the planner shares them with the original."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Worker:
    """A tritonserver that receives requests."""

    name: str
    #: Address of the gRPC service: HOST:PORT or unix:PATH.
    grpc: str
    #: HOST:PORT of the HTTP service, or None if the worker has no such service.
    http: str | None = None
    #: HOST:PORT of the metrics service, or None if the worker has no such service.
    metrics: str | None = None
    #: Address of the worker's control service, in the form of `grpc`. None: the worker's weights and costs are unknown.
    control: str | None = None


class WeightsView(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ModelView(Immutable):
    """One model as its worker last reported it. Counters start when the model is loaded."""

    #: Bytes of the model's weights on the device.
    bytes: int
    weights: WeightsView
    #: True if the weights stay on the device even if the gateway asks for their eviction.
    pinned: bool = False
    #: Expected device seconds per item at the cheapest batch size, or None if the model was never executed.
    item_s: float | None = None
    queued: int = 0
    executing: int = 0
    requests: int = 0
    items: int = 0
    device_seconds: float = 0.0
    #: Items in the model's largest execution, or 0 without a batch axis.
    max_items: int = 0
    #: An input with a batch axis, and the index of that axis. None if a request is one item.
    batch_input: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class WorkerView(Immutable):
    """A worker as its last probe saw it."""

    #: True if the last probe was answered.
    alive: bool
    #: Names of the models and meta models that the worker serves, including models of other Triton backends.
    ready: frozenset[str] = frozenset()
    #: Identifier of the worker's runtime process. The counters of each process start at 0. None if no control service answers.
    instance: str | None = None
    #: Device bytes for weights, or None without a limit or if unknown.
    budget_bytes: int | None = None
    #: Device seconds for the queued and executing requests.
    backlog_s: float = 0.0
    models: Mapping[str, ModelView] = field(default_factory=dict)
    #: Meta models and the models that they call. Called models are placed together with the meta model.
    calls: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Aliases, each with the model that gets most of its requests.
    aliases: Mapping[str, str] = field(default_factory=dict)
    #: Number of the device on its server.
    device: int = 0
    #: Device bytes that no weights occupy, or None without a limit or if unknown.
    free_bytes: int | None = None
    #: Number of devices of the worker.
    devices: int = 1
    #: Number of the measurement. If a view has the same number as the previous view, it has no new counters.
    measurement: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Routes(Immutable):
    """Workers for the requests of one model. A worker with several devices is listed once for each device."""

    #: Names of all workers where the model is ready.
    ready: tuple[str, ...]
    #: Names of the workers of `ready` that the packing chose. Empty if the model is not packed.
    placed: tuple[str, ...] = ()
    #: Number of items that one replica gets before the next replica is chosen. If it is 1, each request gets the replica with
    #: the fewest items in flight.
    quantum: int = 1
    #: Choice among the replicas with the fewest quanta in flight: the least loaded one (`least`), or each in turn (`rr`).
    fill: Literal["least", "rr"] = "least"
    #: Load of one item on a worker, or of one request if `per_item` is false.
    charge: float = 1.0
    per_item: bool = True
    #: The input whose shape gives the number of items, and its axis. None if a request is treated as one item.
    batch_input: tuple[str, int] | None = None


#: Routes by model. The mapping is replaced as a whole.
Table = Mapping[str, Routes]


class Act(Enum):
    #: Load the model's weights onto the device ahead of its requests.
    PREFETCH = "prefetch"
    #: Evict the model's weights unless they are pinned or in use.
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class WeightAction:
    """A prefetch or an eviction to request from a worker's control service."""

    act: Act
    worker: str
    model: str

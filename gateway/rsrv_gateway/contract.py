"""What the parts of the gateway tell each other: workers and what is seen of them, where models go, what is done.

Workers are named; names are what orders and labels them. Times are seconds, memory is bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal


@dataclass(frozen=True, slots=True)
class Worker:
    """A tritonserver that requests can go to."""

    name: str
    #: HOST:PORT or unix:PATH
    grpc: str
    #: HOST:PORT; None: it has none
    http: str | None = None
    metrics: str | None = None
    #: of its control service, as `grpc`; None: what it holds and what it costs is not known
    control: str | None = None


class Weights(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a worker says of one of its models. Counters are since the model was loaded."""

    #: device bytes of its weights
    bytes: int
    weights: Weights
    #: whether weights stay on the device whatever the gateway says
    pinned: bool = False
    #: expected device seconds per item, at the size where that is least; None: never executed
    item_s: float | None = None
    queued: int = 0
    executing: int = 0
    requests: int = 0
    items: int = 0
    device_seconds: float = 0.0
    #: requests that found the weights elsewhere
    misses: int = 0
    #: items in its largest execution; 0: it has no batch axis
    max_items: int = 0
    #: an input with a batch axis, and which axis of the tensor that is; None: a request is one item
    batch_input: tuple[str, int] | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What was last seen of a worker."""

    #: whether it answered its last probe
    alive: bool
    #: names of what it serves now: models and meta models, whoever made them
    ready: frozenset[str] = frozenset()
    #: of its runtime: counters start anew with another one; None: it has no control service that answers
    instance: str | None = None
    #: device bytes that weights may take; None: no limit, or not known
    budget_bytes: int | None = None
    #: device seconds that what waits and executes there will take
    backlog_s: float = 0.0
    models: Mapping[str, ModelView] = field(default_factory=dict)
    #: meta models and the models that they call: these go where the meta model goes
    calls: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routes:
    """Where requests of one model may go."""

    #: all workers where it is ready, by name
    ready: tuple[str, ...]
    #: those of them that the packing chose, by name; empty: not packed
    placed: tuple[str, ...] = ()
    #: items that go to one replica before the next one's turn; 1: each request to the replica with the fewest
    quantum: int = 1
    #: which replica's turn is next, of those with the fewest quanta under way: least: the one with the least
    #: load; rr: each in turn
    fill: Literal["least", "rr"] = "least"
    #: what one item adds to a worker's load; or, not `per_item`, one request
    charge: float = 1.0
    per_item: bool = True
    #: the input whose shape tells the items, and its axis; None: a request is one item, or nobody needs to know
    batch_input: tuple[str, int] | None = None


#: by model; replaced as a whole
Table = Mapping[str, Routes]


class Act(Enum):
    #: load the model's weights onto the device as if a request waited
    PREFETCH = "prefetch"
    #: free them unless they are pinned or used
    EVICT = "evict"


@dataclass(frozen=True, slots=True)
class Step:
    """Something to ask of a worker's control service."""

    act: Act
    worker: str
    model: str

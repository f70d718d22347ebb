"""What the parts of the gateway tell each other: workers and what is seen of them, where models go, what is done.

Workers are named; names are what orders and labels them. Times are seconds, memory is bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

#: upper bounds, seconds, of the intervals in which Durations counts; above the last one is one more
DURATION_BOUNDS: tuple[float, ...] = tuple(0.0005 * 2**k for k in range(17))


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


class WeightsView(Enum):
    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class ModelView:
    """What a worker says of one of its models. Counters are since the model was loaded."""

    #: device bytes of its weights
    bytes: int
    weights: WeightsView
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
class WeightAction:
    """Something to ask of a worker's control service."""

    act: Act
    worker: str
    model: str


@dataclass(frozen=True, slots=True)
class Durations:
    """How long requests took, from their arrival to the end of their answer."""

    #: requests in each interval of DURATION_BOUNDS, and above it: one more than there are bounds
    counts: tuple[int, ...]
    #: seconds, of all together
    sum: float


@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """What a plane has done since its start, and what is under way. Names that clients made up are not in it."""

    #: inference requests that are over, by model, worker (empty: none was asked) and gRPC code by name, such as "OK"
    requests: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    #: items in requests that were sent on, by model
    items: Mapping[str, int] = field(default_factory=dict)
    #: what is under way, by worker, in the unit of the routes' charges
    load: Mapping[str, float] = field(default_factory=dict)
    #: requests under way, by model and worker; only where there are any
    outstanding: Mapping[tuple[str, str], int] = field(default_factory=dict)
    #: requests that went to another worker after this one had failed, by worker
    failovers: Mapping[str, int] = field(default_factory=dict)
    #: by model
    durations: Mapping[str, Durations] = field(default_factory=dict)


class Brain(Protocol):
    """What a plane may ask for. Called on the event loop that the plane was started on."""

    def failed(self, worker: str) -> None:
        """A connection to this worker broke or could not be made: it is looked at now, not with the next probe.

        Returns at once, and may be called for every request.
        """

    async def refresh(self, sure: bool = False) -> None:
        """A request names a model that is not in the table: all workers are looked at now.

        Returns when `apply` was called with what they said, or at once if that was less than a second ago. Whoever asks
        meanwhile waits for the same look. `sure`: something has changed, and a look that began before does not do.
        Never raises.
        """

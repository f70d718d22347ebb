"""What the scheduler is told, and what it answers: two closed unions of frozen values.

Times are seconds on one monotonic clock (the caller's choice); durations are seconds; sizes of
weights are bytes. A *model* is an opaque key, unique among the loaded ones. *Rows* are elements along
the batch axis; a compiled *size* is the number of rows that an executable takes, padding included. A
*variant* is the index of a model's compiled input-shape variant (0 where there is only one).

Slow work is bracketed: `LoadWeights` ends in `WeightsLoaded` or `LoadFailed`, `Execute` in
`ExecutionFinished`. Every request that arrived ends in exactly one `Finish`. (These two, of which a batch has
hundreds, are tuples: a frozen dataclass takes three times as long to make.)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rsrv.runtime.scheduler.settings import SchedulerSettings

#: the level of a request that names none: there is room for more urgent and for less urgent ones.
DEFAULT_PRIORITY = 5


@dataclass(frozen=True, slots=True)
class Program:
    """What the scheduler has to know of one model."""

    model: str
    #: (variant, size) -> seconds of one execution, as measured by the warm-up. Its keys are the compiled sizes.
    costs: Mapping[tuple[int, int], float]
    #: whether several requests may share one execution. If not, each runs alone.
    coalesce: bool
    #: requests that may wait; one more is refused.
    max_queue_depth: int
    #: most useful rows in one execution; None: the largest compiled size.
    max_batch_rows: int | None = None
    weight_bytes: int = 0
    #: expected duration of a load of its weights, until one was measured.
    load_seconds: float = 0.0
    #: share of device time relative to other models, > 0 (used by `fair`).
    weight: float = 1.0
    #: seconds that a request may be held back for others to share its execution; 0: never wait for more.
    max_delay: float = 0.0


class Request(NamedTuple):
    """One client request; never split over executions."""

    id: int
    model: str
    variant: int
    rows: int
    #: absolute; None: waits for ever.
    deadline: float | None = None
    #: smaller is more urgent, as Triton's: 1 is the highest; 0 means the default, `DEFAULT_PRIORITY`.
    priority: int = 0
    #: a sub-call of a running meta model: goes first.
    committed: bool = False


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAdded:
    program: Program
    #: its weights are on the device already, where building the model left them.
    resident: bool = False


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """Its queued requests are refused with `Reason.UNLOADED`; those that execute finish."""

    model: str


@dataclass(frozen=True, slots=True)
class RequestsArrived:
    """All requests that arrived since the last event: they are queued before the device is given work."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RequestsCancelled:
    """Their clients are gone. Unknown and already finished ids are ignored."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExecutionFinished:
    """An `Execute` ended; `error` is None, or says why all its requests failed."""

    dispatch: int
    seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    model: str
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load of this epoch ended without weights: the model's queued requests fail with `error`."""

    model: str
    epoch: int
    error: str


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Decide by other settings from now on. What runs and what is loaded stays."""

    settings: SchedulerSettings


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: expire what is due. The caller sends it at `Scheduler.next_wakeup()`."""


Event = (
    ModelAdded
    | ModelRemoved
    | RequestsArrived
    | RequestsCancelled
    | ExecutionFinished
    | WeightsLoaded
    | LoadFailed
    | SettingsChanged
    | Tick
)

# --- instructions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Execute:
    """Run one compiled size of one model over these requests, oldest first. `rows` of its `size` are useful."""

    dispatch: int
    model: str
    variant: int
    size: int
    rows: int
    requests: tuple[int, ...]
    #: how long it is expected to take; a remark, not part of what is decided
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class LoadWeights:
    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class EvictWeights:
    """Free the model's device buffers; nothing executes on them any more."""

    model: str
    epoch: int


class Outcome(Enum):
    """How a request ends; exactly one of these."""

    ANSWERED = "answered"
    REFUSED = "refused"
    #: the deadline passed.
    EXPIRED = "expired"
    #: the deadline lies ahead, but could not be met any more.
    SHED = "shed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Reason(Enum):
    """Why a request was refused."""

    QUEUE_FULL = "queue_full"
    UNKNOWN_MODEL = "unknown_model"
    UNLOADED = "unloaded"
    TOO_MANY_ROWS = "too_many_rows"
    UNKNOWN_VARIANT = "unknown_variant"
    #: its weights are larger than the device's budget.
    TOO_LARGE = "too_large"


class Finish(NamedTuple):
    """A request is over. `reason` and `retry_after` come with REFUSED, `error` with FAILED."""

    request: int
    outcome: Outcome
    reason: Reason | None = None
    #: seconds after which a place in the queue is likely, by learned cost (with QUEUE_FULL).
    retry_after: float | None = None
    error: str | None = None


Instruction = Execute | LoadWeights | EvictWeights | Finish

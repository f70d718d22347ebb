"""What the scheduler is told, and what it answers: two closed unions of frozen values.

Times are seconds on one monotonic clock (the caller's choice); durations are seconds; sizes of
weights are bytes. A *model* is an opaque key, unique among the loaded ones. *Rows* are elements along
the batch axis; a compiled *size* is the number of rows that an executable takes, padding included. A
*variant* is the index of a model's compiled input-shape variant (0 where there is only one).

Slow work is bracketed: `LoadWeights` ends in `WeightsLoaded`, `LoadFailed` or `LoadAbandoned`, `Execute` in
`ExecutionFinished`, `WarmUp` in `WarmUpEnded`. Every request that arrived ends in exactly one `Finish`. (These
two, of which a batch has hundreds, are tuples: a frozen dataclass takes three times as long to make.)

A *run* is one request of a meta model, which makes requests of its own. Every run that is asked for ends in exactly
one of `Admit`, `Finish` and `RunEnded`; one that was admitted ends in `RunEnded`.

A request that cannot be served is never an exception: it ends in a `Finish`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from rsrv.scheduler.settings import SchedulerSettings

#: the level of a request that names none: there is room for more urgent and for less urgent ones.
DEFAULT_PRIORITY = 5


class CallerError(ValueError):
    """The owner of the scheduler broke the contract of `events`. The scheduler's state is unchanged."""


class InvariantError(AssertionError):
    """The scheduler contradicts itself: a bug in it.

    Attributes:
        model: the model concerned, None if it is not about one.
        story: what happened to that model, oldest first, one readable line each.
    """

    def __init__(self, problem: str, model: str | None = None, story: tuple[str, ...] = ()) -> None:
        super().__init__(problem, model, story)
        self.problem = problem
        self.model = model
        self.story = story

    def __str__(self) -> str:
        about = "" if self.model is None else f" (model {self.model!r})"
        return "\n  ".join((self.problem + about, *self.story))


class Pause(Enum):
    """What becomes of the requests of a model that is paused. What executes, finishes; a warm-up goes on."""

    #: what waits is executed, and so is what runs of meta models call that are under way; new requests are refused.
    DRAIN = "drain"
    #: all wait, nothing starts to execute, and the model takes no part in what is decided.
    HOLD = "hold"
    #: what waits is refused, and so is what comes.
    REJECT = "reject"


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
    #: of all its weights, as if it had no tensor twice and shared none.
    weight_bytes: int = 0
    #: its tensors, each once: key -> bytes. Models share those with equal keys. None: it shares nothing.
    tensors: Mapping[Any, int] | None = None
    #: expected duration of a load of its weights, until one was measured.
    load_seconds: float = 0.0
    #: whether its weights stay on the device, beyond the budget if need be.
    pinned: bool = False
    #: share of device time relative to other models, > 0 (used by `fair`).
    weight: float = 1.0
    #: seconds that a request may be held back for others to share its execution; 0: never wait for more.
    max_delay: float = 0.0
    #: whether, and how, it is paused from the start.
    paused: Pause | None = None
    #: what versions of one model have in common: what they count goes on from one to the next.
    name: str = ""


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
    #: the run of a meta model whose sub-call it is; 0: it is nobody's. Of each run one queued request goes first.
    run: int = 0


class Run(NamedTuple):
    """One run of a meta model, which makes requests while it is under way."""

    #: not 0; no request in flight and no other run has it.
    id: int
    #: the meta's name: what is counted under it is never forgotten.
    meta: str
    #: absolute; until then it waits to be admitted. None: for ever.
    deadline: float | None = None
    #: as a request's.
    priority: int = 0
    #: runs of this meta that may wait, this one included; one more is refused.
    max_waiting: int = 1024
    #: what it calls. While one of these is held, it is not admitted, and takes no place if it was.
    models: tuple[str, ...] = ()


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAdded:
    program: Program
    #: its weights are on the device already.
    resident: bool = False
    #: load its weights and have it warmed up, before any request for it: its costs are not known yet.
    warm_up: bool = False


@dataclass(frozen=True, slots=True)
class WarmUpEnded:
    """The `WarmUp` ended: `costs` as in the program, or None if it failed and the model will be removed."""

    model: str
    costs: Mapping[tuple[int, int], float] | None
    #: whether it failed because the device had no memory left: then there is a second try first.
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Pinned:
    """From now on a model's weights stay on the device, and are loaded if they are not there; or no longer."""

    model: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """From now on these models are paused so; None: they go on. What waits keeps its order."""

    models: tuple[str, ...]
    mode: Pause | None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a model's weights to the device when nobody who waits needs the link. Nothing if they are there."""

    model: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the weights of these models as soon as nothing executes on them. Pinned ones are left alone."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Decide about one model by other values from now on, as in its program; None: it stays as it is."""

    model: str
    weight: float | None = None
    max_delay: float | None = None
    #: requests that wait already stay, however many they are.
    max_queue_depth: int | None = None


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
class RunsAsked:
    """These want to begin. Each ends in an `Admit` or a `Finish`, unless it is withdrawn by `RunEnded`."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run is over, or does not want to begin any more. Unknown ids are ignored.

    Nothing is answered to it. Its requests stay as they are: whoever has no use for them cancels them.
    """

    run: int


@dataclass(frozen=True, slots=True)
class ExecutionFinished:
    """An `Execute` ended; `error` is None, or says why all its requests failed."""

    dispatch: int
    seconds: float
    error: str | None = None
    #: whether the error is that the device had no memory left: then there is a second try.
    out_of_memory: bool = False


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
    #: whether the error is that the device had no memory left: then there is a second try.
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class LoadAbandoned:
    """The load of this epoch ended without weights, as `AbandonLoad` asked."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Compact:
    """Free all weights that are not pinned at once, so that the device's memory has no holes, and load them again."""


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
    | WarmUpEnded
    | Pinned
    | Paused
    | Prefetch
    | Evict
    | PolicyChanged
    | RequestsArrived
    | RequestsCancelled
    | RunsAsked
    | RunEnded
    | ExecutionFinished
    | WeightsLoaded
    | LoadFailed
    | LoadAbandoned
    | Compact
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
    #: whether it is the second try after the device had no memory left: all evictions must have been carried out.
    again: bool = False


@dataclass(frozen=True, slots=True)
class LoadWeights:
    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """Nobody waits for this load any more: end it early, with `LoadAbandoned`, unless it is as good as done."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Execute every size of the model, and measure; its weights are there. Ends in `WarmUpEnded`."""

    model: str
    #: whether it is the second try after the device had no memory left: all evictions must have been carried out.
    again: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The weights of a model that was to be warmed up, pinned or prefetched do not come.

    Nobody tries again by himself, but for a pinned model that found no memory, after a rest.
    """

    model: str
    error: str


@dataclass(frozen=True, slots=True)
class EvictWeights:
    """Free the model's device buffers; nothing executes on them any more."""

    model: str
    epoch: int
    #: whose load, the next one, needs the room: what both have stays. A remark, which the load makes superfluous.
    loading_for: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Admit:
    """A run may begin; until its `RunEnded` it counts as one that is under way."""

    run: int


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
    #: the model is paused.
    PAUSED = "paused"
    #: its weights are not on the device, and nobody asked for them who may (`SchedulerSettings.on_demand`).
    NOT_RESIDENT = "not_resident"
    #: a moment ago its weights found no memory, though all others had given way.
    NO_MEMORY = "no_memory"


class Finish(NamedTuple):
    """A request is over, or a run does not begin. `reason` and `retry_after` come with REFUSED, `error` with FAILED."""

    request: int
    outcome: Outcome
    reason: Reason | None = None
    #: seconds after which a place in the queue is likely, by learned cost (with QUEUE_FULL; None: nobody knows), or those
    #: until its weights are tried again (with NO_MEMORY).
    retry_after: float | None = None
    error: str | None = None


Instruction = Execute | LoadWeights | AbandonLoad | EvictWeights | WarmUp | GiveUp | Admit | Finish

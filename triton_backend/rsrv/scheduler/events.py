"""Events and instructions of the scheduler: two closed unions of values that never change.

Times are seconds on one monotonic clock, which the caller chooses. Durations are in seconds, and sizes of weights in
bytes. A *model* is an opaque key, unique among the added models. *Rows* are elements along the batch axis. A compiled
*size* is the number of rows that an executable takes, including padding. A *variant* is the index of a model's compiled
input-shape variant (0 if there is only one).

Each instruction that takes time ends in one event: `Execute` in `ExecutionFinished`; `WarmUp` in `WarmUpEnded`;
`LoadWeights` in `WeightsLoaded`, `LoadFailed` or `LoadAbandoned`; `ReadWeights` in `WeightsRead`, `LoadFailed` or
`LoadAbandoned`. Every request that arrived ends in exactly one `Finish`. (Requests and finishes are tuples, because a batch
has hundreds of them, and a frozen dataclass takes three times as long to make.)

A *run* is one request of a meta model. It makes its own requests. Every requested run gets exactly one of `Admit` and
`Finish`, unless `RunEnded` withdraws it before. An admitted run ends in `RunEnded`.

A request that cannot be served is never an exception: it ends in a `Finish`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, NamedTuple

from rsrv.scheduler.settings import SchedulerSettings

#: Level of a request without a priority. Other requests can be more urgent or less urgent.
DEFAULT_PRIORITY = 5


class CallerError(ValueError):
    """The owner of the scheduler broke the contract of `events`. The scheduler's state is unchanged."""


class InvariantError(AssertionError):
    """The scheduler contradicts itself, because it has a bug.

    Attributes:
        model: the affected model, or None.
        history: that model's history, oldest first, one readable line each.
    """

    def __init__(self, problem: str, model: str | None = None, history: tuple[str, ...] = ()) -> None:
        super().__init__(problem, model, history)
        self.problem = problem
        self.model = model
        self.history = history

    def __str__(self) -> str:
        about = "" if self.model is None else f" (model {self.model!r})"
        return "\n  ".join((self.problem + about, *self.history))


class Pause(Enum):
    """Mode of a paused model. Running executions and warm-ups continue."""

    #: Waiting requests execute, and so do calls of meta models' runs and steps of generations in progress. New requests are
    #: refused.
    DRAIN = "drain"
    #: Requests wait, and no request starts to execute. The model affects no decision.
    HOLD = "hold"
    #: Waiting and new requests are refused.
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Program:
    """One model, as the scheduler needs to know it."""

    model: str
    #: (variant, size) -> seconds of one execution, as measured by the warm-up. Its keys are the compiled sizes.
    costs: Mapping[tuple[int, int], float]
    #: True if several requests may share one execution. Otherwise, each request executes alone.
    coalesce: bool
    #: Maximum number of waiting requests. Further requests are refused.
    max_queue_depth: int
    #: Maximum number of useful rows in one execution. None means the largest compiled size.
    max_batch_rows: int | None = None
    #: Bytes of all weights of the model, as if no tensor were shared or occurred twice.
    weight_bytes: int = 0
    #: Bytes of the model's distinct tensors, by key. Models share tensors with equal keys. None means that the model shares
    #: nothing.
    tensors: Mapping[Any, int] | None = None
    #: Expected seconds of a load of the model's weights, until a load was measured.
    load_seconds: float = 0.0
    #: True if the model's weights stay on the device, even if they exceed the budget.
    pinned: bool = False
    #: Share of device time relative to other models, above 0. `fair` uses it.
    weight: float = 1.0
    #: Maximum seconds that a request may be delayed so that others can share its execution. 0 means no delay.
    max_delay: float = 0.0
    #: After this many seconds without use, the weights leave the device. inf means that they stay until other weights need the
    #: room.
    idle_seconds: float = inf
    #: Mode in which the model is paused from the start, or None.
    paused: Pause | None = None
    #: Name that all versions of the model share.
    name: str = ""
    #: True if the end of a request brings the next request at once, as with the steps of a generation. An execution of the model
    #: then begins only after the previous execution has ended, so that it includes the next requests. Otherwise, one half of the
    #: generations would always execute after the other half, and never together with it.
    feeds_back: bool = False
    #: True if the variants are lengths of one axis in ascending order. Requests of a variant may then be padded and execute
    #: at a longer variant.
    padded: bool = False


class Request(NamedTuple):
    """One client request. It is never split over executions."""

    id: int
    model: str
    variant: int
    rows: int
    #: Absolute deadline, or None if the request waits forever.
    deadline: float | None = None
    #: Priority as in Triton. Smaller is more urgent, 1 is the highest, and 0 means the default, `DEFAULT_PRIORITY`.
    priority: int = 0
    #: The meta model's run that made this sub-call, or 0. The oldest queued request of each run is committed: it precedes
    #: requests of every priority.
    run: int = 0
    #: True if a runtime crashed while it executed this request. The request then shares the device with no other request,
    #: execution, load or warm-up.
    exclusive: bool = False
    #: True if an earlier runtime accepted the request, or if it belongs to an accepted sequence. Neither a full queue
    #: nor `Pause.DRAIN` refuses it.
    accepted: bool = False
    #: Number that stands for the client's id of the request, or 0. It informs operators, and affects no decision.
    tag: int = 0
    #: Absolute time when the client wants the answer, before the deadline. It determines the request's place in the order of
    #: service. The request does not end at this time.
    due: float | None = None
    #: Common number of the parts of one client's request. 0: the request is not a part. It informs operators, like `tag`.
    whole: int = 0


class Run(NamedTuple):
    """One run of a meta model, which makes requests while it is in progress."""

    #: Number of the run. It is not 0, and unique among live requests and other runs.
    id: int
    #: Name of the meta model. Counters under this name are never reset.
    meta: str
    #: Absolute time until which the run waits for admission, or None for no limit.
    deadline: float | None = None
    #: Same meaning as in a request.
    priority: int = 0
    #: Maximum number of waiting runs of this meta model, including this one. Further runs are refused.
    max_waiting: int = 1024
    #: Models that the run calls. While one of these models is paused in the mode HOLD, the run is not admitted, or frees its slot
    #: if it was admitted before.
    models: tuple[str, ...] = ()


# --- events ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelAdded:
    program: Program
    #: True if the model's weights are already on the device.
    resident: bool = False
    #: True if the model must be warmed up before any request executes, because its costs are unknown. Its weights are loaded
    #: for the warm-up.
    warm_up: bool = False
    #: Place in the line of weights that load into free room when no other load is due. The smallest number loads first. None
    #: means that the model is not in this line.
    restore: int | None = None
    #: True if the model's weights are read from disk before a load, because the host has no copy.
    on_disk: bool = False


@dataclass(frozen=True, slots=True)
class WarmUpEnded:
    """A warm-up ended. `costs`: see `Program.costs`. None: the warm-up failed.

    The caller removes the model after a failed warm-up that is not retried.
    """

    model: str
    costs: Mapping[tuple[int, int], float] | None
    #: True if the warm-up failed for lack of device memory. The warm-up is then retried once.
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Pinned:
    """Pin a model: load its weights if they are absent, and keep them on the device. If `pinned` is false, unpin it."""

    model: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class Paused:
    """Pause these models in this mode from now on. None: resume them. Waiting requests keep their order."""

    models: tuple[str, ...]
    mode: Pause | None


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Load a model's weights when no waiting request needs the link, unless they are on the device already."""

    model: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict the weights of these models as soon as nothing executes on them. Pinned weights stay."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """Use other values of a model's program from now on. None: the value does not change."""

    model: str
    weight: float | None = None
    max_delay: float | None = None
    #: Requests that already wait stay, even beyond the limit.
    max_queue_depth: int | None = None
    idle_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ModelRemoved:
    """Remove a model. Its queued requests are refused with `Reason.UNLOADED`. Its executions continue to their end."""

    model: str


@dataclass(frozen=True, slots=True)
class RequestsArrived:
    """Requests arrived since the last event. The scheduler queues all of them before it starts an execution."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class RequestsCancelled:
    """Clients cancelled these requests. Unknown and already finished ids are ignored."""

    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunsAsked:
    """Runs ask for admission. Each gets an `Admit` or a `Finish`, unless `RunEnded` withdraws it."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class RunEnded:
    """A run has ended, or a waiting run is withdrawn. Unknown ids are ignored.

    There is no answer to this event. The run's requests stay, and the caller cancels those that it does not need any more.
    """

    run: int


@dataclass(frozen=True, slots=True)
class ExecutionFinished:
    """An `Execute` ended. `error`: reason of its failure, or None. After a failure, its requests fail unless it is retried."""

    number: int
    seconds: float
    error: str | None = None
    #: True if the error is a lack of device memory. The execution is then retried once.
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class CopyChanged:
    """The host got or lost its copy of a model's weights. The event is ignored for unknown models, and during a read."""

    model: str
    present: bool


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """The read of this epoch succeeded after `seconds`. A load of the weights need not wait for the disk now."""

    model: str
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The load of this epoch succeeded after `seconds`."""

    model: str
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load or the read of this epoch failed. The model's queued requests fail with `error`, unless the load is retried."""

    model: str
    epoch: int
    error: str
    #: True if the error is a lack of device memory. The load is then retried once.
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class LoadAbandoned:
    """The load or the read of this epoch was abandoned, as `AbandonLoad` requested."""

    model: str
    epoch: int


LoadOutcome = WeightsRead | WeightsLoaded | LoadFailed | LoadAbandoned


@dataclass(frozen=True, slots=True)
class Compact:
    """Evict all weights that are not pinned, so that the device's memory has no holes, and load them again."""


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Decide by other settings from now on. Executions and weights stay."""

    settings: SchedulerSettings


@dataclass(frozen=True, slots=True)
class WindDown:
    """Stop admitting runs. Once no run and no generation is in progress, also stop starting executions.

    Ends in `WoundDown`. Requests that are still queued at the end stay queued. Queued steps of generations
    (`Program.feeds_back`) execute before the end. The caller must not send requests that begin a generation.
    """

    #: Seconds within which runs, executions and generations must end. None: withdraw an earlier `WindDown`, and continue as
    #: before.
    within: float | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: do what is due. The caller sends this event at `Scheduler.next_wakeup()`."""


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
    | CopyChanged
    | LoadOutcome
    | Compact
    | SettingsChanged
    | WindDown
    | Tick
)

# --- instructions ----------------------------------------------------------------------------------------


# `Execute` is not frozen, because the scheduler makes one at each decision, and a frozen object takes four times as long to
# make.
@dataclass(slots=True)
class Execute:
    """Execute one compiled size of a model on these requests, in the order of service. `rows` of the `size` are useful."""

    #: Number of the execution. Numbers rise from 1. A retry has its own number.
    number: int
    model: str
    variant: int
    size: int
    rows: int
    requests: tuple[int, ...]
    #: Expected seconds. They inform operators, and are not part of the decision.
    seconds: float = field(default=0.0, compare=False)
    #: True if this is the retry after a lack of device memory. Carry out all evictions first.
    again: bool = False
    #: True if the request is exclusive. The execution has no other request.
    exclusive: bool = False


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """Read the model's weights from disk for a later load. Ends in `WeightsRead`, `LoadFailed` or `LoadAbandoned`."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Load the model's weights to the device. Ends in `WeightsLoaded`, `LoadFailed` or `LoadAbandoned`."""

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AbandonLoad:
    """End a load or a read early, because it is not needed any more.

    It ends in `LoadAbandoned`. If it is nearly done, it may still succeed or fail instead.
    """

    model: str
    epoch: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Execute and measure every size of the model. Its weights are on the device. Ends in `WarmUpEnded`."""

    model: str
    #: True if this is the retry after a lack of device memory. Carry out all evictions first.
    again: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A load that a warm-up, a pin or a prefetch needs has failed, or has found no room.

    Only the load of a pinned model is retried, after a back-off.
    """

    model: str
    error: str


@dataclass(frozen=True, slots=True)
class EvictWeights:
    """Free the model's device buffers. Nothing executes on them."""

    model: str
    epoch: int
    #: The model that loads next and needs the memory, or None. Tensors that both models have may stay on the device. If they do
    #: not, the load, which follows at once, transfers them again.
    loading_for: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Admit:
    """Let a run begin. It is in progress until its `RunEnded`."""

    run: int


@dataclass(frozen=True, slots=True)
class WoundDown:
    """End of a `WindDown`. If all counts are 0, no execution starts any more, but loads do.

    Otherwise, the time of the `WindDown` was over, and the scheduler serves again as before.
    """

    #: Numbers of runs, executions and generations that have not ended in time. An executing step of a generation
    #: counts as an execution, and so does an execution that waits for its retry.
    runs: int
    executions: int
    steps: int = 0


class Outcome(Enum):
    """Outcome of a request. Every request has exactly one."""

    ANSWERED = "answered"
    REFUSED = "refused"
    #: The deadline passed.
    EXPIRED = "expired"
    #: The deadline had not passed, but could no longer be met.
    SHED = "shed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Reason(Enum):
    """Reason of a refusal, or in the case of `NOT_LOADED`, of a failure."""

    QUEUE_FULL = "queue_full"
    UNKNOWN_MODEL = "unknown_model"
    UNLOADED = "unloaded"
    TOO_MANY_ROWS = "too_many_rows"
    UNKNOWN_VARIANT = "unknown_variant"
    #: The model is paused.
    PAUSED = "paused"
    #: The model's weights are not on the device, and requests do not cause a load (`SchedulerSettings.on_demand`).
    NOT_RESIDENT = "not_resident"
    #: A recent load of the model's weights found no memory, although all other weights were evicted.
    NO_MEMORY = "no_memory"
    #: The load of the model's weights failed.
    NOT_LOADED = "not_loaded"


class Finish(NamedTuple):
    """End a request, or refuse a run. `reason` is set for REFUSED, and for FAILED if a load failed.

    `error` is set for FAILED.
    """

    request: int
    outcome: Outcome
    reason: Reason | None = None
    #: With QUEUE_FULL, seconds after which a place in the queue is likely, by learned costs (None: unknown). With
    #: NO_MEMORY and NOT_LOADED, seconds until the load of the weights may be retried.
    retry_after: float | None = None
    error: str | None = None


Instruction = (
    Execute
    | ReadWeights
    | LoadWeights
    | AbandonLoad
    | EvictWeights
    | WarmUp
    | GiveUp
    | Admit
    | WoundDown
    | Finish
)

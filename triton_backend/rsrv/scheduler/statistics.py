"""Statistics of the scheduler: counters of models, and snapshots of the whole scheduler.

Counters start when a model is added, or when the scheduler is made. They are never reset. The `Totals` of a removed version
are kept while the model has another version. Snapshots are frozen and detached from the scheduler.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, TypeVar

from rsrv.histogram import PADDING, ROWS, SECONDS, Histogram
from rsrv.scheduler.events import Outcome, Pause, Reason
from rsrv.scheduler.weight_states import ON_DEVICE, WeightState

K = TypeVar("K")


class Cause(Enum):
    """Cause of an eviction, other than the removal of its model."""

    #: A load needed the room.
    ROOM = "room"
    #: An operator requested the eviction. Or a warm-up ended, and weights do not load on demand.
    ASKED = "asked"
    #: The budget fell, or models were pinned.
    BUDGET = "budget"
    #: A compaction of the device's memory evicted the weights.
    COMPACTION = "compaction"
    #: The weights were not used within their model's idle limit.
    IDLE = "idle"


class Stage(Enum):
    """Stage of a request when its deadline passed, or when it became certain that the deadline will be missed."""

    #: The deadline had passed on arrival.
    ARRIVAL = "arrival"
    #: The request waited for other executions.
    QUEUE = "queue"
    #: The request waited for its model's weights.
    LOAD = "load"
    #: The request executed, and was answered late.
    EXECUTE = "execute"


@dataclass(slots=True)
class OutcomeCounts:
    """Counters of ended requests by outcome."""

    answered: int = 0
    expired: int = 0
    shed: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: dict[Reason, int] = field(default_factory=dict)

    def refuse(self, reason: Reason, count: int = 1) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + count

    def total(self) -> int:
        return (
            self.answered
            + self.expired
            + self.shed
            + self.cancelled
            + self.failed
            + sum(self.refused.values())
        )

    def add(self, other: "OutcomeCounts") -> None:
        self.answered += other.answered
        self.expired += other.expired
        self.shed += other.shed
        self.cancelled += other.cancelled
        self.failed += other.failed
        for reason, count in other.refused.items():
            self.refuse(reason, count)

    def outcomes(self) -> dict[Outcome, int]:
        """Return the counters by outcome, zeros included."""
        return {
            Outcome.ANSWERED: self.answered,
            Outcome.REFUSED: sum(self.refused.values()),
            Outcome.EXPIRED: self.expired,
            Outcome.SHED: self.shed,
            Outcome.CANCELLED: self.cancelled,
            Outcome.FAILED: self.failed,
        }


@dataclass(slots=True)
class Totals:
    """Counters of one model. Nothing resets them."""

    counts: OutcomeCounts = field(default_factory=OutcomeCounts)
    #: Number of missed deadlines by stage.
    missed: dict[Stage, int] = field(default_factory=dict)
    #: Number of executions started.
    dispatches: int = 0
    #: Number of useful rows in these executions.
    useful_rows: int = 0
    #: Device time of executions that ended, including failed ones.
    device_seconds: float = 0.0
    #: Number of requests that found the weights absent.
    misses: int = 0
    #: Number of evictions of the weights by cause.
    evictions: dict[Cause, int] = field(default_factory=dict)
    #: Seconds from a request's arrival until it is given to the device.
    queue_wait: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: Seconds of each execution, as in `device_seconds`.
    execute: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: Seconds of successful loads.
    load: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: Number of useful rows in each execution.
    rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    #: Number of padding rows in each execution.
    padding: Histogram = field(default_factory=lambda: Histogram(PADDING))

    @classmethod
    def of(cls, several: Iterable["Totals"]) -> "Totals":
        """Return the sum of several counters."""
        total = cls()
        for counts in several:
            total.add(counts)
        return total

    def miss(self, stage: Stage) -> None:
        self.missed[stage] = self.missed.get(stage, 0) + 1

    def miss_weights(self, requests: int) -> None:
        self.misses += requests

    def evict(self, cause: Cause) -> None:
        self.evictions[cause] = self.evictions.get(cause, 0) + 1

    def add(self, other: "Totals") -> None:
        self.counts.add(other.counts)
        _add(self.missed, other.missed)
        self.dispatches += other.dispatches
        self.useful_rows += other.useful_rows
        self.device_seconds += other.device_seconds
        self.misses += other.misses
        _add(self.evictions, other.evictions)
        self.queue_wait.add(other.queue_wait)
        self.execute.add(other.execute)
        self.load.add(other.load)
        self.rows.add(other.rows)
        self.padding.add(other.padding)


class PastTotals:
    """Counters of removed versions, by the name of their model. They are dropped with the model's last version."""

    __slots__ = ("_past",)

    def __init__(self) -> None:
        self._past: dict[str, Totals] = {}

    def keep(self, name: str, totals: Totals, *, others: bool) -> None:
        """Add the counters of a removed version. `others`: True if the model has another version."""
        if others:
            self._past.setdefault(name, Totals()).add(totals)
        else:
            self._past.pop(name, None)

    def with_present(self, versions: Iterable[tuple[str, Totals]]) -> dict[str, Totals]:
        """Return the sums by name. They include the current versions."""
        several: dict[str, list[Totals]] = {name: [past] for name, past in self._past.items()}
        for name, totals in versions:
            several.setdefault(name, []).append(totals)
        # Most models have one version, whose counters need no copy.
        return {name: of[0] if len(of) == 1 else Totals.of(of) for name, of in several.items()}


def _add(mine: dict[K, int], added: Mapping[K, int]) -> None:
    for key, count in added.items():
        mine[key] = mine.get(key, 0) + count


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """Statistics of one model."""

    weights: WeightState
    #: True if the weights stay on the device.
    pinned: bool
    #: True if the model was removed, and its last executions or its load still run.
    draining: bool
    #: Mode in which the model is paused, or None.
    paused: Pause | None
    #: Number of waiting requests.
    queued: int
    #: Number of executing requests.
    executing: int
    #: Number of ended requests by outcome.
    outcomes: Mapping[Outcome, int]
    #: Number of refused requests by reason. Only reasons that occurred are present.
    refused: Mapping[Reason, int]
    #: Number of executions started.
    dispatches: int
    #: Number of useful rows in all executions started.
    useful_rows: int
    #: Number of padding rows in all executions started.
    padded_rows: int
    #: Device time of executions that ended, including failed ones.
    device_seconds: float
    #: (variant, size) -> number of executions started, if there were any.
    sizes: Mapping[tuple[int, int], int]
    #: (variant, size) -> expected seconds of one execution, as learned.
    costs: Mapping[tuple[int, int], float]
    #: Bytes of all weights of the model.
    weight_bytes: int
    #: Bytes of the model's distinct tensors. If no other model shares them, the model takes this many bytes on the device.
    device_bytes: int
    #: Number of completed loads of the weights.
    loads: int
    #: Expected seconds of the next load.
    load_seconds: float
    #: Number of evictions of the weights.
    evictions: int
    #: Expected device time of the waiting requests.
    backlog_seconds: float
    #: Expected seconds per row at the size that costs least per row when it is full.
    row_seconds: float
    #: Maximum number of useful rows in one execution.
    max_rows: int

    @property
    def residency(self) -> str:
        """Return the state of the weights as operators see it: resident, loading or absent."""
        if self.weights in ON_DEVICE:
            return "resident"
        return "loading" if self.weights is WeightState.LOADING else "absent"


class WeightBytes(NamedTuple):
    """Device bytes of weights."""

    #: Bytes of all weights on the device. Each shared tensor is counted once.
    physical: int
    #: Bytes of pinned weights on the device.
    pinned: int
    #: Bytes that the same weights would take if no tensor were shared.
    logical: int
    #: Bytes that weights may take, or None without a limit.
    budget: int | None


class SharedTensors(NamedTuple):
    """Tensors that exactly these models have. They are stored once."""

    bytes: int
    #: Keys of the models.
    models: list[str]
    on_device: bool


@dataclass(frozen=True, slots=True)
class MetaSnapshot:
    """Statistics of the runs of one meta model.

    Each run is counted in one field. An admitted run in progress is also counted in `running`.
    """

    #: Number of runs that wait for admission.
    waiting: int
    #: Number of runs in progress.
    running: int
    #: Number of runs admitted since the start.
    admitted: int
    #: Number of runs whose deadline passed while they waited.
    expired: int
    #: Number of runs refused because too many runs waited.
    refused: int
    #: Number of runs that ended while they waited.
    withdrawn: int


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Statistics of all models, and sums that include removed models."""

    models: Mapping[str, ModelSnapshot]
    #: Statistics by name of each meta model that has ever had a run.
    metas: Mapping[str, MetaSnapshot]
    #: Number of requests that arrived since the start. arrived = sum(outcomes) + queued + executing.
    arrived: int
    #: Number of ended requests of all models by outcome, including removed and unknown models.
    outcomes: Mapping[Outcome, int]
    refused: Mapping[Reason, int]
    queued: int
    executing: int
    #: Number of executions in flight.
    running: int
    #: Device bytes of weights, as in `WeightBytes`: physical, pinned and logical bytes, and the budget.
    weight_bytes: int
    pinned_bytes: int
    logical_bytes: int
    weight_budget_bytes: int | None

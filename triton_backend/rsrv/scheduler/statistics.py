"""Statistics of the scheduler: what is counted and measured of a model, and snapshots of all of it.

Counters rise from the moment a model was added (or the scheduler was made); nothing resets them. `Totals` outlive a
version of a model while another one of its name stays. Snapshots are frozen, detached from the scheduler's state.
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
    """Why weights left the device, other than with their model."""

    #: a load needed the room.
    ROOM = "room"
    #: somebody asked for it, or only an external control plane brings weights, and a warm-up was over.
    ASKED = "asked"
    #: the budget fell, or models were pinned.
    BUDGET = "budget"
    #: all left, so that memory has no holes.
    COMPACTION = "compaction"


class Stage(Enum):
    """Where a request was when its deadline passed, or became certain to."""

    #: it had passed when the request came.
    ARRIVAL = "arrival"
    #: it waited for others' executions.
    QUEUE = "queue"
    #: it waited for its model's weights.
    LOAD = "load"
    #: it executed, and was answered all the same.
    EXECUTE = "execute"


@dataclass(slots=True)
class OutcomeCounts:
    """How requests ended, while counting."""

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
        """By outcome, zeros included."""
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
    """While counting; nothing resets them."""

    counts: OutcomeCounts = field(default_factory=OutcomeCounts)
    #: deadlines that were missed, by where.
    missed: dict[Stage, int] = field(default_factory=dict)
    #: executions started, with their rows of requests.
    dispatches: int = 0
    useful_rows: int = 0
    #: device time of executions that ended, failed ones included.
    device_seconds: float = 0.0
    #: requests that found the weights elsewhere, and times that these gave way.
    misses: int = 0
    evictions: dict[Cause, int] = field(default_factory=dict)
    #: from a request's arrival until it is given to the device; seconds.
    queue_wait: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: as `device_seconds`, of each execution.
    execute: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: of loads that ended well; seconds.
    load: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    #: rows of requests in an execution, and of padding.
    rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    padding: Histogram = field(default_factory=lambda: Histogram(PADDING))

    @classmethod
    def of(cls, several: Iterable["Totals"]) -> "Totals":
        """Their sum."""
        total = cls()
        for one in several:
            total.add(one)
        return total

    def miss(self, stage: Stage) -> None:
        self.missed[stage] = self.missed.get(stage, 0) + 1

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
    """What removed versions of models have counted, by the name of the model, while it has another version."""

    __slots__ = ("_past",)

    def __init__(self) -> None:
        self._past: dict[str, Totals] = {}

    def keep(self, name: str, totals: Totals, *, others: bool) -> None:
        """Take in a version that is gone. `others`: whether the model has another one."""
        if others:
            self._past.setdefault(name, Totals()).add(totals)
        else:
            self._past.pop(name, None)

    def with_present(self, versions: Iterable[tuple[str, Totals]]) -> dict[str, Totals]:
        """The sums by name, those of the versions that are there included."""
        several: dict[str, list[Totals]] = {name: [past] for name, past in self._past.items()}
        for name, totals in versions:
            several.setdefault(name, []).append(totals)
        # Of most there is one version, whose own need no copy.
        return {name: of[0] if len(of) == 1 else Totals.of(of) for name, of in several.items()}


def _add(mine: dict[K, int], others: Mapping[K, int]) -> None:
    for key, count in others.items():
        mine[key] = mine.get(key, 0) + count


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One model."""

    weights: WeightState
    #: whether it stays on the device.
    pinned: bool
    #: removed, but its last executions or its load still run.
    draining: bool
    #: how it is paused; None: it is not.
    paused: Pause | None
    #: requests that wait, and their rows.
    queued: int
    queued_rows: int
    #: requests that execute.
    executing: int
    #: ended requests by outcome.
    outcomes: Mapping[Outcome, int]
    #: refused requests by reason; only reasons that occurred.
    refused: Mapping[Reason, int]
    #: executions started.
    dispatches: int
    #: rows of requests, and rows of padding, in all executions started.
    useful_rows: int
    padded_rows: int
    #: device time of executions that ended, failed ones included.
    device_seconds: float
    #: (variant, size) -> executions started; only those that occurred.
    sizes: Mapping[tuple[int, int], int]
    #: (variant, size) -> expected seconds of one execution, as learned.
    costs: Mapping[tuple[int, int], float]
    #: of all its weights; and of those that differ, which is what it takes on the device alone.
    weight_bytes: int
    device_bytes: int
    #: requests that found its weights elsewhere.
    misses: int
    #: completed loads of the weights, and how long the next one is expected to take.
    loads: int
    load_seconds: float
    #: times that the weights gave way to others.
    evictions: int
    #: expected device time of the waiting requests.
    backlog_seconds: float

    @property
    def residency(self) -> str:
        """Where the weights are, in the three words that operators see."""
        if self.weights in ON_DEVICE:
            return "resident"
        return "loading" if self.weights is WeightState.LOADING else "absent"


class ModelLoad(NamedTuple):
    """Of one model, what is asked for often: named as in its snapshot."""

    queued: int
    executing: int
    pinned: bool
    device_bytes: int
    #: of the execution that is expected to cost least for each of its rows when it is full.
    row_seconds: float
    #: most useful rows that one execution takes.
    max_rows: int
    misses: int
    answered: int
    device_seconds: float
    useful_rows: int


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a snapshot says, as far as it is asked for often."""

    models: Mapping[str, ModelLoad]
    weight_bytes: int
    pinned_bytes: int
    logical_bytes: int
    weight_budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class MetaSnapshot:
    """The runs of one meta model. All that were asked for are in one of these but `running`."""

    #: runs that wait for admission, and those under way.
    waiting: int
    running: int
    #: those that were let in, ever; and those that were not, by why. Withdrawn: ended while they waited.
    admitted: int
    expired: int
    refused: int
    withdrawn: int


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """All models, and the sums that outlive them."""

    models: Mapping[str, ModelSnapshot]
    #: meta models of which a run was ever asked for. Their counters outlive their runs.
    metas: Mapping[str, MetaSnapshot]
    #: requests that ever arrived. arrived = sum(outcomes) + queued + executing.
    arrived: int
    #: ended requests, by how: of all models, removed and unknown ones included.
    outcomes: Mapping[Outcome, int]
    refused: Mapping[Reason, int]
    queued: int
    executing: int
    #: executions in flight.
    running: int
    #: device bytes of weights, resident or on their way; pinned ones; as if no model shared any; and allowed.
    weight_bytes: int
    pinned_bytes: int
    logical_bytes: int
    weight_budget_bytes: int | None

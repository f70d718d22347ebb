"""Statistics of the scheduler at one moment: frozen, detached from its state.

Counters rise from the moment a model was added (or the scheduler was made); nothing resets them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rsrv.scheduler.events import Outcome, Pause, Reason
from rsrv.scheduler.weights import Residency


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """One model."""

    residency: Residency
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
    #: ended requests, by how.
    outcomes: Mapping[Outcome, int]
    #: refused ones, by why; only reasons that occurred.
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
    #: expected device time of what waits.
    backlog_seconds: float


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
class Load:
    """What a snapshot says, as far as it is asked for often."""

    models: Mapping[str, ModelLoad]
    weight_bytes: int
    pinned_bytes: int
    logical_bytes: int
    weight_budget_bytes: int | None


@dataclass(frozen=True, slots=True)
class MetaSnapshot:
    """The runs of one meta model. All that were asked for are in one of these but `running`."""

    #: runs that wait at the gate, and those under way.
    waiting: int
    running: int
    #: those that were let in, ever; and those that were not, by why. Withdrawn: ended while they waited.
    admitted: int
    expired: int
    refused: int
    withdrawn: int


@dataclass(frozen=True, slots=True)
class Snapshot:
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

"""What is counted and measured of a model: one record for each version, which outlives it while others of the name stay."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from rsrv.histogram import PADDING, ROWS, SECONDS, Histogram
from rsrv.scheduler.events import Outcome, Reason

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
class Counts:
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

    def add(self, other: "Counts") -> None:
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

    counts: Counts = field(default_factory=Counts)
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


def _add(mine: dict[K, int], others: Mapping[K, int]) -> None:
    for key, count in others.items():
        mine[key] = mine.get(key, 0) + count

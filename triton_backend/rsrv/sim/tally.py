"""Sums over requests and devices, and the figures computed from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any

from rsrv.scheduler.events import Outcome
from rsrv.sim.record import ExecutionRecord, LoadRecord, RequestRecord, StartRecord

#: Names of the outcomes in the metrics.
ENDS = {
    Outcome.ANSWERED: "served",
    Outcome.SHED: "shed",
    Outcome.EXPIRED: "expired",
    Outcome.REFUSED: "refused",
    Outcome.CANCELLED: "cancelled",
    Outcome.FAILED: "failed",
}

Span = tuple[float, float]


@dataclass(slots=True)
class Tally:
    """Sums over one model, over one device, or over the whole simulation."""

    ends: dict[Outcome, int] = field(default_factory=lambda: dict.fromkeys(ENDS, 0))
    arrived: int = 0
    hits: int = 0
    waits: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    #: Latencies of requests that waited for a start.
    cold_latencies: list[float] = field(default_factory=list)
    device_seconds: float = 0.0
    dispatches: int = 0
    useful_rows: int = 0
    padded_rows: int = 0
    #: Sums of `ExecutionRecord.useful` and of `ExecutionRecord.size`.
    useful: int = 0
    size: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    evictions: int = 0
    starts: int = 0
    cold: int = 0
    read_bytes: int = 0
    #: Intervals with requests in the system, disjoint and ascending.
    busy: list[Span] = field(default_factory=list)

    def add(self, sent: RequestRecord) -> None:
        assert sent.outcome is not None
        self.arrived += 1
        self.hits += sent.hit
        self.cold += sent.cold
        self.ends[sent.outcome] += 1
        if self.busy and sent.arrived <= self.busy[-1][1]:
            self.busy[-1] = (self.busy[-1][0], max(self.busy[-1][1], sent.ended))
        elif sent.ended > sent.arrived:
            self.busy.append((sent.arrived, sent.ended))
        if sent.outcome is Outcome.ANSWERED:
            assert sent.started is not None
            self.waits.append(sent.started - sent.arrived)
            self.latencies.append(sent.ended - sent.arrived)
            if sent.cold:
                self.cold_latencies.append(sent.ended - sent.arrived)

    def ended(self) -> dict[str, int]:
        """Return the number of requests by outcome."""
        return {name: self.ends[outcome] for outcome, name in ENDS.items()}

    def times(self) -> dict[str, float | None]:
        self.waits.sort()
        self.latencies.sort()
        return {
            "wait_p50_s": percentile(self.waits, 0.5),
            "wait_p99_s": percentile(self.waits, 0.99),
            "latency_p50_s": percentile(self.latencies, 0.5),
            "latency_p99_s": percentile(self.latencies, 0.99),
        }

    def figures(self) -> dict[str, Any]:
        """Return the figures that metrics.json has both for each model and for all models together."""
        return {
            **self.ended(),
            "arrived": self.arrived,
            "hit_ratio": ratio(self.hits, self.arrived),
            "device_seconds": self.device_seconds,
            **self.times(),
            "dispatches": self.dispatches,
            "useful_rows": self.useful_rows,
            "padded_rows": self.padded_rows,
            "loads": self.loads,
            "loaded_bytes": self.loaded_bytes,
            "evictions": self.evictions,
            "starts": self.starts,
            "cold": self.cold,
            "cold_p50_s": percentile(sorted(self.cold_latencies), 0.5),
            "read_bytes": self.read_bytes,
        }

    def execute(self, execution: ExecutionRecord, window: float) -> None:
        """Count an execution that started within the window. Its time after the window does not count."""
        self.device_seconds += min(execution.ended, window) - execution.started
        self.dispatches += 1
        self.useful_rows += execution.execute.rows
        self.padded_rows += execution.execute.size - execution.execute.rows
        self.useful += execution.useful
        self.size += execution.size

    def load(self, load: LoadRecord) -> None:
        self.loads += 1
        self.loaded_bytes += load.nbytes
        self.read_bytes += load.read_bytes

    def start(self, start: StartRecord) -> None:
        self.starts += 1
        self.read_bytes += start.read_bytes


def in_time(sent: RequestRecord, window: float) -> bool:
    """Return whether a request was answered by its deadline, if it had one, and within the window."""
    limit = window if sent.request.deadline is None else min(window, sent.request.deadline)
    return sent.outcome is Outcome.ANSWERED and sent.ended <= limit


def percentile(ascending: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile of ascending values, or None if there are no values."""
    return ascending[max(1, ceil(share * len(ascending))) - 1] if ascending else None


def mean(history: Sequence[tuple[float, int]], window: float) -> float | None:
    """Return the mean bytes over the window. `history` has pairs of a time and the bytes from that time on."""
    average = 0.0
    for (since, nbytes), (until, _) in pairwise([*history, (window, 0)]):
        average += nbytes * (min(until, window) - min(since, window))
    return ratio(average, window)


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    return round(value, 9) if isinstance(value, float) else value

"""Histograms with fixed bounds, as in Prometheus, for values that are measured many times a second."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import add, sub
from typing import Any, Protocol

#: Upper bounds of intervals in seconds, for requests and executions.
SECONDS: tuple[float, ...] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
#: Upper bounds of intervals in seconds, for compilations.
LONG_SECONDS: tuple[float, ...] = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
#: Upper bounds for rows of an execution.
ROWS: tuple[float, ...] = tuple(float(2**k) for k in range(13))
#: Upper bounds for rows of padding in an execution.
PADDING: tuple[float, ...] = (0.0, *ROWS)


class Trimmed(Protocol):
    """A histogram of control.proto."""

    sum: float
    first: int

    @property
    def counts(self) -> Sequence[int]:
        """The counts of all intervals from `first` to the last non-empty one, as `Histogram.trimmed` returns them."""


class Histogram:
    """Counts values by interval. Not thread-safe. An interval includes its upper bound. The last interval has no bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], counts: list[int] | None = None, sum: float = 0.0) -> None:
        self.bounds = bounds
        #: Number of values in each interval. There is one more interval than bounds.
        self.counts = [0] * (len(bounds) + 1) if counts is None else counts
        #: Sum of all values.
        self.sum = sum

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        bounds, counts = self.bounds, self.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self.sum += sum(values)

    def add(self, other: "Histogram") -> None:
        """Add the counts of another histogram with the same bounds."""
        self.counts = list(map(add, self.counts, other.counts))
        self.sum += other.sum

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return the values that were added after `earlier`. If counting has begun again after `earlier`, return all values."""
        counts = list(map(sub, self.counts, earlier.counts))
        if min(counts) < 0:
            return self
        return Histogram(self.bounds, counts, self.sum - earlier.sum)

    def quantile(self, q: float) -> float | None:
        """Return a quantile, or None without values. As in PromQL, values are spread evenly within their interval."""
        total = sum(self.counts)
        if not total:
            return None
        rank, below = q * total, 0
        for index, upper in enumerate(self.bounds):
            if below + self.counts[index] >= rank:
                lower = self.bounds[index - 1] if index else 0.0
                return lower + (upper - lower) * (rank - below) / self.counts[index]
            below += self.counts[index]
        return self.bounds[-1]

    def trimmed(self) -> tuple[int, list[int]]:
        """Return the number of empty intervals at the start, and the counts of the others up to the last non-empty one."""
        counts, first, end = self.counts, 0, len(self.counts)
        while end and not counts[end - 1]:
            end -= 1
        while first < end and not counts[first]:
            first += 1
        return first, counts[first:end]

    def to_json(self) -> list[float]:
        """Return [sum, number of empty intervals at the start, counts as in `trimmed`...]."""
        first, counts = self.trimmed()
        return [self.sum, first, *counts]

    @classmethod
    def of(cls, bounds: Sequence[float], trimmed: Trimmed) -> "Histogram":
        """Return the histogram with these bounds and the counts of `trimmed`, which is part of a record."""
        histogram = cls(bounds, sum=trimmed.sum)
        histogram.counts[trimmed.first : trimmed.first + len(trimmed.counts)] = trimmed.counts
        return histogram

    @classmethod
    def from_json(cls, bounds: Sequence[float], value: Any) -> "Histogram":
        """Read `to_json` of a histogram with these bounds. Raises ValueError."""
        histogram = cls(bounds)
        if not isinstance(value, list) or len(value) < 2:
            raise ValueError(f"not a histogram: {value!r:.80}")
        total, first, *counts = value
        if (
            not isinstance(total, (int, float))
            or not abs(total) < 1e18  # nor a NaN
            or set(map(type, value[1:])) != {int}
            or min(value[1:]) < 0
            or max(value[1:]) >= 1 << 53
            or first + len(counts) > len(histogram.counts)
        ):
            raise ValueError(f"not a histogram of {len(bounds)} bounds: {value!r:.80}")
        histogram.counts[first : first + len(counts)] = counts
        histogram.sum = float(total)
        return histogram

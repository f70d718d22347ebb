"""From samples to figures: the rounds that count, medians, ratios of two sides, targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: CPUs that the hypervisor may steal in a round that counts.
MAX_STEAL = 0.1


@dataclass(frozen=True)
class Sample:
    """One measurement of one side. Microseconds of CPU are per request, by role of the process."""

    side: str
    clients: int
    round: int
    infer_per_s: float
    p50_us: float
    p99_us: float
    #: Completed in the window, by Triton's count.
    requests: int
    cpu_us: Mapping[str, float]
    #: Requests in one execute(), and rows in one execution of the runtime.
    triton_batch: float
    device_batch: float | None
    #: Compiled size -> executions of the runtime.
    sizes: Mapping[int, int]
    #: Share of the time in which the runtime's device executed.
    busy: float | None
    steal_cpus: float
    #: CPUs used by processes that are neither the server's nor its clients'.
    other_cpus: float


@dataclass(frozen=True)
class Swapping(Sample):
    """A sample, with the loads of weights during it."""

    seconds: float
    #: Answers by the runtime's own count, between the same two moments as the next two.
    answered: int
    #: Requests that came while their model's weights were absent or loading.
    misses: int
    loads: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Return the share of the requests that found the weights resident."""
        return 1 - self.misses / self.answered


@dataclass(frozen=True)
class Spread:
    """The median of some values, with the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class Rounds:
    """The samples of the rounds that count, and the number of the others."""

    samples: Sequence[Sample]
    kept: int
    dropped: int
    #: All rounds were noisy, so all were kept.
    noisy: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], max_steal: float = MAX_STEAL) -> Rounds:
        """Drop each round in which a sample lost more than `max_steal` CPUs, unless that would be all."""
        numbers = {sample.round for sample in samples}
        bad = {sample.round for sample in samples if sample.steal_cpus > max_steal}
        noisy = bool(bad) and bad == numbers
        if noisy:
            bad = set()
        rest = [sample for sample in samples if sample.round not in bad]
        return cls(rest, len(numbers) - len(bad), len(bad), noisy)

    def of_side(self, side: str, clients: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.side == side and sample.clients == clients]

    def spread(self, side: str, clients: int, value: Callable[[Sample], float]) -> Spread:
        """Return a figure of one side over the rounds."""
        return Spread.of(value(sample) for sample in self.of_side(side, clients))

    def ratio(self, over: str, under: str, clients: int, value: Callable[[Sample], float]) -> Spread:
        """Return the ratio of two sides, taken within each round, over the rounds."""
        above = {sample.round: value(sample) for sample in self.of_side(over, clients)}
        below = {sample.round: value(sample) for sample in self.of_side(under, clients)}
        return Spread.of(above[number] / below[number] for number in sorted(above.keys() & below.keys()))


def summed_sizes(samples: Iterable[Sample]) -> dict[int, int]:
    """Return the executions by compiled size, over all samples, smallest size first."""
    total: dict[int, int] = {}
    for sample in samples:
        for size, count in sample.sizes.items():
            total[size] = total.get(size, 0) + count
    return dict(sorted(total.items()))


@dataclass(frozen=True)
class Target:
    """A figure that should be at least, or at most, a limit."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def reached(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def verdict(self) -> str:
        """Return `pass`, or the shortfall in percent of the limit."""
        if self.reached:
            return "pass"
        return f"falls short by {abs(self.value - self.limit) / self.limit:.0%}"


def per_added_model(fewer: float, more: float, added: int) -> float:
    """Return the cost of each added model."""
    return (more - fewer) / added

"""From samples to figures: which rounds count, medians, ratios of two sides, targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: CPUs that the hypervisor may take from the machine in a round that counts.
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
    #: completed in the window, by Triton's count
    requests: int
    cpu_us: Mapping[str, float]
    #: requests in one execute(), and rows in one execution of the runtime
    triton_batch: float
    device_batch: float | None
    #: compiled size -> executions of the runtime
    sizes: Mapping[int, int]
    #: share of the time in which the runtime's device executed
    busy: float | None
    steal_cpus: float
    #: CPUs used by processes that belong to neither the server nor its clients
    other_cpus: float
    server_us: Mapping[str, float]


@dataclass(frozen=True)
class Swapping(Sample):
    """A sample, with what moved meanwhile."""

    seconds: float
    #: answers by the runtime's own count, between the same two moments as the next two
    answered: int
    #: requests that came while their model's weights were elsewhere, or on their way
    misses: int
    loads: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Share of the requests that found the weights there."""
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
    """The samples of the rounds that count, and what became of the others."""

    samples: Sequence[Sample]
    kept: int
    dropped: int
    #: all rounds were noisy, so all were kept
    noisy: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], max_steal: float = MAX_STEAL) -> Rounds:
        """Drops each round in which any sample lost more than `max_steal` CPUs, unless that would be all."""
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
        """A figure of one side over the rounds."""
        return Spread.of(value(sample) for sample in self.of_side(side, clients))

    def ratio(self, over: str, under: str, clients: int, value: Callable[[Sample], float]) -> Spread:
        """The ratio of two sides, taken within each round, over the rounds."""
        above = {sample.round: value(sample) for sample in self.of_side(over, clients)}
        below = {sample.round: value(sample) for sample in self.of_side(under, clients)}
        return Spread.of(above[number] / below[number] for number in sorted(above.keys() & below.keys()))


def summed_sizes(samples: Iterable[Sample]) -> dict[int, int]:
    """Executions by compiled size, over all samples, smallest size first."""
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
        """`pass`, or by how much it falls short, in percent of the limit."""
        if self.reached:
            return "pass"
        return f"falls short by {abs(self.value - self.limit) / self.limit:.0%}"


def per_added_model(fewer: float, more: float, added: int) -> float:
    """What each of the added models takes."""
    return (more - fewer) / added

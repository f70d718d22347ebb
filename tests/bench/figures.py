"""From samples to figures: valid rounds, medians, ratios of two sides, and targets. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: Largest number of CPUs that the hypervisor may steal in a valid round.
MAX_STEAL = 0.1


@dataclass(frozen=True)
class Sample:
    """One measurement of one side. CPU times are microseconds per request, by the role of the process."""

    side: str
    clients: int
    round: int
    infer_per_s: float
    p50_us: float
    p99_us: float
    #: Number of requests that were completed in the window, as Triton counts them.
    requests: int
    cpu_us: Mapping[str, float]
    #: Requests in one execute().
    triton_batch: float
    #: Rows in one execution of the runtime.
    device_batch: float | None
    #: Number of the runtime's executions by compiled size.
    sizes: Mapping[int, int]
    #: Share of the window during which the runtime's device executed.
    busy: float | None
    steal_cpus: float
    #: Number of CPUs used by processes that belong neither to the server nor to the clients.
    other_cpus: float


@dataclass(frozen=True)
class Swapping(Sample):
    """A sample that also has the loads of weights during its window."""

    seconds: float
    #: Number of answers that the runtime counted during the window.
    answered: int
    #: Number of requests that arrived while their model's weights were absent or loading.
    misses: int
    loads: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """The share of the requests that found their model's weights on the device."""
        return 1 - self.misses / self.answered


@dataclass(frozen=True)
class Spread:
    """The median, the lowest and the highest of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        return cls(median(ordered), ordered[0], ordered[-1])


@dataclass(frozen=True)
class Rounds:
    """The samples of the valid rounds, and the numbers of kept and of dropped rounds."""

    samples: Sequence[Sample]
    kept: int
    dropped: int
    #: True if all rounds were noisy. Then all are kept.
    noisy: bool

    @classmethod
    def of(cls, samples: Sequence[Sample], max_steal: float = MAX_STEAL) -> Rounds:
        """Drop each round in which a sample lost more than `max_steal` CPUs. If this would drop all rounds, keep all."""
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
        """Return the spread of one side's figure over the rounds."""
        return Spread.of(value(sample) for sample in self.of_side(side, clients))

    def ratio(self, over: str, under: str, clients: int, value: Callable[[Sample], float]) -> Spread:
        """Return the spread of the ratio of two sides. The ratio is taken within each round."""
        above = {sample.round: value(sample) for sample in self.of_side(over, clients)}
        below = {sample.round: value(sample) for sample in self.of_side(under, clients)}
        return Spread.of(above[number] / below[number] for number in sorted(above.keys() & below.keys()))


def summed_sizes(samples: Iterable[Sample]) -> dict[int, int]:
    """Return the number of executions of all samples by compiled size, smallest size first."""
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
        """Return `pass`, or by how many percent of the limit the figure misses the limit."""
        if self.reached:
            return "pass"
        return f"falls short by {abs(self.value - self.limit) / self.limit:.0%}"


def per_added_model(fewer: float, more: float, added: int) -> float:
    """Return the cost of each model that was added."""
    return (more - fewer) / added

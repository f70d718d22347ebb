"""Whose weights are on the device, whose come next, and who gives way: the one place that loads or evicts.

Every load has an epoch of its own, rising over all models and loads, so a completion names exactly one
load and a late one hurts nobody. One load is under way at a time: the link to the device is one, and who
comes next is decided as late as possible.
"""

from enum import Enum

from rsrv.runtime.scheduler.errors import CallerError
from rsrv.runtime.scheduler.events import EvictWeights, LoadWeights
from rsrv.runtime.scheduler.eviction import Uses

#: share of the latest pause in the usual one.
_ALPHA = 0.3


class Residency(Enum):
    """Where the weights of a model are."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"


class Holding:
    """The weights of one model."""

    __slots__ = (
        "bytes",
        "epoch",
        "evictions",
        "gap",
        "load_seconds",
        "loads",
        "model",
        "residency",
        "since",
        "used",
        "uses",
    )

    def __init__(self, model: str, size: int, load_seconds: float) -> None:
        self.model = model
        self.bytes = size
        self.residency = Residency.ABSENT
        #: of the current or latest load; 0 before the first.
        self.epoch = 0
        #: completed loads, and evictions other than the one at the model's end.
        self.loads = 0
        self.evictions = 0
        #: how long a load takes: as the latest one, or as the program says.
        self.load_seconds = load_seconds
        #: when the current residency, or the load under way, began.
        self.since = 0.0
        #: when an execution on it ended last, or when it came.
        self.used = 0.0
        #: how long the model usually has no work between two requests; 0.0 before that was seen.
        self.gap = 0.0
        #: when its latest requests came, wherever the weights were.
        self.uses: Uses = ()

    def needed(self, now: float) -> None:
        """A request came after a pause."""
        if not self.epoch:
            return
        # One long pause must not hide for long that they are short.
        gap = min(now - self.used, 4.0 * self.load_seconds)
        self.gap += _ALPHA * (gap - self.gap) if self.gap else gap


class Weights:
    """The weights of all models."""

    __slots__ = ("_epoch", "budget", "bytes", "loading")

    def __init__(self, budget: int | None) -> None:
        self._epoch = 0
        #: device bytes that weights may take; None: no limit.
        self.budget = budget
        #: device bytes of all weights that are resident or on their way.
        self.bytes = 0
        #: whose load is under way.
        self.loading: Holding | None = None

    def missing(self, size: int) -> int:
        """Bytes that must be freed before `size` more fit; <= 0: none."""
        return 0 if self.budget is None else self.bytes + size - self.budget

    def expected_wait(self, holding: Holding, now: float) -> float:
        """Seconds until it can be resident at the earliest."""
        match holding.residency:
            case Residency.RESIDENT:
                return 0.0
            case Residency.LOADING:
                return max(0.0, holding.since + holding.load_seconds - now)
            case Residency.ABSENT:
                ahead = 0.0 if self.loading is None else self.expected_wait(self.loading, now)
                return ahead + holding.load_seconds

    def adopt(self, holding: Holding, now: float) -> None:
        """Weights that are on the device already."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.RESIDENT
        holding.since = holding.used = now
        self.bytes += holding.bytes

    def load(self, holding: Holding, now: float) -> LoadWeights:
        """Start the load of absent weights, while none is under way."""
        self._epoch += 1
        holding.epoch = self._epoch
        holding.residency = Residency.LOADING
        holding.since = now
        self.loading = holding
        self.bytes += holding.bytes
        return LoadWeights(holding.model, holding.epoch)

    def check(self, model: str, epoch: int) -> None:
        """Refuse the completion of a load that was never asked for.

        Raises:
            CallerError: no load had that epoch yet.
        """
        if not 0 < epoch <= self._epoch:
            raise CallerError(
                f"a load of model {model!r} ended with epoch {epoch}; the latest is {self._epoch}"
            )

    def loaded(self, holding: Holding, seconds: float, now: float) -> None:
        """The load under way ended well."""
        self.loading = None
        holding.residency = Residency.RESIDENT
        holding.loads += 1
        holding.load_seconds = seconds
        holding.since = holding.used = now

    def failed(self, holding: Holding) -> None:
        """The load under way ended without weights."""
        self.loading = None
        holding.residency = Residency.ABSENT
        self.bytes -= holding.bytes

    def evict(self, holding: Holding) -> EvictWeights:
        """Free resident weights on which nothing executes."""
        holding.residency = Residency.ABSENT
        self.bytes -= holding.bytes
        return EvictWeights(holding.model, holding.epoch)

"""Settings of the scheduler, which may change while it runs."""

from dataclasses import dataclass
from math import inf
from typing import Literal

#: the disciplines of `disciplines` by name.
DisciplineName = Literal["fair", "fifo", "edf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings by name and unit of the configuration's sections."""

    #: the order in which models execute; a key of the disciplines that the scheduler is given.
    discipline: str = "fair"
    #: executions given to the device at once. The device runs them one after the other.
    depth: int = 1
    #: with a depth above 1: how long before the expected end of the device's last execution it gets the next one, in ms.
    #: Until then requests that arrive may still join that one.
    launch_ahead_ms: float = 2.0
    #: concurrent runs of meta models; the others wait.
    meta_concurrency: int = 2
    #: a model with waiting requests keeps its weights on the device for at least this many times the duration of their
    #: load; see `load_queue`.
    residency_factor: float = 4.0
    #: whether weights load for waiting requests, and are evicted for those of others. If not, they load and leave only by
    #: command (`Pinned`, `Prefetch`, `Evict`), and requests for other models are refused.
    on_demand: bool = True
    #: device bytes that weights may take, pinned ones included; None: no limit.
    weight_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        self._require("depth", self.depth >= 1, "at least 1")
        self._require("meta_concurrency", self.meta_concurrency >= 1, "at least 1")
        self._require("launch_ahead_ms", 0.0 <= self.launch_ahead_ms < inf, "at least 0")
        self._require("residency_factor", 0.0 <= self.residency_factor < inf, "at least 0")
        budget = self.weight_budget_bytes
        self._require("weight_budget_bytes", budget is None or budget >= 0, "None or at least 0")

    def _require(self, name: str, true: bool, rule: str) -> None:
        if not true:
            raise ValueError(f"{name} must be {rule}, not {getattr(self, name)!r}")

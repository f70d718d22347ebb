"""Settings of the scheduler. They may change while it runs."""

from dataclasses import dataclass
from math import inf
from typing import Literal

#: Names of the disciplines in the module `disciplines`.
DisciplineName = Literal["fair", "fifo", "edf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """Settings of a scheduler. Names and units are those of the configuration's sections."""

    #: Name of the discipline that orders the executions of models. The scheduler must know this discipline.
    discipline: str = "fair"
    #: Maximum number of executions given to the device at the same time. The device runs them one after the other.
    depth: int = 1
    #: With a depth above 1, the device gets its next execution this many milliseconds before the expected end of the last one.
    #: Until then, requests that arrive may still join the next execution.
    launch_ahead_ms: float = 2.0
    #: Maximum number of concurrent runs of meta models. Further runs wait.
    meta_concurrency: int = 2
    #: A model with waiting requests keeps its weights on the device for at least this many times the duration of their load.
    #: See `load_queue`.
    residency_factor: float = 4.0
    #: If True, weights load because requests wait for them, and may evict other weights. If False, weights are loaded and
    #: evicted only by command (`Pinned`, `Prefetch`, `Evict`), and requests for other models are refused.
    on_demand: bool = True
    #: Device bytes that weights may take, including pinned ones. None means no limit.
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

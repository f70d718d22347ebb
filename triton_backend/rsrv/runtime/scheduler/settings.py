"""How the scheduler decides: what the configuration may change."""

from dataclasses import dataclass

from rsrv.runtime.scheduler.disciplines import DISCIPLINES


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """How to decide."""

    #: which model goes next; a key of `DISCIPLINES`.
    discipline: str = "fifo"
    #: executions in flight at once. 2 lets an asynchronous device start the next one without a pause.
    depth: int = 1
    #: share of a new sample in the learned cost, in (0, 1]; see `costs`.
    cost_ema_alpha: float = 0.2
    #: a sample counts at most this many times the estimate, > 1; see `costs`.
    cost_outlier_factor: float = 2.0
    #: how fast estimates that nobody measures sink back, in [0, 1]; see `costs`.
    cost_relax: float = 0.01
    #: records kept in each model's story.
    story_length: int = 50

    def __post_init__(self) -> None:
        if self.discipline not in DISCIPLINES:
            raise ValueError(f"discipline must be one of {sorted(DISCIPLINES)}, not {self.discipline!r}")
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1, not {self.depth}")
        if not 0.0 < self.cost_ema_alpha <= 1.0:
            raise ValueError(f"cost_ema_alpha must be in (0, 1], not {self.cost_ema_alpha}")
        if not self.cost_outlier_factor > 1.0:
            raise ValueError(f"cost_outlier_factor must be above 1, not {self.cost_outlier_factor}")
        if not 0.0 <= self.cost_relax <= 1.0:
            raise ValueError(f"cost_relax must be in [0, 1], not {self.cost_relax}")
        if self.story_length < 1:
            raise ValueError(f"story_length must be at least 1, not {self.story_length}")

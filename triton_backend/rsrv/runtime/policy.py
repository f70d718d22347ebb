"""What the scheduler is to decide by: rsrv.yaml, and what only the device knows."""

from rsrv.runtime.scheduler.settings import SchedulerSettings
from rsrv.settings import Settings


def scheduler_settings(
    settings: Settings, *, asynchronous: bool = False, weight_budget_bytes: int | None = None
) -> SchedulerSettings:
    """`asynchronous`: of the device. A second execution launched ahead keeps such a device busy; others gain nothing.

    `weight_budget_bytes`: device bytes that all weights may take, as the budget says.
    """
    section = settings.scheduler
    return SchedulerSettings(
        discipline=section.discipline,
        depth=section.depth or (2 if asynchronous else 1),
        meta_concurrency=section.meta_concurrency,
        launch_ahead_ms=section.launch_ahead_ms,
        residency_factor=section.residency_factor,
        eviction=section.eviction,
        weight_budget_bytes=weight_budget_bytes,
        compaction_interval=section.compaction_interval,
        cost_ema_alpha=section.cost_ema_alpha,
    )

"""What the scheduler is to decide by: rsrv.yaml, what operators have changed since, and what only the device knows."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rsrv.scheduler.events import Pause, Program
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.settings import Residency, Settings, change_model, change_scheduler


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
        on_demand=settings.lifecycle.mode != "explicit",
    )


def terms(settings: Settings, name: str) -> dict[str, Any]:
    """What of a model's program is not the model's own: fields of `Program`."""
    model = settings.for_model(name)
    return {
        "max_queue_depth": model.max_queue_depth or settings.scheduler.max_queue_depth,
        "pinned": model.residency == "device",
        "weight": model.weight,
        "max_delay": model.max_delay_us / 1e6,
    }


class Policy:
    """How models are to be treated, by name: it holds for versions that come later, too.

    Only this changes while the runtime runs, and only on the loop; rsrv.yaml stays as it is.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: of those that are not in `_paused`
        self._all_paused: Pause | None = None
        self._paused: dict[str, Pause | None] = {}
        #: whose weights somebody has prefetched, and nobody evicted since
        self._prefetched: set[str] = set()

    def residency(self, name: str) -> Residency:
        return self.settings.for_model(name).residency

    def queue_depth(self, name: str) -> int:
        """Requests of a model, or runs of a meta model, that may wait."""
        depth: int = terms(self.settings, name)["max_queue_depth"]
        return depth

    def paused(self, name: str) -> Pause | None:
        return self._paused.get(name, self._all_paused)

    def prefetched(self, name: str) -> bool:
        return name in self._prefetched

    def program(self, program: Program, name: str) -> Program:
        """A model's program as it is wanted now."""
        return replace(program, paused=self.paused(name), **terms(self.settings, name))

    def change_scheduler(self, changes: Mapping[str, Any]) -> None:
        """Raises SettingsError; then nothing has changed."""
        self.settings = change_scheduler(self.settings, changes)

    def change_models(self, names: Iterable[str], changes: Mapping[str, Any]) -> None:
        """Other values for keys of these models' sections. Raises SettingsError; then nothing has changed."""
        settings = self.settings
        names = list(names)
        for name in names:
            settings = change_model(settings, name, changes)
        unpinned = [name for name in names if self.residency(name) == "device"]
        self.settings = settings
        # Who is not pinned any more leaves.
        self.evict(name for name in unpinned if self.residency(name) != "device")

    def prefetch(self, names: Iterable[str]) -> None:
        self._prefetched.update(names)

    def evict(self, names: Iterable[str] | None) -> None:
        """None: all."""
        self._prefetched.difference_update(list(self._prefetched) if names is None else names)

    def pause(self, names: Iterable[str] | None, mode: Pause | None) -> None:
        """None: all that there are and that come, and let them go on."""
        if names is None:
            self._all_paused, self._paused = mode, {}
        else:
            self._paused |= dict.fromkeys(names, mode)

"""Settings of the scheduler: from rsrv.yaml, from operators' commands, and from the device."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from rsrv.scheduler.events import Pause, Program
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.settings import Residency, Settings
from rsrv.settings_changes import change_model, change_scheduler


def scheduler_settings(settings: Settings, *, asynchronous: bool = False) -> SchedulerSettings:
    """Return the scheduler's settings, but for the budget of weights.

    `asynchronous`: a second execution launched ahead keeps such a device busy; other devices gain nothing from it.
    """
    section = settings.scheduler
    return SchedulerSettings(
        discipline=section.discipline,
        depth=section.depth or (2 if asynchronous else 1),
        meta_concurrency=section.meta_concurrency,
        eviction=section.eviction,
        on_demand=settings.lifecycle.mode != "explicit",
    )


def terms(settings: Settings, name: str) -> dict[str, Any]:
    """Return the fields of a model's `Program` that settings define, not the bundle."""
    model = settings.for_model(name)
    return {
        "max_queue_depth": model.max_queue_depth or settings.scheduler.max_queue_depth,
        "pinned": model.residency == "device",
        "weight": model.weight,
        "max_delay": model.max_delay_us / 1e6,
        "idle_seconds": model.idle.device,
    }


class Policy:
    """Settings of models by name, for later versions of a model as well.

    They change while the runtime runs, only on the loop.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: of models that are not in `_paused`
        self._all_paused: Pause | None = None
        self._paused: dict[str, Pause | None] = {}
        #: models that an operator has prefetched and not evicted since
        self._prefetched: set[str] = set()

    def residency(self, name: str) -> Residency:
        return self.settings.for_model(name).residency

    def queue_depth(self, name: str) -> int:
        """Return the limit of waiting requests of a model, or of waiting runs of a meta model."""
        depth: int = terms(self.settings, name)["max_queue_depth"]
        return depth

    def paused(self, name: str) -> Pause | None:
        return self._paused.get(name, self._all_paused)

    def prefetched(self, name: str) -> bool:
        return name in self._prefetched

    def program(self, program: Program, name: str) -> Program:
        """Return a model's program with the current settings."""
        return replace(program, paused=self.paused(name), **terms(self.settings, name))

    def change_scheduler(self, changes: Mapping[str, Any]) -> None:
        """Change settings of the scheduler. Raises SettingsError; then nothing has changed."""
        self.settings = change_scheduler(self.settings, changes)

    def change_models(self, names: Iterable[str], changes: Mapping[str, Any]) -> None:
        """Change keys of these models' sections. Raises SettingsError; then nothing has changed."""
        settings = self.settings
        names = list(names)
        for name in names:
            settings = change_model(settings, name, changes)
        unpinned = [name for name in names if self.residency(name) == "device"]
        self.settings = settings
        # Models that are no longer pinned are evicted.
        self.evict(name for name in unpinned if self.residency(name) != "device")

    def prefetch(self, names: Iterable[str]) -> None:
        self._prefetched.update(names)

    def evict(self, names: Iterable[str] | None) -> None:
        """Note that models are evicted; None: all of them."""
        self._prefetched.difference_update(list(self._prefetched) if names is None else names)

    def pause(self, names: Iterable[str] | None, mode: Pause | None) -> None:
        """Pause models, or resume them with `mode` None; `names` None: all models, later ones included."""
        if names is None:
            self._all_paused, self._paused = mode, {}
        else:
            self._paused |= dict.fromkeys(names, mode)

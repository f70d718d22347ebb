"""Settings of the scheduler and of models. They come from the desired document and from the device."""

from dataclasses import replace
from typing import Any

from rsrv.desired import DesiredChanges, DesiredModel, changed, document_of
from rsrv.scheduler.events import Pause, Program
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.settings import Residency, Settings
from rsrv.settings_changes import change_settings

_NOTHING = DesiredModel()


def scheduler_settings(settings: Settings, *, asynchronous: bool = False) -> SchedulerSettings:
    """Return the scheduler's settings, except the budget of weights.

    `asynchronous`: True if a second execution that is launched ahead keeps the device busy. Other devices gain nothing from
    it, so their default depth is 1.
    """
    section = settings.scheduler
    return SchedulerSettings(
        discipline=section.discipline,
        depth=section.depth or (2 if asynchronous else 1),
        meta_concurrency=section.meta_concurrency,
        on_demand=settings.lifecycle.mode != "explicit",
    )


def terms(settings: Settings, name: str) -> dict[str, Any]:
    """Return the fields of a model's `Program` that come from settings, not from the bundle."""
    model = settings.for_model(name)
    return {
        "max_queue_depth": model.max_queue_depth or settings.scheduler.max_queue_depth,
        "pinned": model.residency == "device",
        "weight": model.weight,
        "max_delay": model.max_delay_us / 1e6,
        "idle_seconds": model.idle.device,
    }


class Policy:
    """The desired settings of models by name. They also hold for later versions of a model.

    The first settings come from rsrv.yaml, which is revision 0 of the desired document. The settings change while the
    runtime runs, on the loop.
    """

    def __init__(self, settings: Settings) -> None:
        #: Settings of rsrv.yaml at the start, overridden by the keys of the document.
        self.settings = settings
        self.document = document_of(settings)

    def residency(self, name: str) -> Residency:
        return self.settings.for_model(name).residency

    def queue_depth(self, name: str) -> int:
        """Return the limit of waiting requests of a model, or of waiting runs of a meta model."""
        depth: int = terms(self.settings, name)["max_queue_depth"]
        return depth

    def paused(self, name: str) -> Pause | None:
        mode = self._desired(name).get("paused", self.document["paused"])
        return None if mode is None else Pause(mode)

    def prefetched(self, name: str) -> bool:
        return self._desired(name).get("prefetched", False)

    def asked(self, name: str) -> int:
        """Return the number of the latest command about a model's weights."""
        return self._desired(name).get("asked", 0)

    def program(self, program: Program, name: str) -> Program:
        """Return a model's program with the current settings."""
        return replace(program, paused=self.paused(name), **terms(self.settings, name))

    def change(self, changes: DesiredChanges) -> None:
        """Change the document and the settings. After a SettingsError, nothing has changed."""
        sections = {
            name: {} if entry is None else entry.get("settings", {})
            for name, entry in changes.get("models", {}).items()
        }
        self.settings = change_settings(self.settings, {**changes, "models": sections})
        self.document = changed(self.document, changes)

    def _desired(self, name: str) -> DesiredModel:
        return self.document["models"].get(name, _NOTHING)

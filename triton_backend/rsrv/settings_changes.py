"""Changes of rsrv.yaml while a server runs: when each change takes effect, and changes of a runtime's settings."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from rsrv.explain import explain
from rsrv.settings import (
    ModelSection,
    RuntimeSection,
    SchedulerSection,
    Settings,
    SettingsError,
    Shares,
    load_settings,
    read_settings,
)
from rsrv.wire.paths import write_whole

#: When a change takes effect. restart: after `rsrv restart`. server: after a restart of the server. If the setting's description
#: says so, rsrv-gen must run before that restart. gateway: after a restart of rsrv-gateway.
Effect = Literal["at once", "restart", "server", "gateway"]

_SECTIONS: Final[Mapping[str, Effect]] = {
    "scheduler": "at once",
    "runtime": "restart",
    "stub": "restart",
    "placement": "at once",
    "gateway": "gateway",
    "models": "at once",
}
#: Keys whose effect differs from that of their section. The effect of a section that is not in _SECTIONS is "server".
_KEYS: Final[Mapping[str, Effect]] = {
    "runtime.platform": "server",
    "runtime.devices": "server",
    "runtime.start": "at once",
    "runtime.start_timeout_s": "at once",
    "runtime.idle": "at once",
    "runtime.host_memory_bytes": "at once",
    "stub.front": "server",
    "lifecycle.bundles": "at once",
    "placement.mode": "server",
    "models.max_batch_size": "restart",
    "models.max_rows": "server",
    "models.front": "server",
}


def effect(section: str, key: str) -> Effect:
    """Return when a change of a key takes effect. The section of every model is `models`."""
    return _KEYS.get(f"{section}.{key}", _SECTIONS.get(section, "server"))


def _at_once(section: str, model: type[BaseModel]) -> set[str]:
    return {key for key in model.model_fields if effect(section, key) == "at once"}


#: Keys that take effect at once, in the sections that a runtime follows.
SCHEDULER_KEYS: Final = _at_once("scheduler", SchedulerSection)
RUNTIME_KEYS: Final = _at_once("runtime", RuntimeSection)
MODEL_KEYS: Final = _at_once("models", ModelSection)
#: Keys of the scheduler's section that `rsrv scheduler` can change.
CHANGEABLE: Final = tuple(key for key in SchedulerSection.model_fields if key != "max_queue_depth")
#: Maximum number of models in one command, because a command must fit in one frame.
_MODELS: Final = 200


#: Seconds between two checks of a file of settings.
FILE_CHECK_S: Final = 1.0


class FileMonitor:
    """Checks whether a file must be read again.

    A change is reported only when two consecutive checks find the same new state of the file, because it may still be written.
    """

    def __init__(self, path: Path) -> None:
        """Start from the current state of the file, which does not count as a change."""
        self._path = path
        self._known = self._latest = self._stat()

    def changed(self) -> bool:
        """Check the file. Return True once for each change."""
        before, self._latest = self._latest, self._stat()
        if self._latest != before or before == self._known:
            return False
        self._known = before
        return True

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def refusal_file(file: Path) -> Path:
    """Return the path of the file with the reason why `rsrv serve` does not use the file of --config.

    `file` is the rsrv.yaml of the server's repository.
    """
    return file.with_name(f"{file.name}.refused")


def read_or_keep(file: Path, copy: Path) -> tuple[Settings, str]:
    """Return the settings of a file and "", or the settings of its last good text and the reason why the file is broken.

    `copy` stores the last good text. Raises SettingsError if the file is broken and there is no copy.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        settings = load_settings(text, str(file))
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        if not copy.exists():
            raise SettingsError(str(error)) from None
        return read_settings(copy), str(error)
    with suppress(OSError):  # The disk may be full. The next start may not need the copy.
        write_whole(copy, text)
    return settings, ""


# --- in the control process ------------------------------------------------------------------------------


def differences(before: Settings, after: Settings) -> Iterator[tuple[str, Effect]]:
    """Yield the keys whose values differ, and when each change takes effect. Keys of models are `models.NAME.KEY`."""
    for section in Settings.model_fields:
        if section not in ("models", "aliases"):
            old, new = getattr(before, section), getattr(after, section)
            for key in _differing(old, new):
                yield f"{section}.{key}", effect(section, key)
    none = ModelSection()
    for name in sorted(before.models.keys() | after.models.keys()):
        for key in _differing(before.models.get(name, none), after.models.get(name, none)):
            yield f"models.{name}.{key}", effect("models", key)
    for name in sorted(before.aliases.keys() | after.aliases.keys()):
        if before.aliases.get(name) != after.aliases.get(name):
            yield f"aliases.{name}", "at once"


def _differing(old: BaseModel, new: BaseModel) -> Iterator[str]:
    return (key for key in type(old).model_fields if getattr(old, key) != getattr(new, key))


def in_commands(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the names of models in parts, each for one command."""
    return (names[start : start + _MODELS] for start in range(0, len(names), _MODELS))


# --- in the runtime --------------------------------------------------------------------------------------


def change_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Return the settings with the changed sections. Raises SettingsError.

    A model's section in `changes` replaces all of the model's keys that take effect at once.
    """
    sections: dict[str, Any] = {}
    models = dict(settings.models)
    try:
        for section, model in (("scheduler", SchedulerSection), ("runtime", RuntimeSection)):
            where: tuple[str, ...] = (section,)
            if (change := changes.get(section)) is not None:
                sections[section] = model(**{**getattr(settings, section).model_dump(), **change})
        for name, change in changes.get("models", {}).items():
            where = ("models", name)
            before = models.pop(name, ModelSection())
            unchanged = before.model_dump(exclude=MODEL_KEYS, exclude_unset=True)
            if merged := {**unchanged, **change}:
                models[name] = ModelSection(**merged)
    except (ValidationError, TypeError) as error:
        raise _explained(where, error, changes) from None
    return settings.model_copy(update={**sections, "models": models})


def _explained(where: tuple[str, ...], error: Exception, raw: object) -> SettingsError:
    if not isinstance(error, ValidationError):
        return SettingsError(f"{'.'.join(where)}: must be a mapping of keys")
    # Explain only the first errors: explanations take time, and the runtime waits for them.
    errors = [{**problem, "loc": (*where, *problem["loc"])} for problem in error.errors()[:10]]
    return SettingsError("\n".join(explain(problem, Settings, raw) for problem in errors))


def check_scheduler(section: Mapping[str, Any]) -> None:
    """Check a section `scheduler`. Raises SettingsError."""
    try:
        SchedulerSection(**section)
    except ValidationError as error:
        raise _explained(("scheduler",), error, {"scheduler": section}) from None


def check_model(name: str, section: Mapping[str, Any]) -> None:
    """Check the section of a model. Raises SettingsError."""
    try:
        ModelSection(**section)
    except ValidationError as error:
        raise _explained(("models", name), error, {"models": {name: section}}) from None


def read_shares(name: str, raw: object) -> Shares:
    """Return the shares of an alias from their form in rsrv.yaml. Raises SettingsError."""
    try:
        return TypeAdapter(Shares).validate_python(raw)
    except ValidationError as error:
        raise _explained(("aliases", name), error, {"aliases": {name: raw}}) from None

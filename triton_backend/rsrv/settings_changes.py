"""Changes of rsrv.yaml while a server runs: when each setting takes effect, and the settings of a running runtime."""

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

#: when a change takes effect. at once; restart: after `rsrv restart`; server: with the next tritonserver (after rsrv-gen,
#: if the meaning says so); gateway: with the next rsrv-gateway
Effect = Literal["at once", "restart", "server", "gateway"]

_SECTIONS: Final[Mapping[str, Effect]] = {
    "scheduler": "at once",
    "runtime": "restart",
    "stub": "restart",
    "placement": "at once",
    "gateway": "gateway",
    "models": "at once",
}
#: keys that differ from their section; other sections wait for the next server
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
    """Return when a change of a key takes effect; `models` is the section of each model."""
    return _KEYS.get(f"{section}.{key}", _SECTIONS.get(section, "server"))


def _at_once(section: str, model: type[BaseModel]) -> set[str]:
    return {key for key in model.model_fields if effect(section, key) == "at once"}


#: Keys that take effect at once, in the sections that a runtime follows.
SCHEDULER_KEYS: Final = _at_once("scheduler", SchedulerSection)
RUNTIME_KEYS: Final = _at_once("runtime", RuntimeSection)
MODEL_KEYS: Final = _at_once("models", ModelSection)
#: keys of the scheduler's section that `rsrv scheduler` changes
CHANGEABLE: Final = tuple(key for key in SchedulerSection.model_fields if key != "max_queue_depth")
#: models in one command, which must fit into a frame
_MODELS: Final = 200


#: seconds between two looks at a file of settings
LOOK_S: Final = 1.0


class FileLooks:
    """Looks at a file that is read again when it changes. A change counts when two looks agree."""

    def __init__(self, path: Path) -> None:
        """The content of now is known."""
        self._path = path
        self._known = self._latest = self._look()

    def changed(self) -> bool:
        """Look; return true once for each change."""
        before, self._latest = self._latest, self._look()
        if self._latest != before or before == self._known:
            return False
        self._known = before
        return True

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def read_or_keep(file: Path, copy: Path) -> tuple[Settings, str]:
    """Return the settings of a file, whose text is kept for the time when it is broken.

    If it is broken now, the settings are those of the kept text, and the reason comes with them. Raises SettingsError: the
    file is broken, and there is no kept text.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        settings = load_settings(text, str(file))
    except (OSError, UnicodeDecodeError, SettingsError) as error:
        if not copy.exists():
            raise SettingsError(str(error)) from None
        return read_settings(copy), str(error)
    with suppress(OSError):  # a full disk: the next start may do without
        write_whole(copy, text)
    return settings, ""


# --- in the control process ------------------------------------------------------------------------------


def differences(before: Settings, after: Settings) -> Iterator[tuple[str, Effect]]:
    """Yield the keys whose values differ, `models.NAME.KEY` among them, and when each change takes effect."""
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
    """Return the settings with these sections. Raises SettingsError.

    A model's section replaces all its keys that take effect at once.
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
    # The first few suffice: explaining takes time, and the runtime waits meanwhile.
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
    """Return the shares of an alias as rsrv.yaml has them. Raises SettingsError."""
    try:
        return TypeAdapter(Shares).validate_python(raw)
    except ValidationError as error:
        raise _explained(("aliases", name), error, {"aliases": {name: raw}}) from None

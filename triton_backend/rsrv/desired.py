"""The desired document: the settings that one runtime should follow, from rsrv.yaml and from operators.

The control process sends the whole document when a connection begins, and only changes after that. A runtime starts with
the document that it makes from rsrv.yaml, which is revision 0.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast, get_args

from rsrv.settings import Settings, SettingsError
from rsrv.settings_changes import MODEL_KEYS, RUNTIME_KEYS, SCHEDULER_KEYS

PauseMode = Literal["drain", "hold", "reject"]


class DesiredModel(TypedDict, total=False):
    """The desired state of one model, in all its versions. An absent key means that the value for all models applies."""

    #: Keys of the model's section of rsrv.yaml that take effect at once.
    settings: dict[str, Any]
    #: The model's own pause. None: the model runs even if all models are paused.
    paused: PauseMode | None
    #: True if the weights are loaded when the model is built.
    prefetched: bool
    #: Rises with each command about the weights. The runtime then retries a load even if it has failed before.
    asked: int


class DesiredDocument(TypedDict):
    """The desired state of a runtime: the keys of rsrv.yaml that take effect at once, and the states of models."""

    scheduler: dict[str, Any]
    runtime: dict[str, Any]
    #: The pause of all models that have no pause of their own.
    paused: PauseMode | None
    models: dict[str, DesiredModel]


class DesiredChanges(TypedDict, total=False):
    """The parts of a document that differ from an earlier one. None for a model means that its entry was removed."""

    scheduler: dict[str, Any]
    runtime: dict[str, Any]
    paused: PauseMode | None
    models: dict[str, DesiredModel | None]


def document_of(settings: Settings) -> DesiredDocument:
    """Return the document of rsrv.yaml alone."""
    sections = (
        (name, section.model_dump(mode="json", include=MODEL_KEYS, exclude_unset=True))
        for name, section in settings.models.items()
    )
    return DesiredDocument(
        scheduler=settings.scheduler.model_dump(mode="json", include=SCHEDULER_KEYS),
        runtime=settings.runtime.model_dump(mode="json", include=RUNTIME_KEYS),
        paused=None,
        models={name: DesiredModel(settings=section) for name, section in sections if section},
    )


def difference(before: DesiredDocument, after: DesiredDocument) -> DesiredChanges:
    """Return the changes that turn the document `before` into the document `after`."""
    changes = DesiredChanges()
    if before["scheduler"] != after["scheduler"]:
        changes["scheduler"] = after["scheduler"]
    if before["runtime"] != after["runtime"]:
        changes["runtime"] = after["runtime"]
    if before["paused"] != after["paused"]:
        changes["paused"] = after["paused"]
    old, new = before["models"], after["models"]
    if models := {name: new.get(name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)}:
        changes["models"] = models
    return changes


def changed(before: DesiredDocument, changes: DesiredChanges) -> DesiredDocument:
    """Return a copy of the document with these changes."""
    models = {**before["models"], **changes.get("models", {})}
    return DesiredDocument(
        scheduler=changes.get("scheduler", before["scheduler"]),
        runtime=changes.get("runtime", before["runtime"]),
        paused=changes.get("paused", before["paused"]),
        models={name: entry for name, entry in models.items() if entry is not None},
    )


def check_changes(raw: Mapping[str, Any]) -> DesiredChanges:
    """Return the changes in a frame. The values of settings are checked later, in `AppliedState`. Raises SettingsError."""
    _check_keys("the changes", raw, DesiredChanges.__annotations__)
    _check_pause("paused", raw)
    for name, entry in raw.get("models", {}).items() if _is_mapping("models", raw.get("models", {})) else ():
        if entry is not None and _is_mapping(name, entry):
            _check_keys(name, entry, DesiredModel.__annotations__)
            _is_mapping(f"{name}.settings", entry.get("settings", {}))
            _check_pause(f"{name}.paused", entry)
            if type(entry.get("prefetched", False)) is not bool or type(entry.get("asked", 0)) is not int:
                raise SettingsError(f"{name}: prefetched must be true or false, and asked a whole number")
    return cast(DesiredChanges, raw)


def _check_keys(where: str, section: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    if unknown := section.keys() - known.keys():
        raise SettingsError(f"{where:.80}: unknown key {min(unknown)!r:.80}")


def _check_pause(where: str, section: Mapping[str, Any]) -> None:
    if (mode := section.get("paused")) is not None and mode not in get_args(PauseMode):
        raise SettingsError(f"{where:.80}: must be 'drain', 'hold', 'reject' or null (found {mode!r:.80})")


def _is_mapping(where: str, value: object) -> bool:
    if not isinstance(value, Mapping):
        raise SettingsError(f"{where:.80}: must be a mapping")
    return True

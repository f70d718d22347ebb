"""The settings in rsrv.yaml and the commands of operators, merged into one document for each runtime.

For each key, a command to this control process takes precedence over the file of overrides, which stores the commands to
earlier control processes. The file takes precedence over rsrv.yaml. For an alias, the latest change applies, whether it was made in
rsrv.yaml or by a command.
"""

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import TypeAdapter

from rsrv.desired import DesiredDocument, DesiredModel, PauseMode, document_of
from rsrv.settings import Settings, SettingsError, Shares
from rsrv.settings_changes import check_model, check_scheduler
from rsrv.wire.paths import write_whole

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelOverrides:
    """Changes that operators have made to one model. They override rsrv.yaml."""

    #: Changed keys of the model's section of rsrv.yaml, with their values.
    settings: dict[str, Any] = field(default_factory=dict)
    #: The model's own pause. None: the model runs even if all models are paused. "as all": it follows the pause of all models.
    paused: PauseMode | Literal["as all"] | None = "as all"
    #: Devices onto which an operator has prefetched the weights. An eviction by an operator removes a device from this list.
    prefetched: list[int] = field(default_factory=list)
    #: Number of the latest command about the model's weights. 0: there was none.
    asked: int = 0

    @property
    def empty(self) -> bool:
        return not (self.settings or self.prefetched) and self.paused == "as all"


@dataclass(slots=True)
class Overrides:
    """The settings of operators that override rsrv.yaml, in the form of the file of overrides."""

    #: Keys of the section scheduler.
    scheduler: dict[str, Any] = field(default_factory=dict)
    #: The pause of all models that have no pause of their own.
    paused: PauseMode | None = None
    models: dict[str, ModelOverrides] = field(default_factory=dict)
    #: Shares of each alias. None: the alias was removed.
    aliases: dict[str, Shares | None] = field(default_factory=dict)


_OVERRIDES: Final = TypeAdapter(Overrides)


def _read(path: Path) -> Overrides:
    """Read a file of overrides. A missing file overrides nothing. Raises OSError or ValueError if it cannot be read."""
    if not path.exists():
        return Overrides()
    overrides = _OVERRIDES.validate_json(path.read_bytes())
    try:
        check_scheduler(overrides.scheduler)
        for name, override in overrides.models.items():
            check_model(name, override.settings)
    except SettingsError as error:
        raise ValueError(str(error)) from None
    return overrides


class DesiredState:
    """The desired documents of all runtimes, which change with rsrv.yaml and with commands. Belongs to one event loop.

    A file stores the commands for the next control process. If the file is damaged, a copy of it is read. Commands that cannot be
    written to the file still take effect, and the log has an error.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        """`settings` are the contents of rsrv.yaml. `path` is the path of the file of overrides."""
        #: Identifies this control process. Each control process counts revisions from 1.
        self.instance = secrets.token_hex(8)
        #: Rises with each change.
        self.revision = 1
        self._path, self._copy = path, path.with_suffix(".last.json")
        self._file = document_of(settings)
        self._overrides = self._read()
        self._asked = max((override.asked for override in self._overrides.models.values()), default=0)
        self._followers: list[Callable[[], None]] = []

    def _read(self) -> Overrides:
        for path in (self._path, self._copy):
            try:
                return _read(path)
            except (OSError, ValueError) as error:
                log.error("the settings that operators have changed cannot be read from %s: %s", path, error)
        return Overrides()

    def follow(self, follower: Callable[[], None]) -> None:
        """Call a function after each change."""
        self._followers.append(follower)

    # --- the view -------------------------------------------------------------------------------------------

    def document(self, device: int) -> DesiredDocument:
        """Return the desired document of a device's runtime."""
        overrides = self._overrides
        models = dict(self._file["models"])
        for name, own in overrides.models.items():
            models[name] = desired = DesiredModel()
            if section := self.section(name):
                desired["settings"] = section
            if own.paused != "as all":
                desired["paused"] = own.paused
            if device in own.prefetched:
                desired["prefetched"] = True
            if own.asked:
                desired["asked"] = own.asked
        return DesiredDocument(
            scheduler=self.scheduler, runtime=self._file["runtime"], paused=overrides.paused, models=models
        )

    @property
    def scheduler(self) -> dict[str, Any]:
        """The section `scheduler` with the changes of operators."""
        return {**self._file["scheduler"], **self._overrides.scheduler}

    def section(self, model: str) -> dict[str, Any]:
        """Return the keys of a model's section that take effect at once and that rsrv.yaml or operators set."""
        return {**self._file["models"].get(model, {}).get("settings", {}), **self.overridden(model)}

    def overridden(self, model: str) -> dict[str, Any]:
        """Return the keys of a model's section that operators set."""
        own = self._overrides.models.get(model)
        return {} if own is None else own.settings

    @property
    def overrides(self) -> Overrides:
        """The settings of operators. Callers must not change them."""
        return self._overrides

    def merged_aliases(self, aliases: Mapping[str, Shares]) -> dict[str, Shares]:
        """Return the aliases of rsrv.yaml with the changes of operators."""
        merged = {**aliases, **self._overrides.aliases}
        return {name: shares for name, shares in merged.items() if shares is not None}

    # --- changes --------------------------------------------------------------------------------------------

    def follow_file(self, settings: Settings) -> None:
        """Apply the new contents of rsrv.yaml."""
        self._file = document_of(settings)
        self._changed()

    def configure(self, changes: Mapping[str, Any]) -> None:
        """Set keys of the section scheduler. Raises SettingsError; then nothing has changed."""
        check_scheduler({**self.scheduler, **changes})
        self._overrides.scheduler |= changes
        self._keep()

    def set_models(self, names: Collection[str], changes: Mapping[str, Any]) -> None:
        """Set keys of the sections of models. Raises SettingsError; then nothing has changed."""
        for name in names:
            check_model(name, {**self.section(name), **changes})
        for name in names:
            self._model(name).settings |= changes
        self._keep()

    def set_residency(self, names: Collection[str], residency: str) -> None:
        """Set where the weights of models are kept. Raises SettingsError; then nothing has changed."""
        for name in names:
            check_model(name, {"residency": residency})
        self._asked += 1
        for name in names:
            own = self._model(name)
            own.settings["residency"], own.asked = residency, self._asked
            if residency != "device":
                # Clear the prefetches, so that runtimes evict a model that is no longer pinned, even if it was prefetched.
                own.prefetched.clear()
        self._keep()

    def prefetch(self, names: Collection[str], devices: Collection[int]) -> None:
        """Load the weights of models onto devices, now and whenever the models are built there again."""
        self._asked += 1
        for name in names:
            own = self._model(name)
            own.prefetched, own.asked = sorted({*own.prefetched, *devices}), self._asked
        self._keep()

    def evict(self, names: Collection[str] | None, devices: Collection[int]) -> None:
        """Stop prefetching the named models (None: all models) onto devices."""
        for name in [*self._overrides.models] if names is None else names:
            own = self._model(name)
            own.prefetched = [device for device in own.prefetched if device not in devices]
        self._keep()

    def pause(self, names: Collection[str] | None, mode: PauseMode | None) -> None:
        """Pause models, or resume them if `mode` is None. If `names` is None, this applies to all present and future models."""
        overrides = self._overrides
        if names is None:
            overrides.paused = mode
            for own in overrides.models.values():
                own.paused = "as all"
        for name in names or ():
            self._model(name).paused = "as all" if mode == overrides.paused else mode
        self._keep()

    def set_aliases(self, aliases: dict[str, Shares | None]) -> None:
        self._overrides.aliases = aliases
        self._keep()

    def _model(self, name: str) -> ModelOverrides:
        return self._overrides.models.setdefault(name, ModelOverrides())

    def _keep(self) -> None:
        models = self._overrides.models
        self._overrides.models = {name: override for name, override in models.items() if not override.empty}
        try:
            text = _OVERRIDES.dump_json(self._overrides).decode()
            for path in (self._path, self._copy):
                write_whole(path, text)
        except OSError as error:
            log.error(
                "the settings that operators have changed cannot be saved, and the next control process will not have them: %s: %s",
                self._path,
                error,
            )
        self._changed()

    def _changed(self) -> None:
        self.revision += 1
        for follower in self._followers:
            follower()

"""Settings that operators made while the server ran. A runtime loses them when it ends; the next one gets them again."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rsrv.settings import Shares
from rsrv.wire.paths import write_whole

log = logging.getLogger("rsrv.control")

Command = dict[str, Any]

#: Commands whose effect lasts.
LASTING: Final = frozenset({"residency", "prefetch", "evict", "policy", "pause", "continue"})
#: Stands for all models in the file.
_ALL: Final = "*"


class Overrides:
    """The settings, in a file that the next control process of this server reads.

    An unreadable file counts as empty. If the file cannot be written, only the log says so, because the operator's command
    has been carried out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: Keys of rsrv.yaml's section scheduler.
        self.scheduler: dict[str, Any] = {}
        self._residency: dict[str, str] = {}
        self._policy: dict[str, dict[str, Any]] = {}
        #: Mode by name, or by _ALL for all others; None: not paused although all others are.
        self._paused: dict[str, str | None] = {}
        #: Models and meta models whose weights were prefetched and not evicted since, with the devices.
        self._prefetched: dict[str, set[int]] = {}
        #: Shares of aliases; None: removed.
        self.aliases: dict[str, Shares | None] = {}
        try:
            kept = json.loads(path.read_text())
            self.scheduler = dict(kept["scheduler"])
            self._residency = dict(kept["residency"])
            self._policy = {name: dict(policy) for name, policy in kept["policy"].items()}
            self._paused = dict(kept["paused"])
            self._prefetched = {name: set(devices) for name, devices in kept["prefetched"].items()}
            self.aliases = dict(kept.get("aliases", {}))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.error("the settings of operators are lost: %s cannot be read: %s", path, error)

    @property
    def models(self) -> set[str]:
        """Names of the models with settings of their own."""
        return {*self._residency, *self._policy, *self._paused, *self._prefetched} - {_ALL}

    def section(self, model: str) -> dict[str, Any]:
        """Return the keys of a model's section of rsrv.yaml that were set."""
        residency = {"residency": self._residency[model]} if model in self._residency else {}
        return {**self.policy(model), **residency}

    def policy(self, model: str) -> dict[str, Any]:
        """Return the keys of the command `policy` that were set."""
        return self._policy.get(model, {})

    def merged_aliases(self, aliases: Mapping[str, Shares]) -> dict[str, Shares]:
        """Return the aliases of rsrv.yaml with the changes of operators."""
        merged = {**aliases, **self.aliases}
        return {name: shares for name, shares in merged.items() if shares is not None}

    def set_aliases(self, aliases: dict[str, Shares | None]) -> None:
        self.aliases = aliases
        self._keep()

    def configured(self, changes: dict[str, Any]) -> None:
        """Note changes of the scheduler's settings."""
        self.scheduler |= changes
        self._keep()

    def commanded(self, command: Command, device: int) -> None:
        """Note a command that the runtime of a device carried out, if its effect lasts."""
        match command:
            case {"command": "residency", "model": str(model), "residency": str(residency)}:
                self._residency[model] = residency
                if residency != "device":
                    # A model that is no longer pinned is evicted, also if it was prefetched.
                    self._prefetched.pop(model, None)
            case {"command": "prefetch", "model": str(model)}:
                self._prefetched.setdefault(model, set()).add(device)
            case {"command": "evict", "model": model}:
                for name in [*self._prefetched] if model is None else [model]:
                    self._evict(name, device)
            case {"command": "policy", "model": str(model), **policy}:
                self._policy[model] = {**self.policy(model), **policy}
            case {"command": "pause", "model": model, "mode": str(mode)}:
                self._pause(model, mode)
            case {"command": "continue", "model": model}:
                self._pause(model, None)
            case _:
                return
        self._keep()

    def _evict(self, model: str, device: int) -> None:
        devices = self._prefetched.get(model, set())
        devices.discard(device)
        if not devices:
            self._prefetched.pop(model, None)

    def _pause(self, model: str | None, mode: str | None) -> None:
        if model is None:
            # All models: the modes of single models end.
            self._paused = {} if mode is None else {_ALL: mode}
        elif mode is None and _ALL not in self._paused:
            self._paused.pop(model, None)
        else:
            self._paused[model] = mode

    def for_all(self) -> list[Command]:
        """Return the commands that a new runtime gets at once, beside `scheduler`."""
        mode = self._paused.get(_ALL)
        return [] if mode is None else [{"command": "pause", "model": None, "mode": mode}]

    def for_model(self, model: str, device: int) -> list[Command]:
        """Return the commands that a new runtime of this device gets when it knows this model."""
        commands: list[Command] = []
        if model in self._residency:
            commands.append({"command": "residency", "model": model, "residency": self._residency[model]})
        if model in self._policy:
            commands.append({"command": "policy", "model": model, **self._policy[model]})
        if model in self._paused:
            mode = self._paused[model]
            commands.append(
                {"command": "continue", "model": model}
                if mode is None
                else {"command": "pause", "model": model, "mode": mode}
            )
        if device in self._prefetched.get(model, ()):
            commands.append({"command": "prefetch", "model": model})
        return commands

    def _keep(self) -> None:
        kept = {
            "scheduler": self.scheduler,
            "residency": self._residency,
            "policy": self._policy,
            "paused": self._paused,
            "aliases": self.aliases,
            "prefetched": {name: sorted(devices) for name, devices in self._prefetched.items()},
        }
        try:
            write_whole(self._path, json.dumps(kept))
        except OSError as error:
            log.error(
                "the next control process will not have the settings of operators: %s: %s", self._path, error
            )

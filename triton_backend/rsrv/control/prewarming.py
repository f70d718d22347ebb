"""Starts cold models before requests come: on an operator's command, and at the times in `models.NAME.warm_at`."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NoReturn

from rsrv.control.grpc_service import StatusError
from rsrv.control.overview import served
from rsrv.control.runtime_state import ModelVersion, StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes
from rsrv.control.settings_file import SettingsFile
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.device_choice import by_preference
from rsrv.settings_changes import in_commands
from rsrv.settings_times import due
from rsrv.text import nearest
from rsrv_gen.plan import BUNDLE_FOLDER, CALLS_FOLDER
from rsrv_gen.write import carried, our_models

log = logging.getLogger(__name__)

#: Seconds between two checks of the schedules.
_CHECK_S: Final = 10.0


@dataclass(slots=True)
class _Prewarmed:
    """A model that a runtime was asked to keep without a stub."""

    #: The instance of the runtime.
    instance: str
    bundle: Path
    #: The key that the runtime has given the model. Empty: the runtime has not read the bundle yet.
    key: str = ""


class Prewarming:
    """Starts models without requests, each on one device. Belongs to the control process's loop."""

    def __init__(
        self, file: SettingsFile, runtimes: Runtimes, clock: Callable[[], float] = time.time
    ) -> None:
        """`file` is rsrv.yaml in the root of the model repository. `clock` returns Unix time."""
        self._file, self._runtimes, self._clock = file, runtimes, clock
        #: The models that runtimes keep without stubs, by name.
        self._kept: dict[str, _Prewarmed] = {}
        #: Changes of the runtimes' models since the last check. The current state is not enough, because a model may start and
        #: leave between two checks.
        self._updates = [link.state.subscribe() for link in runtimes.links]
        #: Unix time of the last check of the schedules. 0: no check yet. The first check also starts the models whose scheduled
        #: time was at most `MISSED_S` before, because the server may have been down.
        self._last = 0.0

    async def run(self) -> NoReturn:
        """Follow the schedules, and start models again that were lost with their runtime, until cancelled."""
        while True:
            try:
                await self.follow_schedule()
                await self.keep()
            except (StatusError, OSError) as error:
                # If there is no runtime, the next check tries again.
                log.debug("models could not be started as models.NAME.warm_at says: %s", error)
            await asyncio.sleep(_CHECK_S)

    async def follow_schedule(self) -> None:
        """Start the models whose scheduled time has passed since the last check."""
        now, models = self._clock(), self._file.settings.models
        names = [name for name, section in models.items() if due(section.warm_at, self._last, now)]
        if names:
            paths = await asyncio.to_thread(_bundles, self._file.path.parent, names)
            log.info("models are started as models.NAME.warm_at says: %s", ", ".join(sorted(paths)))
            await self._start(paths)
        self._last = now

    async def keep(self) -> None:
        """Start kept models again whose runtime has ended, and end kept models whose bundles are gone.

        A model is no longer kept once a stub has registered it, or once its runtime has unloaded it, for example because the
        model was idle. An unloaded model starts with its next request.
        """
        self._follow_updates()
        bundles = {name: model.bundle for name, model in self._kept.items()}
        missing = await asyncio.to_thread(
            lambda: [name for name, path in bundles.items() if not path.exists()]
        )
        for name in missing:
            self._kept.pop(name, None)
        for link in self._runtimes.live.values() if missing else ():
            for some in in_commands(missing):
                await link.command({"command": "start", "models": dict.fromkeys(some)})
        self._follow_updates()
        live = {link.state.instance for link in self._runtimes.live.values()}
        lost = {name: model.bundle for name, model in self._kept.items() if model.instance not in live}
        if lost and live:
            # Forget a lost model that another runtime has. A stub or a command has started it there.
            for name in self._known("ready", "loading") & lost.keys():
                del self._kept[name], lost[name]
            await self._start(lost)

    def _follow_updates(self) -> None:
        """Forget the kept models that stubs have registered since the last call, or that their runtime has unloaded."""
        for updates in self._updates:
            while updates.pending:
                match updates.take():
                    case StateChange(instance=instance, key=key, entry=None):
                        self._forget({name for name, model in self._kept_by(instance) if model.key == key})
                    case StateChange(instance=instance, key=key, entry=entry) if entry is not None:
                        self._follow(instance, key, entry)
                    case StateSnapshot(instance=instance, entries=entries):
                        for key, entry in entries.items():
                            self._follow(instance, key, entry)
                        left = {
                            name
                            for name, model in self._kept_by(instance)
                            if model.key and model.key not in entries
                        }
                        self._forget(left)

    def _follow(self, instance: str, key: str, entry: ModelVersion) -> None:
        model = self._kept.get(entry["name"])
        if model is None:
            return
        if entry["stubs"]:
            del self._kept[entry["name"]]
        elif model.instance == instance:
            if entry["state"] != "leaving":
                model.key = key
            elif model.key == key:
                del self._kept[entry["name"]]

    def _kept_by(self, instance: str) -> Iterable[tuple[str, _Prewarmed]]:
        return ((name, model) for name, model in self._kept.items() if model.instance == instance)

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            del self._kept[name]

    def _known(self, *states: str) -> set[str]:
        """Return the names of the models that the runtimes have in these states."""
        return {entry["name"] for entry in self._runtimes.entries.values() if entry["state"] in states}

    async def start(self, patterns: Collection[str], *, poll: bool = False) -> list[pb.StartedModel]:
        """Start cold models, and return the states of all matching models.

        Args:
            patterns: Names, or patterns with * and ?. Empty: all models.
            poll: If True, start only models that an earlier call started and that were lost since.

        Raises:
            LookupError: a name or a pattern matches no model.
            RuntimeDown: no runtime answers.
        """
        paths = await asyncio.to_thread(self._matching, patterns)
        failed = await self._start(paths, poll=poll)
        versions = served(self._runtimes.entries.values())
        return [_started(name, versions.get(name), failed.get(name, "")) for name in sorted(paths)]

    def _matching(self, patterns: Collection[str]) -> dict[str, Path]:
        repository = self._file.path.parent
        names = our_models(repository)
        matched = set(names) if not patterns else set()
        for pattern in patterns:
            matching = {name for name in names if fnmatchcase(name, pattern)}
            if not matching:
                raise LookupError(f"there is no model {pattern!r}{nearest(pattern, sorted(names))}")
            matched |= matching
        return _bundles(repository, matched)

    async def _start(self, paths: Mapping[str, Path], *, poll: bool = False) -> dict[str, str]:
        """Ask runtimes to start models that no runtime has. Return the models that cannot start, with the reasons."""
        if paths and not poll and self._runtimes.asleep:
            for number in range(len(self._runtimes.links)):
                await self._runtimes.wake(number)
        known = self._known("ready", "loading", "failed") if poll else self._known("ready", "loading")
        live, failed = self._runtimes.live, dict[str, str]()
        by_device: dict[int, list[str]] = {}
        for name in paths.keys() - known:
            devices = [
                *self._runtimes.placement.get(name, ()),
                *by_preference(name, len(self._runtimes.links)),
            ]
            device = next((number for number in devices if number in live), None)
            if device is not None:
                by_device.setdefault(device, []).append(name)
        if not live:
            await self._runtimes.query({"command": "ping"})  # raises RuntimeDown
        for device, names in by_device.items():
            link = live[device]
            for some in in_commands(sorted(names)):
                missing = {name: paths[name] for name in some}
                if poll:
                    # Leave out models that this runtime was already asked to start from the same bundle. Commands to an
                    # earlier runtime do not count, because this runtime does not know about them.
                    started = {name: model.bundle for name, model in self._kept_by(link.state.instance)}
                    missing = {name: path for name, path in missing.items() if started.get(name) != path}
                if missing:
                    # Discard the updates about earlier starts of these models.
                    self._follow_updates()
                    self._kept |= {
                        name: _Prewarmed(link.state.instance, path) for name, path in missing.items()
                    }
                    bundles = {name: str(path) for name, path in missing.items()}
                    await link.command({"command": "start", "models": bundles})
                answer = await link.command(
                    {"command": "start", "models": dict.fromkeys(some, ""), "poll": True}
                )
                failed |= answer["failed"]
        return failed


def _started(name: str, entry: ModelVersion | None, failed: str) -> pb.StartedModel:
    if entry is None or entry["state"] == "leaving":
        return pb.StartedModel(name=name, state="failed" if failed else "cold", error=failed)
    state = {"ready": "warm", "loading": "starting"}.get(entry["state"], entry["state"])
    return pb.StartedModel(name=name, state=state, error=entry["error"])


def _bundles(repository: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the bundles of models of the repository by name. A meta model is replaced by the models that it calls."""
    folders: dict[str, Path] = {}
    for name in names:
        called = carried(repository / name)
        folders |= {callee: repository / name / CALLS_FOLDER / callee for callee in called}
        if not called:
            folders[name] = repository / name / BUNDLE_FOLDER
    return folders

"""Starts of models that are cold, before requests come: by command, and at the times of `models.NAME.warm_at`."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, NoReturn

from rsrv.control.grpc_service import StatusError
from rsrv.control.overview import served
from rsrv.control.protocols import ModelVersion
from rsrv.control.runtimes import Runtimes
from rsrv.control.settings_file import SettingsFile
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.device_choice import by_preference
from rsrv.settings_changes import in_commands
from rsrv.settings_times import due
from rsrv.text import nearest
from rsrv_gen.plan import BUNDLE_FOLDER, CALLS_FOLDER
from rsrv_gen.write import carried, our_models

log = logging.getLogger("rsrv.control")

#: seconds between two looks at the schedules
_LOOK_S: Final = 10.0


class Prewarming:
    """Starts models without requests, each on one device. Belongs to the control process's loop."""

    def __init__(
        self, file: SettingsFile, runtimes: Runtimes, clock: Callable[[], float] = time.time
    ) -> None:
        """`file`: in the root of the model repository; `clock`: Unix time."""
        self._file, self._runtimes, self._clock = file, runtimes, clock
        #: the runtime that was told to start a model, and the bundle, by the model's name
        self._told: dict[str, tuple[str, Path]] = {}
        #: a time that was missed counts, however long the server was down
        self._last = 0.0

    async def run(self) -> NoReturn:
        """Follow the schedules, and keep the models that were started, until cancelled."""
        while True:
            try:
                await self.follow_schedule()
                await self.keep()
            except (StatusError, OSError) as error:
                # Without a runtime, the next look tries again.
                log.debug("models were not started by their schedule: %s", error)
            await asyncio.sleep(_LOOK_S)

    async def follow_schedule(self) -> None:
        """Start the models whose time has come since the last look."""
        now, models = self._clock(), self._file.settings.models
        names = [name for name, one in models.items() if due(one.warm_at, self._last, now)]
        if names:
            paths = await asyncio.to_thread(_bundles, self._file.path.parent, names)
            log.info("models start by their schedule: %s", ", ".join(sorted(paths)))
            await self._start(paths)
        self._last = now

    async def keep(self) -> None:
        """Start models again that a runtime's end has lost, and have those go whose bundles are gone.

        A model that a stub has registered is the stub's from then on.
        """
        for entry in self._runtimes.entries.values():
            if entry["stubs"]:
                self._told.pop(entry["name"], None)
        paths = {name: path for name, (_, path) in self._told.items()}
        gone = await asyncio.to_thread(lambda: [name for name, path in paths.items() if not path.exists()])
        for name in gone:
            self._told.pop(name, None)
        for link in self._runtimes.live.values() if gone else ():
            for some in in_commands(gone):
                await link.command({"command": "start", "models": dict.fromkeys(some)})
        live = {link.instance for link in self._runtimes.live.values()}
        lost = {name: path for name, (instance, path) in self._told.items() if instance not in live}
        if lost and live:
            await self._start(lost)

    async def start(self, wanted: Collection[str], *, look: bool = False) -> list[pb.StartedModel]:
        """Start models that are cold, and return all of them; `look`: only those of earlier calls that got lost.

        Args:
            wanted: Names or patterns, with * and ?; none: all models.
            look: Start no others.

        Raises:
            LookupError: a name or a pattern matches no model.
            RuntimeDown: no runtime answers.
        """
        paths = await asyncio.to_thread(self._matching, wanted)
        failed = await self._start(paths, look=look)
        found = served(self._runtimes.entries.values())
        return [_started(name, found.get(name), failed.get(name, "")) for name in sorted(paths)]

    def _matching(self, wanted: Collection[str]) -> dict[str, Path]:
        repository = self._file.path.parent
        names = our_models(repository)
        found = set(names) if not wanted else set()
        for pattern in wanted:
            matching = {name for name in names if fnmatchcase(name, pattern)}
            if not matching:
                raise LookupError(f"there is no model {pattern!r}{nearest(pattern, sorted(names))}")
            found |= matching
        return _bundles(repository, found)

    async def _start(self, paths: Mapping[str, Path], *, look: bool = False) -> dict[str, str]:
        """Tell runtimes to start models that none of them has; return those that cannot start, with the reasons."""
        if paths and not look and self._runtimes.asleep:
            for number in range(len(self._runtimes.links)):
                await self._runtimes.wake(number)
        states = ("ready", "loading", "failed") if look else ("ready", "loading")
        known = {entry["name"] for entry in self._runtimes.entries.values() if entry["state"] in states}
        live, failed = self._runtimes.live, dict[str, str]()
        by_device: dict[int, list[str]] = {}
        for name in paths.keys() - known:
            devices = [
                *self._runtimes.placement.get(name, ()),
                *by_preference(name, len(self._runtimes.links)),
            ]
            device = next((one for one in devices if one in live), None)
            if device is not None:
                by_device.setdefault(device, []).append(name)
        if not live:
            await self._runtimes.query({"command": "ping"})  # raises RuntimeDown
        for device, names in by_device.items():
            link = live[device]
            for some in in_commands(sorted(names)):
                # A runtime that has died since has forgotten what it was told.
                told = {name: (link.instance, paths[name]) for name in some}
                lost = {name: one for name, one in told.items() if not look or self._told.get(name) != one}
                if lost:
                    bundles = {name: str(path) for name, (_, path) in lost.items()}
                    await link.command({"command": "start", "models": bundles})
                    self._told |= lost
                said = await link.command(
                    {"command": "start", "models": dict.fromkeys(some, ""), "look": True}
                )
                failed |= said["failed"]
        return failed


def _started(name: str, entry: ModelVersion | None, failed: str) -> pb.StartedModel:
    if entry is None or entry["state"] == "leaving":
        return pb.StartedModel(name=name, state="failed" if failed else "cold", error=failed)
    state = {"ready": "warm", "loading": "starting"}.get(entry["state"], entry["state"])
    return pb.StartedModel(name=name, state=state, error=entry["error"])


def _bundles(repository: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return the bundles of models of the repository; in place of a meta model, those of the models that it calls."""
    found: dict[str, Path] = {}
    for name in names:
        called = carried(repository / name)
        found |= {one: repository / name / CALLS_FOLDER / one for one in called}
        if not called:
            found[name] = repository / name / BUNDLE_FOLDER
    return found

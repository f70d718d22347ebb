"""The file rsrv.yaml of a running server, which is read again when it changes.

The runtimes and the placement follow some changes at once. Other changes wait for a restart, and until then, the server reports
them. A file with an error changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from rsrv.control.placing import Placing
from rsrv.control.reconciler import Reconciler
from rsrv.control.runtimes import Runtimes
from rsrv.settings import Settings, SettingsError, read_settings
from rsrv.settings_changes import FILE_CHECK_S, Effect, FileMonitor, differences, refusal_file

log = logging.getLogger(__name__)

#: Maximum number of keys that a line of the log names.
_MAX_KEYS: Final = 10
_REMEDIES: Final[dict[Effect, str]] = {
    "restart": "run `rsrv restart`",
    "server": "restart the server",
}


class SettingsFile:
    """The file, its current settings, and the settings that the server does not follow yet."""

    def __init__(self, path: Path, settings: Settings, devices: int) -> None:
        """`settings` are the settings in the file when the server started. `devices` is the number of devices."""
        self.path = path
        #: Settings of the last valid file.
        self.settings = settings
        #: Error of the current file. Empty: the file is used.
        self.error = ""
        #: Reason why `rsrv serve` does not use the file of --config, from which it writes this file. Empty: it uses that file.
        self.config_error = ""
        self._at_start = settings
        #: For each device, the settings in the file when its runtime started.
        self._runtimes = [settings] * devices
        #: Lines about changes that wait for a restart. They are stored, because comparing thousands of models takes time.
        self.waiting: list[str] = []

    async def read(self) -> Settings:
        """Read the file. Raises SettingsError. The settings are then unchanged."""
        settings = await asyncio.to_thread(lambda: read_settings(self.path if self.path.exists() else None))
        self.settings, self.error = settings, ""
        self.waiting = self._compare()
        return settings

    def restarted(self, device: int) -> None:
        """Record that the runtime of a device has read the file."""
        self._runtimes[device] = self.settings
        self.waiting = self._compare()

    def read_config_error(self) -> None:
        """Read `config_error`. Called on a thread."""
        try:
            self.config_error = refusal_file(self.path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            self.config_error = ""

    @property
    def refused(self) -> str:
        """Reason why the operator's latest settings are not used. Empty: they are used."""
        return self.error or self.config_error

    @property
    def notes(self) -> list[str]:
        """Lines about settings in the file that the server does not follow."""
        return [*([f"not used: {self.refused}"] if self.refused else []), *self.waiting]

    def _compare(self) -> list[str]:
        waiting: dict[Effect, dict[str, None]] = {}
        for before, effect in [(settings, "restart") for settings in self._runtimes] + [
            (self._at_start, "server")
        ]:
            for key, when in differences(before, self.settings):
                if when == effect:
                    waiting.setdefault(when, {})[key] = None
        return [f"{_listed(list(keys))}: {_REMEDIES[when]}" for when, keys in waiting.items()]


def _listed(keys: list[str]) -> str:
    more = len(keys) - _MAX_KEYS
    return ", ".join(keys[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else "")


class Rereading:
    """Reads the file again, and passes the settings to the parts of the server. Belongs to the control process's loop."""

    def __init__(
        self,
        file: SettingsFile,
        runtimes: Runtimes,
        placing: Placing,
        lifecycle: Reconciler,
        note: Callable[[str], None],
    ) -> None:
        """`note` adds a line to the live page's log."""
        self._file, self._runtimes, self._placing, self._note = file, runtimes, placing, note
        self._lifecycle = lifecycle
        self._monitor = FileMonitor(file.path)
        #: The settings that the server follows. They may differ from `file.settings`, because a restart also reads the file.
        self._followed = file.settings
        #: The instance of each device's latest runtime.
        self._instances: dict[int, str] = {}

    async def run(self) -> NoReturn:
        """Check the file regularly until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(FILE_CHECK_S)

    async def check(self) -> None:
        """Apply the file if it has changed and two checks agree. Record the runtimes that have read it."""
        # Use a thread, because a disk may block forever.
        if await asyncio.to_thread(self._monitor.changed):
            await self._read_again()
        await asyncio.to_thread(self._file.read_config_error)
        aliases = self._runtimes.desired.merged_aliases(self._file.settings.aliases)
        if aliases != self._lifecycle.aliases:
            self._lifecycle.follow_aliases(aliases)
        for number, link in self._runtimes.live.items():
            if (
                self._instances.setdefault(number, link.state.instance) != link.state.instance
                and not self._file.error
            ):
                self._file.restarted(number)
            self._instances[number] = link.state.instance

    async def _read_again(self) -> None:
        file, before = self._file, self._followed
        try:
            settings = await file.read()
        except SettingsError as error:
            file.error = str(error)
            self._say(
                logging.ERROR,
                f"rsrv.yaml has changed, but the new file is not used: {error}",
            )
            return
        self._followed = settings
        await self._placing.change(settings)
        desired, old, new = self._runtimes.desired, before.aliases, settings.aliases
        desired.follow_file(settings)
        # The latest change of an alias applies. So if an alias has changed in the file, drop the command that changed it before.
        aliases = desired.overrides.aliases.items()
        desired.set_aliases({name: shares for name, shares in aliases if old.get(name) == new.get(name)})
        if changed := [key for key, when in differences(before, settings) if when == "at once"]:
            self._say(logging.INFO, f"rsrv.yaml was read again; changes in force: {_listed(changed)}")
        for note in file.waiting:
            self._say(logging.WARNING, f"rsrv.yaml was read again; not in force yet: {note}")

    def _say(self, level: int, text: str) -> None:
        log.log(level, "%s", text)
        self._note(text)

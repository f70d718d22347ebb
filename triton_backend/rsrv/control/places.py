"""Where the bundles of a repository are."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rsrv.settings import SettingsError, load_settings


class Places:
    """Where the bundles are, as the repository's settings say by now: another rsrv-gen may have added to them."""

    def __init__(self, places: Sequence[Path], file: Path) -> None:
        self._places = places
        self._file = file
        self._version = self._look()

    def read(self) -> Sequence[Path]:
        if (version := self._look()) != self._version:
            # Whoever fixed them in the environment is heard there as well. What can't be read changes nothing.
            with contextlib.suppress(OSError, SettingsError):
                self._places = load_settings(self._file.read_text("utf-8"), str(self._file)).lifecycle.bundles
            self._version = version
        return self._places

    def _look(self) -> tuple[int, int] | None:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

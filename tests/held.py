"""Memory, descriptors and threads of a process, for tests which show that unloaded models keep no resources."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Number of bytes by which resident memory varies without a cause.
_NOISE = 2**16


@dataclass(frozen=True)
class Held:
    """Resources of one process, or of several together."""

    #: Resident bytes without a file behind them.
    anonymous: int
    #: Resident bytes of the pages of files.
    file_backed: int
    descriptors: int
    threads: int

    def __add__(self, other: Held) -> Held:
        return Held(
            self.anonymous + other.anonymous,
            self.file_backed + other.file_backed,
            self.descriptors + other.descriptors,
            self.threads + other.threads,
        )

    @property
    def resident(self) -> int:
        """Return the number of resident bytes."""
        return self.anonymous + self.file_backed

    def less_than(self, other: Held) -> bool:
        """Return True if `other` has more descriptors, more threads, or resident memory that is larger by more than noise."""
        fewer = self.descriptors < other.descriptors or self.threads < other.threads
        return fewer or self.resident < other.resident - _NOISE

    def __str__(self) -> str:
        anonymous, files = self.anonymous / 1e6, self.file_backed / 1e6
        return (
            f"{anonymous:.1f} MB anonymous, {files:.1f} MB of files,"
            f" {self.descriptors} descriptors, {self.threads} threads"
        )


def held(pid: int) -> Held:
    """Return the current resources of the process `pid`."""
    process = Path(f"/proc/{pid}")
    rollup = {}
    for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        rollup[name] = int(value.split()[0]) * 1024
    return Held(
        rollup["Anonymous"],
        rollup["Rss"] - rollup["Anonymous"],
        len(os.listdir(process / "fd")),
        len(os.listdir(process / "task")),
    )


def open_files() -> set[tuple[str, str]]:
    """Return the number and the target of each open descriptor of this process.

    Compare the sets, not their sizes: a thread or an object of an earlier test may close its descriptors at any time.
    """
    descriptors = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # The descriptor may be closed by now.
            descriptors.add((link.name, os.readlink(link)))
    return descriptors


def settled(read: Callable[[], Held], timeout: float = 60.0) -> Held:
    """Call `read` until its answer has not fallen for half a second, and return this answer.

    Raises TimeoutError after `timeout` seconds.
    """
    pause = threading.Event()
    until = time.monotonic() + timeout
    least, same = read(), 0
    while same < 10:
        if time.monotonic() > until:
            raise TimeoutError(f"after {timeout:.0f} s it still changes: {least}")
        pause.wait(0.05)
        now = read()
        if now.less_than(least):
            least, same = now, 0
        else:
            same += 1
    return least


def has_returned(before: Held, after: Held, share: float = 0.02) -> bool:
    """Return True if there are no more descriptors and threads than before, and resident memory has grown by at most `share`."""
    fewer = after.descriptors <= before.descriptors and after.threads <= before.threads
    return fewer and after.resident <= (1 + share) * before.resident


def assert_returned(before: Held, after: Held, share: float = 0.02) -> None:
    """Check `has_returned`."""
    assert has_returned(before, after, share), f"before: {before}; after: {after}"

"""Crash history of a server, and the black box of this runtime. They stop a model from crashing runtimes forever.

The next runtime of the same server reads the black box (`wire.blackbox`) and counts crashes by model. Only a process's parent
learns how the process ended. So the next runtime cannot distinguish a kill -9 by a user from one by the kernel's out-of-memory
killer. Only a model that was being built or warmed up is blamed for such an end.
"""

import faulthandler
import json
import logging
import mmap
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from rsrv.runtime.activity import Memory
from rsrv.wire import paths
from rsrv.wire.blackbox import ASLEEP_AT, BYTES, How, Phase, UnfinishedTask, read_slots

log = logging.getLogger(__name__)

#: If the sum of a model's shares of deaths reaches this value, the model is not loaded. Three deaths with nearly all the blame
#: reach it.
_MAX_SHARES = 2.5
#: A death is ignored after this many seconds, unless the model hung in a build, a warm-up or a load.
_DEATH_COUNTS_S = 3600.0
#: Phases before a model serves. Once the model is built and warmed up, its deaths in these phases are cleared.
_BEFORE_SERVING = ("BUILDING", "WARMING")


class Death(NamedTuple):
    """Death of a runtime for which a model is blamed."""

    #: Name of a Phase.
    phase: str
    how: How
    #: Seconds since 1970.
    at: float
    #: This model's share of the blame, at most 1.
    share: float = 1.0


def blame(unfinished: Iterable[UnfinishedTask], *, crashed: bool, now: float) -> dict[str, Death]:
    """Return the `Death` to record for each model that has probably ended the runtime, by the model's key.

    In order of precedence, these models are to blame: the model that hung; models that were being built or warmed up, because
    their code is untried; after a crash, the models that executed or loaded, each with a share. A model whose task has
    succeeded n times is 1 / (n + 1) as suspect as a model whose task has never succeeded. So a model that is always busy is not
    blamed for the crashes of others. A kill -9 from outside is not blamed on models that executed or loaded.

    A request that may have ended a runtime executes alone in the next runtime. If this runtime dies as well, no model is blamed
    for the second death: the first death is already recorded, and the request is not tried again. So a model is refused only
    after deaths with several different requests.
    """
    unfinished = list(unfinished)
    hung = [task for task in unfinished if task.hung]
    if any(task.alone for task in hung or (unfinished if crashed else ())):
        return {}
    untried = [task for task in unfinished if task.phase.name in _BEFORE_SERVING]
    if hung or untried or not crashed:
        how: How = "hung" if hung else "crashed" if crashed else "killed"
        return {task.key: Death(task.phase.name, how, now) for task in hung or untried}
    # A model may be in two slots. The slot with more ended tasks is the better evidence.
    suspects = {task.key: task for task in sorted(unfinished, key=lambda task: task.ended)}
    doubts = {key: 1.0 / (task.ended + 1) for key, task in suspects.items()}
    whole = sum(doubts.values())
    return {
        key: Death(task.phase.name, "crashed", now, doubts[key] / whole) for key, task in suspects.items()
    }


def verdict(deaths: Iterable[Death], now: float) -> str | None:
    """Return the reason why a model is not loaded any more. None: it may be loaded."""
    deaths = list(deaths)
    # An execution may hang because of its request; a build, a warm-up or a load would hang again.
    hung = [death for death in deaths if death.how == "hung" and death.phase != Phase.EXECUTING.name]
    deaths = [death for death in deaths if death in hung or now - death.at < _DEATH_COUNTS_S]
    shares = sum(death.share for death in deaths)
    if not hung and shares < _MAX_SHARES:
        return None
    last = (hung or deaths)[-1]
    did = {"hung": "it hung", "crashed": "it crashed", "killed": "it was killed"}[last.how]
    times = "once" if len(deaths) == 1 else f"{shares:.0f} times"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last.at))
    return (
        f"the model has ended the runtime {times}: at {when} {did} while {Phase[last.phase].text}. It is not "
        f"loaded again until its bundle changes, the server restarts, or {paths.DEATHS} in the runtime's private "
        "directory is removed"
    )


def _read_death(phase: str, how: How, at: float, share: float) -> Death:
    return Death(Phase[phase].name, how, float(at), float(share))


class CrashHistory:
    """Deaths of this server's runtimes, by the model to blame.

    They are in a file that is read each time, so deleting the file clears the record.
    """

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """If `path` is None, no record is kept."""
        self._path = path
        self._clock = clock
        self._lock = Lock()

    def verdict(self, key: str) -> str | None:
        """Return the reason why a model is not loaded any more. None: it may be loaded."""
        return verdict(self._read().get(key, ()), self._clock())

    def add(self, key: str, death: Death) -> None:
        with self._lock:
            deaths = self._read()
            deaths.setdefault(key, []).append(death)
            self._write(deaths)

    def survived(self, key: str) -> None:
        """Clear the deaths during builds and warm-ups of a model that is now built and warmed up."""
        with self._lock:
            deaths = self._read()
            if key in deaths:
                deaths[key] = [death for death in deaths[key] if death.phase not in _BEFORE_SERVING]
                self._write({key: remaining for key, remaining in deaths.items() if remaining})

    def _read(self) -> dict[str, list[Death]]:
        try:
            if self._path is None or not self._path.exists():
                return {}
            deaths = json.loads(self._path.read_text())
            return {key: [_read_death(**death) for death in some] for key, some in deaths.items()}
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s: cannot be read, so no model is blamed: %s", self._path, error)
            return {}

    def _write(self, deaths: dict[str, list[Death]]) -> None:
        assert self._path is not None
        text = json.dumps({key: [death._asdict() for death in some] for key, some in deaths.items()})
        try:
            paths.write_whole(self._path, text)
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._path, error)


class BlackBox:
    """Black box of this runtime, in its private directory. Without a directory, it lasts as long as the process."""

    def __init__(self, directory: Path | None = None) -> None:
        """Read the previous runtime's black box, and begin a new one."""
        #: Name of the server's device. Data that outlives a runtime is stored under this name. Without a directory, the name is
        #: empty, and no data outlives the runtime.
        self.owner = "" if directory is None else directory.name
        self.history = CrashHistory(None if directory is None else directory / paths.DEATHS)
        self.memory: Memory = bytearray(BYTES)
        self._fd = -1
        if directory is None:
            return
        path = directory / paths.BLACKBOX
        try:
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                # Remove the file first. If this process is killed while it counts the death, the next one does not
                # count it again.
                path.unlink()
                self._take(content, time.time())
            # Use a new file, because the previous runtime may still write into the old one while it ends.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Write the zeros. On a full disk, this raises an error, while a store into a hole would kill the process.
            if os.write(self._fd, bytes(BYTES)) == BYTES:
                self.memory = mmap.mmap(self._fd, BYTES)
        except OSError as error:
            log.warning(
                "%s cannot be written, so no model is blamed if this runtime crashes: %s", path, error
            )

    def catch_signals(self) -> None:
        """Make a fatal signal write the threads' stacks to the file, after the slots."""
        if self._fd >= 0:
            faulthandler.enable(self._fd, all_threads=True)

    def crashed(self, reason: str) -> None:
        """Record that the threads' current tasks end this process. The next runtime blames them, as after a fatal signal."""
        if self._fd >= 0:
            with suppress(OSError):  # The disk is full. No model is blamed then.
                os.write(self._fd, reason.encode())

    def fall_asleep(self) -> None:
        """Record that the process ends to put its device to sleep."""
        self.memory[ASLEEP_AT] = 1

    def clear(self) -> None:
        """Clear the slots, so that the next runtime blames no model for the end that follows."""
        self.memory[:ASLEEP_AT] = bytes(ASLEEP_AT)

    def _take(self, content: bytes, now: float) -> None:
        crash = content[BYTES:].decode(errors="replace")
        tasks = read_slots(content)
        for task in tasks:
            again = " a request that had ended a runtime before" if task.alone else ""
            log.error("the previous runtime died while %s was %s%s", task.key, task.phase.text, again)
        if crash:
            log.error("the previous runtime crashed:\n%s", crash)
        for key, death in blame(tasks, crashed=bool(crash), now=now).items():
            self.history.add(key, death)
            reason = self.history.verdict(key)
            if reason is not None:
                log.critical("%s: %s", key, reason)

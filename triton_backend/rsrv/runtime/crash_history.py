"""The black box: what a runtime did when it died, for the next one, which does not try for ever.

A file that the runtime maps: what each thread does with which model is written there with plain stores, and what a
deadly signal found behind that. The next runtime of the same server reads it, and keeps account of who ended how
many. No process can tell what became of another that is not its child; so a kill -9 looks like the kernel's
out-of-memory killer, and counts only against a model that was being built or warmed up.
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
from typing import Literal, NamedTuple

from rsrv.runtime.activity import ENDED, ENDED_AT, KEY_AT, SLOT_BYTES, SLOTS, Memory, Phase
from rsrv.wire import paths

log = logging.getLogger("rsrv.blackbox")

_BYTES = SLOT_BYTES * SLOTS
#: shares of deaths that add up to a model's not being tried any more: three deaths that are its own, or nearly so
_TOO_MANY = 2.5
#: seconds after which one does not count any more
_LAPSE = 3600.0
#: what a success shows to be no fault of the model's
_BEFORE_SERVING = ("BUILDING", "WARMING")

How = Literal["hung", "crashed", "killed"]


class Death(NamedTuple):
    """How a runtime died, as far as a model is concerned."""

    #: Phase's name
    phase: str
    how: How
    #: seconds since 1970
    at: float
    #: of the blame
    share: float = 1.0


class UnfinishedTask(NamedTuple):
    """What was under way when a runtime died."""

    phase: Phase
    hung: bool
    key: str
    #: how often the same had ended well in that runtime
    ended: int = 0


def read_slots(content: bytes) -> list[UnfinishedTask]:
    """What a black box says; whatever it cannot have said is left out. Nothing, if it was the loop that hung."""
    found: list[UnfinishedTask] = []
    if any(content[at : at + 2] == bytes((Phase.LOOPING, 1)) for at in range(0, _BYTES, SLOT_BYTES)):
        return found
    for at in range(0, _BYTES, SLOT_BYTES):
        slot = content[at : at + SLOT_BYTES]
        key = slot[KEY_AT:].partition(b"\0")[0].decode(errors="replace")
        if key and slot[0] in (Phase.BUILDING, Phase.WARMING, Phase.LOADING, Phase.EXECUTING):
            (ended,) = ENDED.unpack_from(slot, ENDED_AT)
            found.append(UnfinishedTask(Phase(slot[0]), slot[1] != 0, key, ended))
    return found


def blame(found: Iterable[UnfinishedTask], *, crashed: bool, now: float) -> dict[str, Death]:
    """Whose fault a death probably is, by key.

    The one that hung, if one did. Else what was being built or warmed up, which is untried code. Else, if it was a
    crash, what executed or loaded, in shares: who has done the same n times before and lived is 1 / (n + 1) as
    suspect as who has never. So a model that is always busy is not charged with what others do. Somebody's kill -9
    is not theirs.
    """
    found = list(found)
    hung = [one for one in found if one.hung]
    untried = [one for one in found if one.phase.name in _BEFORE_SERVING]
    if hung or untried or not crashed:
        how: How = "hung" if hung else "crashed" if crashed else "killed"
        return {one.key: Death(one.phase.name, how, now) for one in hung or untried}
    # A model may be in two slots: the one in which it has done more says more of it.
    suspects = {one.key: one for one in sorted(found, key=lambda one: one.ended)}
    doubts = {key: 1.0 / (one.ended + 1) for key, one in suspects.items()}
    whole = sum(doubts.values())
    return {key: Death(one.phase.name, "crashed", now, doubts[key] / whole) for key, one in suspects.items()}


def verdict(deaths: Iterable[Death], now: float) -> str | None:
    """Why a model is not tried any more; None: it is."""
    deaths = [death for death in deaths if death.how == "hung" or now - death.at < _LAPSE]
    hung = [death for death in deaths if death.how == "hung"]
    shares = sum(death.share for death in deaths)
    if not hung and shares < _TOO_MANY:
        return None
    last = (hung or deaths)[-1]
    did = {"hung": "it hung", "crashed": "it crashed", "killed": "it was killed"}[last.how]
    times = "once" if len(deaths) == 1 else f"{shares:.0f} times"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last.at))
    return (
        f"the model has ended the runtime {times}: at {when} {did} while {Phase[last.phase].text}. It is not "
        f"tried again until its bundle changes, the server starts anew, or {paths.DEATHS} in the runtime's private "
        "directory is removed"
    )


def _read_death(phase: str, how: How, at: float, share: float) -> Death:
    return Death(Phase[phase].name, how, float(at), float(share))


class CrashHistory:
    """Who has ended runtimes of this server. In a file, which is read anew each time: removing it is a pardon."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """None: nobody has."""
        self._path = path
        self._clock = clock
        self._lock = Lock()

    def verdict(self, key: str) -> str | None:
        """Why a model is not tried any more; None: it is."""
        return verdict(self._read().get(key, ()), self._clock())

    def add(self, key: str, death: Death) -> None:
        with self._lock:
            deaths = self._read()
            deaths.setdefault(key, []).append(death)
            self._write(deaths)

    def survived(self, key: str) -> None:
        """A model was built and warmed up: whatever happened there before was not its fault."""
        with self._lock:
            deaths = self._read()
            if key in deaths:
                deaths[key] = [death for death in deaths[key] if death.phase not in _BEFORE_SERVING]
                self._write({key: rest for key, rest in deaths.items() if rest})

    def _read(self) -> dict[str, list[Death]]:
        try:
            if self._path is None or not self._path.exists():
                return {}
            deaths = json.loads(self._path.read_text())
            return {key: [_read_death(**death) for death in some] for key, some in deaths.items()}
        except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
            log.warning("%s: cannot be read, so nobody is to blame: %s", self._path, error)
            return {}

    def _write(self, deaths: dict[str, list[Death]]) -> None:
        assert self._path is not None
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(json.dumps({k: [death._asdict() for death in some] for k, some in deaths.items()}))
            os.replace(new, self._path)
        except OSError as error:
            log.warning("%s: cannot be written: %s", self._path, error)


class BlackBox:
    """A runtime's own, in its private directory; of no directory it lasts as long as the process."""

    def __init__(self, directory: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Reads what the runtime before left, and starts anew."""
        self.history = CrashHistory(None if directory is None else directory / paths.DEATHS, clock)
        self.memory: Memory = bytearray(_BYTES)
        self._fd = -1
        if directory is None:
            return
        path = directory / paths.BLACKBOX
        try:
            with suppress(FileNotFoundError):
                self._take(path.read_bytes(), clock())
            # Another file in its place: should the one before still end, it does not write here.
            path.unlink(missing_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Written rather than left as a hole: on a full disk that is an error here, and the process's death later.
            if os.write(self._fd, bytes(_BYTES)) == _BYTES:
                self.memory = mmap.mmap(self._fd, _BYTES)
        except OSError as error:
            log.warning("%s: no black box: %s", path, error)

    def catch_signals(self) -> None:
        """Have a deadly signal leave the threads' stacks behind what is mapped."""
        if self._fd >= 0:
            faulthandler.enable(self._fd, all_threads=True)

    def clear(self) -> None:
        """Blame nobody for the end that follows."""
        self.memory[:] = bytes(_BYTES)

    def _take(self, content: bytes, now: float) -> None:
        crash = content[_BYTES:].decode(errors="replace")
        found = read_slots(content)
        for one in found:
            log.error("the runtime before this one died while %s was %s", one.key, one.phase.text)
        if crash:
            log.error("it crashed:\n%s", crash)
        for key, death in blame(found, crashed=bool(crash), now=now).items():
            self.history.add(key, death)
            reason = self.history.verdict(key)
            if reason is not None:
                log.critical("%s: %s", key, reason)

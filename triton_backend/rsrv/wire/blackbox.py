"""Black box of a runtime: a file in its private directory that says what its threads did when it died.

The runtime maps the file, and each of its threads stores in a slot what it does with which model. A fatal signal, and
an end because of what the threads do, append a text. The next runtime replaces the file; a stub opens it while its
runtime lives, so both read the same after the death.
"""

import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Literal, NamedTuple
from weakref import finalize

from rsrv.wire import paths


class Phase(IntEnum):
    """Work of a thread on a model; LOOPING needs no model."""

    BUILDING = 1
    WARMING = 2
    LOADING = 3
    EXECUTING = 4
    LOOPING = 5

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Phase.BUILDING: "being built",
    Phase.WARMING: "being warmed up",
    Phase.LOADING: "loading its weights",
    Phase.EXECUTING: "executing",
    Phase.LOOPING: "looping",
}

#: bytes for one slot: the phase, 1 if it hung, the number of the model's tasks that ended well there (exact, or rounded
#: down to a power of two), and the model's key with a zero byte at its end
SLOT_BYTES = 512
ENDED = Struct("<Q")
ENDED_AT, KEY_AT = 2, 2 + ENDED.size
LONGEST_KEY = SLOT_BYTES - KEY_AT - 1
SLOTS = 7
#: bytes of all slots; the text of a crash follows
BYTES = SLOT_BYTES * SLOTS
#: 1 if the runtime has ended so that its device sleeps: beyond the longest key of the last slot
ASLEEP_AT = BYTES - 1
#: set in the byte of the phase while a request executes alone
ALONE_BIT = 0x80

How = Literal["hung", "crashed", "killed"]


class UnfinishedTask(NamedTuple):
    """Task that had not ended when a runtime died."""

    phase: Phase
    hung: bool
    key: str
    #: tasks of the same model that had ended well in that thread
    ended: int = 0
    #: True if it is the execution of a request that executes alone, because a runtime died while it executed before.
    alone: bool = False


def read_slots(content: bytes) -> list[UnfinishedTask]:
    """Read a black box, without invalid records. If the loop hung, no task is to blame, and the result is empty."""
    found: list[UnfinishedTask] = []
    if any(content[at : at + 2] == bytes((Phase.LOOPING, 1)) for at in range(0, BYTES, SLOT_BYTES)):
        return found
    for at in range(0, BYTES, SLOT_BYTES):
        slot = content[at : at + SLOT_BYTES]
        key = slot[KEY_AT:].partition(b"\0")[0].decode(errors="replace")
        phase = slot[0] & ~ALONE_BIT if slot else 0
        if key and phase in (Phase.BUILDING, Phase.WARMING, Phase.LOADING, Phase.EXECUTING):
            (ended,) = ENDED.unpack_from(slot, ENDED_AT)
            found.append(UnfinishedTask(Phase(phase), slot[1] != 0, key, ended, slot[0] != phase))
    return found


def how_it_ended(content: bytes) -> How:
    """Return how the process of a black box ended.

    A kill in the middle of a crash is a crash. A kill -9, the kernel's out-of-memory killer and an end on purpose leave
    no text.
    """
    if any(content[at + 1 : at + 2] == b"\1" for at in range(0, BYTES, SLOT_BYTES)):
        return "hung"
    return "crashed" if content[BYTES:] else "killed"


def is_suspect(content: bytes, key: str) -> bool:
    """Return whether executions of the model `key`, or of any if it is "", may have ended the process of a black box.

    If no slot says what executed, as after a failure of the loop, any execution may have.
    """
    how = how_it_ended(content)
    found: Sequence[UnfinishedTask] = read_slots(content)
    if how == "killed" or not found:
        return how != "killed"
    return any(
        one.phase is Phase.EXECUTING and key in ("", one.key) and (one.hung or how == "crashed")
        for one in found
    )


class BlackBoxReader:
    """Black box of a living runtime, to be read after its end."""

    def __init__(self, directory: Path) -> None:
        """Open the box of the runtime that serves `directory` now. Without one, each end counts as a crash."""
        try:
            self._fd = os.open(directory / paths.BLACKBOX, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        finalize(self, os.close, self._fd).atexit = False

    @property
    def sleeps(self) -> bool:
        """True if the runtime has ended so that its device sleeps."""
        return self._fd >= 0 and os.pread(self._fd, 1, ASLEEP_AT) == b"\1"

    def is_suspect(self, key: str) -> bool:
        """Return what the function `is_suspect` does, when the runtime is gone."""
        if self._fd < 0:
            return True
        # One byte of the text says that there is one.
        content = os.pread(self._fd, BYTES + 1, 0)
        return len(content) < BYTES or is_suspect(content, key)

"""Black box of a runtime: a file in its private directory that records what its threads were doing when it died.

The runtime maps the file. Each of its threads stores its phase and its model in a slot. The handler of fatal signals appends a
text. The runtime itself appends a text if it must end because of a task, for example after the loss of the device. The next
runtime replaces the file. A stub opens the file while its runtime runs. So the stub reads the old file even if the next runtime
has already replaced it.
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
    """Phase of a thread's work on a model. The phase LOOPING has no model."""

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

#: Bytes of one slot. It holds the phase, a byte that is 1 if the thread hung, the number of the model's tasks that this thread
#: has completed (exact, or rounded down to a power of two), and the model's key with a zero byte at its end.
SLOT_BYTES = 512
ENDED = Struct("<Q")
ENDED_AT, KEY_AT = 2, 2 + ENDED.size
LONGEST_KEY = SLOT_BYTES - KEY_AT - 1
SLOTS = 7
#: Bytes of all slots. The text of a crash follows the slots.
BYTES = SLOT_BYTES * SLOTS
#: Offset of a byte that is 1 if the runtime ended to put its device to sleep. It is the last byte of the last slot, which no
#: key reaches.
ASLEEP_AT = BYTES - 1
#: This bit of the phase's byte is set while a request executes alone.
ALONE_BIT = 0x80

How = Literal["hung", "crashed", "killed"]


class UnfinishedTask(NamedTuple):
    """A task that had not ended when a runtime died."""

    phase: Phase
    hung: bool
    key: str
    #: Number of tasks of the same model that this thread had completed.
    ended: int = 0
    #: True if this task executes a request alone. A request executes alone after a runtime died during its execution.
    alone: bool = False


def read_slots(content: bytes) -> list[UnfinishedTask]:
    """Return the unfinished tasks in a black box. Invalid records are ignored. If the loop hung, the result is empty."""
    tasks: list[UnfinishedTask] = []
    if any(content[at : at + 2] == bytes((Phase.LOOPING, 1)) for at in range(0, BYTES, SLOT_BYTES)):
        return tasks
    for at in range(0, BYTES, SLOT_BYTES):
        slot = content[at : at + SLOT_BYTES]
        key = slot[KEY_AT:].partition(b"\0")[0].decode(errors="replace")
        phase = slot[0] & ~ALONE_BIT if slot else 0
        if key and phase in (Phase.BUILDING, Phase.WARMING, Phase.LOADING, Phase.EXECUTING):
            (ended,) = ENDED.unpack_from(slot, ENDED_AT)
            tasks.append(UnfinishedTask(Phase(phase), slot[1] != 0, key, ended, slot[0] != phase))
    return tasks


def how_it_ended(content: bytes) -> How:
    """Return how the process of a black box ended.

    If a process is killed while it crashes, the result is "crashed". A kill -9, the kernel's out-of-memory killer and an
    intended end leave no text, so the result is "killed".
    """
    if any(content[at + 1 : at + 2] == b"\1" for at in range(0, BYTES, SLOT_BYTES)):
        return "hung"
    return "crashed" if content[BYTES:] else "killed"


def is_suspect(content: bytes, key: str) -> bool:
    """Return whether executions of the model `key` ("": any model) may have ended the process of a black box.

    If no slot names a task, for example because the loop failed, any execution may have ended the process.
    """
    how = how_it_ended(content)
    tasks: Sequence[UnfinishedTask] = read_slots(content)
    if how == "killed" or not tasks:
        return how != "killed"
    return any(
        task.phase is Phase.EXECUTING and key in ("", task.key) and (task.hung or how == "crashed")
        for task in tasks
    )


class BlackBoxReader:
    """Opens the black box of a runtime while the runtime runs, and reads it after the runtime's end."""

    def __init__(self, directory: Path) -> None:
        """Open the black box of the runtime of `directory`. Without a black box, `is_suspect` returns True for every model."""
        try:
            self._fd = os.open(directory / paths.BLACKBOX, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        finalize(self, os.close, self._fd).atexit = False

    @property
    def sleeps(self) -> bool:
        """True if the runtime ended to put its device to sleep."""
        return self._fd >= 0 and os.pread(self._fd, 1, ASLEEP_AT) == b"\1"

    def is_suspect(self, key: str) -> bool:
        """Return the result of the function `is_suspect`. Call it when the runtime has ended."""
        if self._fd < 0:
            return True
        # One byte of the text suffices, because only the presence of a text matters.
        content = os.pread(self._fd, BYTES + 1, 0)
        return len(content) < BYTES or is_suspect(content, key)

"""What is under way on the runtime's threads: for the watchdog, and, should the process die, for the next one."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from mmap import mmap
from struct import Struct
from threading import get_ident
from typing import NamedTuple


class Phase(IntEnum):
    """What a thread does with a model, or, LOOPING, without one."""

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


class Task(NamedTuple):
    """One thing that a thread does."""

    phase: Phase
    #: the model's
    key: str
    #: rows, or, of a load, the bytes of its largest tensor
    size: int
    #: seconds that it should take; 0: not known
    expected: float
    #: rises from one task to the next
    number: int


#: bytes of the black box for one slot: the phase, whether it hung, how often something has ended well there with that
#: model (the power of two below it, or the very number), and the model's key, which a zero byte ends
SLOT_BYTES = 512
ENDED = Struct("<Q")
ENDED_AT, KEY_AT = 2, 2 + ENDED.size
_LONGEST_KEY = SLOT_BYTES - KEY_AT - 1
SLOTS = 7
#: keys whose counts a slot has at most, before it starts anew: those of models that are gone are among them
_REMEMBERED = 10_000

#: bytes that survive the process, or not
Memory = mmap | bytearray


class ActivitySlot:
    """What one thread does now: it alone writes, the watchdog reads.

    An execution that takes microseconds comes by here twice, so that is a few stores and no more.
    """

    __slots__ = (
        "_at",
        "_before",
        "_ended",
        "_expected",
        "_key",
        "_memory",
        "_number",
        "_numbers",
        "_phase",
        "_size",
        "thread",
    )

    def __init__(
        self, memory: Memory | None = None, at: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        self._memory = bytearray(SLOT_BYTES) if memory is None else memory
        self._at = at
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._phase = Phase.LOOPING
        self._key = ""
        #: how often something has ended here, with this key; and with others, when they were here last
        self._ended = 0
        self._before: dict[str, int] = {}
        self._size = 0
        self._expected = 0.0
        #: 0: nothing is under way
        self._number = 0
        #: 0: not known yet
        self.thread = 0

    @property
    def task(self) -> Task | None:
        while number := self._number:
            task = Task(self._phase, self._key, self._size, self._expected, number)
            if number == self._number:
                return task
        return None

    def begin(self, phase: Phase, key: str, size: int = 0, expected: float = 0.0, number: int = 0) -> int:
        """Returns the task's number; `number` is that of a task that another thread has begun."""
        self._number = 0
        if key != self._key:
            if len(self._before) == _REMEMBERED:
                self._before.clear()
            self._before[self._key] = self._ended
            self._key, self._ended = key, self._before.get(key, 0)
            record = ENDED.pack(self._ended) + b"%b\0" % key.encode()[:_LONGEST_KEY]
            at = self._at + ENDED_AT
            self._memory[at : at + len(record)] = record
        self._phase = phase
        self._size = size
        self._expected = expected
        self._memory[self._at] = phase
        self.thread = self.thread or get_ident()
        self._number = number = number or next(self._numbers)
        return number

    def rest(self) -> None:
        """Nothing is under way, but nothing has ended either: it goes on with the next `begin`."""
        self._number = 0
        self._memory[self._at] = 0

    def end(self) -> None:
        self.rest()
        self._ended = ended = self._ended + 1
        if not ended & (ended - 1):
            # Near enough, and far cheaper than each time.
            ENDED.pack_into(self._memory, self._at + ENDED_AT, ended)

    @contextmanager
    def doing(self, phase: Phase, key: str, size: int = 0) -> Iterator[None]:
        self.begin(phase, key, size)
        try:
            yield
        finally:
            self.end()

    def hangs(self) -> None:
        """Note for the next process that this slot is why there is one."""
        self._memory[self._at + 1] = 1


class Activity:
    """All slots: `memory` has SLOT_BYTES for each of SLOTS."""

    def __init__(self, memory: Memory | None = None) -> None:
        memory = bytearray(SLOT_BYTES * SLOTS) if memory is None else memory
        numbers = itertools.count(1)
        slots = [ActivitySlot(memory, index * SLOT_BYTES, numbers) for index in range(SLOTS)]
        self.build, self.warm_up, self.weights, self.short, self.launch, self.read, self.round = slots

    def front(self, launcher: int | None) -> ActivitySlot | None:
        """Whose work the device has; what others want of it waits for that.

        `launcher`: the thread that the device works for, or worked for last, if it says so.
        """
        busy = {
            task.number: slot
            for slot in (self.warm_up, self.short, self.launch, self.read)
            if (task := slot.task) is not None
        }
        for slot in busy.values():
            if slot.thread == launcher:
                return slot
        return busy[min(busy)] if busy else None

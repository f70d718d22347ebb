"""Current task of each thread of the runtime, and the watchdog, which finds a task that hangs.

The threads wait without a limit, so no other part notices a hang. The slots lie in memory that outlives the process: if the
process dies, the next runtime reads them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from mmap import mmap
from threading import Thread, get_ident
from typing import NamedTuple

from rsrv.wire.blackbox import ALONE_BIT, ENDED, ENDED_AT, LONGEST_KEY, SLOT_BYTES, SLOTS, Phase


class Task(NamedTuple):
    """Work of one thread, from its beginning to its end."""

    phase: Phase
    #: Key of the model.
    key: str
    #: Number of rows. For a load, the bytes of its largest tensor.
    size: int
    #: Expected duration in seconds, or 0 if unknown.
    expected: float
    #: Number that increases with each task.
    number: int


#: Maximum number of models, including removed ones, whose tasks a slot counts. When it is reached, the slot drops all counts.
_MAX_COUNTED_MODELS = 10_000

#: A mapped file, which survives the process, or private memory.
Memory = mmap | bytearray


class ActivitySlot:
    """Current task of one thread. Only that thread writes it, and the watchdog reads it.

    Even an execution that takes microseconds calls `begin` and `end`, so each of these does only a few stores.
    """

    def __init__(
        self, memory: Memory | None = None, at: int = 0, numbers: Iterator[int] | None = None
    ) -> None:
        self._memory = bytearray(SLOT_BYTES) if memory is None else memory
        self._at = at
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._phase = Phase.LOOPING
        self._key = ""
        #: Number of tasks of this key that ended in this slot.
        self._ended = 0
        #: Number of tasks that ended in this slot, for each other key.
        self._before: dict[str, int] = {}
        self._size = 0
        self._expected = 0.0
        #: Number of the current task. 0: the thread is idle.
        self._number = 0
        #: Identifier of the thread. 0: not known yet.
        self.thread = 0

    @property
    def task(self) -> Task | None:
        while number := self._number:
            task = Task(self._phase, self._key, self._size, self._expected, number)
            if number == self._number:
                return task
        return None

    def begin(
        self,
        phase: Phase,
        key: str,
        size: int = 0,
        expected: float = 0.0,
        number: int = 0,
        *,
        alone: bool = False,
    ) -> int:
        """Begin a task and return its number.

        `number`: number of the task if another thread began it and this one continues it. `alone`: True if the task executes a
        request alone.
        """
        self._number = 0
        if key != self._key:
            if len(self._before) == _MAX_COUNTED_MODELS:
                self._before.clear()
            self._before[self._key] = self._ended
            self._key, self._ended = key, self._before.get(key, 0)
            record = ENDED.pack(self._ended) + b"%b\0" % key.encode()[:LONGEST_KEY]
            at = self._at + ENDED_AT
            self._memory[at : at + len(record)] = record
        self._phase = phase
        self._size = size
        self._expected = expected
        self._memory[self._at] = phase | ALONE_BIT if alone else phase
        self.thread = self.thread or get_ident()
        self._number = number = number or next(self._numbers)
        return number

    def rest(self) -> None:
        """Become idle without counting a task as ended: the next `begin` continues it."""
        self._number = 0
        self._memory[self._at] = 0

    def end(self) -> None:
        self._number = 0
        self._memory[self._at] = 0
        self._ended = ended = self._ended + 1
        if not ended & (ended - 1):
            # Only powers of two are stored. They are exact enough, and far cheaper than a store for each task.
            ENDED.pack_into(self._memory, self._at + ENDED_AT, ended)

    @contextmanager
    def doing(self, phase: Phase, key: str, size: int = 0, expected: float = 0.0) -> Iterator[None]:
        self.begin(phase, key, size, expected)
        try:
            yield
        finally:
            self.end()

    def mark_hung(self) -> None:
        """Record for the next runtime that this slot's task hung."""
        self._memory[self._at + 1] = 1


class Activity:
    """Slots of all threads. `memory` has SLOT_BYTES bytes for each of the SLOTS slots."""

    def __init__(self, memory: Memory | None = None) -> None:
        memory = bytearray(SLOT_BYTES * SLOTS) if memory is None else memory
        numbers = itertools.count(1)
        slots = [ActivitySlot(memory, index * SLOT_BYTES, numbers) for index in range(SLOTS)]
        self.build, self.warm_up, self.weights, self.short, self.launch, self.read, self.round = slots

    def front(self, launcher: int | None) -> ActivitySlot | None:
        """Return the slot of the task that the device executes. Other tasks for the device wait for it.

        `launcher`: the thread that the device executes for, or executed for last. None: unknown.
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


#: A task hangs if it takes this many times its expected duration.
_HANG_FACTOR = 100.0
#: Number of checks within the limit.
_CHECKS_PER_LIMIT = 4
#: Shortest and longest interval between two checks.
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.05, 5.0
#: The time between two checks is counted as at most this many intervals, because a process that was stopped does not hang.
_MAX_COUNTED_INTERVALS = 2


def advance_ages(
    ages: Mapping[int, float], front: Task | None, further: tuple[Task | None, ...], elapsed: float
) -> dict[int, float]:
    """Return the ages of the current tasks: seconds since each was first seen, by its number.

    `ages` are the ages at the last check, `elapsed` seconds ago.

    `front` is the task that the device executes. While it stays the same, `further` tasks may wait for it, so they do not age.
    """
    stands = front is not None and front.number in ages
    grown = {
        task.number: ages[task.number] + (0.0 if stands else elapsed) if task.number in ages else 0.0
        for task in further
        if task is not None
    }
    if front is not None:
        grown[front.number] = ages[front.number] + elapsed if stands else 0.0
    return grown


def hangs(task: Task | None, ages: Mapping[int, float], limit_s: float) -> bool:
    """Return whether a task exceeds its limit: `limit_s`, or a multiple of its expected duration if that is longer."""
    return task is not None and ages[task.number] > max(limit_s, _HANG_FACTOR * task.expected)


class Watchdog:
    """Thread that checks the slots and calls `report(slot, task, seconds)` for a task that hangs.

    `launcher` returns the thread that the device executes for. Only time in which the watchdog runs is counted, because a
    process that was stopped, or a machine that was suspended, does not hang.
    """

    def __init__(
        self,
        activity: Activity,
        limit_s: float,
        launcher: Callable[[], int | None],
        report: Callable[[ActivitySlot, Task, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity = activity
        self._limit_s = limit_s
        self._launcher = launcher
        self._report = report
        self._clock = clock
        self.interval_s = min(max(limit_s / _CHECKS_PER_LIMIT, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        self._checked = clock()
        self._ages: dict[int, float] = {}

    def start(self) -> None:
        Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.interval_s)
            self.check()

    def check(self) -> None:
        now = self._clock()
        elapsed = min(now - self._checked, _MAX_COUNTED_INTERVALS * self.interval_s)
        self._checked = now
        device = self._activity.front(self._launcher())
        further = (self._activity.weights, self._activity.build, self._activity.round)
        front = None if device is None else device.task
        seen = tuple(slot.task for slot in further)
        self._ages = advance_ages(self._ages, front, seen, elapsed)
        # Check the device first, because the loop may be the thread that executes.
        for slot, task in ((device, front), *zip(further, seen, strict=True)):
            if slot is not None and task is not None and hangs(task, self._ages, self._limit_s):
                self._report(slot, task, self._ages[task.number])
                return


def describe(task: Task, seconds: float) -> str:
    """Describe a task that hangs, for the log."""
    if task.phase is Phase.LOOPING:
        return f"the main loop has not finished a round for {seconds:.1f} s"
    unit = "bytes in its largest tensor" if task.phase is Phase.LOADING else "rows"
    return (
        f"{task.key} hangs: it has been {task.phase.text} for {seconds:.1f} s "
        f"({task.size} {unit}, expected to take {task.expected:.3g} s)"
    )

"""The watchdog: notices that the runtime hangs, which nobody else can, for its threads wait without a limit."""

import threading
import time
from collections.abc import Callable, Mapping

from rsrv.runtime.activity import Activity, ActivitySlot, Phase, Task

#: times as long as expected that something may take
_FACTOR = 100.0
#: looks within the patience, and the seconds between two looks
_LOOKS, _SOONEST, _LATEST = 4, 0.05, 5.0
#: looks' pauses that count at most between two looks
_COUNTED = 2


def grow(
    ages: Mapping[int, float], front: Task | None, others: tuple[Task | None, ...], elapsed: float
) -> dict[int, float]:
    """Seconds for which each task has been seen, by its number, `elapsed` after they were `ages`.

    `front` is what the device works at. While that goes on, all others may wait for it, and do not age.
    """
    stands = front is not None and front.number in ages
    grown = {
        task.number: ages[task.number] + (0.0 if stands else elapsed) if task.number in ages else 0.0
        for task in others
        if task is not None
    }
    if front is not None:
        grown[front.number] = ages[front.number] + elapsed if stands else 0.0
    return grown


def hangs(task: Task | None, ages: Mapping[int, float], patience: float) -> bool:
    """Whether a task goes on for longer than anything that ends. `patience`: seconds that it may take in any case."""
    return task is not None and ages[task.number] > max(patience, _FACTOR * task.expected)


class Watchdog:
    """Looks at what is under way; `found(slot, task, seconds)` is called, on its thread, for what hangs.

    `launcher` is the device's. Time counts only while this thread runs, too: a process that was stopped, or a
    machine that slept, does not hang.
    """

    def __init__(
        self,
        activity: Activity,
        patience: float,
        launcher: Callable[[], int | None],
        found: Callable[[ActivitySlot, Task, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity = activity
        self._patience = patience
        self._launcher = launcher
        self._found = found
        self._clock = clock
        #: seconds between two looks
        self.pause = min(max(patience / _LOOKS, _SOONEST), _LATEST)
        self._looked = clock()
        self._ages: dict[int, float] = {}

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self.pause)
            self.look()

    def look(self) -> None:
        now = self._clock()
        elapsed, self._looked = min(now - self._looked, _COUNTED * self.pause), now
        device = self._activity.front(self._launcher())
        others = (self._activity.weights, self._activity.round)
        front = None if device is None else device.task
        seen = tuple(slot.task for slot in others)
        self._ages = grow(self._ages, front, seen, elapsed)
        # The device first: the loop may be the one that executes.
        for slot, task in ((device, front), *zip(others, seen, strict=True)):
            if slot is not None and task is not None and hangs(task, self._ages, self._patience):
                self._found(slot, task, self._ages[task.number])
                return


def describe(task: Task, seconds: float) -> str:
    """For the log."""
    if task.phase is Phase.LOOPING:
        return f"the loop has not come round for {seconds:.1f} s"
    unit = "bytes in its largest tensor" if task.phase is Phase.LOADING else "rows"
    return (
        f"{task.key} hangs: it has been {task.phase.text} for {seconds:.1f} s "
        f"({task.size} {unit}, expected to take {task.expected:.3g} s)"
    )

"""The executions in flight: they have been given to the device, and have not ended."""

from collections import deque
from dataclasses import dataclass
from itertools import chain
from math import inf

from rsrv.scheduler.events import Execute
from rsrv.scheduler.model import ModelState

#: Maximum number of executions that `behind` examines.
_RECENT = 16
#: Maximum number of names that `behind` returns.
_MAX_NAMES = 3
#: Maximum host time in seconds that is charged for an execution. If the host took longer, the process was probably stopped, and
#: the model does not pay for that.
_MAX_HOST_S = 0.001


@dataclass(slots=True)
class StartedExecution:
    """An execution in flight, or one that found no memory and will be retried."""

    execute: Execute
    model: ModelState
    started: float
    #: Number under which the discipline charges the execution: the number of its first attempt.
    charged: int
    #: Seconds for which nothing else could execute. Set when the execution ends.
    occupied_seconds: float = 0.0


class InFlight(dict[int, StartedExecution]):
    """The executions in flight by number. The device runs them in the order of their numbers."""

    __slots__ = ("_freed", "_recent", "started")

    def __init__(self) -> None:
        super().__init__()
        #: Time when the latest execution ended.
        self._freed = -inf
        #: The latest executions that have ended: the model's family, and the begin and the end of the device's work.
        self._recent: deque[tuple[str, float, float]] = deque(maxlen=_RECENT)
        #: Number of executions started so far, which is also the number of the latest execution.
        self.started = 0

    def start(self, execute: Execute, model: ModelState, now: float, charged: int | None = None) -> None:
        """Add an execution. `charged`: the number of the first attempt if this is a retry."""
        self.started = number = execute.number
        self[number] = StartedExecution(execute, model, now, number if charged is None else charged)

    def end(self, number: int, seconds: float, now: float) -> StartedExecution:
        """Remove an execution that ended after `seconds` on the device.

        `occupied_seconds` includes the host's work before and after the execution, because nothing else executes during that
        work. Between the steps of a generation, that work takes as long as a step.
        """
        ended = self.pop(number)
        since = max(ended.started, self._freed)
        ended.occupied_seconds = max(seconds, min(now - since, seconds + _MAX_HOST_S))
        self._recent.append((ended.model.family, since, now))
        self._freed = now
        return ended

    def behind(self, since: float, until: float, begun_before: float) -> tuple[str, ...]:
        """Return the names of at most three models that executed in this period, the one with the most seconds first.

        `begun_before`: executions that did not begin before this time are ignored.
        """
        freed = self._freed
        running = (
            [(execution.model.family, max(execution.started, freed), until) for execution in self.values()]
            if self
            else []
        )
        seconds: dict[str, float] = {}
        get = seconds.get
        for family, start, end in chain(running, reversed(self._recent)):
            if end <= since:
                break
            if start < begun_before:
                # Written as conditional expressions: calls of `min` and `max` would take a tenth of a decision's time.
                upper = end if end < until else until  # noqa: FURB136
                part = upper - (start if start > since else since)  # noqa: FURB136
                seconds[family] = get(family, 0.0) + part
        if len(seconds) > 1:
            return tuple(sorted(seconds, key=seconds.__getitem__, reverse=True)[:_MAX_NAMES])
        return tuple(seconds)

    @property
    def exclusive(self) -> bool:
        """True if the execution in flight has the device to itself."""
        return any(execution.execute.exclusive for execution in self.values())

    def end_after(self, now: float) -> float | None:
        """Return the time when all executions are expected to have ended.

        None: no execution is in flight, or the first one is overdue.
        """
        first = next(iter(self.values()), None)
        if first is None:
            return None
        since = max(first.started, self._freed)
        if now >= since + first.execute.seconds:
            return None
        return since + sum(execution.execute.seconds for execution in self.values())

    def overdue_seconds(self, now: float) -> float:
        """Return the seconds by which the first execution has exceeded its expected end. There must be an execution."""
        first = next(iter(self.values()))
        return max(0.0, now - max(first.started, self._freed) - first.execute.seconds)

    def seconds(self, now: float) -> float:
        """Return the expected seconds until all executions end. If the first one is overdue, its remaining time is 0."""
        total = 0.0
        done = 0.0
        for execution in self.values():
            if total == 0.0:
                done = min(execution.execute.seconds, max(0.0, now - max(execution.started, self._freed)))
            total += execution.execute.seconds
        return total - done

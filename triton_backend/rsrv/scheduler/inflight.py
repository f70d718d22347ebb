"""What the device has been given to do."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from rsrv.scheduler.events import CallerError, Execute
from rsrv.scheduler.model import ModelState


@dataclass(slots=True)
class Running:
    """An execution in flight."""

    execute: Execute
    model: ModelState
    started: float
    #: the dispatch that the discipline knows of: the first try.
    charged: int


class InFlight:
    """The executions that were started and have not ended; the device runs them in this order."""

    __slots__ = ("_freed", "_running", "started")

    def __init__(self) -> None:
        self._running: dict[int, Running] = {}
        #: when the latest execution ended.
        self._freed = -inf
        #: executions that were ever started; the latest one's dispatch.
        self.started = 0

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(self._running.values())

    def check(self, dispatch: int) -> None:
        """Refuse the end of an execution that is not in flight.

        Raises:
            CallerError: it is not.
        """
        if dispatch not in self._running:
            raise CallerError(f"dispatch {dispatch} is not in flight: {list(self._running)} are")

    def start(self, execute: Execute, model: ModelState, now: float, charged: int | None = None) -> None:
        """`charged`: the first try's dispatch, if this is the second."""
        self.started = dispatch = execute.dispatch
        self._running[dispatch] = Running(execute, model, now, dispatch if charged is None else charged)

    def end(self, dispatch: int, now: float) -> Running:
        self._freed = now
        return self._running.pop(dispatch)

    def end_after(self, now: float) -> float | None:
        """When all of them are expected to have ended; None if that is not known, for the first is overdue."""
        first = next(iter(self._running.values()), None)
        if first is None:
            return None
        since = max(first.started, self._freed)
        if now >= since + first.execute.seconds:
            return None
        return since + sum(running.execute.seconds for running in self._running.values())

    def seconds(self, now: float) -> float:
        """Expected device time left of all of them: sum of expected - elapsed of the first (at most its own)."""
        total = 0.0
        done = 0.0
        for running in self._running.values():
            if total == 0.0:
                done = min(running.execute.seconds, max(0.0, now - max(running.started, self._freed)))
            total += running.execute.seconds
        return total - done

"""Executions on the loop or on threads.

With a depth of 1, the loop itself runs short executions (`_SHORT_S`). One thread runs all others, from the inputs to the
outputs. With a larger depth, two threads run each execution. One gathers and launches the next execution while the device is
busy. The other reads and scatters the outputs of the previous execution.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rsrv.runtime.activity import Activity, ActivitySlot
from rsrv.runtime.device import Device, OutOfMemory
from rsrv.runtime.execution import Dispatch, Flight, Staging, finish, launch
from rsrv.runtime.models import about
from rsrv.runtime.threads import Inbox, WorkerThread
from rsrv.wire.blackbox import Phase

log = logging.getLogger(__name__)

#: An execution on the loop is slow if it takes longer than this many seconds of wall time. This is forty times `_SHORT_S`,
#: the longest expected time.
SLOW_S = 0.02
#: A model is banned for BAN_S seconds if its slow executions take more than this many seconds within WINDOW_S
#: seconds.
BLOCKED_S = 0.1
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Bans of models from the loop, because their executions there took far longer than predicted.

    Some models' costs depend on their inputs. While the loop executes, it notices no deadline, cancellation or arrival. But a
    descheduled CPU makes any single execution slow. So a model is banned by the total time for which its slow executions
    blocked the loop recently: a single execution of a tenth of a second is enough for a ban, but one of 30 ms is not. Bans
    expire. Times are in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        #: Number of bans since the start, over all models.
        self.count = 0
        #: Ends and durations of the latest slow executions, by the model's key.
        self._slow: dict[str, deque[tuple[float, float]]] = {}
        #: Time when the model's latest ban ends, by the model's key.
        self.until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self.until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Record an execution on the loop. Return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque())
        slow.append((now, seconds))
        while now - slow[0][0] > WINDOW_S:
            slow.popleft()
        if sum(took for _, took in slow) < BLOCKED_S:
            return False
        del self._slow[model]
        self.until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self.until.pop(model, None)


#: Maximum expected seconds of an execution that the loop runs itself. Handing the execution over to a thread would cost about
#: 0.1 ms. During the execution, the loop reads no sockets, but such a short delay does no harm.
_SHORT_S = 0.0005


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """An execution has ended. `error` is the reason of its failure, or None."""

    dispatch: Dispatch
    seconds: float
    error: str | None = None
    #: True if the execution may succeed in another try with more memory.
    out_of_memory: bool = False


class Executor:
    """Runs dispatches in order. Each ends in an `ExecutionEnded`, which a thread posts or `run_short` returns."""

    def __init__(self, inbox: Inbox, activity: Activity, clock: Callable[[], float] = time.monotonic) -> None:
        self._inbox = inbox
        self._activity = activity
        self._clock = clock
        self._launch_thread = WorkerThread("launch")
        self._read_thread = WorkerThread("read")
        self._staging = Staging()
        #: The dispatch that the loop executes itself, and its device.
        self.short: tuple[Dispatch, Device] | None = None
        self.bans = LoopBans()

    def start(self, dispatch: Dispatch, device: Device, *, depth: int, contended: bool) -> None:
        """Start an execution on a thread. A short execution is left to the loop, which calls `run_short`.

        `contended`: True if other work may occupy the device. The loop must not wait for such work.
        """
        if depth > 1:
            self._launch_thread.put(partial(self._launch, dispatch, device))
        elif (
            dispatch.execute.seconds <= _SHORT_S
            and not contended
            and not (self.bans.until and self.bans.banned(dispatch.model.key, self._clock()))
        ):
            self.short = dispatch, device
        else:
            self._launch_thread.put(partial(self._execute_and_post, dispatch, device))

    def run_short(self) -> ExecutionEnded:
        """Execute the loop's own dispatch."""
        assert self.short is not None
        (dispatch, device), self.short = self.short, None
        started = self._clock()
        ended = self._execute(dispatch, device, self._activity.short)
        now = self._clock()
        if self.bans.executed(dispatch.model.key, now - started, now):
            log.warning(
                "%s: slow executions took more than %.0f ms within %.0f s, although each was expected to take less than 1 ms. A "
                "separate thread executes the model for the next %.0f s. Either the model's cost depends on its inputs, or the CPUs "
                "are overloaded",
                dispatch.model.key,
                1e3 * BLOCKED_S,
                WINDOW_S,
                BAN_S,
                extra=about(dispatch.model),
            )
        return ended

    def forget(self, model: str) -> None:
        """Drop the records of a removed model, and free the idle blocks of memory."""
        self._staging.clear()
        self.bans.forget(model)

    # --- on the loop or a thread --------------------------------------------------------------------------

    def _execute(self, dispatch: Dispatch, device: Device, slot: ActivitySlot) -> ExecutionEnded:
        """Execute from the inputs to the outputs."""
        _begin(slot, dispatch)
        try:
            return ExecutionEnded(
                dispatch, finish(launch(dispatch, device, self._staging), device, self._staging)
            )
        except Exception as error:  # noqa: BLE001 - logged by _failed
            return _failed(dispatch, error)
        finally:
            slot.end()

    def _execute_and_post(self, dispatch: Dispatch, device: Device) -> None:
        self._inbox.post(self._execute(dispatch, device, self._activity.launch))

    def _launch(self, dispatch: Dispatch, device: Device) -> None:
        """Launch an execution, and pass it to the reading thread.

        The reading thread also reports an execution whose launch failed, so that executions end in order.
        """
        slot = self._activity.launch
        number = _begin(slot, dispatch)
        flight: Flight | ExecutionEnded
        try:
            flight = launch(dispatch, device, self._staging)
        except Exception as error:  # noqa: BLE001 - logged by _failed
            flight = _failed(dispatch, error)
        slot.end()
        self._read_thread.put(partial(self._read, flight, device, number))

    def _read(self, flight: Flight | ExecutionEnded, device: Device, number: int) -> None:
        dispatch, slot = flight.dispatch, self._activity.read
        _begin(slot, dispatch, number)
        if isinstance(flight, Flight):
            try:
                ended = ExecutionEnded(dispatch, finish(flight, device, self._staging))
            except Exception as error:  # noqa: BLE001 - logged by _failed
                ended = _failed(dispatch, error)
        else:
            ended = flight
        slot.end()
        self._inbox.post(ended)


def _begin(slot: ActivitySlot, dispatch: Dispatch, number: int = 0) -> int:
    """Begin the task of an execution on the calling thread. Return the task's number.

    `number`: number of the task if another thread has begun it. 0: the task is new.
    """
    key, execute = dispatch.model.key, dispatch.execute
    return slot.begin(Phase.EXECUTING, key, execute.size, execute.seconds, number, alone=execute.exclusive)


def _failed(dispatch: Dispatch, error: Exception) -> ExecutionEnded:
    """Log the error of an execution, and return the failed execution. Call this while the error is handled.

    The result contains only the error's text, because a stored exception would keep the execution's tensors.
    """
    size = dispatch.execute.size
    if isinstance(error, OutOfMemory):
        log.warning(
            "%s: no memory on the device for an execution of %d rows: %s",
            dispatch.model.key,
            size,
            str(error),
            extra=about(dispatch.model, rows=size),
        )
        return ExecutionEnded(dispatch, 0.0, str(error), out_of_memory=True)
    log.exception("%s: execution failed", dispatch.model.key, extra=about(dispatch.model, rows=size))
    return ExecutionEnded(dispatch, 0.0, f"{type(error).__name__}: {error}")

"""The executor: carries out `Execute` instructions, on the loop or on threads of its own.

With a depth of 1, an execution that is shorter than handing it over would be is the loop's own, and any
other has one thread to itself from its inputs to its outputs. With a larger depth there are two threads:
one gathers and launches the next execution while the device is busy with the one before, whose outputs the
other one reads and scatters while the device is busy with the next.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rsrv.runtime.activity import Activity, ActivitySlot, Phase
from rsrv.runtime.device import Device, OutOfMemory
from rsrv.runtime.execution import Flight, Job, Staging, finish, launch
from rsrv.runtime.models import about
from rsrv.runtime.workers import Inbox, Worker

log = logging.getLogger("rsrv.executor")

#: seconds of wall time above which an execution on the loop is slow: forty times what the loop expects at most
SLOW_S = 0.02
#: seconds that a model's slow executions may take together within WINDOW_S seconds; more ban it for BAN_S seconds
BLOCKED_S = 0.1
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Bans of models from the loop: their executions there took far longer than predicted.

    Some models' costs depend on their inputs, and while the loop executes, it notices no deadline, cancellation or arrival.
    But a descheduled CPU makes any single execution slow. So what counts is for how long a model's slow executions blocked
    the loop recently: one that takes a tenth of a second is evidence enough, one of 30 ms is not. And a ban expires.
    Times are in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        #: bans since the start, of all models
        self.count = 0
        #: by the model's key: when its latest slow executions ended, and how long they took; and when its ban ends
        self._slow: dict[str, deque[tuple[float, float]]] = {}
        self._until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self._until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Note an execution on the loop; return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque())
        slow.append((now, seconds))
        while now - slow[0][0] > WINDOW_S:
            slow.popleft()
        if sum(took for _, took in slow) < BLOCKED_S:
            return False
        del self._slow[model]
        self._until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self._until.pop(model, None)


#: seconds of expected execution below which the loop executes by itself: handing over to a thread and back
#: costs about 0.1 ms, and reading sockets that much later does no harm
_SHORT = 0.0005


class Failure(NamedTuple):
    """Why an execution failed."""

    error: str
    #: whether another try may succeed when there is more room
    out_of_memory: bool = False


class Executor:
    """`executed(job, seconds, failure)` is called on the loop, once per job, in the order of the launches."""

    def __init__(
        self,
        inbox: Inbox,
        executed: Callable[[Job, float, Failure | None], None],
        activity: Activity,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._executed = executed
        self._activity = activity
        self._clock = clock
        self._launcher = Worker("launch")
        self._reader = Worker("read")
        self._staging = Staging()
        #: a job that is the loop's own, and, when it has run, the message that it ended in
        self._short: tuple[Job, Device, float] | None = None
        self._ended: Callable[[], None] | None = None
        self.bans = LoopBans()

    def start(self, job: Job, device: Device, *, seconds: float, depth: int, contended: bool) -> None:
        """`seconds`: expected; `contended`: somebody else uses the device, so that the loop must not wait for it."""
        if depth > 1:
            self._launcher.put(lambda: self._launch(job, device, seconds))
        elif seconds <= _SHORT and not contended and not self.bans.banned(job.model.key, self._clock()):
            self._short = job, device, seconds
        else:
            slot = self._activity.launch
            self._launcher.put(lambda: self._inbox.post(self._execute(job, device, seconds, slot)))

    def forget(self, model: str) -> None:
        """A model is gone, and nothing of it executes."""
        self._staging.clear()
        self.bans.forget(model)

    # --- on the loop --------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether the loop has an execution of its own, or is to hear how that ended."""
        return self._short is not None or self._ended is not None

    def run_short(self) -> Job | None:
        """Execute the loop's own job, if there is one; how it ended is for `tell`."""
        if self._short is None:
            return None
        (job, device, seconds), self._short = self._short, None
        started = self._clock()
        self._ended = self._execute(job, device, seconds, self._activity.short)
        now = self._clock()
        if self.bans.executed(job.model.key, now - started, now):
            log.warning(
                "%s: slow executions took more than %.0f ms within %.0f s, though less than 1 ms was expected of each. A thread "
                "executes the model for the next %.0f s. Either its cost depends on its inputs, or the CPUs are overloaded",
                job.model.key,
                1e3 * BLOCKED_S,
                WINDOW_S,
                BAN_S,
                extra=about(job.model),
            )
        return job

    def tell(self) -> bool:
        """Call `executed` for the loop's own job, if it has run; whether it had."""
        if self._ended is None:
            return False
        ended, self._ended = self._ended, None
        ended()
        return True

    # --- on whichever thread ------------------------------------------------------------------------------

    def _execute(self, job: Job, device: Device, seconds: float, slot: ActivitySlot) -> Callable[[], None]:
        """From the inputs to the outputs; returns what the loop is to do about it."""
        slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds)
        ended = self._end(job, device, self._begin(job, device))
        slot.end()
        return ended

    def _launch(self, job: Job, device: Device, seconds: float) -> None:
        """On the launching thread: the reading one does the rest, even of failures, so that jobs end in order."""
        slot = self._activity.launch
        number = slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds)
        flight = self._begin(job, device)
        slot.end()
        self._reader.put(lambda: self._read(job, device, flight, seconds, number))

    def _read(self, job: Job, device: Device, flight: Flight | Failure, seconds: float, number: int) -> None:
        slot = self._activity.read
        slot.begin(Phase.EXECUTING, job.model.key, job.size, seconds, number)
        ended = self._end(job, device, flight)
        slot.end()
        self._inbox.post(ended)

    def _begin(self, job: Job, device: Device) -> Flight | Failure:
        try:
            return launch(job, device, self._staging)
        except Exception as error:  # noqa: BLE001 - logged by _failure
            return _failure(job, error)

    def _end(self, job: Job, device: Device, flight: Flight | Failure) -> Callable[[], None]:
        seconds, failure = 0.0, None
        if isinstance(flight, Failure):
            failure = flight
        else:
            try:
                seconds = finish(flight, device, self._staging)
            except Exception as error:  # noqa: BLE001 - logged by _failure
                failure = _failure(job, error)
        return lambda: self._executed(job, seconds, failure)


def _failure(job: Job, error: Exception) -> Failure:
    """To be called while the error is handled."""
    if isinstance(error, OutOfMemory):
        # As text: whoever keeps the record would with the error keep the execution's tensors, just now.
        why = str(error)
        log.warning(
            "%s: no memory on the device for an execution of %d rows: %s",
            job.model.key,
            job.size,
            why,
            extra=about(job.model, rows=job.size),
        )
        return Failure(str(error), out_of_memory=True)
    log.exception("%s: execution failed", job.model.key, extra=about(job.model, rows=job.size))
    return Failure(f"{type(error).__name__}: {error}")

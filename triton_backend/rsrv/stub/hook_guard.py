"""Guards against hooks that go wrong, so that they harm no other model.

A hook that hangs: A thread that executes a hook records this in a slot, and clears the slot afterwards. A request has no
other costs. The watching thread checks the slots ten times per timeout. It counts in how many consecutive checks a thread
was in the same interval of a hook. It counts checks and not seconds, because a hook is not to blame for the time in which its
process was stopped or got no processor. Python cannot end a thread, so the process ends after all requests are answered
(`DrainAndExit`). A hook that holds the interpreter's lock prevents even that. Then the backstop, a thread in C, ends the
process without answers. Each check postpones the backstop while there are hooks to check.

A hook that allocates without bound: It gets MemoryError, and its request fails. If its memory is not freed, the
process ends.

A hook that keeps all file descriptors: Its request fails, and the process ends, because it could not reach a runtime again.

A hook that forks: The child must not answer requests, and must not keep the runtime from seeing the end of this process.
"""

import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import count
from types import FrameType, TracebackType
from typing import Any, ClassVar, Protocol

from rsrv import logs
from rsrv.limits import can_have, lift_limit, limit_private_bytes, stack_bytes, total_memory
from rsrv.logs import fields, request_name
from rsrv.stub.replies import Responses
from rsrv.wire.frames import Status
from rsrv.wire.socket import lacks_descriptors, may_open

log = logging.getLogger(__name__)

#: Number of checks per timeout.
CHECKS = 10
#: Shortest time between two checks, in seconds.
_MIN_CHECK_PERIOD_S = 0.01
#: If there was no check for this many timeouts, the backstop ends the process.
BACKSTOP_TIMEOUTS = 2.0
#: Share of the hooks' memory that must be free again after a hook got MemoryError.
_MIN_FREE_SHARE = 1 / 8

#: Descriptors that a stub needs to reach a runtime.
FREE_DESCRIPTORS = 8
#: Text for clients of a process whose hooks keep all descriptors.
KEPT_DESCRIPTORS = (
    "the model's hooks keep so many files open that their process has reached its limit (ulimit -n); the model is being "
    "restarted"
)

#: Number of threads of rsrv that may start at any time: for example the threads that watch hooks, write the log, and connect to
#: a runtime, and the thread of the backstop.
_MORE_THREADS = 5
#: Seconds that a draining process may take to answer all requests.
_DRAIN_S = 5.0
#: Seconds that the interpreter's exit may take after the model was unloaded.
_EXIT_S = 5.0


class Backstop(Protocol):
    """Ends the process unless it is postponed in time, even if the process does nothing else."""

    def put_off(self, seconds: float) -> None: ...

    def cancel(self) -> None: ...


#: Guards the end times of the process's backstop, and the flags that say whether a guard has armed it.
_backstop_lock = threading.RLock()


class Faulthandler:
    """A thread in C that writes all stacks to the server's log and ends the process, without the interpreter's lock.

    The guard of hooks and each import of `model.py` have an instance. The process has one such thread, which acts at the
    earliest end time of all instances.
    """

    #: End time of each instance, by time.monotonic.
    _ends: ClassVar[dict["Faulthandler", float]] = {}

    def put_off(self, seconds: float) -> None:
        with _backstop_lock:
            self._ends[self] = time.monotonic() + seconds
            self._set()

    def cancel(self) -> None:
        with _backstop_lock:
            if self._ends.pop(self, None) is not None:
                self._set()

    def _set(self) -> None:
        if not self._ends:
            faulthandler.cancel_dump_traceback_later()
            return
        left = max(_MIN_CHECK_PERIOD_S, min(self._ends.values()) - time.monotonic())
        with suppress(RuntimeError):  # A hook has left no memory for the thread.
            faulthandler.dump_traceback_later(left, exit=True, file=2)


class DrainAndExit:
    """Ends a stub's process that cannot continue, after all its requests are answered.

    When a stub's process ends, Triton answers only the requests that are inside execute(). So the other requests must be
    answered first. After the end, the control process loads the model again. `stop` refuses further requests, and `leave` ends
    the process.
    """

    def __init__(
        self,
        stop: Callable[[], object],
        responses: Responses,
        leave: Callable[[int], object] = os._exit,
        backstop: Backstop | None = None,
    ) -> None:
        self._stop = stop
        self._responses = responses
        self._leave = leave
        self._backstop = backstop or Faulthandler()
        #: Counts the calls. Two threads never get the same number.
        self._calls = count(1)

    def __call__(self, text: str) -> None:
        """Answer all requests with INTERNAL and this text, and end the process. Only the first call has an effect."""
        if next(self._calls) > 1:
            return
        lift_limit()  # Lack of memory may be the reason.
        self._backstop.put_off(_DRAIN_S)
        try:
            self._stop()
            while not self._responses.settled:
                for reply in self._responses.owed():
                    reply.send_failure(Status.INTERNAL, text)
        except Exception:
            log.exception("the process ends, and its waiting requests could not be answered")
        finally:
            log.critical("this process ends: %s", text)
            self._leave(1)


def bound_exit(leave: Callable[[int], object] = os._exit, backstop: Backstop | None = None) -> None:
    """Limit the duration of the interpreter's exit, which begins after this call.

    The exit calls the exit handlers of model.py, and joins the threads of executors and of the module `threading`. Triton waits
    for the exit without a limit. So if a handler or a thread never ended, the process and its memory would stay forever.
    """
    lift_limit()
    # Arm the backstop as well, because the thread below cannot run while other code holds the interpreter's lock.
    (backstop or Faulthandler()).put_off(_EXIT_S + 1)

    def end() -> None:
        time.sleep(_EXIT_S)
        log.warning(
            "the model was unloaded %g s ago, and exit handlers or threads of its model.py still run. This process ends now, "
            "and they end with it. All threads:",
            _EXIT_S,
        )
        logs.flush()
        faulthandler.dump_traceback(file=2)
        leave(0)

    with suppress(RuntimeError):  # A hook has left no memory for the thread.
        threading.Thread(target=end, name="exit", daemon=True).start()


@dataclass(slots=True, eq=False)
class HookInterval:
    """A part of a hook's execution without a sub-call. A meta model's run has one before, between and after its sub-calls."""

    hook: str
    #: The client's id of the hook's request.
    request: str


#: For each thread, its interval at the last check, and the number of consecutive checks that found this interval.
Seen = Mapping[int, tuple[HookInterval, int]]


def check(before: Seen, now: Mapping[int, HookInterval | None]) -> Seen:
    """Add one check to `before`, and return the result. `now` has each thread's present interval."""
    seen = {}
    for thread, interval in now.items():
        if interval is not None:
            last, checks = before.get(thread, (None, 0))
            seen[thread] = (interval, checks + 1 if last is interval else 1)
    return seen


def find_hung(seen: Seen) -> tuple[int, HookInterval] | None:
    """Return a thread whose hook has taken longer than the timeout, with its interval, or None."""
    for thread, (interval, checks) in seen.items():
        if checks > CHECKS:  # The whole timeout lies between the first and the last check.
            return thread, interval
    return None


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or None if the thread has ended."""
    # In CPython before 3.12, a garbage collection inside the call would wait for a lock that the call itself holds.
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if enabled:
            gc.enable()


class HookGuard:
    """The guard of one process. Until `start` or `watch`, it only records which thread is in which hook."""

    def __init__(self, backstop: Backstop | None = None) -> None:
        #: Present interval of each thread, or None if the thread is not in a hook or waits inside a hook.
        self._intervals: dict[int, HookInterval | None] = {}
        self._end: Callable[[str], object] = lambda text: None
        self._closed = threading.Event()
        #: True if this process is a fork that a hook made.
        self._forked = False
        #: Bytes that hooks may take, or 0 without a limit.
        self._allowance = 0
        self._timeout = 0.0
        self._backstop = backstop or Faulthandler()
        #: True if the backstop runs or is not needed.
        self._armed = True
        #: True if a hook has started since the last check.
        self._used = False

    # --- executing hooks ----------------------------------------------------------------------------------

    def within(self, hook: str, request: str) -> "_SlotContext":
        """Return a context in which this thread executes a hook."""
        return _SlotContext(self, HookInterval(hook, request))

    def waiting(self) -> "_SlotContext":
        """Return a context in which this thread waits, inside a hook, for work that is not the hook's."""
        return _SlotContext(self, None)

    def out_of_memory(self, error: BaseException) -> None:
        """Free the memory of a hook that got MemoryError, and end the process if that does not suffice."""
        traceback.clear_frames(error.__traceback__)
        if self._allowance and not can_have(int(_MIN_FREE_SHARE * self._allowance)):
            self._end(
                "the model's hooks keep nearly all the memory that they are allowed to use; the model is being restarted"
            )

    def out_of_descriptors(self, error: BaseException) -> bool:
        """Return True if the cause of `error` is a lack of file descriptors. End the process if hooks keep the descriptors."""
        if not lacks_descriptors(error):
            return False
        traceback.clear_frames(error.__traceback__)
        if not may_open(FREE_DESCRIPTORS):
            self._end(KEPT_DESCRIPTORS)
        return True

    # --- limits of hooks ----------------------------------------------------------------------------------

    def start(self, settings: Mapping[str, Any], threads: int, end: Callable[[str], object]) -> None:
        """Limit the memory of this process, and the duration of its hooks if the settings limit it.

        `settings` is the section `stub`; `threads` is the number of other threads that may still start; `end` ends the
        process.
        """
        self._end = end
        self._allowance = settings["memory_limit_bytes"] or total_memory() // 2
        limit_private_bytes(self._allowance + (threads + _MORE_THREADS) * stack_bytes())

        def forked() -> None:
            self._forked = True

        os.register_at_fork(after_in_child=forked)
        if settings["hook_timeout_s"] is not None:
            self.watch(settings["hook_timeout_s"], end)

    def watch(self, timeout: float, end: Callable[[str], object]) -> None:
        """Call `end` if a hook takes longer than `timeout` seconds."""
        self._timeout, self._end = timeout, end
        self._armed = False
        threading.Thread(target=self._watch, name="hooks", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with _backstop_lock:
            self._armed = True
            self._backstop.cancel()

    # --- the watching thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen: Seen = {}
        while not self._closed.wait(max(self._timeout / CHECKS, _MIN_CHECK_PERIOD_S)):
            seen = check(seen, dict(self._intervals))
            self._put_off(idle=not seen)
            hung = find_hung(seen)
            if hung is not None:
                self._end_hung(*hung)
                return

    def _end_hung(self, thread: int, interval: HookInterval) -> None:
        frame = frame_of(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"
        del frame
        log.error(
            "%s: model.py: %s has not returned for %g s (stub.hook_timeout_s). It is here:\n%s",
            request_name(interval.request),
            interval.hook,
            self._timeout,
            stack,
            extra=fields(request=interval.request, hook=interval.hook),
        )
        self._end(f"the model's {interval.hook} hook hangs; the model is being restarted")

    def _put_off(self, *, idle: bool) -> None:
        with _backstop_lock:
            self._armed = False  # From here on, a thread that starts a hook arms the backstop.
            used, self._used = self._used, False
            if used or not idle:
                self._arm()
            else:
                # A process that is stopped while it is idle must not end when it continues.
                self._backstop.cancel()

    def _arm(self) -> None:
        if not self._closed.is_set():
            self._backstop.put_off(BACKSTOP_TIMEOUTS * self._timeout)
        self._armed = True


class _SlotContext(AbstractContextManager[None]):
    """Sets the slot of a thread. A generator with contextlib costs four times as much."""

    __slots__ = ("_before", "_guard", "_interval", "_thread")

    def __init__(self, guard: HookGuard, interval: HookInterval | None) -> None:
        self._guard = guard
        self._interval = interval

    def __enter__(self) -> None:
        guard = self._guard
        self._thread = thread = threading.get_ident()
        self._before = guard._intervals.get(thread)
        guard._intervals[thread] = self._interval
        guard._used = True
        if not guard._armed:
            with _backstop_lock:
                guard._arm()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard._forked:
            # This process is a fork of the stub, and it has returned from the hook. It must not continue as the stub.
            os._exit(1)
        before = self._before
        # If this context was inside a hook, a new interval of that hook begins now.
        self._guard._intervals[self._thread] = before and HookInterval(before.hook, before.request)

"""Hooks that go wrong: what keeps them from hurting anybody but their own model.

A hook that hangs. Whoever executes one notes it in a slot of its thread and clears it after, which is all that a request
pays. One thread looks at the slots ten times per timeout, and counts in how many looks in a row a thread was in the
same interval of a hook. Looks are counted, not seconds: a process that was stopped, or got no processor, is not blamed
for the time that it did not have. Python's threads cannot be ended, so the process is, after all have been answered
(`DrainAndExit`). A hook that holds the interpreter's lock keeps even that from happening: then a thread of C's, which is put
off at each look while there are hooks to look at, ends the process without a word to anybody.

A hook that allocates without bound. It gets MemoryError, and its request fails. If its memory does not come back, the
process ends.

A hook that forks. The child must neither answer requests nor keep the runtime from seeing the end of this process.
"""

import faulthandler
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from rsrv.logs import fields
from rsrv.stub.memory_limits import can_have, lift_limit, limit_private_bytes, stack_bytes, total_memory
from rsrv.stub.replies import Responses
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: looks per timeout
LOOKS = 10
#: seconds between two looks, at least
_SHORTEST = 0.01
#: timeouts after which a process ends that nobody looks after
_BACKSTOP = 2.0
#: share of the memory that hooks may have which must be there again when one has failed for want of it
_FREE = 1 / 8

#: threads that may start at any time: the one here, the backstop's, the log's, one that looks for a runtime
_MORE_THREADS = 5
#: seconds that a process which ends may take to answer all requests
_DRAIN_S = 5.0


class Backstop(Protocol):
    """Ends the process unless it is put off in time, whatever else the process does."""

    def put_off(self, seconds: float) -> None: ...

    def cancel(self) -> None: ...


class Faulthandler:
    """A thread of C's, which writes all stacks to the server's log first. It takes no lock of the interpreter's."""

    def put_off(self, seconds: float) -> None:
        with suppress(RuntimeError):  # a hook has taken the memory for the thread
            faulthandler.dump_traceback_later(seconds, exit=True, file=2)

    def cancel(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class DrainAndExit:
    """The end of a stub's process that cannot go on, after all its requests are answered.

    Triton never answers the requests of a process that has ended, but for those inside execute(). So they are answered
    first. The control process loads a model without a process again.

    `stop` keeps further requests away, `leave` ends the process.
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
        self._said = threading.Lock()

    def __call__(self, text: str) -> None:
        """Answer all that wait with INTERNAL and this text, and end. Of several threads the first one does it."""
        if not self._said.acquire(blocking=False):
            return
        lift_limit()  # it may be for want of memory
        self._backstop.put_off(_DRAIN_S)
        try:
            # What comes from now on is told to come again.
            self._stop()
            while not self._responses.settled:
                for reply in self._responses.owed():
                    reply.send_failure(Status.INTERNAL, text)
        except Exception:
            log.exception("answering the requests of a process that ends")
        finally:
            log.critical("this process ends: %s", text)
            self._leave(1)


@dataclass(slots=True, eq=False)
class HookInterval:
    """A hook that executes without a break. A meta model's run that calls others has one before and after each call."""

    hook: str
    #: its request's id
    request: str


#: by thread: the interval that it was last seen in, and in how many looks in a row
Seen = Mapping[int, tuple[HookInterval, int]]


def look(before: Seen, now: Mapping[int, HookInterval | None]) -> Seen:
    """What is known after one more look at the threads."""
    seen = {}
    for thread, interval in now.items():
        if interval is not None:
            last, looks = before.get(thread, (None, 0))
            seen[thread] = (interval, looks + 1 if last is interval else 1)
    return seen


def find_hung(seen: Seen) -> tuple[int, HookInterval] | None:
    """A thread whose hook has taken longer than it may."""
    for thread, (interval, looks) in seen.items():
        if looks > LOOKS:  # between the first and the last one lies the whole timeout
            return thread, interval
    return None


class HookGuard:
    """Of one process. Only notes who is in which hook until it is told what hooks may do."""

    def __init__(self, backstop: Backstop | None = None) -> None:
        #: by thread, None between intervals
        self._intervals: dict[int, HookInterval | None] = {}
        self._end: Callable[[str], object] = lambda text: None
        self._closed = threading.Event()
        #: whether this is not the stub, but a copy of it that a hook made
        self._forked = False
        #: bytes that hooks may have; 0: no limit
        self._allowance = 0
        self._timeout = 0.0
        self._backstop = backstop or Faulthandler()
        self._lock = threading.Lock()
        #: whether the backstop stands ready, or need not; and whether a hook has started since the last look
        self._armed = True
        self._used = False

    # --- what executes hooks ------------------------------------------------------------------------------

    def within(self, hook: str, request: str) -> "_Turn":
        """`with` it, this thread executes a hook."""
        return _Turn(self, HookInterval(hook, request))

    def waiting(self) -> "_Turn":
        """`with` it, inside a hook, this thread waits for what is not the hook's fault."""
        return _Turn(self, None)

    def out_of_memory(self, error: BaseException) -> None:
        """A hook has got no memory: let go of what it had, and end the process if that does not help."""
        traceback.clear_frames(error.__traceback__)
        if self._allowance and not can_have(int(_FREE * self._allowance)):
            self._end("the model's hooks keep all memory that they may have; the model is being restarted")

    # --- what hooks may do --------------------------------------------------------------------------------

    def start(
        self,
        settings: Mapping[str, Any],
        threads: int,
        end: Callable[[str], object],
        in_fork: Callable[[], None],
    ) -> None:
        """Of this process, for as long as it lives.

        `settings` is the section `stub`; `threads` so many that are not hooks' may still start; `end` ends the
        process; `in_fork` is called in each copy of it.
        """
        self._end = end
        self._allowance = settings["memory_limit_bytes"] or total_memory() // 2
        limit_private_bytes(self._allowance + (threads + _MORE_THREADS) * stack_bytes())

        def forked() -> None:
            self._forked = True
            in_fork()

        os.register_at_fork(after_in_child=forked)
        if settings["hook_timeout_s"] is not None:
            self.watch(settings["hook_timeout_s"], end)

    def watch(self, timeout: float, end: Callable[[str], object]) -> None:
        """Have `end` called when a hook takes longer than `timeout` seconds."""
        self._timeout, self._end = timeout, end
        self._armed = False
        threading.Thread(target=self._watch, name="hooks", daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._armed = True
            self._backstop.cancel()

    # --- the watching thread ------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen: Seen = {}
        while not self._closed.wait(max(self._timeout / LOOKS, _SHORTEST)):
            seen = look(seen, dict(self._intervals))
            self._put_off(idle=not seen)
            hung = find_hung(seen)
            if hung is not None:
                self._tell(*hung)
                return

    def _tell(self, thread: int, interval: HookInterval) -> None:
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"
        del frame
        log.error(
            "request %r: model.py: %s has not returned for %g s (stub.hook_timeout_s). It is here:\n%s",
            interval.request,
            interval.hook,
            self._timeout,
            stack,
            extra=fields(request=interval.request, hook=interval.hook),
        )
        self._end(f"the model's {interval.hook} hook hangs; the model is being restarted")

    def _put_off(self, *, idle: bool) -> None:
        with self._lock:
            self._armed = False  # from here on, who starts a hook sees to the backstop
            used, self._used = self._used, False
            if used or not idle:
                self._arm()
            else:
                # So that a process that is stopped while it has nothing to do does not end when it goes on.
                self._backstop.cancel()

    def _arm(self) -> None:
        if not self._closed.is_set():
            self._backstop.put_off(_BACKSTOP * self._timeout)
        self._armed = True


class _Turn(AbstractContextManager[None]):
    """A class of its own: contextlib's way costs four times as much."""

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
            with guard._lock:
                guard._arm()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._guard._forked:
            # A copy of this process came back from the hook. It must not go on as if it were the stub.
            os._exit(1)
        before = self._before
        # The hook that this one interrupted starts anew.
        self._guard._intervals[self._thread] = before and HookInterval(before.hook, before.request)

"""Hooks that go wrong: what keeps them from hurting anybody but their own model.

A hook that hangs. Whoever executes one notes it in a slot of its thread and clears it after, which is all that a request
pays. One thread looks at the slots ten times per timeout, and counts in how many looks in a row a thread was in the
same stretch of a hook. Looks are counted, not seconds: a process that was stopped, or got no processor, is not blamed
for the time that it did not have. Python's threads cannot be ended, so the process is, after all have been answered
(`farewell`). A hook that holds the interpreter's lock keeps even that from happening: then a thread of C's, which is put
off at each look while there are hooks to look at, ends the process without a word to anybody.

A hook that allocates without bound. It gets MemoryError, and its request fails. If its memory does not come back, the
process ends.

A hook that forks. The child must neither answer requests nor keep the runtime from seeing the end of this process.
"""

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rsrv.logs import fields
from rsrv.stub.farewell import Backstop, Faulthandler
from rsrv.stub.memory_limits import can_have, limit_private_bytes, stack_bytes, total_memory

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


@dataclass(slots=True, eq=False)
class Stretch:
    """A hook that executes without a break. A meta model's run that calls others has one before and after each call."""

    hook: str
    #: its request's id
    request: str


#: by thread: the stretch that it was last seen in, and in how many looks in a row
Seen = Mapping[int, tuple[Stretch, int]]


def look(before: Seen, now: Mapping[int, Stretch | None]) -> Seen:
    """What is known after one more look at the threads."""
    seen = {}
    for thread, stretch in now.items():
        if stretch is not None:
            last, looks = before.get(thread, (None, 0))
            seen[thread] = (stretch, looks + 1 if last is stretch else 1)
    return seen


def find_hung(seen: Seen) -> tuple[int, Stretch] | None:
    """A thread whose hook has taken longer than it may."""
    for thread, (stretch, looks) in seen.items():
        if looks > LOOKS:  # between the first and the last one lies the whole timeout
            return thread, stretch
    return None


class HookGuard:
    """Of one process. Only notes who is in which hook until it is told what hooks may do."""

    def __init__(self, backstop: Backstop | None = None) -> None:
        #: by thread, None between stretches
        self._stretches: dict[int, Stretch | None] = {}
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
        return _Turn(self, Stretch(hook, request))

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
            seen = look(seen, dict(self._stretches))
            self._put_off(idle=not seen)
            hung = find_hung(seen)
            if hung is not None:
                self._tell(*hung)
                return

    def _tell(self, thread: int, stretch: Stretch) -> None:
        frame = sys._current_frames().get(thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(it has ended)"
        del frame
        log.error(
            "request %r: model.py: %s has not returned for %g s (stub.hook_timeout_s). It is here:\n%s",
            stretch.request,
            stretch.hook,
            self._timeout,
            stack,
            extra=fields(request=stretch.request, hook=stretch.hook),
        )
        self._end(f"the model's {stretch.hook} hook hangs; the model is being restarted")

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

    __slots__ = ("_before", "_guard", "_stretch", "_thread")

    def __init__(self, guard: HookGuard, stretch: Stretch | None) -> None:
        self._guard = guard
        self._stretch = stretch

    def __enter__(self) -> None:
        guard = self._guard
        self._thread = thread = threading.get_ident()
        self._before = guard._stretches.get(thread)
        guard._stretches[thread] = self._stretch
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
        self._guard._stretches[self._thread] = before and Stretch(before.hook, before.request)

"""Threads for work that blocks, and the inbox through which their results reach the loop."""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)

#: Increment of the niceness of threads whose work may wait. Such a thread gets a tenth of the time of a competing thread.
_NICER = 10


class Inbox:
    """Messages to the loop. Any thread may post a message. This wakes the loop's epoll, and the loop drains the inbox.

    A message is a value that describes what has ended (`loop.Loop._take` handles all kinds), or an action to call.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._messages: deque[Any] = deque()

    def post(self, message: object) -> None:
        self._messages.append(message)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[Any]:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages


class WorkerThread:
    """A thread that runs actions in order. An action must handle its own errors, because an unhandled error ends the process.

    A thread that died silently would leave requests unanswered forever. But every stub notices the end of the process at once,
    and the stubs start another runtime.
    """

    def __init__(self, name: str) -> None:
        self._actions: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.put = self._actions.put
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            action = self._actions.get()
            try:
                action()
            except BaseException:
                log.critical("thread %s failed; the runtime ends", self._thread.name, exc_info=True)
                os._exit(70)
            del action  # The action's tensors must not live until the next action arrives.


def lower_priority() -> None:
    """Lower the priority of the calling thread, and of the threads and processes that it starts later."""
    own = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + _NICER))

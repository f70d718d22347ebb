"""Threads for what waits: the device, and the preparing of models. They take work and end it in a message."""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("rsrv.workers")


class Inbox:
    """Messages from threads to the loop: any thread posts, the loop's selector wakes and drains."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._messages: deque[Callable[[], None]] = deque()

    def post(self, message: Callable[[], None]) -> None:
        """Have the loop call `message`."""
        self._messages.append(message)
        os.eventfd_write(self.fd, 1)

    def drain(self) -> list[Callable[[], None]]:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return []
        messages = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages


class Worker:
    """One thread that runs jobs in order. A job handles its own errors; one that does not ends the process.

    A thread that died silently would leave requests unanswered for ever; the process's death is noticed
    by every stub at once, and they start another.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], Any]) -> None:
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except BaseException:
                log.critical("thread %s failed; the runtime ends", self._thread.name, exc_info=True)
                os._exit(70)
            del job  # its tensors must not live until the next one comes

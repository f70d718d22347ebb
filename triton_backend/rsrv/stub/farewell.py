"""The end of a stub's process that cannot go on: nobody is left without an answer.

Triton never answers the requests of a process that has ended, but for those inside execute(). So they are answered
first. A model without a process is loaded anew by the control process.
"""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from rsrv.stub.memory_limits import lift_limit
from rsrv.stub.replies import Responses
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: seconds that answering everybody may take
_LAST_WORDS = 5.0


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


class Farewell:
    """`stop` keeps further requests away, `leave` ends the process."""

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
        self._backstop.put_off(_LAST_WORDS)
        try:
            # What comes from now on is told to come again.
            self._stop()
            while not self._responses.settled:
                for reply in self._responses.owed():
                    reply.send_failure(Status.INTERNAL, text)
        except Exception:
            log.exception("saying farewell")
        finally:
            log.critical("this process ends: %s", text)
            self._leave(1)

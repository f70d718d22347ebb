"""Requests that end without an answer, in the log, with the ids that their clients gave them."""

import logging
import threading
import time
from collections.abc import Callable

from rsrv.logs import TEXT, fields, shorten
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: seconds between two lines about requests that end in the same way
_EVERY = 1.0
#: not a matter of the server's
_THEIRS = (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED)


class Complaints:
    """For any thread. Each failure of ours has a line.

    Others come in crowds, and to turn one away must stay cheap: of those that end in the same way one a second has a
    line, with how many had none since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: by status: when its last line was, and those without one since
        self._said: dict[Status, tuple[float, int]] = {}

    def ended(self, status: Status, text: str, request: str) -> None:
        """`text`: what the client is told. `request`: its id as `id_of` has it, or ""."""
        if status is Status.INTERNAL:
            log.error(
                "request %r failed: %s",
                request,
                shorten(text, TEXT),
                extra=fields(request=request, status="INTERNAL"),
            )
            return
        now = self._clock()
        with self._lock:
            said, unsaid = self._said.get(status, (-_EVERY, 0))
            due = now - said >= _EVERY
            self._said[status] = (now, 0) if due else (said, unsaid + 1)
        if due:
            log.log(
                logging.INFO if status in _THEIRS else logging.WARNING,
                "request %r: %s: %s%s",
                request,
                status.name,
                shorten(text, TEXT),
                f" ({unsaid} more since the last such line)" if unsaid else "",
                extra=fields(request=request, status=status.name, more=unsaid),
            )

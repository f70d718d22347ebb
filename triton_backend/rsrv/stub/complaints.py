"""Requests that end without an answer, in the log, with the ids that their clients gave them."""

import logging
import time
from collections.abc import Callable

from rsrv.logs import TEXT, fields, of_request, shorten
from rsrv.throttle import Throttle, more
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: not a matter of the server's
_THEIRS = (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED)


class Complaints:
    """For any thread. A failure of ours has a line, as far as `LineLimit` admits it.

    Others come in crowds, and to turn one away must stay cheap: of those that end in the same way one a second has a
    line, with how many had none since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._throttle = Throttle(clock=clock)

    def ended(self, status: Status, text: str, request: str) -> None:
        """`text`: what the client is told. `request`: its id as `Request` has it, or ""."""
        if status is Status.INTERNAL:
            log.error(
                "request %r failed: %s",
                request,
                shorten(text, TEXT),
                extra=of_request(request, status="INTERNAL"),
            )
            return
        left_out = self._throttle.take(status)
        if left_out is not None:
            log.log(
                logging.INFO if status in _THEIRS else logging.WARNING,
                "request %r: %s: %s%s",
                request,
                status.name,
                shorten(text, TEXT),
                more(left_out),
                extra=fields(request=request, status=status.name, more=left_out),
            )

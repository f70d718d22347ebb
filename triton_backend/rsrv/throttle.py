"""Throttling of log lines that clients can cause at any rate: a few of a kind, and counts of those left out."""

import logging
import threading
import time
from collections.abc import Callable, Hashable

#: End of a line that stands for several suppressed lines of the same kind.
MORE = " (%u more since the last such line)"
#: loggers of the libraries that read what clients send
_LIBRARIES = frozenset({"aiohttp", "asyncio", "grpc"})
#: module of the errors of requests that are not HTTP: aiohttp logs a traceback for each of them
_NOT_HTTP = "aiohttp.http_exceptions"
#: characters of such an error's text
_MAX_TEXT = 200
#: lines about single requests, with the same message, that may be written at once
_BURST = 5


class Throttle:
    """A budget of lines for each kind: `burst` at once, and one more each second. Any thread."""

    def __init__(self, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        #: by kind: lines that may be written at a time, that time, and the lines left out since the last one
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """Return the number of lines of this kind left out since the last one, or None if this line is left out, too.

        There must be few kinds: each is remembered.
        """
        now = self._clock()
        with self._lock:
            budget, then, left_out = self._kinds.get(kind, (self._burst, now, 0))
            budget = min(self._burst, budget + now - then)
            if budget < 1:
                self._kinds[kind] = budget, now, left_out + 1
                return None
            self._kinds[kind] = budget - 1, now, 0
            return left_out


def more(left_out: int) -> str:
    """Return the end of a line before which `left_out` of the same kind were left out."""
    return MORE % left_out if left_out else ""


class LineLimit(logging.Filter):
    """Limits the lines that clients cause, so that none of them can fill the disk; passes all others.

    Such lines are about single requests (`logs.of_request`), limited by message, or come from libraries, limited by
    logger and class of exception. A request that is not HTTP costs no traceback.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._requests, self._libraries = Throttle(_BURST, clock), Throttle(clock=clock)

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "of_request", False):
            left_out = self._requests.take((record.name, record.msg))
        elif record.name.partition(".")[0] in _LIBRARIES:
            kind, error = record.exc_info[:2] if record.exc_info else (None, None)
            if kind is not None and kind.__module__ == _NOT_HTTP:
                kind = None
                text = " ".join(str(error).split())[:_MAX_TEXT]
                record.msg, record.args = f"{record.getMessage()}: {text}", None
                record.exc_info = record.exc_text = None
            left_out = self._libraries.take((record.name, kind or record.levelno))
        else:
            return True
        if left_out:
            record.msg, record.args = record.getMessage() + more(left_out), None
            record.__dict__["fields"] = {**record.__dict__.get("fields", {}), "more": left_out}
        return left_out is not None

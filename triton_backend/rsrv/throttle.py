"""Throttling of log lines that clients can cause at any rate. A few lines of each kind are written; others are counted."""

import logging
import threading
import time
from collections.abc import Callable, Hashable

#: End of a line that stands for several suppressed lines of the same kind.
MORE = " (%u more since the last such line)"
#: Loggers of the libraries that read data from clients.
_LIBRARIES = frozenset({"aiohttp", "asyncio", "grpc"})
#: Module of the errors about requests that are not HTTP. aiohttp logs a traceback for each such request.
_NOT_HTTP = "aiohttp.http_exceptions"
#: Maximum number of characters of the text of an error about a request that is not HTTP.
_MAX_TEXT = 200
#: Size of a burst: this many lines with the same message, each about one request, may be written at once.
_BURST = 5


class Throttle:
    """A budget of lines for each kind: `burst` lines at once, and one more each second. Thread-safe."""

    def __init__(self, burst: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        #: For each kind: the number of lines that could be written after the latest call of `take`, the time of that call, and
        #: the number of lines left out since the last written line.
        self._kinds: dict[Hashable, tuple[float, float, int]] = {}

    def take(self, kind: Hashable) -> int | None:
        """Return None if this line must be left out. Otherwise, return the number of lines of the kind left out before it.

        There must be few kinds, because each is remembered.
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
    """Return the end of a line. It reports that `left_out` lines of the same kind were left out before this line."""
    return MORE % left_out if left_out else ""


class LineLimit(logging.Filter):
    """Limits the lines that clients cause, so that no client can fill the disk. All other lines pass.

    Lines about single requests (`logs.of_request`) are limited by message. Lines of libraries are limited by logger and class
    of exception. A request that is not HTTP gets no traceback.
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

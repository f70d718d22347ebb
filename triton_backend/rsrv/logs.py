"""Log lines: text for people, or a JSON object per line for programs. Lines have numbers and names, never tensors.

Every process of rsrv writes to its stderr, which is the log of tritonserver or of `rsrv serve`.
"""

import json
import logging
import math
import os
import re
import select
import sys
import threading
import time
from collections import deque
from copy import copy
from typing import Any, Literal

from rsrv.throttle import LineLimit

Format = Literal["human", "json"]

_NAME = "rsrv"
#: Words for a request whose client has given it no id.
NAMELESS = "a request without an id"
#: Maximum number of lines that wait for a blocked log.
_MAX_WAITING = 1000
#: `flush` waits for at most this many seconds.
_FLUSH_TIMEOUT_S = 2.0
#: Maximum number of characters of a request's id in a line.
MAX_ID_LENGTH = 200
#: Maximum number of characters of a text from outside in a line.
MAX_TEXT_LENGTH = 500
#: Maximum number of characters of a message or traceback.
_MAX_MESSAGE = 16_000
#: Control characters and Unicode's line ends, without tabs and newlines.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def shorten(text: str, most: int) -> str:
    """Shorten a text to its first and last characters, about `most` in all, because a client may send megabytes."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...({len(text)} characters)...{text[-half:]}"


def fields(**values: Any) -> dict[str, Any]:
    """Return `extra` for a log call. It has fields for programs, in addition to the text for people.

    Values are numbers, texts and lists of them. None and empty texts are left out.
    """
    present = {name: value for name, value in values.items() if value is not None and not _is_empty(value)}
    return {"fields": present}


def request_name(id: str) -> str:
    """Return the words for a request in a log line: `request 'ID'` or `a request without an id`."""
    return f"request {id!r}" if id else NAMELESS


def of_request(id: str, **values: Any) -> dict[str, Any]:
    """Return `fields` for a line about one request. `LineLimit` limits such lines, because clients can cause any number."""
    return {**fields(request=id, **values), "of_request": True}


def _is_empty(value: object) -> bool:
    return isinstance(value, str) and not value


def setup(format: Format = "human", model: str | None = None, *, aside: bool = False) -> None:
    """Log to stderr. This may be called again when the settings are known.

    `model` is the name of the model that this process serves, if there is one. If `aside` is True, a thread writes the lines,
    and logging does not wait for it (`Aside`).
    """
    root = logging.getLogger()
    handler = next((known for known in root.handlers if known.name == _NAME), None)
    if handler is not None and aside and not isinstance(handler, Aside):
        root.removeHandler(handler)
        handler = None
    if handler is None:
        handler = Aside() if aside else logging.StreamHandler(sys.stderr)
        handler.name = _NAME
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        # Log the warnings of Python as well. Otherwise, they would be lines of another format.
        logging.captureWarnings(True)
        handler.addFilter(LineLimit())
    handler.setFormatter(formatter(format, model))


def flush() -> None:
    """Write the waiting lines, within limited time. A process must call this before `os._exit`."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def write(fd: int, data: bytes) -> None:
    """Write all of `data`, even if another process has made the file non-blocking. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            # Do not use select(), because it takes only descriptors up to 1023, and a server has more.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def formatter(format: Format, model: str | None = None) -> logging.Formatter:
    """Return the formatter for a format; `model` is as in `setup`."""
    if format == "json":
        return JsonLines(model)
    suffix = "" if model is None else f" {model.replace('%', '%%')}"
    return TextLines(f"%(asctime)s %(levelname).1s %(name)s{suffix}: %(message)s")


class TextLines(logging.Formatter):
    """Formats lines for people.

    A text may quote a client. So its second and later lines are indented, and control characters are escaped.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(_rendered(record))
        return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text).replace("\n", "\n    ")

    def formatException(self, ei: Any) -> str:
        return shorten(super().formatException(ei), _MAX_MESSAGE)


class JsonLines(logging.Formatter):
    """Formats JSON objects. `time` is UTC, RFC 3339. A field of the log call overrides a common field of the same name."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self._model = model

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            **({} if self._model is None else {"model": self._model}),
            **getattr(record, "fields", {}),
            "message": shorten(record.getMessage(), _MAX_MESSAGE),
        }
        if record.exc_info:
            line["exception"] = shorten(self.formatException(record.exc_info), _MAX_MESSAGE)
        try:
            return _json(line)
        except (TypeError, ValueError):
            return _json(_jsonable(line))


def _json(value: object) -> str:
    """Return JSON. Raises TypeError or ValueError for a key or a number that JSON does not have."""
    # Write only the type of any other value, so that an array cannot get into the log by mistake.
    return json.dumps(value, default=lambda unknown: type(unknown).__name__, allow_nan=False)


def _jsonable(value: object) -> object:
    """Replace numbers that JSON does not have, and keys that are not texts, by texts."""
    match value:
        case dict():
            return {str(key): _jsonable(each) for key, each in value.items()}
        case list() | tuple():
            return [_jsonable(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


class Aside(logging.Handler):
    """Writes on a thread of its own, so that a stopped terminal or a pipe without a reader blocks no other thread.

    If too many lines wait, further lines are dropped, and a later line reports their number. After a critical line, logging waits
    for a limited time until all lines are written, because the process may end next. The thread starts with the first line. A
    fork of the process does not have the thread, so in the fork, the logging thread itself writes, and may block.
    """

    def __init__(self, fd: int = 2, most: int = _MAX_WAITING) -> None:
        super().__init__()
        self._fd = fd
        self._most = most
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._lines: deque[str | logging.LogRecord] = deque()
        self._lost = 0
        self._started = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Format an exception now. While it waits, it would keep everything alive that it refers to, including tensors.
            line = self.format(record) if record.exc_info else _rendered(record)
        except Exception:  # noqa: BLE001  as in every handler
            self.handleError(record)
            return
        if not self._is_original() or not self._take(line):
            self._put(line)
        if record.levelno >= logging.CRITICAL:
            self.flush()

    def _is_original(self) -> bool:
        """Return False in a fork of the process, where locks that other threads held stay locked."""
        return os.getpid() == self._process

    def _take(self, line: str | logging.LogRecord) -> bool:
        """Queue a line, or count it as lost. Return False if the writing thread cannot be started."""
        with self._changed:
            if not self._started:
                try:
                    threading.Thread(target=self._write, name="log", daemon=True).start()
                except RuntimeError:
                    return False
                self._started = True
            if len(self._lines) < self._most:
                self._lines.append(line)
                self._changed.notify_all()
            else:
                self._lost += 1
            return True

    def flush(self) -> None:
        """Wait until all lines are written, for a limited time. `logging` also calls this at the interpreter's end."""
        if self._is_original():
            with self._changed:
                self._changed.wait_for(lambda: not self._lines, _FLUSH_TIMEOUT_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines[0]
            self._put(line)
            # Read the count only after the write, because further lines may be lost while the write blocks. One line then
            # reports all of them.
            with self._changed:
                lost, self._lost = self._lost, 0
            if lost:
                self._put(_lost(lost))
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()

    def _put(self, line: str | logging.LogRecord) -> None:
        """Write a line with one call, so that lines of several processes do not mix, unless they are very long."""
        try:
            text = line if isinstance(line, str) else self.format(line)
            write(self._fd, f"{text}\n".encode(errors="backslashreplace"))
        except OSError:
            pass  # The log was closed.
        except Exception:  # noqa: BLE001  the thread must go on
            self.handleError(logging.makeLogRecord({}))


def _rendered(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy of the record with a complete message, because the arguments may change before it is written."""
    made = copy(record)
    made.msg, made.args = shorten(record.getMessage(), _MAX_MESSAGE), None
    return made


def _lost(lines: int) -> logging.LogRecord:
    """Return a warning about lost lines."""
    text = "the log is blocked: %d lines are lost"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lines,), None)

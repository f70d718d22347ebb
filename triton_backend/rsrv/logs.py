"""Lines of the log: for people, or JSON objects for programs, one each. What they say is numbers and names, never tensors.

Every process of rsrv writes to its stderr, which is tritonserver's log, or the node's.
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
#: lines that wait for a log that takes no more; seconds that the last words may take
_MOST, _PATIENCE = 1000, 2.0
#: characters of what others give: a request's id, a text; and of any message, or traceback, at all
ID, TEXT, _LONGEST = 200, 500, 16_000
#: what a terminal obeys, or takes for the end of a line; but for tabs and newlines
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")


def shorten(text: str, most: int) -> str:
    """At most about so many characters of a text, of its start and of its end: a client may send megabytes."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...({len(text)} characters)...{text[-half:]}"


def fields(**values: Any) -> dict[str, Any]:
    """For `extra` of a log call: what a program finds under names of its own, beside the text for people.

    Numbers, texts and lists of them. What is None or empty is left out.
    """
    kept = {name: value for name, value in values.items() if value is not None and not _is_empty(value)}
    return {"fields": kept}


def of_request(id: str, **values: Any) -> dict[str, Any]:
    """As `fields`, of a line about one request: clients can cause any number of them, so `LineLimit` counts them."""
    return {**fields(request=id, **values), "of_request": True}


def _is_empty(value: object) -> bool:
    return isinstance(value, str) and not value


def setup(format: Format = "human", model: str | None = None, *, aside: bool = False) -> None:
    """Log to stderr. May be called again, when the settings are known.

    `model`: what this process belongs to, if it is a model's. `aside`: from now on nobody waits until a line is written
    (`Aside`).
    """
    root = logging.getLogger()
    handler = next((one for one in root.handlers if one.name == _NAME), None)
    if handler is not None and aside and not isinstance(handler, Aside):
        root.removeHandler(handler)
        handler = None
    if handler is None:
        handler = Aside() if aside else logging.StreamHandler(sys.stderr)
        handler.name = _NAME
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        # Those of Python's libraries would be lines that are neither.
        logging.captureWarnings(True)
        handler.addFilter(LineLimit())
    handler.setFormatter(formatter(format, model))


def flush() -> None:
    """What was said is written, or it takes too long: for processes that end without the interpreter's own end."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def write(fd: int, data: bytes) -> None:
    """All of it, whenever there is room: somebody else may have said of the same file that nobody waits. Raises OSError."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            # Not select(), which knows no descriptor beyond 1023, of which a server has many.
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


def formatter(format: Format, model: str | None = None) -> logging.Formatter:
    """`model`: as `setup` has it."""
    if format == "json":
        return JsonLines(model)
    whose = "" if model is None else f" {model.replace('%', '%%')}"
    return TextLines(f"%(asctime)s %(levelname).1s %(name)s{whose}: %(message)s")


class TextLines(logging.Formatter):
    """Who reads them sees what is a line of ours: those that continue one are indented, and no character acts.

    Texts quote what clients send.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(_said(record))
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text).replace("\n", "\n    ")

    def formatException(self, ei: Any) -> str:
        return shorten(super().formatException(ei), _LONGEST)


class JsonLines(logging.Formatter):
    """`time` is UTC, RFC 3339. A field that a line gives itself goes before what all lines have."""

    def __init__(self, model: str | None = None) -> None:
        super().__init__()
        self._model = model

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        said = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": os.getpid(),
            **({} if self._model is None else {"model": self._model}),
            **getattr(record, "fields", {}),
            "message": shorten(record.getMessage(), _LONGEST),
        }
        if record.exc_info:
            said["exception"] = shorten(self.formatException(record.exc_info), _LONGEST)
        try:
            return _json(said)
        except (TypeError, ValueError):
            return _json(_sayable(said))


def _json(said: object) -> str:
    """Raises TypeError, ValueError: JSON has no such key, or no such number."""
    # An array that somebody puts there by mistake must not get into the log.
    return json.dumps(said, default=lambda value: type(value).__name__, allow_nan=False)


def _sayable(value: object) -> object:
    """With texts in place of what JSON has not: numbers that are none, and keys of other types."""
    match value:
        case dict():
            return {str(key): _sayable(each) for key, each in value.items()}
        case list() | tuple():
            return [_sayable(each) for each in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value


class Aside(logging.Handler):
    """Writes on a thread of its own: a terminal that was stopped, or a pipe that nobody reads, holds nobody up.

    What finds no room is lost, and a line says how much. Critical lines are waited for a while: after them the process
    may end. There is a thread as soon as there is a line. In a copy of the process there is none, so whoever speaks
    there waits.
    """

    def __init__(self, fd: int = 2, most: int = _MOST) -> None:
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
            # An exception would keep alive all that it leads to: tensors, too.
            line = self.format(record) if record.exc_info else _said(record)
        except Exception:  # noqa: BLE001  as every handler's
            self.handleError(record)
            return
        if not self._is_here() or not self._take(line):
            self._put(line)
        if record.levelno >= logging.CRITICAL:
            self.flush()

    def _is_here(self) -> bool:
        """Else this is a copy of the process, where nobody gives back what others held when it was made."""
        return os.getpid() == self._process

    def _take(self, line: str | logging.LogRecord) -> bool:
        """False: there is no thread for it, and no memory for one."""
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
        """Waits until all is written, but not for ever. Also called at the interpreter's end."""
        if self._is_here():
            with self._changed:
                self._changed.wait_for(lambda: not self._lines, _PATIENCE)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line, lost, self._lost = self._lines[0], self._lost, 0
            self._put(line)
            if lost:
                self._put(_lost(lost))
            with self._changed:
                self._lines.popleft()
                self._changed.notify_all()

    def _put(self, line: str | logging.LogRecord) -> None:
        """By itself: what several processes write at once stays apart by the line, if that is not too long."""
        try:
            text = line if isinstance(line, str) else self.format(line)
            write(self._fd, f"{text}\n".encode(errors="backslashreplace"))
        except OSError:
            pass  # who has closed it does not want to know
        except Exception:  # noqa: BLE001  the thread goes on
            self.handleError(logging.makeLogRecord({}))


def _said(record: logging.LogRecord) -> logging.LogRecord:
    """With its message made, of what may be something else by the time that it is written."""
    made = copy(record)
    made.msg, made.args = shorten(record.getMessage(), _LONGEST), None
    return made


def _lost(lines: int) -> logging.LogRecord:
    """Says so."""
    text = "the log takes no more: %d lines are lost"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (lines,), None)

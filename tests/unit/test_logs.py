"""The log lines of processes, and a log that does not block threads."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import resource
import select
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from unittest.mock import Mock

import numpy as np
import pytest
from aiohttp.http_exceptions import BadStatusLine, InvalidHeader
from hypothesis import given
from hypothesis import strategies as st

from rsrv import logs
from rsrv.limits import raise_limit
from rsrv.stub.request import ArrivalTime, ClientRequest, FailureLog
from rsrv.throttle import LineLimit
from rsrv.wire.frames import Status
from tests.fakes import FakeRequest


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Yield the root logger without handlers, and restore it after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def two_records() -> None:
    """Log two records. The second one has an exception."""
    log = logging.getLogger("rsrv.test")
    log.info("%d of %s\nis here", 1, "ä", extra=logs.fields(bytes=5, request="", evicted=["b"], reason=None))
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")


def test_lines_for_people(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """A line has time, severity, logger, model and message."""
    logs.setup("human", "a%s")
    two_records()
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith(" I rsrv.test a%s: 1 of ä")
    assert second == "    is here"


def test_lines_for_programs(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, each record is one line with its non-empty fields."""
    logs.setup("json", "a")
    two_records()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    assert first.pop("pid") > 0
    assert first == {
        "level": "info",
        "logger": "rsrv.test",
        "model": "a",
        "message": "1 of ä\nis here",
        "bytes": 5,
        "evicted": ["b"],
    }
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: no")


def test_an_array_is_no_field(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """If an array is in a field by mistake, the field has the name of its type, without data."""
    logs.setup("json")
    logging.getLogger("rsrv.test").info("here", extra=logs.fields(x=np.full(3, 12345)))
    assert json.loads(capsys.readouterr().err)["x"] == "ndarray"


def test_values_that_json_does_not_have_become_texts(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """NaN, infinity, and keys that are not texts become texts, so that any JSON parser can read the line."""
    logs.setup("json")
    made = logs.fields(rate=float("nan"), costs={(0, 1): [float("inf"), 2.0]}, size=3)
    logging.getLogger("rsrv.test").info("here", extra=made)
    document = json.loads(capsys.readouterr().err, parse_constant=pytest.fail)
    assert (document["rate"], document["costs"], document["size"]) == ("nan", {"(0, 1)": ["inf", 2.0]}, 3)


@given(st.text())
def test_nothing_that_a_client_sends_looks_like_a_line_of_ours(text: str) -> None:
    """Texts of clients, which hooks quote in messages and exceptions, cannot look like a log line or control a terminal."""
    text = f"\x1b[2J\r{text}\n2026-11-22 01:19:54,534 E rsrv.stub: a lie"
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord("rsrv", logging.ERROR, "", 0, "%s", (text,), sys.exc_info())
    first, *others = logs.formatter("human").format(record).splitlines()
    assert " E rsrv: \\x1b[2J\\r" in first
    assert len(others) >= 4
    assert all(line.startswith("    ") for line in others)
    assert "\x1b" not in "".join(others)


@pytest.mark.parametrize("format", ["human", "json"])
def test_a_long_line_is_shortened(format: logs.Format) -> None:
    """If a hook's error quotes megabytes of a client, the log line has only the start, the end and the length of the text."""
    try:
        raise ValueError("x" * 1_000_000 + "the end")
    except ValueError as error:
        record = logging.LogRecord("rsrv", logging.ERROR, "", 0, "no: %s", (error,), sys.exc_info())
    text = logs.formatter(format).format(record)
    assert len(text) < 40_000
    assert "no: xxx" in text
    assert "...(1000011 characters)...x" in text
    assert "Traceback" in text
    assert text.count("xthe end") == 2


def test_it_is_set_up_again(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """The log is set up again when the settings are known. Each later record is logged only once, in the configured format."""
    logs.setup()
    logs.setup("json")
    logging.getLogger("rsrv.test").info("here")
    assert json.loads(capsys.readouterr().err)["message"] == "here"


def test_lines_that_hooks_log_keep_their_logger(root: logging.Logger) -> None:
    """model.py may be loaded before the second setup of the log. If it has added a handler, this handler is kept."""
    logs.setup()
    own = logging.StreamHandler(io.StringIO())
    root.addHandler(own)
    logs.setup("json")
    assert own in root.handlers


def test_warnings_are_lines_of_the_log(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """A Python warning becomes a line of the log. For example, numpy warns if a hook divides by zero."""
    logs.setup("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("divide by zero", RuntimeWarning, stacklevel=1)
    document = json.loads(capsys.readouterr().err)
    assert document["level"] == "warning"
    assert "divide by zero" in document["message"]


class Pipe:
    """A full pipe as the log. Writing blocks until the test reads from it."""

    def __init__(self) -> None:
        self._reader, self.end = os.pipe()
        self._skip = fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, 4096)
        os.write(self.end, b"." * self._skip)

    def empty(self) -> None:
        """Read the bytes that fill the pipe. Later reads return only lines of the log."""
        os.read(self._reader, self._skip)
        self._skip = 0

    def read(self, count: int) -> list[str]:
        """Return this number of lines."""
        text = b""
        while text[self._skip :].count(b"\n") < count:
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            assert poll.poll(30_000), text
            text += os.read(self._reader, 4096)
        lines = text[self._skip :].decode().splitlines()
        self._skip = 0
        return lines

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.end)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.close()


def say(handler: logging.Handler, text: str, level: int = logging.INFO) -> None:
    handler.handle(logging.makeLogRecord({"msg": text, "levelno": level, "levelname": "ANY"}))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_log_that_is_not_read_blocks_no_thread(pipe: Pipe, blocking: bool) -> None:
    """If nobody reads the log, lines that do not fit are counted, and their number is logged later.

    All other lines arrive complete and in order, whether the log is blocking or not: another process may change that.
    """
    os.set_blocking(pipe.end, blocking)
    handler = logs.Aside(pipe.end, 3)
    lines = ["line 0", "line 1" * 3000, "line 2"]
    for line in (*lines, *"abcde"):
        say(handler, line)
    written = pipe.read(4)
    written.remove("the log is blocked: 5 lines are lost")
    assert written == [logs.shorten(line, 16_000) for line in lines]
    handler.flush()


def test_a_log_may_have_any_descriptor(pipe: Pipe) -> None:
    """Writing to a full log waits until the log is read, even if its descriptor is above 1023.

    A server with hundreds of models has such descriptors.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_limit(resource.RLIMIT_NOFILE)
    far = fcntl.fcntl(pipe.end, fcntl.F_DUPFD, 1024)
    os.set_blocking(far, False)
    writer = threading.Thread(target=logs.write, args=(far, b"here\n"))
    writer.start()
    assert pipe.read(1) == ["here"]
    writer.join()
    os.close(far)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_process_without_a_line_has_no_thread_for_them(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process starts its thread for log lines with the first line. If no thread can be started, it logs without one."""
    threads = set(threading.enumerate())
    handler = logs.Aside(pipe.end)
    assert set(threading.enumerate()) <= threads  # A thread of an earlier test may have ended.
    pipe.empty()
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    say(handler, "here")
    assert pipe.read(1) == ["here"]


_FORKED = """
import logging, os, threading
from rsrv import logs

handler = logs.Aside()
held, go = threading.Event(), threading.Event()
def hold():
    with handler._changed:
        held.set()
        go.wait(30)
threading.Thread(target=hold).start()
held.wait(30)
child = os.fork()
if child:
    go.set()
else:
    handler.handle(logging.makeLogRecord({"msg": "of the copy", "levelno": 20}))
handler.flush()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
handler.handle(logging.makeLogRecord({"msg": "of the process", "levelno": 20}))
"""


def test_a_copy_of_the_process_logs_without_its_thread() -> None:
    """After a fork, the child logs without waiting for locks that other threads held, because nobody releases them."""
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORKED]
    done = subprocess.run(script, stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == ["of the copy", "of the process"]


def test_a_line_is_as_things_were(pipe: Pipe, capsys: pytest.CaptureFixture[str]) -> None:
    """A line has the values that its arguments had when it was logged, even if it is written later.

    A message that cannot be formatted does not end the writing thread.
    """
    handler = logs.Aside(pipe.end)
    handler.setFormatter(logs.formatter("json"))
    names = ["a"]
    for args in ((names,), ("too", "many")):
        handler.handle(logging.LogRecord("rsrv", logging.INFO, "", 0, "here: %s", args, None))
    names.append("b")
    say(handler, "the end")
    assert [json.loads(line)["message"] for line in pipe.read(2)] == ["here: ['a']", "the end"]
    assert "not all arguments converted" in capsys.readouterr().err


def test_a_critical_line_is_written_before_the_end(pipe: Pipe) -> None:
    """A critical line is written at once, because the process may end right after it."""
    handler = logs.Aside(pipe.end)
    pipe.empty()
    for number in range(5):
        say(handler, f"line {number}")
    say(handler, "the end", logging.CRITICAL)
    assert pipe.read(6)[-1] == "the end"


def test_a_closed_log_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """If nobody reads the log any more, logging causes no error."""
    reader, end = os.pipe()
    os.close(reader)
    handler = logs.Aside(end)
    say(handler, "line")
    handler.flush()
    os.close(end)
    assert capsys.readouterr().err == ""


def test_a_process_that_serves_never_waits_for_the_log(
    root: logging.Logger, capfd: pytest.CaptureFixture[str]
) -> None:
    """A stub writes its first lines at once, because its start may fail. When it serves, a thread writes its lines."""
    logs.setup(model="a")
    logging.getLogger("rsrv.test").info("first")
    logs.setup("json", "a", aside=True)
    (handler,) = [candidate for candidate in root.handlers if candidate.name == "rsrv"]
    assert isinstance(handler, logs.Aside)
    logging.getLogger("rsrv.test").info("second")
    logs.flush()
    first, second = capfd.readouterr().err.splitlines()
    assert first.endswith(" I rsrv.test a: first")
    assert json.loads(second)["message"] == "second"


@pytest.mark.parametrize("status", [Status.INTERNAL, Status.INVALID])
def test_a_complaint_about_megabytes_is_short(status: Status, caplog: pytest.LogCaptureFixture) -> None:
    """A client's id and text may be megabytes long. The log quotes only a limited part of them."""
    request = ClientRequest(FakeRequest({}, id="i" * 10_000_000), ArrivalTime.now())
    with caplog.at_level(logging.INFO, "rsrv.stub"):
        FailureLog().ended(status, "t" * 1_000_000, request.id)
    (record,) = caplog.records
    assert len(record.getMessage()) < 1000
    assert len(record.__dict__["fields"]["request"]) < 250


def test_lines_about_single_requests_are_limited_by_their_message(root: logging.Logger) -> None:
    """Of lines about single requests with the same message, only a few per second are logged. The others are counted.

    Lines that are not about a request are not limited.
    """
    now = [100.0]
    limit = LineLimit(lambda: now[0])
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(limit)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    log = logging.getLogger("rsrv.test")

    for number in range(8):
        log.error("request %r failed", number, extra=logs.of_request(str(number)))
    log.error("request %r is odd: %s", 8, "100 %", extra=logs.of_request(""))
    for _ in range(8):
        log.error("another line")
    now[0] += 1
    log.error("request %r failed", 9, extra=logs.of_request("9"))

    assert stream.getvalue().splitlines() == [
        *(f"request {number} failed" for number in range(5)),
        "request 8 is odd: 100 %",
        *["another line"] * 8,
        "request 9 failed (3 more since the last such line)",
    ]


def test_every_process_that_logs_limits_lines_about_requests(root: logging.Logger) -> None:
    """Lines about requests are limited both before and after the settings are known."""
    for aside in (False, True):
        logs.setup(aside=aside)
        (handler,) = [candidate for candidate in root.handlers if candidate.name == "rsrv"]
        assert [type(log_filter) for log_filter in handler.filters] == [LineLimit]


def test_of_a_crowd_that_is_refused_one_a_second_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """If many requests are refused with the same status, one line per second names one of them and counts the others.

    Each failure of rsrv itself has a line.
    """
    now = [100.0]
    failures = FailureLog(lambda: now[0])
    with caplog.at_level(logging.INFO, "rsrv.stub"):
        for moment, status, who in [
            (0.0, Status.QUEUE_FULL, "a"),
            (0.1, Status.QUEUE_FULL, "b"),
            (0.2, Status.DEADLINE, "c"),
            (0.3, Status.QUEUE_FULL, "d"),
            (0.4, Status.INTERNAL, "e"),
            (0.5, Status.INTERNAL, ""),
            (1.0, Status.QUEUE_FULL, "f"),
            (1.1, Status.INVALID, "g"),
        ]:
            now[0] = 100.0 + moment
            failures.ended(status, "why", who)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "request 'a': QUEUE_FULL: why"),
        ("WARNING", "request 'c': DEADLINE: why"),
        ("ERROR", "request 'e' failed: why"),
        ("ERROR", "a request without an id failed: why"),
        ("WARNING", "request 'f': QUEUE_FULL: why (2 more since the last such line)"),
        ("INFO", "request 'g': INVALID: why"),
    ]
    assert [record.__dict__["fields"].get("request") for record in caplog.records] == [*"ace", None, "f", "g"]


def test_lines_that_a_library_repeats_are_counted_in_place_of_written() -> None:
    """A library may log one line per second for each of its loggers and each class of exception. Further lines are counted.

    Lines of rsrv's own loggers are not limited by this.
    """
    now = [100.0]
    repeated = LineLimit(lambda: now[0])

    def written(moment: float, logger: str, error: Exception | None = None) -> str | None:
        now[0] = 100.0 + moment
        raised = None if error is None else (type(error), error, None)
        record = logging.LogRecord(logger, logging.ERROR, "", 0, "%s is bad", ("that",), raised)
        return record.getMessage() if repeated.filter(record) else None

    assert written(0.0, "aiohttp.server", ValueError()) == "that is bad"
    assert written(0.1, "aiohttp.server", ValueError()) is None
    assert written(0.2, "aiohttp.server", ValueError("another")) is None
    assert written(0.3, "aiohttp.server", TypeError()) == "that is bad"
    assert written(0.4, "asyncio") == "that is bad"
    assert [written(0.5, "rsrv.gateway") for _ in range(3)] == ["that is bad"] * 3
    assert written(1.0, "aiohttp.server", ValueError()) == "that is bad (2 more since the last such line)"
    assert written(2.0, "aiohttp.server", ValueError()) == "that is bad"


def test_a_request_that_is_not_http_costs_one_short_line(root: logging.Logger) -> None:
    """A malformed HTTP request causes one short line without a traceback. An error of a handler is logged with its traceback."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(LineLimit(lambda: 100.0))
    root.addHandler(handler)
    log = logging.getLogger("aiohttp.server")
    errors = [BadStatusLine("x" * 9000 + "\n^"), InvalidHeader(b"a\nb"), ValueError("ours")]

    for error in errors:
        try:
            raise error
        except Exception as raised:
            log.error("Error handling request from %s", "::1", exc_info=raised)

    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("Error handling request from ::1: 400, message: ")
    assert len(lines[0]) < 300
    assert lines[1:3] == ["Error handling request from ::1", "Traceback (most recent call last):"]
    assert lines[-1] == "ValueError: ours"

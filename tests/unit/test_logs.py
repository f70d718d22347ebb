"""What the processes log, and that nobody waits for it."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv import logs
from rsrv.stub.complaints import Complaints
from rsrv.stub.terms import id_of
from rsrv.wire.frames import Status


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def two_records() -> None:
    """The second with an exception."""
    log = logging.getLogger("rsrv.test")
    log.info("%d of %s\nis here", 1, "ä", extra=logs.fields(bytes=5, request="", evicted=["b"], reason=None))
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")


def test_lines_for_people(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """When, how grave, who, of which model, and what."""
    logs.setup("human", "a%s")
    two_records()
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first.endswith(" I rsrv.test a%s: 1 of ä")
    assert second == "    is here"


def test_lines_for_programs(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Each record is one line, whatever it says, with fields of its own as far as there is something in them."""
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
    """Whoever puts one there by mistake finds the type's name, and no data."""
    logs.setup("json")
    logging.getLogger("rsrv.test").info("here", extra=logs.fields(x=np.full(3, 12345)))
    assert json.loads(capsys.readouterr().err)["x"] == "ndarray"


def test_what_is_no_json_is_said_all_the_same(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that are none, and keys that are no texts: the line is not lost, and any reader of JSON takes it."""
    logs.setup("json")
    made = logs.fields(rate=float("nan"), costs={(0, 1): [float("inf"), 2.0]}, size=3)
    logging.getLogger("rsrv.test").info("here", extra=made)
    said = json.loads(capsys.readouterr().err, parse_constant=pytest.fail)
    assert (said["rate"], said["costs"], said["size"]) == ("nan", {"(0, 1)": ["inf", 2.0]}, 3)


@given(st.text())
def test_nothing_that_a_client_sends_looks_like_a_line_of_ours(text: str) -> None:
    """Nor does it reach a terminal as an order: hooks quote what they get, in messages and in exceptions."""
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
def test_a_line_has_an_end(format: logs.Format) -> None:
    """A client's megabytes, in what a hook raises: start and end are there, and how much there was."""
    try:
        raise ValueError("x" * 1_000_000 + "the end")
    except ValueError as error:
        record = logging.LogRecord("rsrv", logging.ERROR, "", 0, "no: %s", (error,), sys.exc_info())
    said = logs.formatter(format).format(record)
    assert len(said) < 40_000
    assert "no: xxx" in said
    assert "...(1000011 characters)...x" in said
    assert "Traceback" in said
    assert said.count("xthe end") == 2


def test_it_is_set_up_again(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are known only after the first lines; each record is logged once, and as they say."""
    logs.setup()
    logs.setup("json")
    logging.getLogger("rsrv.test").info("here")
    assert json.loads(capsys.readouterr().err)["message"] == "here"


def test_what_hooks_log_stays_theirs(root: logging.Logger) -> None:
    """model.py is loaded between the two: a handler that it adds is not taken away."""
    logs.setup()
    own = logging.StreamHandler(io.StringIO())
    root.addHandler(own)
    logs.setup("json")
    assert own in root.handlers


def test_warnings_are_lines_of_the_log(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    """Python's own: a hook's division by zero is said by numpy in this way."""
    logs.setup("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("divide by zero", RuntimeWarning, stacklevel=1)
    said = json.loads(capsys.readouterr().err)
    assert said["level"] == "warning"
    assert "divide by zero" in said["message"]


class Stopped(io.StringIO):
    """A terminal that takes nothing until it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.goes_on.wait(30)
        return super().write(text)


def say(handler: logging.Handler, text: str, level: int = logging.INFO) -> None:
    handler.handle(logging.makeLogRecord({"msg": text, "levelno": level, "levelname": "ANY"}))


def test_nobody_waits_for_a_log_that_is_not_read() -> None:
    """What finds no room is counted, and said when the log goes on; what there was room for is there, in order."""
    stream = Stopped()
    handler = logs.Aside(stream, 3)
    say(handler, "line 0")
    assert stream.reached.wait(30)
    for number in range(1, 8):
        say(handler, f"line {number}")
    stream.goes_on.set()
    handler.flush()
    assert stream.getvalue().splitlines() == [
        "line 0",
        "line 1",
        "the log takes no more: 5 lines are lost",
        "line 2",
    ]


def test_a_line_is_as_things_were(capsys: pytest.CaptureFixture[str]) -> None:
    """What it was made of may change before it is written; and one that cannot be made ends nothing."""
    stream = Stopped()
    handler = logs.Aside(stream)
    handler.setFormatter(logs.formatter("json"))
    names = ["a"]
    for args in ((names,), ("too", "many")):
        handler.handle(logging.LogRecord("rsrv", logging.INFO, "", 0, "here: %s", args, None))
    names.append("b")
    stream.goes_on.set()
    say(handler, "the end", logging.CRITICAL)
    assert [json.loads(line)["message"] for line in stream.getvalue().splitlines()] == [
        "here: ['a']",
        "the end",
    ]
    assert "not all arguments converted" in capsys.readouterr().err


def test_last_words_are_written_before_the_end() -> None:
    """After a critical line a process may end at once."""
    stream = io.StringIO()
    handler = logs.Aside(stream)
    for number in range(5):
        say(handler, f"line {number}")
    say(handler, "the end", logging.CRITICAL)
    assert stream.getvalue().splitlines()[-1] == "the end"


def test_a_closed_log_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Who has closed it does not want to know."""
    stream = io.StringIO()
    stream.close()
    handler = logs.Aside(stream)
    say(handler, "line")
    handler.flush()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("status", [Status.INTERNAL, Status.INVALID])
def test_a_complaint_about_megabytes_is_short(status: Status, caplog: pytest.LogCaptureFixture) -> None:
    """An id and a text of a client's may be as long as its request: what is said of them has a length."""
    with caplog.at_level(logging.INFO, "rsrv.stub"):
        Complaints().ended(status, "t" * 1_000_000, id_of(Requested("i" * 10_000_000)))
    (record,) = caplog.records
    assert len(record.getMessage()) < 1000
    assert len(record.__dict__["fields"]["request"]) < 250


class Requested:
    """Triton's request, as far as its id goes."""

    def __init__(self, id: str) -> None:
        self._id = id

    def request_id(self) -> str:
        return self._id


def test_of_a_crowd_that_is_refused_one_a_second_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """With the others' number; each way to end has its own lines, and a failure of ours always has one."""
    now = [100.0]
    complaints = Complaints(lambda: now[0])
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
            complaints.ended(status, "why", who)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "request 'a': QUEUE_FULL: why"),
        ("WARNING", "request 'c': DEADLINE: why"),
        ("ERROR", "request 'e' failed: why"),
        ("ERROR", "request '' failed: why"),
        ("WARNING", "request 'f': QUEUE_FULL: why (2 more since the last such line)"),
        ("INFO", "request 'g': INVALID: why"),
    ]
    assert [record.__dict__["fields"].get("request") for record in caplog.records] == [*"ace", None, "f", "g"]

"""The children's log lines, each with its process's name."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from rsrv.serve.child_process import LinePrefixer


def test_lines_come_when_they_are_whole() -> None:
    """An incomplete line waits for its end."""
    lines = LinePrefixer("worker0")

    assert lines.feed(b"one\ntw") == b"[worker0] one\n"
    assert lines.feed(b"o\n\n") == b"[worker0] two\n[worker0] \n"
    assert lines.end() == b""


def test_what_is_json_stays_json() -> None:
    """JSON lines get the name as a field; other lines are prefixed."""
    lines = LinePrefixer("worker0")

    assert lines.feed(b'{"level": "info"}\nI1122 ...\n{}\n') == (
        b'{"process": "worker0", "level": "info"}\n[worker0] I1122 ...\n[worker0] {}\n'
    )


def test_a_last_line_without_an_end_is_kept() -> None:
    """A last line without a newline, as before a kill, is printed."""
    lines = LinePrefixer("gateway")

    assert lines.feed(b"I am ab") == b""
    assert lines.end() == b"[gateway] I am ab\n"
    assert lines.end() == b""


def test_a_line_without_an_end_is_cut_somewhere() -> None:
    """A very long line is cut, because it would fill the memory."""
    lines = LinePrefixer("w")

    assert lines.feed(b"x" * 2_000_000) == b"[w] " + b"x" * 2_000_000 + b"\n"


def test_text_that_only_begins_like_json_is_text() -> None:
    """A cut piece of JSON, or a printed set, is prefixed as text."""
    lines = LinePrefixer("w")
    assert lines.feed(b'{"a", "b"}\n') == b'[w] {"a", "b"}\n'
    assert lines.feed(b'{"deep": ' + b"[" * 100_000 + b"\n").startswith(b'[w] {"deep"')
    long = b'{"message": "' + b"x" * 200_000
    assert lines.feed(long) == b""
    assert json.loads(lines.feed(b'"}\n'))["process"] == "w"
    assert lines.feed(long * 10).startswith(b'[w] {"message"')


@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5))
def test_it_does_not_matter_how_the_text_arrives(text: bytes, cuts: list[int]) -> None:
    """For any pieces of text, no character is lost and every line has its name."""
    lines = LinePrefixer("w")
    assume(b'{"' not in text)  # Otherwise some of it may be JSON.
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    out = b"".join(lines.feed(text[a:b]) for a, b in pairwise(edges)) + lines.end()

    whole = text if text.endswith(b"\n") or not text else text + b"\n"
    assert out == b"".join(b"[w] " + line + b"\n" for line in whole.split(b"\n")[:-1])

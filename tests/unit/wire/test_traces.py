"""Frames of traces: round trips, and refusals of malformed frames."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.wire import frames, traces
from rsrv.wire.frames import Kind, ProtocolError
from rsrv.wire.traces import Mark, Span

trace_ids = st.binary(min_size=16, max_size=16).map(bytes.hex)
span_ids = st.binary(min_size=8, max_size=8).map(bytes.hex)
texts = st.text(max_size=traces.MAX_TEXT)
times = st.integers(0, 2**62 - 1)
values = st.one_of(texts, st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
marks = st.builds(Mark, st.integers(0, 2**64 - 1), trace_ids, span_ids)
spans = st.builds(
    Span,
    trace_ids,
    span_ids,
    st.one_of(st.just(""), span_ids),
    texts,
    times,
    times.map(lambda late: 2**62 + late),
    texts,
    st.dictionaries(texts, values, max_size=4),
)
GOOD: list[Any] = ["a" * 32, "b" * 16, "", "queue", 1, 2, "", {}]


@given(st.lists(marks, max_size=5))
def test_marks_survive(sent: list[Mark]) -> None:
    """The runtime unpacks the marks that a stub packs."""
    frame = traces.pack_marks(sent)

    assert frames.read_header(frame) == (Kind.TRACE, len(sent))
    assert list(traces.unpack_marks(frame, len(sent))) == sent


@given(st.lists(spans, max_size=4), st.integers(0, 9))
def test_spans_survive(sent: list[Span], dropped: int) -> None:
    """The runtime unpacks the spans that a stub packs, with any texts."""
    (frame,) = traces.pack_spans(sent, dropped)

    assert frames.read_header(frame)[0] is Kind.SPANS
    assert traces.read_spans(frames.unpack_json(frame)) == (sent, dropped)


def test_many_spans_with_long_texts_take_several_frames() -> None:
    """Spans with long texts are packed into several frames, each below the limit.

    The number of dropped spans is sent once.
    """
    long = "\U0001f600" * traces.MAX_TEXT
    sent = [Span("a" * 32, "b" * 16, "", long, n, n, long, {long: long}) for n in range(traces.MAX_SPANS)]

    packed = traces.pack_spans(sent, 7)

    assert len(packed) > 1
    assert all(len(frame) <= frames.MAX_FRAME for frame in packed)
    arrived = [traces.read_spans(frames.unpack_json(frame)) for frame in packed]
    assert [span for spans, _ in arrived for span in spans] == sent
    assert sum(dropped for _, dropped in arrived) == 7


def test_more_spans_than_a_frame_may_have_are_refused() -> None:
    """A frame with too many spans is refused, because requests would wait while the runtime reads it."""
    with pytest.raises(ProtocolError, match="33 spans"):
        traces.read_spans({"spans": [GOOD] * (traces.MAX_SPANS + 1), "dropped": 0})


WRONG: list[tuple[int, Any]] = [
    (0, "a" * 31),
    (0, "A" * 32),
    (1, ""),
    (2, "zz"),
    (3, None),
    (3, "x" * 201),
    (4, 3),
    (4, -1),
    (5, 2**63),
    (5, "2"),
    (6, 0),
    (7, []),
    (7, {"k": None}),
    (7, {"k": 2**63}),
    (7, {"k": "x" * 201}),
]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"spans": [], "dropped": -1},
        {"spans": [], "dropped": float("inf")},
        {"spans": 1, "dropped": 0},
        *({"spans": [[*GOOD[:place], wrong, *GOOD[place + 1 :]]], "dropped": 0} for place, wrong in WRONG),
        {"spans": [GOOD[:7]], "dropped": 0},
    ],
    ids=str,
)
def test_a_malformed_span_is_refused(answer: dict[str, Any]) -> None:
    """A malformed span is refused, because it would make the exporter of spans fail.

    The sender is not trusted, because hooks run in its process.
    """
    assert traces.read_spans({"spans": [GOOD], "dropped": 0}) == ([Span(*GOOD)], 0)
    with pytest.raises(ProtocolError):
        traces.read_spans(answer)

"""Trace contexts of requests, and their spans until they are reported."""

from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.tracing import OpenSpan, Spans, end_request, read_traceparent
from rsrv.wire.frames import Status
from rsrv.wire.traces import MAX_SPANS, MAX_TEXT
from tests.fakes import FakeRequest
from tests.logged import logged_here

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


def ignored() -> None:
    """Do nothing when a span is added."""


@pytest.mark.parametrize(
    ("text", "well"),
    [
        (SAMPLED, True),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-what-later-versions-add", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        (f"{SAMPLED}\n", False),
        ("", False),
        (None, False),
        (17, False),
    ],
)
def test_contexts_are_read_as_w3c_has_them(text: object, well: bool) -> None:
    """A traceparent is read as W3C defines it. A context that is invalid or not sampled is ignored."""
    assert read_traceparent(text) == ((TRACE, PARENT) if well else None)


@given(st.text())
def test_an_invalid_context_is_no_failure(text: str) -> None:
    """Any text may come from a client. An invalid context raises no error."""
    assert read_traceparent(text) is None


def test_an_open_span_is_the_parent_of_others() -> None:
    """An open span is the parent of its children, and of requests that are sent with its traceparent."""
    open_span = OpenSpan(Spans(ignored, Lock()), TRACE, PARENT)

    assert read_traceparent(open_span.traceparent) == (TRACE, open_span.id)
    child = open_span.child()
    assert (child.trace, child.parent) == (TRACE, open_span.id)


def test_tritons_own_span_is_the_parent_if_there_is_one() -> None:
    """The parent of a request's span is Triton's own span, or else the span in the request's parameter `traceparent`.

    If there is neither, or if the parent is not sampled, the request is not traced.
    """
    spans, other = Spans(ignored, Lock()), f"00-{TRACE}-{'1' * 16}-01"

    def parent(context: str | None, parameter: str) -> str | None:
        open_span = spans.begin(FakeRequest({}, traceparent=context), {"traceparent": parameter})
        return None if open_span is None else open_span.parent

    assert parent(SAMPLED, other) == PARENT
    assert parent(None, other) == "1" * 16
    assert parent(SAMPLED[:-1] + "0", "") is None
    assert parent(None, "") is None
    assert parent(None, "junk") is None


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TraceParent", "TRACEPARENT"])
def test_a_header_may_be_spelled_in_any_case(name: str) -> None:
    """The header's name may be in upper or lower case, because HTTP ignores the case and Triton forwards names unchanged."""
    open_span = Spans(ignored, Lock()).begin(FakeRequest({}), {"rsrv_priority": 1, name: SAMPLED})

    assert open_span is not None
    assert (open_span.trace, open_span.parent) == (TRACE, PARENT)


@pytest.mark.parametrize("context", ["null", "[]", "{}", '"text"', "{", "[" * 100_000])
def test_the_context_of_tritons_span_may_be_invalid(context: str) -> None:
    """If the context of Triton's span cannot be read, the parent comes from the header."""
    request = FakeRequest({})
    request.context = context

    open_span = Spans(ignored, Lock()).begin(request, {"traceparent": SAMPLED})
    assert open_span is not None
    assert open_span.parent == PARENT


def test_a_triton_without_traces_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """If this Triton cannot report traces, requests are not traced, and the log says so once."""
    spans = Spans(ignored, Lock())

    assert spans.begin(object(), {}) is None
    assert spans.begin(object(), {}) is None
    assert len(logged_here(caplog)) == 1


def test_a_refused_request_says_why() -> None:
    """The span of a refused request has its status and its error. Long texts are cut."""
    spans = Spans(ignored, Lock())
    open_span = OpenSpan(spans, TRACE, PARENT)

    end_request(open_span, "a@0123", 0.0, Status.QUEUE_FULL, "x" * 1000, "w" * 1000, rows=2)

    (span,), _ = spans.take()
    assert (span.parent, span.id, span.name, span.error) == (PARENT, open_span.id, "infer a", "x" * MAX_TEXT)
    assert span.attributes == {
        "rsrv.model": "a",
        "rsrv.version": "0123",
        "rsrv.rows": 2,
        "rsrv.request_id": "w" * MAX_TEXT,
        "rsrv.status": "QUEUE_FULL",
    }
    assert 0 == span.start_ns < span.end_ns


def test_spans_that_are_not_reported_are_counted_and_dropped() -> None:
    """If too many spans wait for a report, the first ones are kept. The number of dropped spans is returned once."""
    added: list[None] = []
    spans = Spans(lambda: added.append(None), Lock(), max_waiting=MAX_SPANS + 10)
    open_span = OpenSpan(spans, TRACE, PARENT)
    for number in range(MAX_SPANS + 25):
        open_span.add_child(f"part {number}", 0.0)

    assert len(added) == MAX_SPANS + 25
    first, dropped = spans.take()
    assert ([span.name for span in first], dropped) == ([f"part {n}" for n in range(MAX_SPANS)], 15)
    rest, dropped = spans.take()
    assert (len(rest), dropped) == (10, 0)
    assert spans.take() == ([], 0)

"""Timelines in the form of traces for Perfetto."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.chrome_trace import chrome_trace
from rsrv.control.v1 import control_pb2 as pb


def test_a_trace() -> None:
    """Executions are named after their model. Other spans are named after their kind and model."""
    spans = [
        pb.Span(
            kind=pb.SPAN_KIND_EXECUTE,
            model="a",
            key="a@1",
            start_unix_s=2.0,
            seconds=0.5,
            rows=3,
            size=4,
            requests=2,
        ),
        pb.Span(kind=pb.SPAN_KIND_LOAD, model="a", key="a@1", start_unix_s=1.0, seconds=0.25, failed=True),
        pb.Span(kind=pb.SPAN_KIND_EVICT, model="a", key="a@1", start_unix_s=3.0),
        pb.Span(kind=99, model="a"),  # type: ignore[arg-type]  # of a server that is newer
    ]
    assert [event for event in chrome_trace(spans)["traceEvents"] if event["ph"] != "M"] == [
        {
            "name": "load a",
            "cat": "load",
            "pid": 2,
            "tid": 1,
            "ts": 1e6,
            "dur": 0.25e6,
            "ph": "X",
            "args": {"version": "a@1", "failed": True},
        },
        {
            "name": "a",
            "cat": "execute",
            "pid": 1,
            "tid": 1,
            "ts": 2e6,
            "dur": 0.5e6,
            "ph": "X",
            "args": {"version": "a@1", "rows": 3, "size": 4, "requests": 2},
        },
        {
            "name": "evict a",
            "cat": "evict",
            "pid": 2,
            "tid": 1,
            "ts": 3e6,
            "ph": "i",
            "s": "t",
            "args": {"version": "a@1"},
        },
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_lanes(times: list[tuple[int, int]]) -> None:
    """For any spans, spans in one lane do not overlap, and there are only as many lanes as needed."""
    spans = [
        pb.Span(kind=pb.SPAN_KIND_EXECUTE, start_unix_s=start, seconds=seconds) for start, seconds in times
    ]
    events = [event for event in chrome_trace(spans)["traceEvents"] if event["ph"] == "X"]
    lanes: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        lane = lanes.setdefault(event["tid"], [])
        if lane:
            assert event["ts"] >= lane[-1]["ts"] + lane[-1]["dur"] - 2
        lane.append(event)
    busiest = max((sum(s <= at < s + max(d, 1e-9) for s, d in times) for at, _ in times), default=0)
    assert len(lanes) <= max(busiest, 1 if times else 0)

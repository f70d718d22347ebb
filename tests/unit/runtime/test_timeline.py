"""The device's recent spans, and the requests that have arrived recently."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.timeline import ARRIVALS_S, DeviceSpan, RecentArrivals, Timeline
from rsrv.scheduler import events as ev


def test_what_the_device_did() -> None:
    """A span is recorded when it ends. It has its kind, model, start and end."""
    timeline = Timeline()
    timeline.begins(ev.LoadWeights("a@1", 1), 10.0)
    timeline.happened(ev.WeightsLoaded("a@1", 1, 0.5), 11.0)
    timeline.begins(ev.WarmUp("a@1"), 11.0)
    timeline.happened(ev.WarmUpEnded("a@1", {}), 13.0)
    timeline.begins(ev.Execute(7, "a@1", 0, 4, 3, (1, 2)), 13.0)
    timeline.begins(ev.Execute(8, "a@1", 0, 4, 4, (3,)), 13.5)
    timeline.happened(ev.ExecutionFinished(7, 0.25), 14.0)
    timeline.happened(ev.ExecutionFinished(8, 0.5, "broken"), 14.5)
    timeline.begins(ev.EvictWeights("a@1", 1), 15.0)
    assert timeline.spans.since(0, 9) == (
        0,
        [
            DeviceSpan("load", "a@1", 10.5, 11.0),
            DeviceSpan("warm_up", "a@1", 11.0, 13.0),
            DeviceSpan("execute", "a@1", 13.75, 14.0, 3, 4, 2),
            DeviceSpan("execute", "a@1", 14.0, 14.5, 4, 4, 1, failed=True),
            DeviceSpan("evict", "a@1", 15.0, 15.0),
        ],
    )


def test_loads_that_end_without_weights() -> None:
    """A load that is abandoned or fails is recorded as failed, from its start."""
    timeline = Timeline()
    for epoch in (1, 2):
        timeline.begins(ev.LoadWeights("a@1", epoch), float(epoch))
    timeline.happened(ev.LoadAbandoned("a@1", 1), 3.0)
    timeline.happened(ev.LoadFailed("a@1", 2, "no"), 4.0)
    assert timeline.spans.since(0, 9)[1] == [
        DeviceSpan("load", "a@1", 1.0, 3.0, failed=True),
        DeviceSpan("load", "a@1", 2.0, 4.0, failed=True),
    ]


def test_an_answer() -> None:
    """The answer to a reader has the age of each span's start, and the number with which the reader continues."""
    timeline = Timeline()
    timeline.begins(ev.EvictWeights("a@1", 1), 15.0)
    assert timeline.answer("i", 0, 17.5) == {
        "instance": "i",
        "first": 0,
        "next": 1,
        "end": 1,
        "spans": [("evict", "a@1", 2.5, 0.0, 0, 0, 0, False)],
    }


def test_arrivals_are_kept_for_a_reader_only() -> None:
    """Requests are recorded only after a reader has asked for them, until none has asked for ten seconds."""
    timeline = Timeline()
    calls = ev.Request(2, "a@1", 1, 4, deadline=13.5, priority=3, run=7)
    timeline.happened(ev.RequestsArrived((ev.Request(1, "a@1", 0, 1),)), 10.0)
    assert timeline.arrivals.answer("i", 0, 11.0)["requests"] == []

    timeline.happened(ev.RequestsArrived((calls, ev.Request(3, "a@1", 0, 1, accepted=True))), 12.0)
    answer = timeline.arrivals.answer("i", 0, 12.5)
    assert answer["requests"] == [(12.0, "a@1", 4, 1, 1.5, 3, True)]  # Request 3 arrived before a restart.
    assert (answer["instance"], answer["first"], answer["next"], answer["end"]) == ("i", 0, 2, 2)

    timeline.happened(ev.RequestsArrived((ev.Request(4, "b@1", 0, 2),)), 12.5 + ARRIVALS_S)
    assert timeline.arrivals.answer("i", 2, 30.0)["end"] == 2


def test_a_slow_reader_learns_what_it_has_lost() -> None:
    """The oldest requests are dropped first.

    A slow reader sees the loss, because `first` is above the number it asked for.
    """
    arrivals = RecentArrivals(2)
    arrivals.answer("i", 0, 0.0)
    arrivals.add([ev.Request(id, "a@1", 0, 1) for id in range(1, 6)], 1.0)
    answer = arrivals.answer("i", 0, 2.0)
    assert (answer["first"], answer["next"], len(answer["requests"])) == (3, 5, 2)


@given(length=st.integers(1, 10), count=st.integers(0, 30), most=st.integers(1, 7))
def test_reading_on(length: int, count: int, most: int) -> None:
    """A reader that continues from the last answer gets all recorded spans, once and in order."""
    timeline = Timeline(length)
    for at in range(count):
        timeline.begins(ev.EvictWeights("a", at), float(at))
    starts: list[float] = []
    at = 0
    while at < timeline.spans.next:
        first, spans = timeline.spans.since(at, most)
        assert spans
        starts += [span.start for span in spans]
        at = first + len(spans)
    assert starts == [float(number) for number in range(max(0, count - length), count)]
    assert timeline.spans.since(at + 5, most) == (timeline.spans.next, [])

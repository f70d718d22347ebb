"""Sentences about histories: every record of the runtime has a sentence. Several devices or versions are named."""

import re
from datetime import datetime
from pathlib import Path

import pytest

from rsrv.control.sentences import (
    _OUTCOMES,
    _REFUSALS,
    _SENTENCES,
    clock_time,
    history_lines,
    record_sentence,
    request_lines,
    request_sentence,
)
from rsrv.control.v1 import control_pb2 as pb
from rsrv.runtime.model_states import LifecycleState
from rsrv.scheduler.events import Outcome, Pause, Reason
from rsrv.scheduler.statistics import Cause
from rsrv.scheduler.weight_states import LoadReason, WeightState

NOW = datetime(2026, 11, 23, 8, 0, 0).timestamp()


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (pb.HistoryRecord(what="arrived", requests=1), "a request arrived"),
        (pb.HistoryRecord(what="weights reading", why="demand"), "reading its weights from disk"),
        (
            pb.HistoryRecord(what="weights absent", why="end of read", seconds=2.0),
            "its weights were read from disk in 2 s",
        ),
        (
            pb.HistoryRecord(what="execute", requests=3, rows=7, size=16),
            "3 requests executed together: 7 rows, padded to 16",
        ),
        (pb.HistoryRecord(what="execute", requests=1, rows=1, size=1), "a request executed alone: 1 row"),
        (
            pb.HistoryRecord(what="answered", requests=3, seconds=0.0042),
            "3 requests answered after 4.2 ms on the device",
        ),
        (
            pb.HistoryRecord(what="failed", requests=1, seconds=0.5, why="{broken}"),
            "a request failed after 500 ms on the device: {broken}",
        ),
        (
            pb.HistoryRecord(what="refused queue_full", requests=2),
            "2 requests refused: the queue was full",
        ),
        (
            pb.HistoryRecord(what="weights absent", why="room", model="tickets", bytes=6_500_000),
            "evicted to make room for tickets (6.5 MB)",
        ),
        (
            pb.HistoryRecord(what="weights resident", why="loaded", seconds=0.026),
            "its weights are on the device after 26 ms",
        ),
        (pb.HistoryRecord(what="weights resident", why="warmed up"), ""),
        (pb.HistoryRecord(what="of a newer runtime", why="x"), "of a newer runtime x"),
    ],
)
def test_a_record_is_a_sentence(record: pb.HistoryRecord, sentence: str) -> None:
    """The sentence of a record has its counts, sizes, times and names."""
    assert record_sentence(record) == sentence


def test_every_record_of_the_runtime_has_words() -> None:
    """Each state, reason and record that the scheduler can write has a sentence of its own."""
    scheduler = Path(record_sentence.__code__.co_filename).parents[1] / "scheduler"
    source = "".join(path.read_text() for path in sorted(scheduler.glob("*.py")))
    written = set(re.findall(r'history\.add\(\s*now, "([^"]+)"', source))
    assert {"arrived", "execute", "prefetch"} <= written
    known = {what for what, _ in _SENTENCES}
    states = {f"weights {state}" for state in WeightState} | {f"model {state}" for state in LifecycleState}
    pauses = {f"paused: {mode.value}" for mode in Pause}

    assert written | states | pauses <= known
    assert {("weights queued", reason.value) for reason in LoadReason} <= _SENTENCES.keys()
    assert {("weights absent", cause.value) for cause in Cause} <= _SENTENCES.keys()
    assert {reason.value for reason in Reason} - {"unknown_model"} == _REFUSALS.keys()


def test_lines_of_several_versions_are_in_one_order() -> None:
    """Lines of all versions are in the order of time, each with its version. The last line says what the weights wait for."""

    def ready(at: float) -> pb.HistoryRecord:
        return pb.HistoryRecord(unix_s=NOW + at, what="model ready")

    answer = pb.GetHistoryResponse(
        histories=[
            pb.History(key="a@1", records=[ready(-2.0), ready(-0.25)], waits_for="queued"),
            pb.History(key="a@2", records=[ready(-1.0)]),
        ]
    )

    assert history_lines(answer, NOW) == [
        "07:59:58.000 a@1: ready",
        "07:59:59.000 a@2: ready",
        "07:59:59.750 a@1: ready",
        "08:00:00.000 a@1: its weights are queued",
    ]


def test_the_time_of_another_day_has_its_date() -> None:
    """A line from another day has a date."""
    assert clock_time(NOW - 86400, NOW) == "2026-11-22 08:00:00.000"


SLOW = pb.SlowRequest(
    number="3.17",
    model="cats",
    rows=3,
    arrived_unix_s=NOW - 10.0,
    seconds=0.0412,
    weights_s=0.026,
    others_s=0.01,
    executing_s=0.0052,
    behind=["defects", "cats"],
    outcome="answered",
    batch_requests=3,
    batch_rows=7,
    batch_size=16,
    evicted=pb.HistoryRecord(
        unix_s=NOW - 10.5, what="weights absent", why="room", model="tickets", bytes=6_500_000
    ),
)


def test_a_slow_request_has_the_parts_of_its_time() -> None:
    """The sentence of a slow request has each part of its wait, with the reason.

    A line about the eviction that caused the wait precedes it. Equal evictions share a line.
    """
    twice = pb.GetRequestsResponse(requests=[SLOW, SLOW])

    evicted, request = request_lines(twice, NOW)
    assert evicted == "07:59:49.500 cats was evicted to make room for tickets (6.5 MB)"
    assert request == (
        "07:59:50.000 request 3.17 of 3 rows for cats waited 36 ms: 26 ms for its weights, 10 ms behind defects and "
        "other requests for this model; executed with 2 others, padded to 16 in 5.2 ms; answered after 41.2 ms"
    )


@pytest.mark.parametrize(
    ("slow", "sentence"),
    [
        (
            pb.SlowRequest(seconds=0.5, peers_s=0.5, outcome="expired", deadline_s=0.5),
            (
                "waited 500 ms for more requests to share its execution (max_delay_us); its deadline passed: ended after 500 ms, "
                "with a deadline of 500 ms"
            ),
        ),
        (
            pb.SlowRequest(seconds=2.0, outcome="failed", before_s=0.012, after_s=0.003),
            (
                "waited no time; failed after 2 s; its model's process took 12 ms before (preprocess, inputs) and "
                "3 ms after (postprocess, answer)"
            ),
        ),
        (
            pb.SlowRequest(seconds=2.0, others_s=2.0, outcome="waiting"),
            "waited 2 s for the device; still waits after 2 s",
        ),
        (
            pb.SlowRequest(seconds=2.0, executing_s=2.0, outcome="executing", batch_requests=1),
            "waited no time; executes alone for 2 s; not answered yet after 2 s",
        ),
    ],
)
def test_a_request_that_is_not_answered_has_a_sentence(slow: pb.SlowRequest, sentence: str) -> None:
    """The sentence of a request in progress, or without an execution, has the time so far and the deadline."""
    slow.number, slow.model, slow.rows, slow.call = "1.2", "a", 1, True

    assert request_sentence(slow) == f"request 1.2 of 1 row for a, called by a meta model, {sentence}"


def test_a_large_request_is_one_with_its_parts() -> None:
    """The sentence of a large request has the total time of all its executions.

    It does not mention other requests in these executions.
    """
    slow = pb.SlowRequest(
        number="1.2",
        model="a",
        rows=500,
        parts=16,
        seconds=2.0,
        others_s=0.5,
        executing_s=1.5,
        outcome="answered",
    )
    assert request_sentence(slow) == (
        "request 1.2 of 500 rows in 16 parts for a waited 500 ms for the device; executed in 1.5 s; answered after 2 s"
    )


def test_every_outcome_has_words() -> None:
    """Each outcome of a request has words, and so have both states of a request in progress."""
    assert {outcome.value for outcome in Outcome} | {"waiting", "executing"} == _OUTCOMES.keys()

"""The failures after which a request is sent again, and the time of the next attempt."""

from __future__ import annotations

import pytest

from rsrv.client.retries import Code, Failure, decide
from rsrv.front import rules
from rsrv.wire.frames import Status


def after(failure: Failure, attempts: int = 1, **facts: bool) -> float | str:
    """Return the pause before the next attempt in seconds, or the reason why there is no next attempt."""
    decision = decide(failure, attempts, 100.0, 160.0, **facts)
    return decision if isinstance(decision, str) else round(decision - 100.0, 3)


#: Pause in seconds before the second attempt of a request, by failure. None means that there is no second attempt.
TABLE = {
    (Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] too many requests wait for this model; retry after 120 ms"): 0.12,
    (Code.RESOURCE_EXHAUSTED, "[rsrv:QUEUE_FULL] too many requests wait; retry after 120 ms"): 0.12,
    (Code.UNAVAILABLE, f"[rsrv:QUEUE_FULL] {rules.NO_MEMORY}"): 0.05,
    (Code.UNAVAILABLE, f"[rsrv:STARTING] {rules.STILL_STARTING % ('', '', 60, 60, 600)}"): 0.05,
    (Code.UNAVAILABLE, f"[rsrv:RUNTIME_DOWN] {rules.DOWN}"): 0.05,
    (Code.INTERNAL, "in ensemble 'e', [rsrv:QUEUE_FULL] too many requests wait; retry after 120 ms"): 0.12,
    (Code.UNAVAILABLE, "[rsrv:PAUSED] the model is paused"): 0.05,
    (Code.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new requests"): 0.05,
    (Code.CONNECTION, "Socket closed"): 0.05,
    (Code.NOT_FOUND, "Request for unknown model: 'm' is not found"): 0.05,
    (Code.INVALID_ARGUMENT, "Request for unknown model: 'm' is not found"): 0.05,
    (Code.UNAVAILABLE, f"[rsrv:DEADLINE] {rules.LATE}"): None,
    (Code.UNAVAILABLE, "[rsrv:NOT_RESIDENT] prefetch or pin the model first"): None,
    (Code.NOT_FOUND, "[rsrv:SEQUENCE_LOST] the sequence has ended"): None,
    (Code.INVALID_ARGUMENT, "input x: expected shape [-1, 4], got [1, 3]"): None,
    (Code.RESOURCE_EXHAUSTED, "the request has more than max_message_bytes"): None,
    (Code.DEADLINE_EXCEEDED, "no answer before the deadline"): None,
    (Code.CANCELLED, rules.CLIENT_CANCELLED): None,
    (Code.INTERNAL, rules.SUSPECT): None,
    (Code.OTHER, "unauthenticated"): None,
}


@pytest.mark.parametrize(("code", "text"), TABLE)
def test_each_failure_is_repeated_or_reported(code: Code, text: str) -> None:
    """After a temporary failure, the request is sent again after the pause that the server names, or else after a short pause."""
    expected = TABLE[code, text]
    assert after(Failure(code, text)) == ("" if expected is None else expected)


def test_every_tag_of_the_server_is_decided_about() -> None:
    """The table has each tag that a front sends."""
    tags = {Failure(code, text).tag for code, text in TABLE}
    assert {Status(status).name for status in rules.TAGGED} <= tags


@pytest.mark.parametrize(("code", "text"), TABLE)
def test_no_step_of_a_sequence_is_repeated(code: Code, text: str) -> None:
    """After any failure, a step of a sequence is not sent again."""
    assert isinstance(after(Failure(code, text), repeatable=False), str)


def test_a_server_that_never_answered_is_reported_at_once() -> None:
    """If the server has never answered, or has never served the model to this client, the client does not retry.

    The address or the model's name is probably wrong.
    """
    unknown = Failure(Code.NOT_FOUND, "Request for unknown model: 'm' is not found")
    assert after(Failure(Code.CONNECTION, "Connection refused"), reached=False) == ""
    assert after(unknown, served=False) == ""
    assert after(Failure(Code.UNAVAILABLE, "Server not ready"), reached=False, served=False) == 0.05


def test_pauses_double_up_to_two_seconds() -> None:
    """Each pause is twice the pause before, up to two seconds, for any number of attempts."""
    down = Failure(Code.CONNECTION, "Connection refused")
    assert [after(down, attempts=count) for count in (1, 2, 3, 6, 7, 5000)] == [0.05, 0.1, 0.2, 1.6, 2.0, 2.0]


def test_chance_spreads_the_attempts_of_many_clients() -> None:
    """Chance makes a pause longer by at most a quarter, so that many clients do not retry at the same time."""
    full = Failure(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 1000 ms")
    assert [decide(full, 1, 0.0, 9.0, chance=chance) for chance in (0.0, 0.5, 1.0)] == [1.0, 1.125, 1.25]


def test_nothing_is_sent_after_the_deadline() -> None:
    """If the next attempt would be after the deadline, the client does not retry, and the error says so."""
    full = Failure(Code.UNAVAILABLE, "[rsrv:QUEUE_FULL] full; retry after 1000 ms")
    assert decide(full, 1, 0.0, 1.1) == 1.0
    assert (
        decide(full, 1, 0.0, 1.0) == "not repeated, because the deadline leaves no time for another attempt"
    )

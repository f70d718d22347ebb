"""What is said of requests when a worker dies under them."""

from __future__ import annotations

import numpy as np

from tests.bench.gateway.clients import OK, WRONG, Requests
from tests.bench.gateway.outage import AFTER_S, BEFORE_S, judge

KILLING, KILLED = 100.0, 100.1
BEGIN, END = KILLING - BEFORE_S, KILLED + AFTER_S


def requests(*more: tuple[float, float, str]) -> Requests:
    """One of 10 ms every 100 ms, but none while the worker is killed; and `more`."""
    steady = [(at, at + 0.01, OK) for at in np.arange(BEGIN, END, 0.1) if not KILLING - 0.05 < at < KILLED]
    began, ended, code = zip(*steady, *more, strict=True)
    return Requests(np.array(began), np.array(ended), np.array(code))


def test_a_death_that_nobody_noticed() -> None:
    """Nothing failed and nothing took longer than before: no time was bad."""
    found = judge(0, requests(), KILLING, KILLED, END)
    assert (found.under_way, found.failed, found.failed_later, found.wrong, found.harm_ms) == (0, 0, 0, 0, 0)
    assert found.before_p99_ms == found.after_p99_ms or abs(found.before_p99_ms - 10) < 1e-6


def test_what_began_after_the_death_cannot_have_been_on_the_worker_that_died() -> None:
    """A failure counts as one of those under way only if its request began before the worker was dead."""
    found = judge(
        0,
        requests(
            (99.99, 100.2, "UNAVAILABLE"),
            (100.05, 100.2, "UNAVAILABLE"),
            (100.3, 100.4, "UNAVAILABLE"),
        ),
        KILLING,
        KILLED,
        END,
    )
    assert (found.under_way, found.failed, found.failed_later) == (2, 2, 1)


def test_harm_ends_with_the_last_request_that_felt_it() -> None:
    """Be it that it failed, or that it took several times as long as those before; wrong answers count on their own."""
    slow = (100.2, 100.7, OK)
    failed = (100.2, 100.5, "UNAVAILABLE")
    found = judge(0, requests(slow, failed, (101.0, 101.01, WRONG)), KILLING, KILLED, END)
    assert found.wrong == 1
    assert round(found.harm_ms) == 1010
    found = judge(0, requests(slow, failed), KILLING, KILLED, END)
    assert round(found.harm_ms) == 700


def test_failures_are_counted_by_code_and_wrong_answers_apart() -> None:
    """The percentile is of what was answered right."""
    found = requests((0.0, 9.0, "UNAVAILABLE"), (0.0, 9.0, WRONG))
    assert dict(found.failed()) == {"UNAVAILABLE": 1}
    assert found.wrong == 1
    assert round(found.p99_ms()) == 10
    assert len(found.between(0, 10).code) == 2

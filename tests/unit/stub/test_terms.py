"""What requests ask for, and what the calendar has to do with it."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rsrv.stub.terms import Terms, read_parameters, read_terms
from tests.fakes import FakeRequest

SECOND = 1_000_000_000
HOURS = 10 * 3600 * SECOND
#: the machine runs for a day; the calendar says 2026
NOW, TODAY = 24 * 3600 * SECOND, 1_790_000_000 * SECOND


def terms(unix_ns: int = TODAY, timeout_us: int = 0, **parameters: int) -> Terms:
    request = FakeRequest({}, timeout_us, json.dumps(parameters))
    return read_terms(request, read_parameters(request), NOW, unix_ns)


@given(st.integers(-(1 << 62), 1 << 62))
def test_a_timeout_counts_from_now_whatever_the_calendar_says(jump: int) -> None:
    """And so does a request without any deadline."""
    assert terms(TODAY + jump, timeout_us=5_000_000).deadline_ns == NOW + 5 * SECOND
    assert terms(TODAY + jump, rsrv_priority=3) == Terms(0, 3)


def test_a_deadline_by_the_calendar_is_kept_by_the_clock_from_its_arrival_on() -> None:
    """A request that arrived before the calendar was changed keeps its time."""
    assert terms(rsrv_deadline_unix_ns=TODAY + SECOND).deadline_ns == NOW + SECOND


def test_a_deadline_by_the_calendar_that_arrives_after_a_jump_is_what_the_calendar_says() -> None:
    """Hours forward: it has passed. Hours back: it is hours away, and the timeout beside it is not."""
    until = TODAY + SECOND

    assert 0 < terms(TODAY + HOURS, rsrv_deadline_unix_ns=until).deadline_ns < NOW
    assert terms(TODAY - HOURS, rsrv_deadline_unix_ns=until).deadline_ns == NOW + HOURS + SECOND
    both = terms(TODAY - HOURS, timeout_us=2_000_000, rsrv_deadline_unix_ns=until)
    assert both.deadline_ns == NOW + 2 * SECOND


@given(st.integers(1, (1 << 63) - 1), st.integers(0, 1 << 63))
def test_no_calendar_makes_a_deadline_that_cannot_be_sent(until: int, unix_ns: int) -> None:
    """It is one, and fits into a frame."""
    assert 0 < terms(unix_ns, rsrv_deadline_unix_ns=until).deadline_ns < 1 << 63

"""Times of a week: when they are due, and when a missed time is still due."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from rsrv.settings_times import due


def at(text: str) -> float:
    """Return the Unix time of a text such as `02 09:04`: a day of June 2025 and a time. 1 June is a Sunday."""
    day, clock = text.split(" ")
    return datetime.fromisoformat(f"2025-06-{day}T{clock}").timestamp()


@pytest.mark.parametrize(
    ("times", "last", "now", "expected"),
    [
        (["Mon-Fri 08:55"], "02 08:54", "02 08:55", True),
        (["Mon-Fri 08:55"], "02 08:55", "02 08:56", False),
        (["Mon-Fri 08:55"], "02 08:56", "03 08:54", False),
        (["mon,wed 08:55"], "02 09:10", "04 08:55", True),
        (["mon,wed 08:55"], "02 09:10", "03 08:55", False),
        (["Sat-Mon 08:55"], "01 00:00", "08 08:56", True),
        (["Sat-Mon 08:55"], "02 09:00", "06 08:56", False),
        (["8:55"], "06 08:54", "07 08:55", True),
        (["Mon 08:55", "Tue 10:00"], "02 09:10", "03 10:00", True),
    ],
)
def test_a_time_of_the_week_is_due_once(times: list[str], last: str, now: str, expected: bool) -> None:
    """A time is due at the first check after it, and not at later checks."""
    assert due(times, at(last), at(now)) == expected


def test_a_missed_time_counts_for_ten_minutes() -> None:
    """After an outage of the server, a time nine minutes ago is still due. A time eleven minutes ago is not."""
    assert due(["Mon 08:55"], 0.0, at("02 09:04"))
    assert not due(["Mon 08:55"], 0.0, at("02 09:06"))


def test_midnight_and_the_week_before_are_found() -> None:
    """A time of Sunday night is due on Monday just after midnight."""
    assert due(["Sun 23:58"], at("01 23:00"), at("02 00:03"))


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a time zone with daylight saving time."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Europe/Berlin")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(("night", "comes_at"), [("2026-03-29", "03:30"), ("2026-10-25", "02:30")])
def test_a_time_of_the_night_when_the_clock_is_changed_is_due_once(night: str, comes_at: str) -> None:
    """If the clock skips a time, for daylight saving, it is due one hour later. If the clock repeats a time, it is due once."""
    last = datetime.fromisoformat(f"{night}T00:00").astimezone(UTC).timestamp()
    times = []
    for now in range(int(last) + 30, int(last) + 6 * 3600, 30):
        if due(["2:30"], last, now):
            times.append(f"{datetime.fromtimestamp(now):%H:%M}")
        last = now

    assert times == [comes_at]

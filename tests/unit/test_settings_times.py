"""Times of a week: when they come, and when a missed one still counts."""

from datetime import datetime

import pytest

from rsrv.settings_times import due


def at(text: str) -> float:
    """Return a moment of the week of Monday, 2 June 2025."""
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
    """A time is due at the first look after it, and not again at later ones."""
    assert due(times, at(last), at(now)) == expected


def test_a_missed_time_counts_for_ten_minutes() -> None:
    """After a server was down, the time of nine minutes ago is due; that of eleven minutes ago is not."""
    assert due(["Mon 08:55"], 0.0, at("02 09:04"))
    assert not due(["Mon 08:55"], 0.0, at("02 09:06"))


def test_midnight_and_the_week_before_are_found() -> None:
    """A time of Sunday night is due on Monday just after midnight."""
    assert due(["Sun 23:58"], at("01 23:00"), at("02 00:03"))

"""Times of the week in rsrv.yaml, such as `Mon-Fri 08:55`."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Annotated, Final, Self

from pydantic import AfterValidator

#: If the server was down at a scheduled time, and starts at most this many seconds later, the time still takes effect.
MISSED_S: Final = 600.0

_DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class WeekTimes:
    """A time of day on some days of the week."""

    #: Numbers of the days. Monday is 0.
    days: frozenset[int]
    at: time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as `Mon-Fri 08:55`. A text without days means every day. Raises ValueError."""
        days, _, clock = text.strip().rpartition(" ")
        try:
            hours, minutes = re.fullmatch(r"(\d?\d):(\d\d)", clock).groups()  # type: ignore[union-attr]
            return cls(_days(days or "Mon-Sun"), time(int(hours), int(minutes)))
        except (AttributeError, ValueError):
            raise ValueError(
                f"{text!r} is not a time; write it as 08:55, Mon-Fri 08:55 or Sat,Sun 10:00"
            ) from None

    def latest(self, now: float) -> float:
        """Return the Unix time of the latest of these times that is not after `now`. The machine's time zone applies."""
        here = datetime.fromtimestamp(now)
        moments = (datetime.combine(here - timedelta(days=back), self.at) for back in range(8))
        # Compare Unix times. If the clock skips a time in spring, for example 02:30, the time takes effect an hour later, at
        # 03:30. If the clock repeats a time in autumn, only its first occurrence takes effect.
        times = (moment.timestamp() for moment in moments if moment.weekday() in self.days)
        return next(time for time in times if time <= now)


def _days(text: str) -> frozenset[int]:
    """Return the days of `Mon-Fri,Sun`. Raises ValueError."""
    numbers: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.strip().partition("-")
        start, end = _DAYS.index(first), _DAYS.index(last or first)
        numbers.update(day % 7 for day in range(start, end + 1 if end >= start else end + 8))
    return frozenset(numbers)


def due(times: Iterable[str], last: float, now: float) -> bool:
    """Return True if one of these times of the week is after `last` and at most ten minutes before `now`."""
    return any(max(last, now - MISSED_S) < WeekTimes.parse(text).latest(now) for text in times)


def _is_week_time(text: str) -> str:
    WeekTimes.parse(text)
    return text


#: The text of a `WeekTimes`.
WeekTime = Annotated[str, AfterValidator(_is_week_time)]

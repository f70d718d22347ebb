"""Types of settings for times and sizes. A value is a number in the unit that the key's name ends with, or a text with a unit."""

from math import inf
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, PlainSerializer

from rsrv.units import parse_size, parse_time

#: Durations of at least this many seconds count as never.
_FOREVER_S: Final = 1e12


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_time(noun: str, unit: str) -> BeforeValidator:
    """Return a validator that accepts numbers in `unit`, whose plural is `noun`, and texts with any unit."""

    def read(value: Any) -> Any:
        if isinstance(value, str):
            try:
                return parse_time(value, unit)
            except ValueError:
                value = None
        if not _is_number(value):
            raise ValueError(f"must be {noun} such as 300, or a time such as 500ms, 90s, 5m or 1h")
        return value

    return BeforeValidator(read)


def _as_bytes(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError:
            value = None
    if not _is_number(value):
        raise ValueError("must be bytes such as 16000000000, or a size such as 512MB, 16GB or 16GiB")
    return value


def _as_duration(value: Any) -> float:
    """Return a duration in seconds, infinity for `never`. Raises ValueError."""
    if value == "never":
        return inf
    if isinstance(value, str):
        try:
            value = parse_time(value)
        except ValueError:
            value = None
    if not _is_number(value) or not value > 0:
        raise ValueError("must be a time above 0 such as 600, 90s, 10m, 1h or 2d, or never")
    # Compare before the conversion, which fails for whole numbers that are larger than any float.
    return float(value) if value < _FOREVER_S else inf


Seconds = Annotated[float, _as_time("seconds", "s")]
Milliseconds = Annotated[float, _as_time("milliseconds", "ms")]
Microseconds = Annotated[int, _as_time("microseconds", "us")]
Bytes = Annotated[int, BeforeValidator(_as_bytes)]
#: Seconds; `never` is infinity.
Duration = Annotated[
    float,
    BeforeValidator(_as_duration),
    PlainSerializer(lambda seconds: "never" if seconds == inf else seconds, when_used="json"),
]

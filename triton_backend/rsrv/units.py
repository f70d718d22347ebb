"""Times and sizes as people write them, with or without a unit: `5m`, `500ms`, `16GB`, `2GiB`."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Final

#: Seconds of each unit.
_TIMES: Final[Mapping[str, Decimal]] = {
    unit: Decimal(seconds)
    for unit, seconds in (
        ("us", "0.000001"),
        ("ms", "0.001"),
        ("s", "1"),
        ("m", "60"),
        ("h", "3600"),
        ("d", "86400"),
    )
}
#: Prefixes as powers of 1000, or of 1024 if an i follows.
_SIZES: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER: Final = r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d{1,3})?)\s*"
_TIME: Final = re.compile(rf"{_NUMBER}({'|'.join(_TIMES)})?\s*")
_SIZE: Final = re.compile(rf"{_NUMBER}(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)


def parse_time(text: str, unit: str = "s") -> float:
    """Return a time in `unit`. A number without a unit is also in `unit`. Raises ValueError."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a time, such as 500ms, 90s, 5m or 1h")
    return float(Decimal(match[1]) * _TIMES[match[2] or unit] / _TIMES[unit])


def parse_size(text: str) -> int:
    """Return a number of bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    if match is not None:
        size = Decimal(match[1]) * (1024 if match[3] else 1000) ** _SIZES[(match[2] or "").lower()]
        if size == size.to_integral_value():
            return int(size)
    raise ValueError(f"{text!r} is not a size, such as 512MB, 16GB or 16GiB")

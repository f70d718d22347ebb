"""Times and sizes in the forms that people write."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.units import parse_size, parse_time

POWERS = {
    "": 1,
    "B": 1,
    "k": 10**3,
    "kB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "gb": 10**9,
    "T": 10**12,
}
BINARY = {"Ki": 2**10, "MiB": 2**20, "Gi": 2**30, "GiB": 2**30, "TiB": 2**40}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600, "d": 86400}


@given(st.integers(0, 10**6), st.sampled_from(sorted(POWERS | BINARY)), st.sampled_from(["", " "]))
def test_a_size_is_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    """Sizes have units of 1000 or 1024, with or without B, in upper or lower case."""
    assert parse_size(f"{number}{space}{unit}") == number * (POWERS | BINARY)[unit]


@given(st.floats(0, 1e6, allow_subnormal=False), st.sampled_from(sorted(SECONDS)))
def test_a_time_is_its_number_times_its_unit(number: float, unit: str) -> None:
    """A time is returned in seconds, or in the unit that the caller names. A number without a unit is in this unit."""
    assert math.isclose(parse_time(f"{number:.6f}{unit}"), float(f"{number:.6f}") * SECONDS[unit])
    assert parse_time(f"{number:.6f}", unit) == float(f"{number:.6f}")


@pytest.mark.parametrize(
    ("text", "size"), [("0.5GB", 500_000_000), ("1.5GiB", 3 << 29), ("2e9", 2 * 10**9), (" 7 ", 7)]
)
def test_a_size_may_have_a_fraction_if_its_bytes_are_whole(text: str, size: int) -> None:
    """A size such as 1.5 kB may have a fraction if it is a whole number of bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "16 GBs", "1.5B", "iB", "5i", "1e5000", "inf", "nan", "16,5GB", "0x10"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    """If a text is not a size, the message has examples."""
    with pytest.raises(ValueError, match="such as 512MB, 16GB or 16GiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "m", "5 min", "1h30m", "5M", "1e5000", "inf", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """A text that is not a time is refused. So are units in capitals, because M could mean a month."""
    with pytest.raises(ValueError, match="such as 500ms, 90s, 5m or 1h"):
        parse_time(text)


def test_a_time_in_another_unit_is_exact() -> None:
    """A time in microseconds is an exact integer."""
    assert parse_time("2ms", "us") == 2000
    assert parse_time("0.3ms", "us") == 300

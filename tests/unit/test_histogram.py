"""What is observed is counted once, in the interval that it belongs to, and travels without loss."""

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.histogram import ROWS, SECONDS, Histogram

values = st.lists(st.floats(0, 100, allow_nan=False), max_size=50)


@given(values)
def test_every_value_is_in_the_interval_below_its_bound(seen: list[float]) -> None:
    """A bound belongs to the interval below it, as Prometheus' `le` says."""
    histogram = Histogram(SECONDS)
    for value in seen:
        histogram.observe(value)

    assert sum(histogram.counts) == len(seen)
    for index, bound in enumerate(SECONDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in seen)
    assert histogram.sum == pytest.approx(sum(seen))


@given(values, values)
def test_two_halves_are_the_whole(one: list[float], two: list[float]) -> None:
    """Added up after each went through JSON."""
    whole, parts = Histogram(SECONDS), [Histogram(SECONDS), Histogram(SECONDS)]
    for part, seen in zip(parts, (one, two), strict=True):
        for value in seen:
            part.observe(value)
            whole.observe(value)

    total = Histogram(SECONDS)
    for part in parts:
        total.add(Histogram.from_json(SECONDS, part.to_json()))

    assert total.counts == whole.counts
    assert total.sum == pytest.approx(whole.sum)


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [0.0],
        ["0", 0],
        [float("nan"), 0],
        [float("inf"), 0],
        [0.0, -1, 1],
        [0.0, 0, -1],
        [0.0, 0, 1.5],
        [0.0, 0, True],
        [0.0, 14, 1],
        [0.0, 0, *[1] * 15],
    ],
)
def test_what_is_no_histogram_is_refused(said: Any) -> None:
    """Whoever sends it; of 13 bounds."""
    with pytest.raises(ValueError, match="not a histogram"):
        Histogram.from_json(ROWS, said)


def test_bounds_rise() -> None:
    """Else values would be in the wrong interval."""
    assert all(bisect_left(SECONDS, bound) == index for index, bound in enumerate(SECONDS))

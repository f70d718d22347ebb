"""A histogram counts each value once, in its interval, and is the same after it was written as JSON and read."""

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.histogram import ROWS, SECONDS, Histogram

values = st.lists(st.floats(0, 100, allow_nan=False), max_size=50)


@given(values)
def test_every_value_is_in_the_interval_below_its_bound(seen: list[float]) -> None:
    """A value that equals a bound is in the interval below it, as with Prometheus' `le`."""
    histogram = Histogram(SECONDS)
    for value in seen:
        histogram.observe(value)

    assert sum(histogram.counts) == len(seen)
    for index, bound in enumerate(SECONDS):
        assert sum(histogram.counts[: index + 1]) == sum(value <= bound for value in seen)
    assert histogram.sum == pytest.approx(sum(seen))


@given(values, values)
def test_two_halves_are_the_whole(first: list[float], second: list[float]) -> None:
    """The sum of two histograms is the histogram of all values, even after each was written as JSON and read."""
    whole, parts = Histogram(SECONDS), [Histogram(SECONDS), Histogram(SECONDS)]
    for part, seen in zip(parts, (first, second), strict=True):
        for value in seen:
            part.observe(value)
            whole.observe(value)

    total = Histogram(SECONDS)
    for part in parts:
        total.add(Histogram.from_json(SECONDS, part.to_json()))

    assert total.counts == whole.counts
    assert total.sum == pytest.approx(whole.sum)


@pytest.mark.parametrize(
    "document",
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
def test_json_that_is_no_histogram_is_refused(document: Any) -> None:
    """JSON with another number of bounds, or with wrong values, is refused."""
    with pytest.raises(ValueError, match="not a histogram"):
        Histogram.from_json(ROWS, document)


def test_bounds_rise() -> None:
    """The bounds of intervals rise."""
    assert all(bisect_left(SECONDS, bound) == index for index, bound in enumerate(SECONDS))


def made(seen: list[float]) -> Histogram:
    histogram = Histogram(SECONDS)
    for value in seen:
        histogram.observe(value)
    return histogram


@given(values, values)
def test_what_came_later_is_the_difference(earlier: list[float], later: list[float]) -> None:
    """The difference between two states of a histogram is the histogram of the values that were added between them."""
    histogram = made(earlier + later).since(made(earlier))

    assert histogram.counts == made(later).counts
    assert histogram.sum == pytest.approx(sum(later), abs=1e-9)


@given(values, values)
def test_all_counts_of_a_restarted_histogram_are_later(earlier: list[float], now: list[float]) -> None:
    """If an interval has fewer values than before, the histogram was restarted. The difference then has all its values."""
    before = made(earlier)
    if all(count >= old for count, old in zip(made(now).counts, before.counts, strict=True)):
        return
    histogram = made(now).since(before)

    assert (histogram.counts, histogram.sum) == (made(now).counts, made(now).sum)


@given(values, st.floats(0.01, 1.0))
def test_a_quantile_is_in_the_interval_of_the_value(seen: list[float], q: float) -> None:
    """A quantile lies in the interval that contains the exact value, or is the last bound if this value is above it.

    Without values, there is no quantile.
    """
    quantile = made(seen).quantile(q)

    assert (quantile is None) == (not seen)
    if quantile is not None:
        value = sorted(seen)[max(0, -int(-q * len(seen) // 1) - 1)]
        index = bisect_left(SECONDS, value)
        upper = SECONDS[min(index, len(SECONDS) - 1)]
        lower = SECONDS[index - 1] if 0 < index < len(SECONDS) else 0.0 if index == 0 else upper
        assert lower - 1e-9 <= quantile <= upper + 1e-9


@given(values.filter(bool))
def test_quantiles_rise(seen: list[float]) -> None:
    """The quantile of a larger share is not smaller."""
    quantiles = [made(seen).quantile(q / 20) or 0.0 for q in range(1, 21)]
    assert quantiles == sorted(quantiles)

"""The charts of the live page: points of the last minutes, hour and day."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rsrv.control.charts import RANGES, Charts
from rsrv.control.overview import Work
from rsrv.histogram import SECONDS, Histogram


def work(*values: float, misses: int = 0, device_s: float = 0.0) -> Work:
    """Return the work of requests, each of which took one of these times in seconds."""
    request = Histogram(SECONDS)
    for value in values:
        request.observe(value)
    return Work(len(values), 0, misses, device_s, request)


def test_a_point_has_the_figures_of_its_interval() -> None:
    """A point has the rate, percentiles, device time and hits of the updates since the previous point."""
    charts = Charts()
    assert charts.add(100.0, work(1.0, 1.0), 2) == {}  # The first update has no interval before it.
    assert charts.add(102.0, work(*[0.002] * 9, misses=2, device_s=3.0), 2) == {}
    (point,) = charts.add(105.0, work(0.4, misses=3, device_s=2.0), 2).values()
    assert (point.t, point.rate, point.busy, point.hits) == (105.0, 2.0, 0.5, 0.5)
    assert 0.001 < (point.p50_s or 0) <= 0.0025
    assert 0.25 < (point.p99_s or 0) <= 0.5
    idle = charts.add(110.0, work(), 2)["5 min"]
    assert (idle.rate, idle.p50_s, idle.p99_s, idle.hits) == (0.0, None, None, None)
    assert charts.all()["5 min"] == [point, idle]


def test_a_time_without_updates_is_a_gap() -> None:
    """After minutes without updates, the next point covers only the time after this gap, and earlier points stay."""
    charts = Charts()
    charts.add(0.0, work(), 1)
    charts.add(5.0, work(0.1), 1)
    assert charts.add(200.0, work(*[0.1] * 900), 1) == {}
    assert charts.add(205.0, work(0.1), 1)["5 min"].rate == 0.2
    assert [point.t for point in charts.all()["5 min"]] == [5.0, 205.0]


@given(st.floats(0.2, 5.0), st.integers(1, 60_000))
def test_the_points_are_bounded(every: float, updates: int) -> None:
    """At any rate of updates, a range has at most its maximum number of points, and no work is lost.

    The distance between two points is about the range's number of seconds.
    """
    charts, updates = Charts(), min(updates, int(3_000 / every))
    for number in range(updates):
        charts.add(number * every, work(0.1), 1)
    for name, seconds, most in RANGES:
        points = charts.all().get(name, [])
        assert len(points) <= most
        steps = [later.t - point.t for point, later in pairwise(points)]
        # Times are rounded to tenths.
        assert all(0.95 * seconds - 0.11 <= step <= seconds + every + 0.2 for step in steps)
        assert all(abs(point.rate * every - 1) < 0.01 for point in points)

"""Rates, latencies and shares of a server over the last minutes, hour and day, in bounded memory. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rsrv.control.overview import Work


class Range(NamedTuple):
    """A range of time. It has at most `points` points, each of which stands for `seconds` seconds."""

    name: str
    seconds: float
    points: int


#: The ranges have 324 points in all, about 50 kB.
RANGES = (Range("5 min", 5.0, 60), Range("1 h", 30.0, 120), Range("24 h", 600.0, 144))


class Point(NamedTuple):
    """Figures of an interval that ended at the Unix time `t`. A figure is None if there were no requests."""

    t: float
    #: Answers per second, and failures per second.
    rate: float
    errors: float
    #: Percentiles of the duration of a request, in seconds.
    p50_s: float | None
    p99_s: float | None
    #: Share of the devices' time in which they executed.
    busy: float
    #: Share of the requests that found their weights on the device.
    hits: float | None


@dataclass(slots=True)
class _Ring:
    """The points of one range, and the work since the latest one."""

    points: deque[Point]
    began: float
    work: Work = field(default_factory=Work)


class Charts:
    """The points of each range.

    The interval of a point ends with the first update after its nominal end, so that no point is empty when an update is late.
    """

    def __init__(self) -> None:
        self._rings: dict[str, _Ring] = {}

    def add(self, now: float, work: Work, devices: int) -> dict[str, Point]:
        """Add the work since the previous call, at Unix time `now`. Return the points that end now, by range."""
        ended = {}
        for name, seconds, most in RANGES:
            ring = self._rings.get(name)
            # After a long time without updates, for example because no runtime answered, begin a new interval: the figures of
            # that time are unknown.
            if ring is None or not 0 <= now - ring.began < 2 * seconds + RANGES[0].seconds:
                points = deque[Point](maxlen=most) if ring is None else ring.points
                self._rings[name] = _Ring(points, now)
                continue
            ring.work.add(work)
            elapsed = now - ring.began
            # Accept a slightly shorter interval, because updates may be a little early.
            if elapsed >= 0.95 * seconds:
                ended[name] = _point(now, elapsed, ring.work, devices)
                ring.points.append(ended[name])
                ring.began, ring.work = now, Work()
        return ended

    def all(self) -> dict[str, list[Point]]:
        """Return all points by range, the latest last."""
        return {name: list(ring.points) for name, ring in self._rings.items()}


def _point(now: float, elapsed: float, work: Work, devices: int) -> Point:
    return Point(
        round(now, 1),
        _brief(work.requests / elapsed),
        _brief(work.errors / elapsed),
        _quantile(work, 0.5),
        _quantile(work, 0.99),
        _brief(min(1.0, work.device_s / elapsed / max(1, devices))),
        None if work.hit_share is None else _brief(work.hit_share),
    )


def _quantile(work: Work, q: float) -> float | None:
    seconds = work.request.quantile(q)
    return None if seconds is None else _brief(seconds)


def _brief(value: float) -> float:
    """Return the value with the digits that a chart shows."""
    return float(f"{value:.4g}")

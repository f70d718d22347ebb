"""Divides a batch among several devices if they answer all of it sooner than one device would. All functions are pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from rsrv.placement.device_choice import SOONER

#: Minimum number of seconds that the division of a batch must save. The answers of a divided batch are sent through response
#: senders, which takes more time than a list that execute() returns.
_LEAST_GAIN_S = 0.001


class ExecutionCosts:
    """Seconds that a device needs for any number of rows, computed from the measured times of single executions."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]) -> None:
        """`seconds` has the duration of one execution at each of the `sizes`. There must be at least one size."""
        self._executions = list(zip(sizes, seconds, strict=True))
        self._known: dict[int, float] = {0: 0.0}

    def __call__(self, rows: int) -> float:
        """Return the shortest time for `rows` rows.

        Full executions of one size compute most rows. The remainder may have another size.
        """
        seconds = self._known.get(rows)
        if seconds is None:
            seconds = self._known[rows] = min(
                rows // size * each + self._alike(rows % size) for size, each in self._executions
            )
        return seconds

    def _alike(self, rows: int) -> float:
        """Return the shortest time in which executions of one size compute `rows` rows."""
        return min(-(-rows // size) * each for size, each in self._executions)


class Forecast(NamedTuple):
    """Expected work of one device."""

    #: Seconds until the device could begin a batch that arrived now, including the load of weights.
    free_s: float
    #: True if the weights are on the device.
    warm: bool
    costs: ExecutionCosts

    def ends_in_s(self, rows: int) -> float:
        return self.free_s + self.costs(rows)


@dataclass(slots=True)
class _Share:
    """A device's part of a batch."""

    forecast: Forecast
    rows: int = 0


def divide(rows: Sequence[int], whole: Forecast, others: Sequence[Forecast]) -> list[int]:
    """Return a device number for each request of a batch: 0 is the device `whole`, and 1, 2, ... are the `others` in order.

    The largest requests are assigned first. Each request is assigned to the device that would finish it first. If all requests
    have one row, the batch then ends as early as possible. The batch is not divided unless this makes its last answer clearly
    earlier. Devices in `others` that lack the weights get no requests.

    Args:
        rows: number of rows of each request. No request is divided.
        whole: the device that would answer the whole batch first.
        others: further devices.
    """
    ends_whole = whole.ends_in_s(sum(rows))
    shares = {0: _Share(whole)} | {
        n: _Share(forecast) for n, forecast in enumerate(others, 1) if forecast.warm
    }
    parts = [0] * len(rows)
    for index in sorted(range(len(rows)), key=rows.__getitem__, reverse=True):
        least = inf
        for number, share in shares.items():
            end = share.forecast.ends_in_s(share.rows + rows[index])
            if end < least:
                least, parts[index] = end, number
        shares[parts[index]].rows += rows[index]
    ends_cut = max(
        (share.forecast.ends_in_s(share.rows) for share in shares.values() if share.rows), default=0.0
    )
    return parts if ends_cut <= min(SOONER * ends_whole, ends_whole - _LEAST_GAIN_S) else [0] * len(rows)

"""What HAProxy tells of the requests that it sent to workers: a line each, as the log-format of `config` has it."""

from bisect import bisect_left
from collections.abc import Callable

import grpc

from rsrv_gateway.http_outcomes import CODES
from rsrv_gateway.plane import DURATION_BOUNDS, Durations

#: gRPC codes by number, as a header has it
_CODES: dict[str, str] = {str(code.value[0]): code.name for code in grpc.StatusCode}


#: with these a worker may be about to end: it does not have the model any more for which it got a request
_DOUBTFUL = ("NOT_FOUND", "UNAVAILABLE")


class Told:
    """Counts what was told.

    Args:
        worker_in: tells whose a slot is.
        doubted: called with a worker that may be about to end.
    """

    def __init__(self, worker_in: Callable[[str], str], doubted: Callable[[str], None]) -> None:
        self._worker_in = worker_in
        self._doubted = doubted
        self._requests: dict[tuple[str, str, str], int] = {}
        self._durations: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}
        #: lines that are not as they should be
        self.strange = 0

    def take(self, line: str) -> None:
        """MODEL SLOT STATUS CODE MICROSECONDS END"""
        parts = line.split()
        if len(parts) != 6 or not parts[4].isdigit():
            self.strange += 1
            return
        model, slot, status, code, duration, end = parts
        worker, ended = self._worker_in(slot), code_of(status, code, end)
        key = (model, worker, ended)
        self._requests[key] = self._requests.get(key, 0) + 1
        if ended in _DOUBTFUL:
            self._doubted(worker)
        seconds = int(duration) / 1e6
        if model not in self._durations:
            self._durations[model], self._seconds[model] = [0] * (len(DURATION_BOUNDS) + 1), 0.0
        self._durations[model][bisect_left(DURATION_BOUNDS, seconds)] += 1
        self._seconds[model] += seconds

    def requests(self) -> dict[tuple[str, str, str], int]:
        """By model, worker and gRPC code."""
        return dict(self._requests)

    def durations(self) -> dict[str, Durations]:
        return {
            model: Durations(tuple(counts), self._seconds[model]) for model, counts in self._durations.items()
        }


def code_of(status: str, code: str, end: str) -> str:
    """The gRPC code by name. `code` is from the header (-: there was none), `end` says who ended the request, and when
    (HAProxy's termination state: --, if it ended as it should)."""
    if end[0] == "C":
        return "CANCELLED"
    if code != "-":
        return _CODES.get(code, "UNKNOWN")
    if status == "200":
        return "OK" if end[0] == "-" else "UNAVAILABLE"  # the worker was lost amid the answer
    meant = CODES.get(int(status)) if status.isdigit() else None
    return "UNKNOWN" if meant is None else str(meant.name)

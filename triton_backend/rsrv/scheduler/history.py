"""A bounded history of one model. Details are converted to data only when they are read, which is rare."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from math import inf
from operator import itemgetter
from typing import NamedTuple

from rsrv.scheduler.events import Execute, ExecutionFinished, LoadFailed, PolicyChanged
from rsrv.scheduler.statistics import Cause

Value = str | int | float | list[int]
#: Details of a record: an instruction or an event as it was passed, ids of requests, text, or named values.
Details = Execute | ExecutionFinished | LoadFailed | PolicyChanged | Sequence[int] | str | Mapping[str, Value]

#: Maximum number of ids that one record shows.
_MAX_IDS = 16

#: Maximum number of records per model.
MAX_RECORDS = 50
#: Maximum number of state changes per model. They are stored separately, so that records of requests do not displace them.
MAX_CHANGES = 30

#: Changes of state after which requests can execute.
_USABLE = ("weights resident", "weights evicting")
#: Reasons of evictions.
_EVICTED = {*(cause.value for cause in Cause), "removed"}


class HistoryRecord(NamedTuple):
    """One record of a model's history."""

    at: float
    #: Text such as `arrived`, or `weights loading` for a change of state.
    what: str
    details: Mapping[str, Value]

    def __str__(self) -> str:
        shown = (
            f"{key}={value:.6f}" if isinstance(value, float) else f"{key}={value}"
            for key, value in self.details.items()
        )
        return " ".join((f"t={self.at:.6f}", self.what, *shown))


class History:
    """The latest records of one model, and the latest changes of its weights' state."""

    __slots__ = ("_changes", "_records", "count")

    def __init__(self) -> None:
        #: Number of records and changes so far. Each record stores its number, which orders records of equal time.
        self.count = 0
        self._records: deque[tuple[int, float, str, Details]] = deque(maxlen=MAX_RECORDS)
        # This is a list, because a short list takes 100 bytes, but a deque takes 760.
        self._changes: list[tuple[int, float, str, Details]] = []

    def add(self, now: float, event: str, details: Details = "") -> None:
        self.count += 1
        self._records.append((self.count, now, event, details))

    def change(self, now: float, state: str, details: Mapping[str, Value]) -> None:
        """Add a change of state."""
        self.count += 1
        self._changes.append((self.count, now, state, details))
        del self._changes[:-MAX_CHANGES]

    def absences(self, since: float) -> tuple[list[tuple[float, float]], HistoryRecord | None]:
        """Return the periods in which the weights were not usable, and the latest eviction that began such a period, or None.

        Periods that ended before `since` are left out. A period that has not ended has the end inf.
        """
        periods: list[tuple[float, float]] = []
        evicted, end = None, inf
        for _, at, event, details in reversed(self._changes):
            if event in _USABLE:
                if at <= since:
                    break
            else:
                if end > since:
                    periods.append((at, end))
                if event == "weights absent" and isinstance(details, Mapping) and details["why"] in _EVICTED:
                    evicted = evicted or HistoryRecord(at, event, details)
            end = at
        return periods, evicted

    def records(self, beside: Iterable[HistoryRecord] = ()) -> list[HistoryRecord]:
        """Return all records and changes, oldest first. `beside` has other records to insert, oldest first."""
        begun = {record.number: record for *_, record in self._records if isinstance(record, Execute)}
        own = merge(self._changes, self._records, key=itemgetter(0))
        read = (HistoryRecord(now, event, _read(details, begun)) for _, now, event, details in own)
        return list(merge(beside, read, key=itemgetter(0)))


def _read(details: Details, begun: Mapping[int, Execute]) -> Mapping[str, Value]:
    match details:
        case str():
            return {"why": details} if details else {}
        case Mapping():
            return details
        case Execute():
            shape: dict[str, Value] = {"dispatch": details.number, "variant": details.variant}
            return shape | {"size": details.size, "rows": details.rows} | _ids(details.requests)
        case ExecutionFinished():
            ended: dict[str, Value] = {"dispatch": details.number, "seconds": details.seconds}
            if (execute := begun.get(details.number)) is not None:
                ended |= {"size": execute.size, "rows": execute.rows, "requests": len(execute.requests)}
            return ended if details.error is None else ended | {"why": details.error}
        case LoadFailed():
            return {"why": details.error}
        case PolicyChanged():
            changed = {key: getattr(details, key) for key in ("weight", "max_delay", "max_queue_depth")}
            return {"why": ", ".join(f"{key} {value}" for key, value in changed.items() if value is not None)}
        case _:
            return _ids(details)


def _ids(ids: Sequence[int]) -> dict[str, Value]:
    return {"requests": len(ids), "ids": list(ids[:_MAX_IDS])}

"""A bounded history of one model, made readable only when it is read."""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import merge
from operator import itemgetter

from rsrv.scheduler.events import (
    AbandonLoad,
    EvictWeights,
    Execute,
    ExecutionFinished,
    LoadFailed,
    LoadWeights,
    PolicyChanged,
    WeightsLoaded,
)

#: the details of a record: an instruction or an event as it was given, ids of requests, or text.
Details = (
    Execute
    | ExecutionFinished
    | LoadWeights
    | WeightsLoaded
    | LoadFailed
    | AbandonLoad
    | EvictWeights
    | PolicyChanged
    | Sequence[int]
    | str
)

#: ids that one line shows at most.
_MAX_IDS = 16

#: records kept of each model, and changes of state, which outlast the records of its requests.
LENGTH, CHANGES_LENGTH = 50, 30


class History:
    """The latest records of one model, and the latest changes of its weights' state."""

    __slots__ = ("_added", "_changes", "_records")

    def __init__(self) -> None:
        #: number of records and changes so far, which keeps those of one moment in order.
        self._added = 0
        self._records: deque[tuple[int, float, str, Details]] = deque(maxlen=LENGTH)
        self._changes: deque[tuple[int, float, str, Details]] = deque(maxlen=CHANGES_LENGTH)

    def add(self, now: float, what: str, details: Details) -> None:
        """Add a record. The details become text only when they are read, which is rare."""
        self._added += 1
        self._records.append((self._added, now, what, details))

    def change(self, now: float, state: str, why: str) -> None:
        """Add a change of state."""
        self._added += 1
        self._changes.append((self._added, now, f"{state} ({why})", ""))

    def lines(self, beside: Iterable[tuple[float, str]] = ()) -> list[str]:
        """Return one line per record, oldest first: `t=<seconds> <what> <details>`.

        `beside`: times and texts of other lines to insert, oldest first.
        """
        own = merge(self._changes, self._records, key=itemgetter(0))
        timed = ((now, f"{what} {_text(details)}".rstrip()) for _, now, what, details in own)
        return [f"t={now:.6f} {text}" for now, text in merge(beside, timed, key=itemgetter(0))]


def _text(details: Details) -> str:
    match details:
        case str():
            return details
        case Execute():
            return (
                f"dispatch={details.dispatch} variant={details.variant} size={details.size}"
                f" rows={details.rows} requests={_ids(details.requests)}"
            )
        case ExecutionFinished():
            error = "" if details.error is None else f" error={details.error}"
            return f"dispatch={details.dispatch} seconds={details.seconds:.6f}{error}"
        case WeightsLoaded():
            return f"epoch={details.epoch} seconds={details.seconds:.6f}"
        case LoadFailed():
            return f"epoch={details.epoch} error={details.error}"
        case PolicyChanged():
            changed = {key: getattr(details, key) for key in ("weight", "max_delay", "max_queue_depth")}
            return " ".join(f"{key}={value}" for key, value in changed.items() if value is not None)
        case LoadWeights() | AbandonLoad() | EvictWeights():
            return f"epoch={details.epoch}"
        case _:
            return f"requests={_ids(details)}"


def _ids(ids: Sequence[int]) -> str:
    shown = ",".join(str(request) for request in ids[:_MAX_IDS])
    return shown if len(ids) <= _MAX_IDS else f"{shown},... ({len(ids)} in all)"

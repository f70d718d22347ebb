"""A bounded history of one model, made readable only when it is read."""

from collections import deque
from collections.abc import Sequence

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

#: records kept of each model.
LENGTH = 50


class History:
    """The latest records of one model."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: deque[tuple[float, str, Details]] = deque(maxlen=LENGTH)

    def add(self, now: float, what: str, details: Details) -> None:
        """Add a record. The details become text only when they are read, which is rare."""
        self._records.append((now, what, details))

    def lines(self) -> list[str]:
        """Return one line per record, oldest first: `t=<seconds> <what> <details>`."""
        return [f"t={now:.6f} {what} {_text(details)}".rstrip() for now, what, details in self._records]


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

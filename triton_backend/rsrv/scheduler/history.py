"""A bounded log of what happened to one model, made readable only when somebody asks."""

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

#: what a line is about: an instruction or an event as it was given, ids of requests, or text.
Subject = (
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

#: more ids than this are abbreviated in a line.
_IDS = 16


#: records that are kept of each model.
LENGTH = 50


class History:
    """The latest records of one model."""

    __slots__ = ("_records",)

    def __init__(self) -> None:
        self._records: deque[tuple[float, str, Subject]] = deque(maxlen=LENGTH)

    def add(self, now: float, what: str, subject: Subject) -> None:
        # Values are kept as they are: text is for the reader, who is rare.
        self._records.append((now, what, subject))

    def lines(self) -> list[str]:
        """One line per record, oldest first: `t=<seconds> <what> <details>`."""
        return [f"t={now:.6f} {what} {_details(subject)}".rstrip() for now, what, subject in self._records]


def _details(subject: Subject) -> str:
    match subject:
        case str():
            return subject
        case Execute():
            return (
                f"dispatch={subject.dispatch} variant={subject.variant} size={subject.size}"
                f" rows={subject.rows} requests={_ids(subject.requests)}"
            )
        case ExecutionFinished():
            error = "" if subject.error is None else f" error={subject.error}"
            return f"dispatch={subject.dispatch} seconds={subject.seconds:.6f}{error}"
        case WeightsLoaded():
            return f"epoch={subject.epoch} seconds={subject.seconds:.6f}"
        case LoadFailed():
            return f"epoch={subject.epoch} error={subject.error}"
        case PolicyChanged():
            changed = {key: getattr(subject, key) for key in ("weight", "max_delay", "max_queue_depth")}
            return " ".join(f"{key}={value}" for key, value in changed.items() if value is not None)
        case LoadWeights() | AbandonLoad() | EvictWeights():
            return f"epoch={subject.epoch}"
        case _:
            return f"requests={_ids(subject)}"


def _ids(ids: Sequence[int]) -> str:
    shown = ",".join(str(request) for request in ids[:_IDS])
    return shown if len(ids) <= _IDS else f"{shown},... ({len(ids)} in all)"

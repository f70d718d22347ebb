"""The decision whether a failed request is sent again, and when. It is pure: the time and the chance are arguments."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: First pause before a repetition, in seconds. It doubles up to the maximum.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
#: Largest random share added to a pause, so that clients that were refused together do not return together.
SPREAD: Final = 0.25

#: An error's tag. Ensembles and models that call other models put their own names before it.
_TAG = re.compile(r"\[rsrv:([A-Z_]+)\]")
_AFTER = re.compile(r"retry after (\d+) ms")
#: Triton's text about a model that it does not serve at the moment. Some releases send it as INVALID_ARGUMENT.
_UNKNOWN_MODEL: Final = "unknown model"


class Code(StrEnum):
    """Outcome of a request: gRPC's codes, and CONNECTION if no server answered."""

    CONNECTION = "no connection to the server"
    INVALID_ARGUMENT = "invalid argument"
    NOT_FOUND = "not found"
    UNAVAILABLE = "unavailable"
    RESOURCE_EXHAUSTED = "resource exhausted"
    DEADLINE_EXCEEDED = "deadline exceeded"
    CANCELLED = "cancelled"
    INTERNAL = "internal error"
    OTHER = "refused"


#: Tags of failures that end by themselves. Other tags stand for failures that a repetition does not cure.
RETRIED_TAGS: Final = frozenset({"QUEUE_FULL", "STARTING", "RUNTIME_DOWN", "PAUSED"})
#: Codes of failures without a tag that may come from the connection alone.
_NO_ANSWERS: Final = frozenset({Code.CONNECTION, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED})
#: Codes of failures without a tag that end by themselves.
RETRIED_CODES: Final = frozenset({Code.CONNECTION, Code.UNAVAILABLE})


@dataclass(frozen=True)
class Failure:
    """An answer that is an error, or no answer."""

    code: Code
    text: str

    @property
    def tag(self) -> str:
        """The tag of rsrv's error, such as QUEUE_FULL, or an empty text."""
        match = _TAG.search(self.text)
        return match[1] if match else ""

    @property
    def after_s(self) -> float | None:
        """Seconds after which the server asks for a retry, or None if it names no time."""
        match = _AFTER.search(self.text)
        return int(match[1]) / 1000 if match else None

    @property
    def is_answer(self) -> bool:
        """False if the server may still work on the request."""
        return bool(self.tag) or self.code not in _NO_ANSWERS


def decide(
    failure: Failure,
    attempts: int,
    now: float,
    deadline: float,
    *,
    repeatable: bool = True,
    reached: bool = True,
    served: bool = True,
    chance: float = 0.0,
) -> float | str:
    """Return the time at which to send a failed request again, or the reason not to repeat it.

    The reason is empty if the failure itself explains it.

    Args:
        failure: the failure of the latest attempt.
        attempts: number of attempts so far, at least 1.
        now: the time.
        deadline: the time after which the answer is useless.
        repeatable: False for a step of a sequence, because a repetition would do its work twice.
        reached: the server has answered before. If it has not, a wrong address is more likely than a server that is down.
        served: the server has served the model to this client. An unknown model then means that the server restarts.
        chance: a random number from 0 to 1.
    """
    if not _may_pass(failure, reached, served):
        return ""
    if not repeatable:
        return "a step of a sequence may not be repeated"
    pause = failure.after_s
    if pause is None:
        pause = min(FIRST_PAUSE_S * 2 ** min(attempts - 1, 20), MAX_PAUSE_S)
    at = now + pause * (1 + SPREAD * chance)
    return at if at < deadline else "the deadline leaves no time for another attempt"


def _may_pass(failure: Failure, reached: bool, served: bool) -> bool:
    """Return whether the failure ends by itself."""
    if failure.tag:
        return failure.tag in RETRIED_TAGS
    if failure.code is Code.NOT_FOUND or _UNKNOWN_MODEL in failure.text:
        return served
    if failure.code is Code.CONNECTION:
        return reached
    return failure.code in RETRIED_CODES

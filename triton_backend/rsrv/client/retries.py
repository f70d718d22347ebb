"""Decide whether a failed request is sent again, and when. The module is pure: the time and a random number are arguments."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: Seconds before the first retry, and maximum pause in seconds. The pause doubles with each attempt.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
#: A pause is prolonged by a random share of up to this, so that clients that were refused together do not retry together.
SPREAD: Final = 0.25

#: Matches the tag in an error's text. It need not be at the start: ensembles and meta models put the names of models before it.
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


#: Tags of temporary failures. Failures with other tags are not cured by a retry.
RETRIED_TAGS: Final = frozenset({"QUEUE_FULL", "STARTING", "RUNTIME_DOWN", "PAUSED"})
#: Failures with these codes and without a tag may come from the connection. The server may then still work on the request.
_NO_ANSWERS: Final = frozenset({Code.CONNECTION, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED})
#: Codes of temporary failures, if the error has no tag.
RETRIED_CODES: Final = frozenset({Code.CONNECTION, Code.UNAVAILABLE})


@dataclass(frozen=True)
class Failure:
    """Failure of an attempt: the server answered with an error, or did not answer."""

    code: Code
    text: str

    @property
    def tag(self) -> str:
        """The tag of rsrv's error, such as QUEUE_FULL, or an empty text."""
        match = _TAG.search(self.text)
        return match[1] if match else ""

    @property
    def after_s(self) -> float | None:
        """Seconds to wait before a retry, if the server has named a time, and otherwise None."""
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
        return "not repeated, because it is a step of a sequence"
    pause = failure.after_s
    if pause is None:
        pause = min(FIRST_PAUSE_S * 2 ** min(attempts - 1, 20), MAX_PAUSE_S)
    at = now + pause * (1 + SPREAD * chance)
    return at if at < deadline else "not repeated, because the deadline leaves no time for another attempt"


def _may_pass(failure: Failure, reached: bool, served: bool) -> bool:
    """Return whether the failure is temporary."""
    if failure.tag:
        return failure.tag in RETRIED_TAGS
    if failure.code is Code.NOT_FOUND or _UNKNOWN_MODEL in failure.text:
        return served
    if failure.code is Code.CONNECTION:
        return reached
    return failure.code in RETRIED_CODES

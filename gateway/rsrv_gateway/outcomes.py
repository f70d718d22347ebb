"""What a worker's refusal means: whether another worker is asked, and what the client gets. Pure; both fronts use it.

A worker says with gRPC codes, or with HTTP statuses that mean the same, what Triton's backends can say. What they have no
code for is UNAVAILABLE with a tag in front of the message.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from grpc import StatusCode

#: as `[rsrv:QUEUE_FULL] text`; an ensemble writes its own words before it
_TAG = re.compile(r"\[rsrv:([A-Z_]+)\]")

#: the code that a tagged UNAVAILABLE stands for
MEANT = {
    "QUEUE_FULL": StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE": StatusCode.DEADLINE_EXCEEDED,
    "NOT_RESIDENT": StatusCode.FAILED_PRECONDITION,
}
#: with these another worker would only be given the load that this one refused, or answer too late
_FINAL = (StatusCode.RESOURCE_EXHAUSTED, StatusCode.DEADLINE_EXCEEDED)
_ELSEWHERE = (StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE)

#: Connections that may break under one request. A request that ends whatever computes it must not go through all workers.
MOST_LOSSES = 2

#: characters of a client's invention that are repeated
_LONGEST_NAME = 256

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call ended when not with an answer."""

    code: StatusCode
    message: str
    trailing: Metadata = ()
    #: whether the connection broke while the request was there, which may be what ended the worker
    lost: bool = False

    def for_client(self) -> StatusCode:
        """The code that the client gets; message and metadata stay as they are."""
        return _meant(self) or self.code

    def is_retryable(self) -> bool:
        """Whether another worker may answer, if nothing was answered yet."""
        return self.code in _ELSEWHERE and _meant(self) not in _FINAL

    def suspects_worker(self) -> bool:
        """Whether the worker may be gone, and is worth a look: it is unavailable, and none of its models says why."""
        return self.code is StatusCode.UNAVAILABLE and not tagged(self.message)

    def preferred_to(self, earlier: "Refusal | None") -> "Refusal":
        """Which of two is for the client, when the request was refused by one worker after the other.

        That a model is not there is the lesser word: who may come back later has a reason to do so.
        """
        return earlier if earlier is not None and self.code is StatusCode.NOT_FOUND else self


def _meant(refusal: Refusal) -> StatusCode | None:
    if refusal.code is not StatusCode.UNAVAILABLE:
        return None
    tag = _TAG.search(refusal.message)
    return None if tag is None else MEANT.get(tag[1])


def tagged(message: str) -> bool:
    """Whether a model says with it what it has no code for."""
    return _TAG.search(message) is not None


def not_found(model: str) -> Refusal:
    """As Triton says it, but for a name so long that no client would take the message."""
    return Refusal(StatusCode.NOT_FOUND, f"Request for unknown model: '{_shown(model)}' is not found")


def another_model(own: str, model: str) -> Refusal:
    """Of a message in the stream of the model `own`."""
    return Refusal(
        StatusCode.INVALID_ARGUMENT,
        f"this stream belongs to model '{own}'; open another stream for '{_shown(model)}'",
    )


def _shown(model: str) -> str:
    return model if len(model) <= _LONGEST_NAME else f"{model[:_LONGEST_NAME]}..."


def not_served(model: str) -> Refusal:
    return Refusal(
        StatusCode.UNAVAILABLE, f"no worker serves model '{model}' at the moment: try again in a while"
    )


def unsupported() -> Refusal:
    return Refusal(
        StatusCode.UNIMPLEMENTED,
        "the gateway serves several servers and does not change their settings; ask a server itself",
    )


def no_worker() -> Refusal:
    return Refusal(StatusCode.UNAVAILABLE, "no worker answers at the moment: try again in a while")

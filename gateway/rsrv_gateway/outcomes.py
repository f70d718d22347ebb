"""The meaning of a worker's refusal: whether the request fails over, and the error for the client. Pure. Both proxies use it.

A worker answers with the gRPC codes that Triton's backends can return, or with equivalent HTTP statuses. In place of other codes,
it sends UNAVAILABLE with a tag in front of the message.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from grpc import StatusCode

#: Pattern of a tag, as in `[rsrv:QUEUE_FULL] text`. An ensemble puts its own text before the tag.
_TAG = re.compile(r"\[rsrv:([A-Z_]+)\]")

#: Codes by tag: the code that an UNAVAILABLE error with this tag stands for.
MEANT = {
    "QUEUE_FULL": StatusCode.RESOURCE_EXHAUSTED,
    "DEADLINE": StatusCode.DEADLINE_EXCEEDED,
    "NOT_RESIDENT": StatusCode.FAILED_PRECONDITION,
}
#: Codes without a failover. After RESOURCE_EXHAUSTED, a failover would only move the load to other workers. After
#: DEADLINE_EXCEEDED, it would be too late.
_FINAL = (StatusCode.RESOURCE_EXHAUSTED, StatusCode.DEADLINE_EXCEEDED)
_ELSEWHERE = (StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE)

#: Maximum number of connections that may break during one request, because a request that crashes its server must not reach all
#: servers.
CONNECTION_LOSSES_MAX = 2

#: Maximum number of characters of a client's invented name in an error message.
_NAME_MAX_CHARS = 256
#: An unknown name is compared with at most this many known names, which takes about 15 ms.
_COMPARED_MAX = 200
#: An unknown name is compared only with known names that are at most this many characters shorter or longer.
_LENGTHS_DIFFER_MAX = 3

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a call ended without an answer."""

    code: StatusCode
    message: str
    trailing: Metadata = ()
    #: True if the connection broke during the request, which may have crashed the worker.
    lost: bool = False

    def for_client(self) -> StatusCode:
        """Return the code for the client. The message and the metadata stay unchanged."""
        return _meant(self) or self.code

    def is_retryable(self) -> bool:
        """Return True if the request may be sent to another worker. The caller checks that the client has no answer yet."""
        return self.code in _ELSEWHERE and _meant(self) not in _FINAL

    def suspects_worker(self) -> bool:
        """Return True if the worker may be down: it is unavailable, and the message does not come from one of its models."""
        return self.code is StatusCode.UNAVAILABLE and not tagged(self.message)

    def preferred_to(self, earlier: "Refusal | None") -> "Refusal":
        """Return the better of two consecutive refusals for the client.

        NOT_FOUND is worse than any other refusal, because clients do not retry after NOT_FOUND.
        """
        return earlier if earlier is not None and self.code is StatusCode.NOT_FOUND else self


def _meant(refusal: Refusal) -> StatusCode | None:
    if refusal.code is not StatusCode.UNAVAILABLE:
        return None
    tag = _TAG.search(refusal.message)
    return None if tag is None else MEANT.get(tag[1])


def tagged(message: str) -> bool:
    """Return True if the message has a tag for a code that Triton lacks."""
    return _TAG.search(message) is not None


def not_found(model: str, known: Iterable[str] = ()) -> Refusal:
    """Return Triton's refusal of an unknown model, with the most similar of the `known` names.

    A long name is shortened, because clients limit the message's size.
    """
    like = (name for name in known if abs(len(name) - len(model)) <= _LENGTHS_DIFFER_MAX)
    near = get_close_matches(model, islice(like, _COMPARED_MAX), n=1, cutoff=0.75)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    return Refusal(StatusCode.NOT_FOUND, f"Request for unknown model: '{_shown(model)}' is not found{hint}")


def another_model(own: str, model: str) -> Refusal:
    """Return the refusal of a message for another model in a stream of the model `own`."""
    return Refusal(
        StatusCode.INVALID_ARGUMENT,
        f"this stream belongs to model '{own}'; open another stream for '{_shown(model)}'",
    )


def _shown(model: str) -> str:
    return model if len(model) <= _NAME_MAX_CHARS else f"{model[:_NAME_MAX_CHARS]}..."


def no_classes(model: str, output: str) -> Refusal:
    """Return the refusal of a request for classes of strings. Tritonserver before 25.07 crashes when it computes them."""
    return Refusal(
        StatusCode.INVALID_ARGUMENT,
        f"output '{_shown(output)}' of model '{_shown(model)}' has strings, and Triton has no classes of strings: ask "
        "for this output without the parameter classification",
    )


def not_served(model: str) -> Refusal:
    return Refusal(
        StatusCode.UNAVAILABLE, f"no worker serves model '{model}' at the moment: try again in a while"
    )


def unsupported() -> Refusal:
    return Refusal(
        StatusCode.UNIMPLEMENTED,
        "the gateway serves several servers and does not change their settings; ask a server itself",
    )


def unauthenticated() -> Refusal:
    return Refusal(StatusCode.UNAUTHENTICATED, "the token is missing, or wrong")


def no_worker() -> Refusal:
    return Refusal(StatusCode.UNAVAILABLE, "no worker answers at the moment: try again in a while")

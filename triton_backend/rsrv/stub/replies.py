"""Responses and failures in Triton's terms, and response senders that answer exactly once."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any
from weakref import ReferenceType, ref

from rsrv.front.rules import CODES, TAGGED
from rsrv.logs import of_request, request_name
from rsrv.wire.frames import Status

log = logging.getLogger(__name__)

_TAG = re.compile(
    r"\[rsrv:(" + "|".join(status.name for status in Status if status is not Status.OK) + r")\] "
)
#: Parameter of a response: the request's number, for `rsrv why NUMBER`.
NUMBER = "rsrv_request"

#: An answer with more bytes than this may not fit into Triton's shared memory (64 MB in a container by default).
_LARGE_BYTES = 256 * 1024
#: A large answer is sent in one step only if Triton's shared memory has room for this many such answers, because other answers
#: also need room.
_AMPLE_FACTOR = 4


def free_shared_memory() -> int:
    """Return the bytes by which Triton's shared memory can grow."""
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


class RequestFailure(Exception):
    """A request ends without an answer. `text` is for the client; `blame` is for the operator, without contents of tensors."""

    def __init__(self, status: Status, text: str, blame: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.blame = blame or text

    def copy(self) -> "RequestFailure":
        """Return an equal failure without a traceback, because a stored traceback would keep all of its frames alive."""
        return RequestFailure(self.status, self.text, self.blame)


def invalid(text: str) -> RequestFailure:
    """Return the failure of a request that is wrong, so that its client has to change it."""
    return RequestFailure(Status.INVALID, text)


class CallError(Exception):
    """A sub-call of the model `stage` failed. If `run` does not catch it, the client gets `status` and `text`."""

    def __init__(self, stage: str, status: Status, text: str) -> None:
        super().__init__(f"stage {stage!r}: {text}")
        self.stage = stage
        self.status = status
        self.text = text

    def copy(self) -> "CallError":
        """Return an error without a traceback, as `RequestFailure.copy`."""
        return CallError(self.stage, self.status, self.text)


def tag_failure(status: Status, text: str) -> str:
    """Return a message with the status's tag, in case the status code itself is lost. `untag` reverses this."""
    return f"[rsrv:{status.name}] {text}"


def untag(message: str) -> RequestFailure | None:
    """Return the failure of a tagged message, or None for a message without a tag.

    The tag need not come first, because an ensemble puts its own name before it.
    """
    match = _TAG.search(message)
    if match is None:
        return None
    return RequestFailure(Status[match[1]], message[: match.start()] + message[match.end() :])


def status_of(pb_utils: Any, error: Any) -> Status:
    """Return the status of a failed call of another model. Up to release 25.03 of Triton, it is always INTERNAL."""
    code = error.code()
    for status in (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED, Status.RUNTIME_DOWN):
        if code == getattr(pb_utils.TritonError, CODES.get(status, "UNAVAILABLE")):
            return status
    return Status.INTERNAL


class Responses:
    """Makes Triton's response objects."""

    def __init__(self, pb_utils: Any) -> None:
        self._pb = pb_utils
        #: True if responses can have parameters, which needs release 25.02 or later.
        self._has_parameters = hasattr(pb_utils.InferenceResponse, "parameters")
        self.final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._owed: dict[int, ReferenceType[Reply]] = {}

    def owed(self) -> list["Reply"]:
        """Return the replies that are neither sent nor dropped. Thread-safe."""
        return [reply for reference in list(self._owed.values()) if (reply := reference()) is not None]

    @property
    def settled(self) -> bool:
        """True if no reply is owed."""
        return not self._owed

    def answer(self, tensors: list[Any], parameters: Mapping[str, int | str] | None = None) -> Any:
        """Make a response. Releases of Triton before 25.02 do not send its parameters."""
        if parameters and self._has_parameters:
            return self._pb.InferenceResponse(output_tensors=tensors, parameters=dict(parameters))
        return self._pb.InferenceResponse(output_tensors=tensors)

    def failure(self, status: Status, text: str, *, sub_call: bool = False) -> Any:
        """Make the response of a failed request.

        The text for a `sub_call` has a tag, because BLS turns every code into INTERNAL up to release 25.03.
        """
        code = getattr(self._pb.TritonError, CODES.get(status, "UNAVAILABLE"))
        message = tag_failure(status, text) if sub_call or status in TAGGED else text
        error = self._pb.TritonError(message, code)
        return self._pb.InferenceResponse(output_tensors=[], error=error)

    def send(self, triton: Any, response: Any) -> None:
        """Send the answer to Triton's request by its sender.

        Never raises, because other requests of the batch still need answers.
        """
        try:
            triton.get_response_sender().send(response, flags=self.final)
        except Exception:
            log.exception("a request could not be answered")


class Reply:
    """A response sender that ends its answer exactly once. If it is dropped before that, it sends an error.

    A request without an answer blocks its client, the model's unload and the server's shutdown. A check for cancellation after
    the answer kills the server, so a lock separates checks and the answer.

    `deadline_ns` is the time of the request's deadline by CLOCK_MONOTONIC, or 0.
    """

    def __init__(self, sender: Any, responses: Responses, deadline_ns: int = 0, client_id: str = "") -> None:
        self._sender = sender
        self._responses = responses
        self.deadline_ns = deadline_ns
        self._client_id = client_id
        self._lock = Lock()
        self.sent = False
        responses._owed[id(self)] = ref(self)

    def send(self, response: Any, nbytes: int = 0) -> None:
        """Send the answer, unless an answer was already sent. `nbytes` is its approximate size.

        Triton closes a sender permanently before it copies a final response. If its shared memory has no room for the
        copy, the client would get nothing. So if there may be no room, the answer is sent first, and the end in a second step.
        This must not be done for a request of another model through BLS: Triton 24.10 mistakes a separate end for a second
        answer, and the whole server crashes.
        """
        with self._lock:
            if self.sent:
                return
            self.sent = True
            self._responses._owed.pop(id(self), None)
            if nbytes <= _LARGE_BYTES or _AMPLE_FACTOR * nbytes <= free_shared_memory():
                self._sender.send(response, flags=self._responses.final)
                return
            try:
                self._sender.send(response, flags=0)
            finally:
                self._sender.send(flags=self._responses.final)

    def send_part(self, response: Any) -> None:
        """Send a response of an answer that continues, unless the answer has ended."""
        with self._lock:
            if not self.sent:
                self._sender.send(response, flags=0)

    def send_failure(self, status: Status, text: str) -> None:
        """Send a failure unless an answer was sent; never raises."""
        try:
            self.send(self._responses.failure(status, text))
        except Exception:
            log.exception(
                "%s could not be answered", request_name(self._client_id), extra=of_request(self._client_id)
            )

    def cancelled(self) -> bool:
        """Return whether the client has cancelled its request; never raises."""
        try:
            with self._lock:
                return not self.sent and bool(self._sender.is_cancelled())
        except Exception:
            log.exception(
                "%s: checking for cancellation failed",
                request_name(self._client_id),
                extra=of_request(self._client_id),
            )
            return False

    def __del__(self) -> None:
        if not self.sent:
            log.error("%s was dropped", request_name(self._client_id), extra=of_request(self._client_id))
            self.send_failure(Status.INTERNAL, "the request was dropped; this is a fault of rsrv")


class PartReply:
    """The reply of a part of a large request. It passes the part's outcome to the large request."""

    def __init__(self, whole: Reply, has_ended: Callable[[], bool], take: Callable[[Any], None]) -> None:
        """`has_ended` returns True if the large request has ended. `take` receives the part's outcome."""
        self._whole = whole
        self._has_ended = has_ended
        self._take = take
        self._done = False

    @property
    def sent(self) -> bool:
        """True if nobody waits for the part's outcome."""
        return self._done or self._whole.sent or self._has_ended()

    def send(self, outcome: Any, nbytes: int = 0) -> None:
        """Pass the outcome of the part to the large request, unless this was already done."""
        if not self._done:
            self._done = True
            self._take(outcome)

    def send_failure(self, status: Status, text: str) -> None:
        """End the part with a failure."""
        self.send(RequestFailure(status, text))

    def cancelled(self) -> bool:
        """Return True if the part is of no use any more; never raises."""
        return self.sent or self._whole.cancelled()

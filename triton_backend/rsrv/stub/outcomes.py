"""Outcomes of requests: each is answered once, counted, told in its trace, and logged if it failed."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rsrv.logs import TEXT, fields, of_request, shorten
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import RequestFailure, Responses
from rsrv.stub.request import OUR_FAULT, ClientRequest, Now
from rsrv.stub.tracing import Spans, end_request
from rsrv.throttle import Throttle, more
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: not a matter of the server's
_THEIRS = (Status.INVALID, Status.NOT_FOUND, Status.CANCELLED)
#: requests of a batch that a line of the log names
_MOST_NAMED = 16
_NONE: Mapping[str, int] = {}

#: Answers a batch: with a response for each request, in order; or with None, and then each request has a reply, which
#: is sent later.
Answer = Callable[[list[ClientRequest]], Sequence[Any] | None]


class Outcomes:
    """The record of how requests of every kind of model end. For any thread."""

    def __init__(self, meters: Meters, responses: Responses) -> None:
        self._meters = meters
        self._responses = responses
        self._failure_log = FailureLog()
        self._key = ""
        #: where spans of requests go; None: no request is traced
        self.spans: Spans | None = None

    def serve(self, key: str, *, traced: bool) -> None:
        """The requests that come from now on are those of the model `key`, NAME@VERSION."""
        self._key, self.spans = key, self._meters.spans if traced else None

    def ended(
        self, request: ClientRequest, status: Status, text: str = "", attributes: Mapping[str, int] = _NONE
    ) -> None:
        """The request has its answer, or `text` is why not. `attributes` are those of its span."""
        self._meters.answered(status, request.since)
        if request.trace is not None:
            end_request(request.trace, self._key, request.since, status, text, request.id, attributes)

    def failed(
        self, request: ClientRequest, failure: RequestFailure, attributes: Mapping[str, int] = _NONE
    ) -> Any:
        """Return the response of a request that ends with `failure`."""
        self.ended(request, failure.status, failure.text, attributes)
        self._failure_log.ended(failure.status, failure.text, request.id)
        return self._responses.failure(failure.status, failure.text, sub_call=request.terms.run != 0)

    def turned_away(self, requests: Sequence[ClientRequest], status: Status, text: str) -> list[Any]:
        """Return the responses of requests that get no further; one that has failed already keeps its own failure."""
        failure = RequestFailure(status, text)
        return [self.failed(request, request.failure or failure) for request in requests]


def blame(request: ClientRequest, error: Exception) -> None:
    """Have the request fail for what was raised when it was prepared. Call this while `error` is handled."""
    if isinstance(error, RequestFailure):
        request.failure = error.anew()
    else:
        log.exception("request %r: preparing failed", request.id, extra=of_request(request.id))
        text = "the request could not be prepared; the server's log says why"
        request.failure = RequestFailure(Status.INTERNAL, text)


class FailureLog:
    """Log lines of requests that end without an answer, with the ids that their clients gave them.

    For any thread. A failure of ours has a line, as far as `LineLimit` admits it.

    Others come in crowds, and to turn one away must stay cheap: of those that end in the same way one a second has a
    line, with how many had none since the line before.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._throttle = Throttle(clock=clock)

    def ended(self, status: Status, text: str, request: str) -> None:
        """`text`: what the client is told. `request`: its id as `ClientRequest` has it, or ""."""
        if status is Status.INTERNAL:
            log.error(
                "request %r failed: %s",
                request,
                shorten(text, TEXT),
                extra=of_request(request, status="INTERNAL"),
            )
            return
        left_out = self._throttle.take(status)
        if left_out is not None:
            log.log(
                logging.INFO if status in _THEIRS else logging.WARNING,
                "request %r: %s: %s%s",
                request,
                status.name,
                shorten(text, TEXT),
                more(left_out),
                extra=fields(request=request, status=status.name, more=left_out),
            )


class EntryPoint:
    """Triton's entry to a stub: it never raises, and each request is answered exactly once.

    If `execute()` raises while replies of the same batch are sent, Triton 24.10 crashes with all of its models, or hangs.
    A request without an answer blocks its client, the unload of its model and the server's shutdown.

    Whatever `answer` does, raising and leaving requests out included, what `execute` returns is right for Triton.

    `reply` gives a request a reply. `end` ends the process, for when not even a failure can be answered.
    """

    def __init__(
        self,
        answer: Answer,
        outcomes: Outcomes,
        reply: Callable[[ClientRequest], object],
        end: Callable[[str], object],
    ) -> None:
        self._answer = answer
        self._outcomes = outcomes
        self._reply = reply
        self._end = end

    def execute(self, batch: Sequence[Any]) -> list[Any] | None:
        """Answer Triton's requests: a list of responses, or None if they come later."""
        requests: list[ClientRequest] = []
        try:
            now, spans = Now.read(), self._outcomes.spans
            requests += [ClientRequest(triton, now, spans) for triton in batch]
            responses = self._answer(requests)
            replies = sum(request.reply is not None for request in requests)
            if responses is None and replies == len(batch):
                return None
            if responses is not None and replies == 0 and len(responses) == len(batch):
                return list(responses)
            count = "no" if responses is None else len(responses)
            text = "a batch of %d requests has %d replies and %s responses"
            log.error(text, len(batch), replies, count, extra=of_request(""))
        except BaseException:  # SystemExit, too, would leave the batch without answers
            named = [request.id for request in requests[:_MOST_NAMED]]
            text = "a batch of %d requests failed: %s"
            log.exception(text, len(batch), named, extra=of_request("", requests=named))
        try:
            return self._rescue(batch, requests)
        except BaseException:
            log.exception("requests are without an answer")
            self._end("the model's process cannot answer any more; it is being restarted")
            return None

    def _rescue(self, batch: Sequence[Any], requests: Sequence[ClientRequest]) -> list[Any] | None:
        """Fail each request that has no answer. Requests of one batch must all be answered in the same way."""
        if all(request.reply is None for request in requests):
            now = Now.read()
            requests = [*requests, *(ClientRequest(triton, now) for triton in batch[len(requests) :])]
            failure = RequestFailure(Status.INTERNAL, OUR_FAULT)
            return [self._outcomes.failed(request, failure) for request in requests]
        for request in requests:
            if request.reply is None:
                self._reply(request)
            assert request.reply is not None
            if not request.reply.sent:
                self._outcomes.ended(request, Status.INTERNAL, OUR_FAULT)
                request.reply.send_failure(Status.INTERNAL, OUR_FAULT)
        return None

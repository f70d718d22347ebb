"""Triton's entry to a stub: it never raises, and each request is answered exactly once.

If `execute()` raises while replies of the same batch are sent, Triton 24.10 crashes with all of its models, or hangs.
A request without an answer blocks its client, the unload of its model and the server's shutdown.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rsrv.logs import of_request
from rsrv.stub.endings import Endings
from rsrv.stub.replies import Failure
from rsrv.stub.request import OUR_FAULT, Now, Request
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

#: requests of a batch that a line of the log names
_MOST_NAMED = 16

#: Answers a batch: with a response for each request, in order; or with None, and then each request has a reply, which
#: is sent later.
Answer = Callable[[list[Request]], Sequence[Any] | None]


class Entry:
    """Whatever `answer` does, raising and leaving requests out included, what `execute` returns is right for Triton.

    `reply` gives a request a reply. `end` ends the process, for when not even a failure can be answered.
    """

    def __init__(
        self,
        answer: Answer,
        endings: Endings,
        reply: Callable[[Request], object],
        end: Callable[[str], object],
    ) -> None:
        self._answer = answer
        self._endings = endings
        self._reply = reply
        self._end = end

    def execute(self, batch: Sequence[Any]) -> list[Any] | None:
        """Answer Triton's requests: a list of responses, or None if they come later."""
        requests: list[Request] = []
        try:
            now, spans = Now.read(), self._endings.spans
            requests += [Request(triton, now, spans) for triton in batch]
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

    def _rescue(self, batch: Sequence[Any], requests: Sequence[Request]) -> list[Any] | None:
        """Fail each request that has no answer. Requests of one batch must all be answered in the same way."""
        if all(request.reply is None for request in requests):
            now = Now.read()
            requests = [*requests, *(Request(triton, now) for triton in batch[len(requests) :])]
            failure = Failure(Status.INTERNAL, OUR_FAULT)
            return [self._endings.failed(request, failure) for request in requests]
        for request in requests:
            if request.reply is None:
                self._reply(request)
            assert request.reply is not None
            if not request.reply.sent:
                self._endings.ended(request, Status.INTERNAL, OUR_FAULT)
                request.reply.send_failure(Status.INTERNAL, OUR_FAULT)
        return None

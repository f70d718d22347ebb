"""How requests end, of every kind of model: counted, told in their traces, and in the log where there was no answer."""

import logging
from collections.abc import Mapping
from typing import Any

from rsrv.logs import of_request
from rsrv.stub.complaints import Complaints
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import Failure, Responses
from rsrv.stub.request import Request
from rsrv.stub.tracing import Spans, end_request
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")

_NONE: Mapping[str, int] = {}


class Endings:
    """For any thread."""

    def __init__(self, meters: Meters, responses: Responses) -> None:
        self._meters = meters
        self._responses = responses
        self._complaints = Complaints()
        self._key = ""
        #: where spans of requests go; None: no request is traced
        self.spans: Spans | None = None

    def serve(self, key: str, *, traced: bool) -> None:
        """The requests that come from now on are those of the model `key`, NAME@VERSION."""
        self._key, self.spans = key, self._meters.spans if traced else None

    def ended(
        self, request: Request, status: Status, text: str = "", attributes: Mapping[str, int] = _NONE
    ) -> None:
        """The request has its answer, or `text` is why not. `attributes` are those of its span."""
        self._meters.answered(status, request.since)
        if request.trace is not None:
            end_request(request.trace, self._key, request.since, status, text, request.id, attributes)

    def failed(self, request: Request, failure: Failure, attributes: Mapping[str, int] = _NONE) -> Any:
        """Return the response of a request that ends with `failure`."""
        self.ended(request, failure.status, failure.text, attributes)
        self._complaints.ended(failure.status, failure.text, request.id)
        return self._responses.failure(failure.status, failure.text, sub_call=request.terms.run != 0)


def blame(request: Request, error: Exception) -> None:
    """Have the request fail for what was raised when it was prepared. Call this while `error` is handled."""
    if isinstance(error, Failure):
        request.failure = error.anew()
    else:
        log.exception("request %r: preparing failed", request.id, extra=of_request(request.id))
        text = "the request could not be prepared; the server's log says why"
        request.failure = Failure(Status.INTERNAL, text)

"""How requests end, of every kind of model: counted, told in their traces, and in the log where there was no answer."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rsrv.logs import fields
from rsrv.stub.complaints import Complaints
from rsrv.stub.meters import Meters
from rsrv.stub.replies import Failure, Responses
from rsrv.stub.terms import id_of
from rsrv.stub.tracing import Trace, end_request, end_unserved
from rsrv.wire.frames import Status

log = logging.getLogger("rsrv.stub")


class Ending(Protocol):
    """A request that has come."""

    request: Any
    since: float  # when it came, of time.perf_counter
    trace: Trace | None

    def fail(self, status: Status, text: str) -> None: ...

    @property
    def attributes(self) -> Mapping[str, str | int | float]:
        """What its span tells of it."""


class Endings:
    """For any thread. `key`: the model's, NAME@VERSION, for traces."""

    def __init__(self, meters: Meters, responses: Responses) -> None:
        self._meters = meters
        self._responses = responses
        self._complaints = Complaints()

    def ended(self, one: Ending, key: str, status: Status, text: str = "") -> None:
        """It has its answer, or `text` is why not."""
        self._meters.answered(status, one.since)
        if one.trace is not None:
            end_request(one.trace, key, one.since, status, text, id_of(one.request), one.attributes)

    def failed(self, one: Ending, key: str, status: Status, text: str, *, sub_call: bool = False) -> Any:
        """Its response; `sub_call` as `Responses.failure` has it."""
        self.ended(one, key, status, text)
        self._complaints.ended(status, text, id_of(one.request))
        return self._responses.failure(status, text, sub_call=sub_call)

    def turned_away(
        self, requests: Sequence[Any], since: float, status: Status, text: str, key: str | None = None
    ) -> list[Any]:
        """The responses of requests that came at `since` and get no further. `key`: None if they are not in traces."""
        for request in requests:
            if key is not None:
                end_unserved(self._meters.spans, request, key, since, status, text)
            self._meters.answered(status, since)
            self._complaints.ended(status, text, id_of(request))
        return [self._responses.failure(status, text) for _ in requests]


def blame(one: Ending, error: Exception) -> None:
    """It fails for what was raised when it was prepared. To be called while that is handled."""
    if isinstance(error, Failure):
        # Without the exception itself: its traceback would keep the whole batch alive.
        one.fail(error.status, error.text)
    else:
        who = id_of(one.request)
        log.exception("request %r: preparing failed", who, extra=fields(request=who))
        one.fail(Status.INTERNAL, "the request could not be prepared; the server's log says why")

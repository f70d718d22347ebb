"""Client requests. They are read when they arrive, answered exactly once, counted, traced, and logged if they fail."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

from rsrv.front.rules import CLIENT_FAULTS, NO_INTEGER, NO_RUN, NOT_HANDLED, NOT_UTF8, UNKNOWN_PARAMETER
from rsrv.logs import MAX_ID_LENGTH, MAX_TEXT_LENGTH, fields, of_request, request_name, shorten
from rsrv.stub.metrics import Meters
from rsrv.stub.replies import PartReply, Reply, RequestFailure, Responses, invalid
from rsrv.stub.tensors import size_of
from rsrv.stub.tracing import OpenSpan, Spans, end_request
from rsrv.throttle import Throttle, more
from rsrv.wire.frames import Status, request_tag

log = logging.getLogger(__name__)

#: Parameter of sub-calls that go through Triton: the token of their run, in decimal.
RUN = "rsrv_run"
#: Parameter of sub-calls through Triton: the number of the run's device, if it is not 0.
RUN_DEVICE = "rsrv_device"
#: Parameter that the guard of batches (native/guard.c) sets. Its value names an input with a string that exceeds the tensor.
_INCOMPLETE = "rsrv_incomplete"
#: Parameters that clients may set, in the order of the text UNKNOWN_PARAMETER. An alias reads the last one.
_PUBLIC = ("rsrv_deadline_unix_ns", "rsrv_priority", "rsrv_sticky")
#: All parameters of rsrv. Every other name that begins with `rsrv_` is a mistake.
OURS = frozenset({*_PUBLIC, RUN, RUN_DEVICE, _INCOMPLETE})
#: Parameter with the relative deadline in ns, which clients of ReactantServer send.
_REACTANT_TIMEOUT = "reactant_timeout_ns"
#: Latest deadline that a frame can carry, in ns.
_LATEST_DEADLINE_NS = (1 << 63) - 1

#: Maximum number of requests of a batch that a line of the log names.
_MAX_NAMED = 16


# --- arrival --------------------------------------------------------------------------------------------------


class ArrivalTime(NamedTuple):
    """The time at which a batch of requests arrives."""

    seconds: float  # time.perf_counter
    monotonic_ns: int
    unix_ns: int

    @classmethod
    def now(cls) -> "ArrivalTime":
        return cls(time.perf_counter(), time.monotonic_ns(), time.time_ns())


class RequestParams(NamedTuple):
    """A request's parameters that rsrv obeys."""

    deadline_ns: int  # CLOCK_MONOTONIC, 0: none
    priority: int = 0
    #: Token of the meta model's run that made this sub-call, or 0.
    run: int = 0
    #: Number of the run's device.
    device: int = 0


_NO_PARAMS = RequestParams(0)


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A request as its client sent it.

    Everything that a client chooses freely is read when the request arrives, so it cannot raise an error later. `failure` is set
    if the request cannot be served because its text is not UTF-8 or its parameters are wrong.
    """

    #: Triton's request object; None once the request is answered and its inputs are released
    triton: Any
    arrival: InitVar[ArrivalTime]
    #: Collects the spans of traced requests. None: no request is traced.
    spans: InitVar[Spans | None] = None
    #: time.perf_counter of the request's arrival.
    since: float = 0.0
    #: The client's id, cut to the length that the log and traces accept. "" if there is none.
    id: str = ""
    #: Hash that stands for the id in frames. 0: there is no id.
    tag: int = 0
    #: Number of the latest submission. -1: there was none.
    number: int = -1
    params: RequestParams = _NO_PARAMS
    #: Number of rows. None until the shapes are known.
    rows: int | None = None
    span: OpenSpan | None = None
    failure: RequestFailure | None = None
    #: Number of runtimes that died while they executed the request.
    deaths: int = 0
    #: Time since which the request waits for a runtime, by time.monotonic. 0: it has not waited yet.
    waiting_since: float = 0.0
    #: Time until which the request may wait, by time.monotonic.
    retry_until: float = 0.0
    #: Set if the request is answered after execute() returned.
    reply: Reply | PartReply | None = None
    #: True if this is a part of a client's request (`large_request`).
    is_part: bool = False
    #: Number of the whole request, the same in all its parts.
    whole: int = 0
    #: True for a part that a full queue must not refuse, because its large request has waited, or has submitted its first part.
    admitted: bool = False
    #: Size of the inputs in bytes. 0 until `measure` was called, or if the inputs cannot be read.
    nbytes: int = 0

    def __post_init__(self, arrival: ArrivalTime, spans: Spans | None) -> None:
        """Read Triton's request; never raises."""
        self.since = arrival.seconds
        try:
            id = self.triton.request_id()
            if id:
                self.id, self.tag = shorten(id, MAX_ID_LENGTH), request_tag(id)
            text, timeout_us = self.triton.parameters(), self.triton.timeout()
            parameters = parse_parameters(text) if len(text) > 2 else {}
            if spans is not None:
                self.span = spans.begin(self.triton, parameters)
            if parameters or timeout_us:
                self.params = read_params(timeout_us, parameters, arrival.monotonic_ns, arrival.unix_ns)
        except UnicodeDecodeError:
            self.failure = invalid(NOT_UTF8)
        except Exception as error:  # noqa: BLE001 - logged by failure_for
            self.failure = self.failure_for(error)

    @property
    def deadline_s(self) -> float:
        """Time of the deadline by time.monotonic, or 0 without a deadline."""
        return self.params.deadline_ns / 1e9

    @property
    def is_sub_call(self) -> bool:
        return self.params.run != 0

    def measure(self) -> None:
        """Set `nbytes`."""
        with suppress(Exception):  # The request is refused later, when it is read.
            self.nbytes = sum(size_of(tensor.as_numpy()) for tensor in self.triton.inputs())

    def open_reply(self, responses: Responses) -> Reply:
        """Open and return the request's reply, which answers it after execute() returned."""
        sender = self.triton.get_response_sender()
        self.reply = reply = Reply(sender, responses, self.params.deadline_ns, self.id)
        return reply

    def failure_for(self, error: Exception) -> RequestFailure:
        """Return the failure of the request after an error in handling it. Call this inside the `except` block of `error`."""
        if isinstance(error, RequestFailure):
            return error.copy()  # A traceback would keep the whole batch alive.
        log.exception("%s: handling failed", request_name(self.id), extra=of_request(self.id))
        return RequestFailure(Status.INTERNAL, NOT_HANDLED)


def parse_parameters(text: str) -> Mapping[str, Any]:
    """Return the parameters of a Triton request from JSON. They include headers that Triton forwards. Raises RequestFailure."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise invalid("the request's parameters cannot be read")
    return parsed


def read_params(timeout_us: int, parameters: Mapping[str, Any], now_ns: int, unix_ns: int) -> RequestParams:
    """Return the parameters that rsrv obeys, with the earliest of the deadlines. Raises RequestFailure for wrong parameters.

    `timeout_us` is Triton's own timeout, 0 for none. `now_ns` and `unix_ns` are the current time by CLOCK_MONOTONIC and by the
    calendar. A deadline by the calendar is converted here, when the request arrives. So a later change of the machine's
    calendar does not move it.
    """
    for name in parameters:
        if name.startswith("rsrv_") and name not in OURS:
            raise invalid(UNKNOWN_PARAMETER % f"{name!r:.80}")
    if (incomplete := parameters.get(_INCOMPLETE)) is not None:
        raise invalid(
            f"input {incomplete!r:.100}: the length before a string is larger than the rest of the tensor"
        )
    deadlines = [now_ns + timeout_us * 1000] if timeout_us else []
    priority = _integer(parameters, "rsrv_priority", 0, 0xFFFF)
    if until_unix_ns := _integer(parameters, "rsrv_deadline_unix_ns", 0, 1 << 63):
        deadlines.append(max(1, until_unix_ns - unix_ns + now_ns))
    # As in ReactantServer, 0 or a negative number means no deadline.
    if (timeout_ns := _integer(parameters, _REACTANT_TIMEOUT, -(1 << 63), 1 << 63)) > 0:
        deadlines.append(now_ns + timeout_ns)
    # The token is text, because readers that parse JSON numbers as floating-point numbers would change it.
    run = _decimal(parameters, RUN)
    device = _decimal(parameters, RUN_DEVICE) if run else 0
    return RequestParams(min(*deadlines, _LATEST_DEADLINE_NS) if deadlines else 0, priority, run, device)


def _decimal(parameters: Mapping[str, Any], name: str) -> int:
    number = str(parameters.get(name, "0"))
    if not (number.isascii() and number.isdecimal() and len(number) <= 20 and int(number) < 1 << 64):
        raise invalid(NO_RUN % name)
    return int(number)


def _integer(parameters: Mapping[str, Any], name: str, first: int, limit: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value < limit:
        raise invalid(NO_INTEGER % (name, first, limit - 1, f"{value!r:.50}"))
    return value


# --- outcomes -------------------------------------------------------------------------------------------------


class Outcomes:
    """Records the ends of requests, for any kind of model: counts, spans and log lines. Thread-safe."""

    def __init__(self, meters: Meters, responses: Responses) -> None:
        self._meters = meters
        self._responses = responses
        self._failure_log = FailureLog()
        self._key = ""
        #: Collects the spans of requests. None if no request is traced.
        self.spans: Spans | None = None

    def serve(self, key: str, *, traced: bool) -> None:
        """Attribute requests to the model `key` (NAME@VERSION) from now on. `traced` says whether spans are collected."""
        self._key, self.spans = key, self._meters.spans if traced else None

    def ended(self, request: ClientRequest, status: Status, text: str = "") -> None:
        """Record that the request has its answer, or fails with `text`."""
        self._meters.answered(status, request.since, request.number)
        if request.span is not None:
            end_request(request.span, self._key, request.since, status, text, request.id, request.rows)

    def failed(self, request: ClientRequest, failure: RequestFailure) -> Any:
        """Record that the request ends with `failure`, and return its response."""
        self.ended(request, failure.status, failure.text)
        if failure.status is Status.INTERNAL:
            self._meters.failed(failure.blame)
        self._failure_log.ended(failure.status, failure.text, request.id)
        return self._responses.failure(failure.status, failure.text, sub_call=request.params.run != 0)


class FailureLog:
    """Log lines of requests that fail, with the ids that their clients gave them. Thread-safe.

    Each failure that is rsrv's fault has a line, unless `LineLimit` suppresses it. There may be very many other failures, and
    refusing a request must be cheap. So each of the other statuses has at most one line a second, with the number of failures
    since the previous line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._throttle = Throttle(clock=clock)

    def ended(self, status: Status, text: str, request: str) -> None:
        """Log a failure. `text` is the text for the client, and `request` is `ClientRequest.id`."""
        if status is Status.INTERNAL:
            log.error(
                "%s failed: %s",
                request_name(request),
                shorten(text, MAX_TEXT_LENGTH),
                extra=of_request(request, status="INTERNAL"),
            )
            return
        left_out = self._throttle.take(status)
        if left_out is not None:
            log.log(
                logging.INFO if status in CLIENT_FAULTS else logging.WARNING,
                "%s: %s: %s%s",
                request_name(request),
                status.name,
                shorten(text, MAX_TEXT_LENGTH),
                more(left_out),
                extra=fields(request=request, status=status.name, more=left_out),
            )


#: Answers a batch. It returns a response for each request, in order, or None. After None, each request has a reply that is
#: sent later.
Answer = Callable[[list[ClientRequest]], Sequence[Any] | None]


class EntryPoint:
    """The function of a stub that Triton calls. It never raises, and answers each request exactly once.

    If `execute()` raises while replies of the same batch are sent, Triton 24.10 crashes with all of its models, or hangs.
    A request without an answer blocks its client, the unload of its model and the server's shutdown. So `execute`
    answers all requests even if `answer` raises or leaves requests out.

    `reply` opens the reply of a request. `end` ends the process if not even a failure can be sent.
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
        """Answer Triton's requests. Return a list of responses, or None if the responses are sent later."""
        requests: list[ClientRequest] = []
        try:
            arrival, spans = ArrivalTime.now(), self._outcomes.spans
            for triton in batch:
                requests.append(ClientRequest(triton, arrival, spans))
            responses = self._answer(requests)
            replied = 0
            for request in requests:
                replied += request.reply is not None
            if responses is None and replied == len(batch):
                return None
            if responses is not None and not replied and len(responses) == len(batch):
                return list(responses)
            count = "no" if responses is None else len(responses)
            text = "a batch of %d requests has %d replies and %s responses"
            log.error(text, len(batch), replied, count, extra=of_request(""))
        except BaseException:  # SystemExit would also leave the batch without answers
            named = [request.id for request in requests[:_MAX_NAMED]]
            text = "a batch of %d requests failed: %s"
            log.exception(text, len(batch), named, extra=of_request("", requests=named))
        try:
            self._rescue(batch, requests)
        except BaseException:
            log.exception("requests could not be answered")
            self._end("the model's process cannot answer any more; it is being restarted")
        return None

    def _rescue(self, batch: Sequence[Any], requests: Sequence[ClientRequest]) -> None:
        """Fail each request that has no answer. Use its reply, because a decoupled model must not return a list."""
        arrival = ArrivalTime.now()
        for request in (*requests, *(ClientRequest(triton, arrival) for triton in batch[len(requests) :])):
            if request.reply is None:
                self._reply(request)
            assert request.reply is not None
            if not request.reply.sent:
                self._outcomes.ended(request, Status.INTERNAL, NOT_HANDLED)
                request.reply.send_failure(Status.INTERNAL, NOT_HANDLED)

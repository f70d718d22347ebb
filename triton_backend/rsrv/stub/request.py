"""A client's request: read once when it arrives, and answered once, whatever goes wrong."""

import json
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from rsrv.logs import ID, of_request, shorten
from rsrv.stub.replies import Failure, Reply
from rsrv.stub.tracing import Spans, Trace
from rsrv.wire.frames import Status, request_tag

log = logging.getLogger("rsrv.stub")

#: parameter of sub-calls that go through Triton: the token of their run, in decimal
RUN = "rsrv_run"
#: relative deadline in ns, the parameter that clients of ReactantServer send
_REACTANT_TIMEOUT = "reactant_timeout_ns"
#: the latest deadline that a frame can carry, in ns
_NEVER = (1 << 63) - 1

#: what a client hears of a fault that is not its own
OUR_FAULT = "the request could not be handled; the server's log says why"


class Now(NamedTuple):
    """The time at which a batch of requests arrives."""

    seconds: float  # time.perf_counter
    monotonic_ns: int
    unix_ns: int

    @classmethod
    def read(cls) -> "Now":
        return cls(time.perf_counter(), time.monotonic_ns(), time.time_ns())


class Terms(NamedTuple):
    """What a request asks for beside its tensors."""

    deadline_ns: int  # CLOCK_MONOTONIC, 0: none
    priority: int = 0
    #: token of the meta model's run that it is a sub-call of; 0: none
    run: int = 0


class Request:
    """All that a client chooses freely is read here, when the request arrives, and cannot raise later.

    `failure` says why the request gets no further, if so: text that is not UTF-8, or wrong parameters.
    """

    __slots__ = ("failure", "id", "reply", "since", "tag", "terms", "trace", "triton")

    def __init__(self, triton: Any, now: Now, spans: Spans | None = None) -> None:
        """`triton` is Triton's object for the request. `spans`: None if no request is traced. Never raises."""
        #: None once the request is answered and its inputs are given back
        self.triton = triton
        self.since = now.seconds
        #: the client's id for it, "" for none, cut to what the log and traces take; and what stands for it in frames
        self.id = ""
        self.tag = 0
        self.terms = Terms(0)
        self.trace: Trace | None = None
        self.failure: Failure | None = None
        #: set if the request is answered after execute() returned
        self.reply: Reply | None = None
        try:
            self._read(now, spans)
        except Failure as failure:
            self.failure = failure.anew()  # without a traceback, which would keep the whole batch alive
        except UnicodeDecodeError:
            self.failure = Failure(Status.INVALID, "the request's id and parameters must be UTF-8")
        except Exception:
            log.exception("request %r: reading failed", self.id, extra=of_request(self.id))
            self.failure = Failure(Status.INTERNAL, OUR_FAULT)

    def _read(self, now: Now, spans: Spans | None) -> None:
        id = self.triton.request_id()
        self.id, self.tag = shorten(id, ID), request_tag(id)
        parameters = read_parameters(self.triton)
        if spans is not None:
            self.trace = spans.begin(self.triton, parameters)
        self.terms = read_terms(self.triton.timeout(), parameters, now.monotonic_ns, now.unix_ns)


def read_parameters(triton: Any) -> Mapping[str, Any]:
    """Return a Triton request's parameters, and the headers that Triton forwards. Raises Failure, UnicodeDecodeError."""
    text = triton.parameters()
    if len(text) <= 2:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Failure(Status.INVALID, "the request's parameters cannot be read")
    return found


def read_terms(timeout_us: int, parameters: Mapping[str, Any], now_ns: int, unix_ns: int) -> Terms:
    """Return what the parameters ask for, and the earliest of the deadlines. Raises Failure for wrong parameters.

    `timeout_us` is Triton's own timeout, 0 for none. `now_ns` and `unix_ns` are the time, by CLOCK_MONOTONIC and by the
    calendar. Only deadlines by the calendar depend on it, and only here, when the request arrives: a later change of
    the machine's calendar neither expires nor prolongs them.
    """
    deadlines = [now_ns + timeout_us * 1000] if timeout_us else []
    if not parameters:
        return Terms(min(*deadlines, _NEVER) if deadlines else 0)
    priority = _integer(parameters, "rsrv_priority", 0, 0xFFFF)
    if until_unix_ns := _integer(parameters, "rsrv_deadline_unix_ns", 0, 1 << 63):
        deadlines.append(max(1, until_unix_ns - unix_ns + now_ns))
    # There, too, no deadline is 0 or below.
    if (timeout_ns := _integer(parameters, _REACTANT_TIMEOUT, -(1 << 63), 1 << 63)) > 0:
        deadlines.append(now_ns + timeout_ns)
    # As text: a reader that takes JSON numbers for floating-point ones would change it.
    run = str(parameters.get(RUN, "0"))
    if not (run.isascii() and run.isdecimal() and len(run) <= 20 and int(run) < 1 << 64):
        raise Failure(Status.INVALID, f"parameter {RUN} is for sub-calls of meta models")
    return Terms(min(*deadlines, _NEVER) if deadlines else 0, priority, int(run))


def _integer(parameters: Mapping[str, Any], name: str, first: int, limit: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value < limit:
        raise Failure(
            Status.INVALID,
            f"parameter {name} must be an integer from {first} below {limit}, got {value!r:.50}",
        )
    return value

"""Requests of a stub: as a client sent them, and on their way through a model or a meta model."""

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rsrv.logs import ID, of_request, shorten
from rsrv.stub.connection import RuntimeConnection, Slab
from rsrv.stub.endpoint import Array, ExecutionPlan
from rsrv.stub.replies import Reply, RequestFailure
from rsrv.stub.session import Link
from rsrv.stub.tracing import Spans, Trace
from rsrv.wire.calls import Entrance
from rsrv.wire.frames import Completion, Status, Submission, request_tag

log = logging.getLogger("rsrv.stub")

#: parameter of sub-calls that go through Triton: the token of their run, in decimal
RUN = "rsrv_run"
#: relative deadline in ns, the parameter that clients of ReactantServer send
_REACTANT_TIMEOUT = "reactant_timeout_ns"
#: the latest deadline that a frame can carry, in ns
_NEVER = (1 << 63) - 1
#: seconds between looks whether a run's client is still there; each costs up to 0.2 ms
_CHECK = 0.05

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


class ClientRequest:
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
        self.failure: RequestFailure | None = None
        #: set if the request is answered after execute() returned
        self.reply: Reply | None = None
        try:
            self._read(now, spans)
        except RequestFailure as failure:
            self.failure = failure.anew()  # without a traceback, which would keep the whole batch alive
        except UnicodeDecodeError:
            self.failure = RequestFailure(Status.INVALID, "the request's id and parameters must be UTF-8")
        except Exception:
            log.exception("request %r: reading failed", self.id, extra=of_request(self.id))
            self.failure = RequestFailure(Status.INTERNAL, OUR_FAULT)

    def _read(self, now: Now, spans: Spans | None) -> None:
        id = self.triton.request_id()
        self.id, self.tag = shorten(id, ID), request_tag(id)
        parameters = read_parameters(self.triton)
        if spans is not None:
            self.trace = spans.begin(self.triton, parameters)
        self.terms = read_terms(self.triton.timeout(), parameters, now.monotonic_ns, now.unix_ns)


def read_parameters(triton: Any) -> Mapping[str, Any]:
    """Return a Triton request's parameters, and the headers that Triton forwards. Raises RequestFailure, UnicodeDecodeError."""
    text = triton.parameters()
    if len(text) <= 2:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestFailure(Status.INVALID, "the request's parameters cannot be read")
    return found


def read_terms(timeout_us: int, parameters: Mapping[str, Any], now_ns: int, unix_ns: int) -> Terms:
    """Return what the parameters ask for, and the earliest of the deadlines. Raises RequestFailure for wrong parameters.

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
        raise RequestFailure(Status.INVALID, f"parameter {RUN} is for sub-calls of meta models")
    return Terms(min(*deadlines, _NEVER) if deadlines else 0, priority, int(run))


def _integer(parameters: Mapping[str, Any], name: str, first: int, limit: int) -> int:
    value = parameters.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int) or not first <= value < limit:
        raise RequestFailure(
            Status.INVALID,
            f"parameter {name} must be an integer from {first} below {limit}, got {value!r:.50}",
        )
    return value


@dataclass(slots=True, eq=False)
class ModelRequest:
    """One request of a model on its way through the stub."""

    id: int  # unique on its connection
    request: ClientRequest
    connection: RuntimeConnection
    #: what the request asks for, once its shapes are known
    inputs: Sequence[Array] = ()
    plan: ExecutionPlan | None = None
    client_rows: int = 0  # as the client counts them, if Triton batches
    #: where its inputs and outputs lie, bytes from the segment's start
    slab: Slab | None = None
    inputs_at: int = 0
    outputs_at: int = 0
    execute_ns: int = 0  # of the execution it was part of
    response: Any = None  # if it was made before the rest of its batch was done
    checked: float = 0.0  # when its client was last asked after
    cancelling: bool = False

    def put(self, slab: Slab) -> None:
        """Give it its part of a batch's memory, in which `inputs_at` and `outputs_at` were counted from 0."""
        self.slab = slab
        self.inputs_at += slab.place.offset
        self.outputs_at += slab.place.offset

    def write(self) -> Submission:
        """Copy the inputs to shared memory; what to send then."""
        plan, slab = self.plan, self.slab
        assert plan is not None
        assert slab is not None
        for (spec, offset), array in zip(plan.inputs, self.inputs, strict=True):
            slab.view(self.inputs_at + offset, spec, plan.rows)[...] = array
        self.inputs = ()
        deadline_ns, priority, run = self.request.terms
        return Submission(
            self.id,
            deadline_ns,
            plan.rows,
            plan.index,
            priority,
            slab.place.segment,
            self.inputs_at,
            self.outputs_at,
            run,
            self.request.tag,
        )

    @property
    def nbytes(self) -> int:
        """Of the answer, about, as far as it may be sent in two steps.

        Not that of a sub-call: the second one would end the server (24.10 takes it for another answer), while an answer
        that finds no room is missed by its caller for as long as a call through Triton may take.
        """
        return self.plan.output_bytes if self.plan and not self.request.terms.run else 0

    @property
    def attributes(self) -> Mapping[str, int]:
        """What its span tells of it."""
        return {} if self.plan is None else {"rsrv.rows": self.plan.rows}

    def release(self) -> None:
        """It is answered: its memory serves others."""
        if self.slab is not None:
            self.connection.release(self.slab)

    def finish(self, done: Completion) -> None:
        self.execute_ns = done.execute_ns
        if done.status is not Status.OK:
            self.fail(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = RequestFailure(status, text)


@dataclass(slots=True, eq=False)
class MetaRequest:
    """One request of a meta model on its way through the stub."""

    id: int  # of its ENTER
    request: ClientRequest
    link: Link
    connection: RuntimeConnection  # that its ENTER goes by, if it has to wait
    #: random, so that nobody else can name it
    token: int = field(default_factory=lambda: secrets.randbits(64) or 1)
    let_in: bool = False
    response: Any = None
    checked: float = 0.0
    cancelling: bool = False
    #: arrays that the response may refer to
    results: Sequence[Array] = ()
    #: where execute() waits for it
    inbox: queue.SimpleQueue["MetaRequest"] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self) -> Entrance:
        deadline_ns, priority, _ = self.request.terms
        return Entrance(self.id, self.token, deadline_ns, priority, self.request.tag)

    def finish(self, done: Completion) -> None:
        self.let_in = done.status is Status.OK
        if self.request.trace is not None:
            self.request.trace.part("queue", self.request.since, done.text)
        if not self.let_in:
            self.fail(done.status, done.text)

    def fail(self, status: Status, text: str) -> None:
        self.request.failure = RequestFailure(status, text)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.results)

    def release(self) -> None:
        self.request.triton, self.results = None, ()

    def check(self) -> None:
        """Raises RequestFailure when nobody needs the answer any more."""
        if 0 < self.request.terms.deadline_ns <= time.monotonic_ns():
            raise RequestFailure(Status.DEADLINE, "the deadline passed before it was called")
        now = time.monotonic()
        reply = self.request.reply
        if reply is not None and now - self.checked > _CHECK:
            self.checked = now
            if reply.cancelled():
                raise RequestFailure(Status.CANCELLED, "the request was cancelled")

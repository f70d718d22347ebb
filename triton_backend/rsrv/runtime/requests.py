"""Unanswered requests: frames become the scheduler's requests, and its decisions become answers.

Belongs to the loop. A plain request needs this module only. The modules `meta_requests` and `stateful_requests` add what
sub-calls of meta models need, and steps of sequences and generations.
"""

from collections.abc import Iterable

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.executor import ExecutionEnded
from rsrv.runtime.slices import PendingRequest, RequestKind, RequestSlice, Slice
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.runtime.weight_manager import Outbox
from rsrv.scheduler import events as ev
from rsrv.wire.frames import ALONE, END, START, WAITED, Completion, ProtocolError, Status
from rsrv.wire.layout import ALIGNMENT

#: a connection's own request ids stay below this, so that (connection, id) makes one number
_ID_BITS = 40
_PLAIN_FLAGS, _STEP_FLAGS = ALONE | WAITED, ALONE | WAITED | START | END
#: characters of a request's number
_MAX_NUMBER = 32
ABORTED = "the request was aborted"
CANCELLED = "the request was cancelled"


class Requests:
    """All requests by global id, and the completions that are not sent yet."""

    def __init__(self, catalog: Catalog, transport: Transport, traces: Traces, outbox: Outbox) -> None:
        self._catalog = catalog
        self._transport = transport
        self._traces = traces
        self._outbox = outbox
        #: Requests by global id.
        self.pending: dict[int, PendingRequest] = {}
        #: requests that the scheduler does not know yet
        self.arrived: list[ev.Request] = []
        #: connections with completions to send
        self.answering: set[PeerConnection] = set()
        #: Kinds that are not plain: steps of sequences and generations, and sub-calls of runs.
        self.steps = self.calls = RequestKind()

    # --- frames -------------------------------------------------------------------------------------------

    def submit(self, connection: PeerConnection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._catalog.served_by(connection)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, interface, stateful = model.key, model.interface, model.pool is not None
        variants, longest = interface.variants, interface.longest
        pending, base = self.pending, connection.id << _ID_BITS
        for submission in submissions:
            (
                request, deadline_ns, rows, index, priority,
                segment_id, flags, inputs_at, outputs_at, token, tag, sequence, length,
            ) = submission  # fmt: skip
            if index >= len(variants):
                raise ProtocolError(f"SUBMIT for variant {index} of {len(variants)}")
            segment = connection.segments.get(segment_id)
            if segment is None:
                raise ProtocolError(f"SUBMIT in unknown segment {segment_id}")
            variant, size = variants[index], len(segment)
            if longest or length:
                if not 0 < length <= longest:
                    raise ProtocolError(f"SUBMIT of length {length}, of 1 to {longest}")
                index, variant = interface.at_length(length)
            if (
                (inputs_at | outputs_at) % ALIGNMENT
                or inputs_at + variant.inputs.places(rows)[1] > size
                or outputs_at + variant.outputs.places(rows)[1] > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            if flags > (_STEP_FLAGS if stateful else _PLAIN_FLAGS):
                raise ProtocolError(f"SUBMIT with unknown flags {flags}")
            id = base | request
            if request >> _ID_BITS or id in pending:
                self.new_id(connection, request)  # raises
            if connection.marks and (mark := connection.marks.pop(request, None)) is not None:
                self._traces.begin(id, mark, key)
            place = (
                connection, request, rows, segment, inputs_at, outputs_at, tag, variant if length else None,
            )  # fmt: skip
            asked = ev.Request(
                id,
                key,
                index,
                rows,
                deadline_ns / 1e9 if deadline_ns else None,
                priority,
                0,
                flags & ALONE != 0,
                flags & WAITED != 0,
                tag,
                None,
                0 if stateful else sequence,
            )
            if stateful or token:
                kind = self.steps if stateful else self.calls
                kind.submit(place, asked, token, (sequence, flags))
            else:
                pending[id] = RequestSlice(*place)
                self.arrived.append(asked)

    def cancel(self, connection: PeerConnection, requests: Iterable[int]) -> None:
        self.cancel_all(tuple(_global_id(connection, request) for request in requests))

    def cancel_all(self, ids: tuple[int, ...]) -> None:
        """Cancel requests by global id."""
        others = [id for kind in (self.steps, self.calls) for id in kind.cancel(ids)]
        self._outbox.append(ev.RequestsCancelled((*ids, *others)))

    def closed(self, connection: PeerConnection) -> None:
        """Cancel the requests of a closed connection."""
        gone = tuple(id for id, part in self.pending.items() if part.connection is connection)
        if gone:
            self.cancel_all(gone)
        for kind in (self.steps, self.calls):
            kind.closed(connection)

    def abort(self, tag: int) -> tuple[int, set[int], set[int]]:
        """Abort the requests, runs and generations with this tag.

        Returns the number of aborted runs and generations, the ids of requests with the tag, and these with the runs'
        sub-calls. All of them end when the scheduler has handled the event, except executing requests. These are
        answered as usual, but their run does not continue.
        """
        if not tag:
            return 0, set(), set()
        parts = self.pending.items()
        own = {id for id, part in parts if isinstance(part, RequestSlice) and part.tag == tag}
        aborted = [kind.abort(tag) for kind in (self.steps, self.calls)]
        cancelled = own.union(*(ids for _, ids in aborted))
        self.cancel_all(tuple(sorted(cancelled)))
        return sum(count for count, _ in aborted), own, cancelled

    # --- decisions of the scheduler -----------------------------------------------------------------------

    def slices(self, ids: Iterable[int]) -> tuple[Slice, ...]:
        """Return the requests of an execution."""
        pending: dict[int, Slice] = self.pending  # type: ignore[assignment]
        return tuple(map(pending.__getitem__, ids))

    def answer(self, finish: ev.Finish, ended: ExecutionEnded) -> None:
        """Complete a request whose execution succeeded."""
        part = self.pending.pop(finish.request)
        if part.kind is None or part.kind.answered(part):
            execute, took_ns = ended.dispatch.execute, int(ended.seconds * 1e9)
            completion = Completion(part.request, Status.OK, execute.size, execute.rows, took_ns)
            self.complete(part.connection, completion)

    def fail(self, finish: ev.Finish) -> None:
        """Complete a request that was not answered."""
        status, text = _failure(finish)
        part = self.pending.get(finish.request)
        if part is None:
            for kind in (self.steps, self.calls):
                kind.refused(finish.request, status, text)
            return
        if part.kind is not None:
            status, text = part.kind.failed(part, status, text)
        self.end(finish.request, status, text)

    # --- answers ------------------------------------------------------------------------------------------

    def send_answers(self) -> None:
        """Send all completions."""
        answering, self.answering = self.answering, set()
        for connection in answering:
            self._transport.guard(connection, connection.send_completions)

    def end(self, id: int, status: Status, text: str) -> None:
        """Complete a request without an execution."""
        part = self.pending.pop(id)
        self._traces.live.pop(id, None)  # the scheduler may never have known it
        if part.kind is None or part.kind.ended(part, status, text):
            self.complete(part.connection, Completion(part.request, status, text=text))

    def complete(self, connection: PeerConnection, completion: Completion) -> None:
        if not connection.closed:
            connection.completions.append(completion)
            self.answering.add(connection)

    def new_id(self, connection: PeerConnection, request: int) -> int:
        """Return the global id of a connection's new request. Raises ProtocolError."""
        id = _global_id(connection, request)
        if id in self.pending:
            raise ProtocolError(f"request {request} is there already, and not answered yet")
        return id


def request_number(id: int) -> str:
    """Return the number by which operators name a request: its connection's, and its own there; or a generation's step."""
    return f"step.{-id}" if id < 0 else f"{id >> _ID_BITS}.{own_number(id)}"


def own_number(id: int) -> int:
    """Return the number that the connection of a request gave it."""
    return id & (1 << _ID_BITS) - 1


def parse_number(text: str) -> int | None:
    """Return the global id that `request_number` names; None if the text is no such number."""
    connection, _, request = text.partition(".")
    if len(text) > _MAX_NUMBER or not (text.isascii() and request.isdigit()):
        return None
    if connection == "step":
        return -int(request)
    return int(connection) << _ID_BITS | int(request) if connection.isdigit() else None


def _global_id(connection: PeerConnection, id: int) -> int:
    if id >> _ID_BITS:
        raise ProtocolError(f"request id {id} has more than {_ID_BITS} bits")
    return connection.id << _ID_BITS | id


def _failure(finish: ev.Finish) -> tuple[Status, str]:
    """Return a request's status and the text for its client, without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.SHED:
            return Status.DEADLINE, "the deadline cannot be met any more"
        case ev.Outcome.CANCELLED:
            return Status.CANCELLED, CANCELLED
        case ev.Outcome.FAILED if finish.reason is ev.Reason.NOT_LOADED:
            text = f"the model's weights could not be loaded: {finish.error}; send the request again after {finish.retry_after:.1f} s"
            return Status.INTERNAL, text
        case ev.Outcome.FAILED:
            return Status.INTERNAL, "the model failed to execute; the server's log says why"
    match finish.reason:
        case ev.Reason.QUEUE_FULL:
            after = "later" if finish.retry_after is None else f"after {finish.retry_after * 1e3:.0f} ms"
            return Status.QUEUE_FULL, f"too many requests wait for this model; retry {after}"
        case ev.Reason.NO_MEMORY:
            text = f"the device has no memory for this model's weights; they are tried again in {finish.retry_after:.1f} s"
            return Status.QUEUE_FULL, text
        case ev.Reason.TOO_MANY_ROWS:
            return Status.INVALID, "the request has more rows than the model's largest batch"
        case ev.Reason.UNKNOWN_VARIANT:
            return Status.INVALID, "no module is compiled for this input shape"
        case ev.Reason.PAUSED:
            return Status.PAUSED, "the model is paused; try again when an operator lets it go on"
        case ev.Reason.NOT_RESIDENT:
            text = "its weights are not on the device; the control plane must bring them there first"
            return Status.NOT_RESIDENT, text
        case _:
            return Status.NOT_FOUND, "the model is not loaded"

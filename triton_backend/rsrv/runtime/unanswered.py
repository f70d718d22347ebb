"""Unanswered requests of all kinds, and the completions that are not sent yet. Belongs to the loop."""

from collections.abc import Iterable

from rsrv.runtime.executor import ExecutionEnded
from rsrv.runtime.request_ids import global_id
from rsrv.runtime.slices import PendingRequest, Slice
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.scheduler import events as ev
from rsrv.wire.frames import Completion, ProtocolError, Status

ABORTED = "the request was aborted"
CANCELLED = "the request was cancelled"


class UnansweredRequests:
    """All unanswered requests by global id. The methods complete them."""

    def __init__(self, transport: Transport, traces: Traces) -> None:
        self._transport = transport
        self._traces = traces
        #: The unanswered requests by global id.
        self.pending: dict[int, PendingRequest] = {}
        #: Requests that the scheduler does not know yet.
        self.arrived: list[ev.Request] = []
        #: Connections with completions to send.
        self.answering: set[PeerConnection] = set()

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

    # --- answers ------------------------------------------------------------------------------------------

    def send_answers(self) -> None:
        """Send all completions."""
        answering, self.answering = self.answering, set()
        for connection in answering:
            self._transport.guard(connection, connection.send_completions)

    def end(self, id: int, status: Status, text: str) -> None:
        """Complete a request that ended without an execution."""
        part = self.pending.pop(id)
        self._traces.live.pop(id, None)  # The scheduler may never have known the request.
        if part.kind is None or part.kind.ended(part, status, text):
            self.complete(part.connection, Completion(part.request, status, text=text))

    def complete(self, connection: PeerConnection, completion: Completion) -> None:
        if not connection.closed:
            connection.completions.append(completion)
            self.answering.add(connection)

    def new_id(self, connection: PeerConnection, request: int) -> int:
        """Return the global id of a connection's new request. Raises ProtocolError."""
        id = global_id(connection.id, request)
        if id in self.pending:
            raise ProtocolError(f"request {request} exists already, and is not answered yet")
        return id


def failure(finish: ev.Finish) -> tuple[Status, str]:
    """Return a request's status and the text for its client, without paths or tracebacks."""
    match finish.outcome:
        case ev.Outcome.EXPIRED:
            return Status.DEADLINE, "the deadline passed before the model could run"
        case ev.Outcome.SHED:
            return Status.DEADLINE, "the deadline cannot be met any more"
        case ev.Outcome.CANCELLED:
            return Status.CANCELLED, CANCELLED
        case ev.Outcome.FAILED if finish.reason is ev.Reason.NOT_LOADED:
            text = (
                f"the model's weights could not be loaded: {finish.error}; "
                f"send the request again after {finish.retry_after:.1f} s"
            )
            return Status.INTERNAL, text
        case ev.Outcome.FAILED:
            return Status.INTERNAL, "the model failed to execute; the server's log says why"
    match finish.reason:
        case ev.Reason.QUEUE_FULL:
            after = "later" if finish.retry_after is None else f"after {finish.retry_after * 1e3:.0f} ms"
            return Status.QUEUE_FULL, f"too many requests wait for this model; retry {after}"
        case ev.Reason.NO_MEMORY:
            text = f"the device has no memory for this model's weights; loading is retried in {finish.retry_after:.1f} s"
            return Status.QUEUE_FULL, text
        case ev.Reason.TOO_MANY_ROWS:
            return Status.INVALID, "the request has more rows than the model's largest batch"
        case ev.Reason.UNKNOWN_VARIANT:
            return Status.INVALID, "no module is compiled for this input shape"
        case ev.Reason.PAUSED:
            return Status.PAUSED, "the model is paused; try again when an operator has resumed it"
        case ev.Reason.NOT_RESIDENT:
            text = (
                "the model's weights are not on the device; an operator must prefetch or pin the model first"
            )
            return Status.NOT_RESIDENT, text
        case _:
            return Status.NOT_FOUND, "the model is not loaded"

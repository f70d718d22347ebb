"""Requests of stubs: their frames become the scheduler's requests. Belongs to the loop.

A plain request needs only this module and `unanswered`. The module `meta_requests` handles sub-calls of meta models, and
`stateful_requests` handles steps of sequences and generations.
"""

from collections.abc import Iterable

from rsrv.runtime.catalog import Catalog
from rsrv.runtime.request_ids import ID_BITS, global_id
from rsrv.runtime.slices import RequestKind, RequestSlice
from rsrv.runtime.timeline import Traces
from rsrv.runtime.transport import PeerConnection
from rsrv.runtime.unanswered import UnansweredRequests, failure
from rsrv.runtime.weight_manager import Outbox
from rsrv.scheduler import events as ev
from rsrv.wire.frames import ALONE, END, START, WAITED, ProtocolError
from rsrv.wire.layout import ALIGNMENT

_PLAIN_FLAGS, _STEP_FLAGS = ALONE | WAITED, ALONE | WAITED | START | END


class Requests:
    """Handles requests, cancellations and closed connections.

    Requests that are not plain are passed to the `RequestKind` that handles them.
    """

    def __init__(
        self,
        unanswered: UnansweredRequests,
        steps: RequestKind,
        calls: RequestKind,
        catalog: Catalog,
        traces: Traces,
        outbox: Outbox,
    ) -> None:
        """`steps` handles steps of sequences and generations, and `calls` handles sub-calls of runs."""
        self._unanswered = unanswered
        self._steps = steps
        self._calls = calls
        self._kinds = (steps, calls)
        self._catalog = catalog
        self._traces = traces
        self._outbox = outbox

    # --- frames -------------------------------------------------------------------------------------------

    def submit(self, connection: PeerConnection, submissions: Iterable[tuple[int, ...]]) -> None:
        model = self._catalog.served_by(connection)
        if model is None:
            raise ProtocolError("SUBMIT before REGISTERED")
        key, interface, stateful = model.key, model.interface, model.pool is not None
        variants, longest = interface.variants, interface.longest
        pending, arrived = self._unanswered.pending, self._unanswered.arrived
        base = connection.id << ID_BITS
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
                or inputs_at + variant.inputs.places[rows].nbytes > size
                or outputs_at + variant.outputs.places[rows].nbytes > size
            ):
                raise ProtocolError("SUBMIT outside its segment, or not aligned")
            if flags > (_STEP_FLAGS if stateful else _PLAIN_FLAGS):
                raise ProtocolError(f"SUBMIT with unknown flags {flags}")
            id = base | request
            if request >> ID_BITS or id in pending:
                self._unanswered.new_id(connection, request)  # This call always raises an error.
            if connection.marks and (mark := connection.marks.pop(request, None)) is not None:
                self._traces.begin(id, mark, key)
            place = (
                connection, request, rows, segment, inputs_at, outputs_at, tag, variant if length else None,
            )  # fmt: skip
            scheduled = ev.Request(
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
                kind = self._steps if stateful else self._calls
                kind.submit(place, scheduled, token, (sequence, flags))
            else:
                pending[id] = RequestSlice(*place)
                arrived.append(scheduled)

    def cancel(self, connection: PeerConnection, requests: Iterable[int]) -> None:
        self.cancel_all(tuple(global_id(connection.id, request) for request in requests))

    def cancel_all(self, ids: tuple[int, ...]) -> None:
        """Cancel requests by global id."""
        cancelled = [id for kind in self._kinds for id in kind.cancel(ids)]
        self._outbox.append(ev.RequestsCancelled((*ids, *cancelled)))

    def closed(self, connection: PeerConnection) -> None:
        """Cancel the requests of a closed connection."""
        closed = tuple(id for id, part in self._unanswered.pending.items() if part.connection is connection)
        if closed:
            self.cancel_all(closed)
        for kind in self._kinds:
            kind.closed(connection)

    def abort(self, tag: int) -> tuple[int, set[int], set[int]]:
        """Abort the requests, runs and generations with this tag.

        Returns the number of aborted runs and generations, the ids of the requests with the tag, and the ids of all cancelled
        requests, which include the sub-calls of the aborted runs. The cancelled requests end when the scheduler handles the
        cancellation. A request that executes is still answered, but an aborted run does not continue after it.
        """
        if not tag:
            return 0, set(), set()
        parts = self._unanswered.pending.items()
        own = {id for id, part in parts if isinstance(part, RequestSlice) and part.tag == tag}
        aborted = [kind.abort(tag) for kind in self._kinds]
        cancelled = own.union(*(ids for _, ids in aborted))
        self.cancel_all(tuple(sorted(cancelled)))
        return sum(count for count, _ in aborted), own, cancelled

    def fail(self, finish: ev.Finish) -> None:
        """Complete a request that was not answered."""
        status, text = failure(finish)
        part = self._unanswered.pending.get(finish.request)
        if part is None:
            for kind in self._kinds:
                kind.refused(finish.request, status, text)
            return
        if part.kind is not None:
            status, text = part.kind.failed(part, status, text)
        self._unanswered.end(finish.request, status, text)

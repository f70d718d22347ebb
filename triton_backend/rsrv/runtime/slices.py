"""Requests as parts of executions, and the interface of the kinds of requests that are not plain."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rsrv.runtime.device import Array
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler import events as ev
from rsrv.wire.frames import Status
from rsrv.wire.layout import Block, Variant
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype


class RequestKind:
    """Handler of one kind of requests, such as sub-calls of meta models, from their arrival to their end.

    Plain requests need no handler. Subclasses must override `submit`. The other methods of this class treat a request like a
    plain one.
    """

    def submit(self, place: tuple[Any, ...], request: ev.Request, token: int, step: tuple[int, int]) -> None:
        """Handle a request of SUBMIT.

        Args:
            place: arguments of `RequestSlice`.
            request: the request for the scheduler.
            token: token of the meta model's run, or 0.
            step: number of the sequence, and the flags.
        """
        raise NotImplementedError

    def answered(self, part: Any) -> bool:
        """Handle a request whose execution succeeded. Return whether its client gets a completion."""
        return True

    def failed(self, part: Any, status: Status, text: str) -> tuple[Status, str]:
        """Return the status and the text for the client of a request that the scheduler ended without an answer.

        `status`, `text`: the status and the text that a plain request gets.
        """
        return status, text

    def ended(self, part: Any, status: Status, text: str) -> bool:
        """Handle a request that ended without an execution. Return whether its client gets a completion."""
        return True

    def refused(self, id: int, status: Status, text: str) -> None:
        """Handle an id that the scheduler refused and that is not in `UnansweredRequests.pending`."""

    def cancel(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Handle the cancellation of the requests with these global ids. Return ids of further requests to cancel."""
        return ()

    def abort(self, tag: int) -> tuple[int, set[int]]:
        """Abort all runs or generations with a tag. Return their number, and the ids of requests to cancel."""
        return 0, set()

    def closed(self, connection: PeerConnection) -> None:
        """Handle the end of a connection."""


class PendingRequest(Protocol):
    """A request without an answer."""

    connection: PeerConnection
    #: The connection's number for the request.
    request: int
    #: Kind of the request, or None if it is plain.
    kind: RequestKind | None


class Slice(PendingRequest, Protocol):
    """A request's share of an execution: a `RequestSlice`, or a sub-call of a meta model."""

    rows: int

    @property
    def segment(self) -> Bytes | None:
        """Memory with the request's inputs and outputs, or None if they are not in one segment."""

    @property
    def shapes(self) -> Variant | None:
        """Tensors of the request at its own length, if the model has a padded axis."""

    def source(self, index: int, block: Block) -> object:
        """Return an input: an array in shared memory, or a tensor on the device."""

    def target(self, index: int, block: Block) -> Array | None:
        """Return the place of an output in shared memory. None: the output is not needed there."""

    def mark(self) -> None:
        """Set the first byte of the request's outputs to 1.

        If this process dies, the byte shows the stub that the request may be the cause.
        """


@dataclass(slots=True, eq=False)
class RequestSlice:
    """A request's share of an execution: its connection, and the places of its inputs and outputs."""

    connection: PeerConnection
    request: int  # The connection's own id.
    rows: int
    segment: Bytes
    inputs_at: int
    outputs_at: int
    tag: int = 0  # Hash of the client's id for the request, or 0 without one.
    #: Tensors of the request at its own length, if the model has a padded axis.
    shapes: Variant | None = None
    #: Kind of the request, or None if it is plain.
    kind: RequestKind | None = None

    def source(self, index: int, block: Block) -> Array:
        """View an input in shared memory."""
        own = block if self.shapes is None else self.shapes.inputs
        return view(own, index, self.rows, self.segment, self.inputs_at)

    def target(self, index: int, block: Block) -> Array:
        """View an output in shared memory."""
        own = block if self.shapes is None else self.shapes.outputs
        return view(own, index, self.rows, self.segment, self.outputs_at)

    def mark(self) -> None:
        if self.outputs_at < len(self.segment):
            self.segment[self.outputs_at] = 1


def view(block: Block, index: int, rows: int, memory: Bytes | Array, start: int) -> Array:
    """Return a view of one tensor of a block. The block begins at byte `start` of the memory."""
    places, dtype = block.places[rows], numpy_dtype(block.tensors[index].dtype)
    return np.ndarray(places.shapes[index], dtype, memory, start + places.offsets[index])

"""Runs of meta models in the runtime: their frames, the calls that wait for admission, and their tensors on the device."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.device import Array, Buffer
from rsrv.runtime.slices import RequestKind
from rsrv.runtime.transport import PeerConnection, Registration
from rsrv.scheduler import events as ev
from rsrv.wire.calls import Call, Entrance, Spot, Where
from rsrv.wire.frames import ProtocolError, Status
from rsrv.wire.layout import ITEMSIZE, Block, Tensor
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype

#: Maximum number of calls of one run that wait for its admission.
_MAX_HELD = 16_384


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a run keeps on the device: `rows` rows of an output of `size` rows, beginning with the row `first`."""

    buffer: Buffer
    tensor: Tensor
    first: int
    rows: int
    size: int

    @property
    def nbytes(self) -> int:
        """Device bytes of the whole output. Other runs may also keep parts of it."""
        return self.tensor.nbytes(self.size)

    def fits(self, tensor: Tensor, rows: int) -> bool:
        """Return whether this tensor can be the input `tensor` of a call with `rows` rows."""
        mine = self.tensor
        return (
            (mine.batch_axis is None or self.rows == rows)
            and mine.dtype == tensor.dtype
            and mine.batch_axis == tensor.batch_axis
            and mine.dims == tensor.dims
        )


@dataclass(slots=True, eq=False)
class MetaRun:
    """One request of a meta model."""

    #: The scheduler's number for the run. No request has the same number.
    id: int
    token: int
    group: Registration
    #: Connection of the run's ENTER.
    connection: PeerConnection
    #: The connection's number for ENTER. It is free again after the answer.
    request: int
    #: The loop's number for ENTER. It is free again after the answer.
    enter_id: int
    #: Seconds on the loop's clock.
    deadline: float | None
    priority: int
    #: True if another device's runtime counts the run's outcome.
    further: bool
    tag: int
    kind: RequestKind | None
    admitted: bool = False
    #: True if an operator aborted the run. It ends with its next call.
    aborted: bool = False
    #: Sub-calls that wait for the run's admission.
    held: list[ev.Request] = field(default_factory=list)
    #: Tensors on the device, by the numbers that the run's stub chose.
    kept: dict[int, Kept] = field(default_factory=dict)
    #: Device bytes of the tensors that unfinished calls of the run will add to `kept`, by the same numbers.
    promised: dict[int, int] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Device bytes of the outputs that the run keeps, or is about to keep."""
        return sum(tensor.nbytes for tensor in self.kept.values()) + sum(self.promised.values())

    def account(self, seconds: float) -> None:
        """Count a sub-call of the run that used the device for this many seconds."""
        counts = self.group.counts
        counts.calls += 1
        counts.device_seconds += seconds


class Runs:
    """Waiting and active runs, by token and by the scheduler's number."""

    def __init__(self) -> None:
        #: Runs by token.
        self.by_token: dict[int, MetaRun] = {}
        self._by_id: dict[int, MetaRun] = {}
        # Numbers of runs are below the numbers of all requests, because a request's number has the connection's number in its
        # upper bits.
        self._ids = itertools.count(1)

    def __iter__(self) -> Iterator[MetaRun]:
        return iter(list(self.by_token.values()))

    @property
    def kept_bytes(self) -> int:
        """Device bytes of the outputs that runs keep, or are about to keep.

        An output is counted once for each run that keeps it.
        """
        return sum(run.kept_bytes for run in self)

    def get(self, id: int) -> MetaRun | None:
        """Return the run with the scheduler's number."""
        return self._by_id.get(id)

    def find(self, token: int, model: str) -> MetaRun | None:
        """Return the admitted run with this token if it may call a model with this name, in any version."""
        run = self.by_token.get(token)
        return run if run is not None and run.admitted and model in run.group.calls else None

    def of(self, connection: PeerConnection, token: int) -> MetaRun | None:
        """Return the run of the connection's model with this token. None: the run has ended, or never began.

        Raises:
            ProtocolError: the run belongs to another model.
        """
        run = self.by_token.get(token)
        if run is not None and run.group is not connection.group:
            raise ProtocolError("a frame for a run of another model")
        return run

    def entered_on(self, connection: PeerConnection) -> list[MetaRun]:
        """Return the connection's runs. Waiting runs come first, because the end of an active run would admit them."""
        mine = [run for run in self if run.connection is connection]
        return sorted(mine, key=lambda run: run.admitted)

    def enter(
        self,
        connection: PeerConnection,
        group: Registration,
        entrance: Entrance,
        enter_id: int,
        kind: RequestKind,
    ) -> MetaRun:
        """Add a run. It waits for its admission. Raises ProtocolError."""
        if not group.is_meta:
            raise ProtocolError("ENTER on a connection that is not a meta model's")
        request, token, deadline_ns, priority, further, tag = entrance
        if not token or token in self.by_token:
            raise ProtocolError("ENTER of a run that exists already, or without a token")
        deadline = deadline_ns / 1e9 if deadline_ns else None
        run = MetaRun(
            next(self._ids),
            token,
            group,
            connection,
            request,
            enter_id,
            deadline,
            priority,
            further != 0,
            tag,
            kind,
        )
        self.by_token[token] = self._by_id[run.id] = run
        return run

    def hold(self, run: MetaRun, request: ev.Request) -> None:
        """Keep a sub-call until its run is admitted. Raises ProtocolError."""
        if len(run.held) >= _MAX_HELD:
            raise ProtocolError(f"more than {_MAX_HELD} calls of a run that is not admitted")
        run.held.append(request)

    def remove(self, run: MetaRun, status: Status) -> None:
        """Remove a run that has ended, and count its outcome.

        If the run used several devices, only the runtime of one device counts the outcome.
        """
        del self.by_token[run.token], self._by_id[run.id]
        run.kept.clear()
        if not run.further:
            run.group.counts.outcomes[status.name.lower()] += 1


# --- the tensors of a call --------------------------------------------------------------------------------


def find_sources(run: MetaRun, connection: PeerConnection, call: Call, block: Block) -> list[Array | Kept]:
    """Return a call's inputs, on the host or on the device. Raises ProtocolError."""
    if len(call.inputs) != len(block.tensors):
        raise ProtocolError(f"CALL with {len(call.inputs)} inputs for a model of {len(block.tensors)}")
    sources: list[Array | Kept] = []
    for place, tensor in zip(call.inputs, block.tensors, strict=True):
        if place.where == Where.MEMORY:
            sources.append(_in_memory(connection, place, tensor, call.rows))
            continue
        tensor_kept = run.kept.get(place.at)
        if place.where != Where.DEVICE or tensor_kept is None or not tensor_kept.fits(tensor, call.rows):
            raise ProtocolError(f"CALL with input {tensor.name!r} from nowhere, or of another kind")
        sources.append(tensor_kept)
    return sources


def find_targets(
    run: MetaRun, connection: PeerConnection, call: Call, block: Block
) -> tuple[list[Array | None], dict[int, int]]:
    """Return the places of a call's outputs on the host, and the numbers of the outputs that stay on the device.

    Raises ProtocolError.
    """
    if len(call.outputs) != len(block.tensors):
        raise ProtocolError(f"CALL with {len(call.outputs)} outputs for a model of {len(block.tensors)}")
    targets: list[Array | None] = []
    keep: dict[int, int] = {}
    for index, (place, tensor) in enumerate(zip(call.outputs, block.tensors, strict=True)):
        if place.where == Where.MEMORY:
            targets.append(_in_memory(connection, place, tensor, call.rows))
            continue
        targets.append(None)
        if place.where not in (Where.DEVICE, Where.NOWHERE):
            raise ProtocolError(f"CALL with output {tensor.name!r} in an unknown place")
        if place.where == Where.DEVICE:
            if place.at in run.kept or place.at in run.promised or place.at in keep.values():
                raise ProtocolError(f"CALL that keeps number {place.at}, which is in use already")
            keep[index] = place.at
    return targets, keep


def _in_memory(connection: PeerConnection, place: Spot, tensor: Tensor, rows: int) -> Array:
    segment: Bytes | None = connection.segments.get(place.segment)
    if segment is None:
        raise ProtocolError(f"CALL in unknown segment {place.segment}")
    if place.at % ITEMSIZE[tensor.dtype] or place.at + tensor.nbytes(rows) > len(segment):
        raise ProtocolError("CALL outside its segment, or not aligned")
    return np.ndarray(tensor.shape(rows), numpy_dtype(tensor.dtype), segment, place.at)

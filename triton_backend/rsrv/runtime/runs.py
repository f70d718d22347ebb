"""Runs of meta models: they ask to be let in, call models, keep tensors on the device, and leave.

Belongs to the loop. The scheduler says who is let in, and treats the sub-calls of those as committed; here is what
it need not know: which frames belong to which run, and what waits until a run is let in.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.device import Array, Buffer
from rsrv.runtime.transport import Connection, Registration
from rsrv.scheduler import events as ev
from rsrv.wire.calls import Call, Entrance, Spot, Where
from rsrv.wire.frames import ProtocolError, Status
from rsrv.wire.layout import ITEMSIZE, Block, Tensor
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype

#: calls of one run that may wait until it is let in
_MAX_HELD = 16_384


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that a run keeps on the device: rows `first` and following of an output of `size` rows."""

    buffer: Buffer
    tensor: Tensor
    first: int
    rows: int
    size: int

    @property
    def nbytes(self) -> int:
        """Device bytes of the whole output, of which others may keep parts, too."""
        return self.tensor.nbytes(self.size)

    def fits(self, tensor: Tensor, rows: int) -> bool:
        """Whether it can be that input of a call with so many rows."""
        mine = self.tensor
        return (
            (mine.batch_axis is None or self.rows == rows)
            and mine.dtype == tensor.dtype
            and mine.batch_axis == tensor.batch_axis
            and mine.dims == tensor.dims
        )


@dataclass(slots=True, eq=False)
class Run:
    """One request of a meta model."""

    #: the scheduler's number for it, which is no request's
    id: int
    token: int
    group: Registration
    #: of its ENTER: whose, the connection's own number, and the loop's, both free again once it is answered
    connection: Connection
    request: int
    asking: int
    #: seconds on the loop's clock
    deadline: float | None
    priority: int
    tag: int
    admitted: bool = False
    #: whether it is to end with its next call, because somebody aborted it
    aborted: bool = False
    #: sub-calls that wait until it is let in
    held: list[ev.Request] = field(default_factory=list)
    #: by the numbers that its stub chose
    kept: dict[int, Kept] = field(default_factory=dict)
    #: device bytes of what its calls under way will keep, likewise
    promised: dict[int, int] = field(default_factory=dict)

    @property
    def kept_bytes(self) -> int:
        """Device bytes of the outputs that it keeps, or is about to."""
        return sum(kept.nbytes for kept in self.kept.values()) + sum(self.promised.values())

    def account(self, seconds: float) -> None:
        """One of its sub-calls had the device for so long."""
        counts = self.group.counts
        assert counts is not None
        counts.calls += 1
        counts.device_seconds += seconds


class Runs:
    """All that wait or run. `feed` takes the scheduler's events, `arrive` a sub-call of a run that is let in.

    `done` answers one of a connection's requests, by the loop's number for it.
    """

    def __init__(
        self,
        feed: Callable[[ev.Event], None],
        arrive: Callable[[ev.Request], None],
        done: Callable[[int, Status, str], None],
    ) -> None:
        self._feed = feed
        self._arrive = arrive
        self._done = done
        self._by_token: dict[int, Run] = {}
        self._by_id: dict[int, Run] = {}
        # Below all requests' numbers, which have a connection's in their upper bits.
        self._ids = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._by_token)

    def __iter__(self) -> Iterator[Run]:
        return iter(list(self._by_token.values()))

    @property
    def kept_bytes(self) -> int:
        """Device bytes of the outputs that runs keep, or are about to; one that several keep counts for each."""
        return sum(run.kept_bytes for run in self)

    def get(self, id: int) -> Run | None:
        """A run by the scheduler's number."""
        return self._by_id.get(id)

    def find(self, token: int, model: str) -> Run | None:
        """The run that may call a model of that name, in whatever version, by its token."""
        run = self._by_token.get(token)
        return run if run is not None and run.admitted and model in run.group.calls else None

    def of(self, connection: Connection, token: int) -> Run | None:
        """A run of the connection's model; None: it is over. Raises ProtocolError if it is another's."""
        run = self._by_token.get(token)
        if run is not None and run.group is not connection.group:
            raise ProtocolError("a frame for a run of another model")
        return run

    # --- what stubs want ----------------------------------------------------------------------------------

    def enter(self, connection: Connection, group: Registration, entrance: Entrance, asking: int) -> Run:
        """A run wants to be let in, which the caller asks the scheduler. Raises ProtocolError."""
        if group.counts is None:
            raise ProtocolError("ENTER on a connection that is not a meta model's")
        request, token, deadline_ns, priority, tag = entrance
        if not token or token in self._by_token:
            raise ProtocolError("ENTER of a run that is there already, or without a token")
        deadline = deadline_ns / 1e9 if deadline_ns else None
        run = Run(next(self._ids), token, group, connection, request, asking, deadline, priority, tag)
        self._by_token[token] = self._by_id[run.id] = run
        return run

    def call(self, run: Run, request: ev.Request) -> None:
        """A run calls a model: now, or when it is let in. Raises ProtocolError."""
        if run.admitted:
            self._arrive(request)
        elif len(run.held) < _MAX_HELD:
            run.held.append(request)
        else:
            raise ProtocolError(f"more than {_MAX_HELD} calls of a run that is not let in")

    def leave(self, run: Run, status: Status, text: str = "the request was cancelled") -> None:
        """A run is over. `text` is for one that waits to be let in."""
        self._forget(run, status)
        if not run.admitted:
            self._turn_away(run, Status.CANCELLED, text)
        run.kept.clear()
        self._feed(ev.RunEnded(run.id))

    def closed(self, connection: Connection) -> None:
        """A connection ended, and with it the runs that entered on it."""
        mine = [run for run in self if run.connection is connection]
        # Those that wait first: the ends of the others would let them in.
        for run in sorted(mine, key=lambda run: run.admitted):
            if run.id in self._by_id:  # else the scheduler has ended it meanwhile, for its deadline
                self.leave(run, Status.CANCELLED)

    # --- what the scheduler says --------------------------------------------------------------------------

    def admit(self, id: int) -> None:
        """A run is let in."""
        run = self._by_id[id]
        run.admitted = True
        self._done(run.asking, Status.OK, "")
        held, run.held = run.held, []
        for request in held:
            self._arrive(request)

    def refuse(self, run: Run, status: Status, text: str) -> None:
        """A run is not let in."""
        self._forget(run, status)
        self._turn_away(run, status, text)

    def _turn_away(self, run: Run, status: Status, text: str) -> None:
        """Answer the ENTER of a run that is not let in, and all calls that waited for that."""
        for id in (run.asking, *(request.id for request in run.held)):
            self._done(id, status, text)

    def _forget(self, run: Run, status: Status) -> None:
        del self._by_token[run.token], self._by_id[run.id]
        counts = run.group.counts
        assert counts is not None
        name = status.name.lower()
        counts.outcomes[name] = counts.outcomes.get(name, 0) + 1


# --- the tensors of a call --------------------------------------------------------------------------------


def find_sources(run: Run, connection: Connection, call: Call, block: Block) -> list[Array | Kept]:
    """A call's inputs, wherever they are. Raises ProtocolError."""
    if len(call.inputs) != len(block.tensors):
        raise ProtocolError(f"CALL with {len(call.inputs)} inputs for a model of {len(block.tensors)}")
    sources: list[Array | Kept] = []
    for spot, tensor in zip(call.inputs, block.tensors, strict=True):
        if spot.where == Where.MEMORY:
            sources.append(_in_memory(connection, spot, tensor, call.rows))
            continue
        kept = run.kept.get(spot.at)
        if spot.where != Where.DEVICE or kept is None or not kept.fits(tensor, call.rows):
            raise ProtocolError(f"CALL with input {tensor.name!r} from nowhere, or of another kind")
        sources.append(kept)
    return sources


def find_targets(
    run: Run, connection: Connection, call: Call, block: Block
) -> tuple[list[Array | None], dict[int, int]]:
    """Where a call's outputs go on the host, and by which number others stay on the device. Raises ProtocolError."""
    if len(call.outputs) != len(block.tensors):
        raise ProtocolError(f"CALL with {len(call.outputs)} outputs for a model of {len(block.tensors)}")
    targets: list[Array | None] = []
    keep: dict[int, int] = {}
    for index, (spot, tensor) in enumerate(zip(call.outputs, block.tensors, strict=True)):
        if spot.where == Where.MEMORY:
            targets.append(_in_memory(connection, spot, tensor, call.rows))
            continue
        targets.append(None)
        if spot.where not in (Where.DEVICE, Where.NOWHERE):
            raise ProtocolError(f"CALL with output {tensor.name!r} in an unknown place")
        if spot.where == Where.DEVICE:
            if spot.at in run.kept or spot.at in run.promised or spot.at in keep.values():
                raise ProtocolError(f"CALL that keeps number {spot.at}, which is there already")
            keep[index] = spot.at
    return targets, keep


def _in_memory(connection: Connection, spot: Spot, tensor: Tensor, rows: int) -> Array:
    segment: Bytes | None = connection.segments.get(spot.segment)
    if segment is None:
        raise ProtocolError(f"CALL in unknown segment {spot.segment}")
    if spot.at % ITEMSIZE[tensor.dtype] or spot.at + tensor.nbytes(rows) > len(segment):
        raise ProtocolError("CALL outside its segment, or not aligned")
    return view(tensor, rows, segment, spot.at)


def view(tensor: Tensor, rows: int, segment: Bytes, at: int) -> Array:
    """A tensor in shared memory, `at` bytes into the segment."""
    return np.ndarray(tensor.shape(rows), numpy_dtype(tensor.dtype), segment, at)

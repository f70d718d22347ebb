"""Executions: gather the requests' inputs, launch, read, scatter the outputs; on the loop or on threads.

With a depth of 1, the loop itself runs a short execution (`_SHORT_S`); any other has one thread from its inputs to its
outputs. With a larger depth there are two threads: one gathers and launches the next execution while the device is busy
with the one before; the other reads and scatters outputs meanwhile.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rsrv.runtime.activity import Activity, ActivitySlot
from rsrv.runtime.allocation import LARGE, PageLocks, aligned
from rsrv.runtime.device import Array, Buffer, Device, DeviceRows, Launched, OutOfMemory
from rsrv.runtime.models import CompiledModel, about
from rsrv.runtime.runs import Kept, MetaRun, view
from rsrv.runtime.sequences import SequenceEntry
from rsrv.runtime.state_pool import SlotRow
from rsrv.runtime.threads import Inbox, WorkerThread
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler import events as ev
from rsrv.wire.blackbox import Phase
from rsrv.wire.layout import Block, Tensor, Variant
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype


@dataclass(slots=True, eq=False)
class RequestSlice:
    """A request's share of an execution: its connection, and the places of its inputs and outputs."""

    connection: PeerConnection
    request: int  # the connection's own id
    rows: int
    segment: Bytes
    inputs_at: int
    outputs_at: int
    run: MetaRun | None = None
    tag: int = 0  # hash of the client's id for it; 0: it has none
    sequence: SequenceEntry | None = None
    #: Tensors of the request at its own length, if the model has a padded axis.
    shapes: Variant | None = None

    def source(self, index: int, block: Block) -> Array:
        """View an input in shared memory."""
        return self._view(index, block if self.shapes is None else self.shapes.inputs, self.inputs_at)

    def target(self, index: int, block: Block) -> Array:
        """View an output in shared memory."""
        return self._view(index, block if self.shapes is None else self.shapes.outputs, self.outputs_at)

    def _view(self, index: int, block: Block, start: int) -> Array:
        return view(block.tensors[index], self.rows, self.segment, start + block.places(self.rows)[0][index])


@dataclass(slots=True, eq=False)
class CallSlice:
    """A sub-call's share of an execution: each tensor has a place of its own, on the host or on the device."""

    connection: PeerConnection
    request: int
    rows: int
    run: MetaRun
    sources: Sequence[Array | Kept]
    #: None: not wanted on the host
    targets: Sequence[Array | None]
    #: output -> the number by which the run keeps it on the device
    keep: Mapping[int, int]
    #: outputs to keep, by number: the execution leaves them here, and the loop gives them to the run
    made: dict[int, Kept] = field(default_factory=dict)

    def source(self, index: int, block: Block) -> Array | Kept:
        return self.sources[index]

    def target(self, index: int, block: Block) -> Array | None:
        return self.targets[index]

    def mark(self) -> None:
        """Set the first byte of its outputs in shared memory."""
        for target in self.targets:
            if target is not None and target.nbytes:
                target.reshape(-1).view(np.uint8)[0] = 1
                return

    def settle(self, *, succeeded: bool) -> None:
        """On the loop: give the kept outputs to the run; after a failure there may be another try."""
        if succeeded:
            self.run.kept |= self.made
            self.end_promises()
        self.made.clear()

    def end_promises(self) -> None:
        """On the loop: stop counting outputs to keep as promised: the run has them, or they will not come."""
        for number in self.keep.values():
            self.run.promised.pop(number, None)


Slice = RequestSlice | CallSlice


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An `Execute` instruction with everything that its execution needs."""

    execute: ev.Execute
    model: CompiledModel
    #: of the model, by the instruction's number
    variant: Variant
    slices: tuple[Slice, ...]
    #: some of its slices are sub-calls of meta models
    has_calls: bool = False
    #: of a model with state: the slot of each slice
    rows_in_slots: tuple[SlotRow, ...] = ()

    def kept(self, index: int) -> list[Kept | None] | None:
        """Return the tensors of an input that are on the device already, by slice; None: none is."""
        if not self.has_calls:
            return None
        sources = [part.sources[index] if isinstance(part, CallSlice) else None for part in self.slices]
        kept = [source if isinstance(source, Kept) else None for source in sources]
        return kept if any(kept) else None

    @property
    def unread(self) -> Collection[int]:
        """Outputs that no slice wants on the host."""
        if not self.has_calls:
            return ()
        block = self.variant.outputs
        outputs = range(len(block.tensors))
        return {index for index in outputs if all(p.target(index, block) is None for p in self.slices)}

    @property
    def merges(self) -> bool:
        """The inputs have to be merged on the device, for which something may have to be compiled."""
        inputs = range(len(self.variant.inputs.tensors))
        return any(kept and not self.covered(index, kept) for index in inputs if (kept := self.kept(index)))

    def covered(self, index: int, kept: Sequence[Kept | None]) -> bool:
        """Return whether one tensor on the device is this input as it is: the rows of all slices are in place."""
        first, at = kept[0], 0
        batched = self.variant.inputs.tensors[index].batch_axis is not None
        if first is None or first.size != (self.execute.size if batched else 1):
            return False
        for part, one in zip(self.slices, kept, strict=True):
            if one is None or one.buffer is not first.buffer or one.first != at:
                return False
            at += part.rows
        return True


@dataclass(slots=True)
class Staging:
    """Memory in which batches are assembled: a block for each execution that may still read its own.

    Blocks serve all models, and grow with the largest batch. The loop and the executor's threads share them: each
    access is one atomic step.
    """

    #: blocks that no execution uses
    _idle: list[Array] = field(default_factory=list)
    #: of the blocks, and of the segments from which inputs are read in place
    locks: PageLocks = field(default_factory=PageLocks)

    def take(self, nbytes: int) -> Array:
        try:
            block = self._idle.pop()
        except IndexError:
            return aligned(nbytes)
        return block if block.nbytes >= nbytes else aligned(nbytes)

    def give(self, block: Array) -> None:
        """Return a block after its execution."""
        self._idle.append(block)

    def clear(self) -> None:
        """Free all idle blocks."""
        self._idle.clear()


@dataclass(slots=True, eq=False)
class ContiguousRun:
    """`count` slices of equally many rows, `stride` bytes apart."""

    first: Slice
    last: Slice
    count: int = 1
    stride: int = 0

    def take(self, part: Slice) -> bool:
        """Append a slice if it continues the run; return whether it does."""
        last = self.last
        if not isinstance(part, RequestSlice) or not isinstance(last, RequestSlice):
            return False
        stride = part.inputs_at - last.inputs_at
        if (
            part.rows != last.rows
            or part.shapes is not None
            or part.segment is not last.segment
            or stride <= 0
            or (self.count > 1 and stride != self.stride)
            or part.outputs_at - last.outputs_at != stride
        ):
            return False
        self.last, self.count, self.stride = part, self.count + 1, stride
        return True

    def copy(self, batch: Array, at: int, index: int, block: Block, *, outputs: bool) -> int:
        """Copy between the slices' tensors and rows `at` and following of `batch` (rows first); return the row after."""
        tensor, part = block.tensors[index], self.first
        first = part.target(index, block) if outputs else part.source(index, block)
        end = at + self.count * part.rows
        if not isinstance(first, np.ndarray):
            return end  # on the device, or not wanted
        rows = batch[at:end]
        if self.count == 1:
            parts = _rows_first(first, tensor)
            if tensor.padded_axis is not None:
                # The rest of the rows is padding.
                rows = rows[tuple(map(slice, parts.shape))]
        else:
            assert isinstance(part, RequestSlice)
            shape, strides = (self.count, *first.shape), (self.stride, *first.strides)
            start = part.outputs_at if outputs else part.inputs_at
            start += block.places(part.rows)[0][index]
            parts = np.ndarray(shape, first.dtype, part.segment, start, strides)
            if tensor.batch_axis:
                parts = np.moveaxis(parts, tensor.batch_axis + 1, 1)
            rows = rows.reshape(self.count, part.rows, *rows.shape[1:])
        if outputs:
            parts[...] = rows
        else:
            rows[...] = parts
        return end


def find_contiguous_runs(slices: Sequence[Slice]) -> list[ContiguousRun]:
    """Group slices that lie in one segment at equal distances with equally many rows, as those of one execute() do.

    A run is copied at once: this makes large batches of small tensors cheap.
    """
    groups: list[ContiguousRun] = []
    group: ContiguousRun | None = None
    for part in slices:
        if group is None or not group.take(part):
            group = ContiguousRun(part, part)
            groups.append(group)
    return groups


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatch that was launched on the device."""

    dispatch: Dispatch
    launched: Launched
    #: the block of its assembled inputs; None: they are read in place
    staged: Array | None
    #: times that the model's state was lost before it
    losses: int = 0


def launch(dispatch: Dispatch, device: Device, staging: Staging) -> Flight:
    """Launch a dispatch on the device."""
    weights = dispatch.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    execute = dispatch.execute
    first = dispatch.slices[0]
    alone = len(dispatch.slices) == 1 and execute.rows == execute.size
    if alone and isinstance(first, RequestSlice) and first.shapes is not None:
        alone = first.shapes is dispatch.variant
    for part in dispatch.slices:
        # If this process dies, the stub knows by this that the request may be the cause.
        if isinstance(part, CallSlice):
            part.mark()
        elif part.outputs_at < len(part.segment):
            part.segment[part.outputs_at] = 1
    nbytes = dispatch.variant.inputs.places(execute.size)[1]
    staged = None if alone else staging.take(nbytes)
    if nbytes >= LARGE:
        # What the device reads: the assembled batch, or the segment of a request that is read in place.
        if staged is not None:
            staging.locks.add(staged, device.page_lock)
        elif isinstance(first, RequestSlice):
            staging.locks.add(first.segment, device.page_lock)
    inputs = gather(dispatch, staged, device)
    executable = dispatch.model.executables[execute.variant, execute.size]
    pool, losses = dispatch.model.pool, 0
    if pool is None:
        launched = device.launch(executable, weights, inputs, dispatch.unread)
    else:
        launched, losses = pool.launch(
            device, executable, weights, inputs, execute.size, dispatch.rows_in_slots
        )
    if dispatch.has_calls:
        _keep(dispatch, launched, device)
    return Flight(dispatch, launched, staged, losses)


def _keep(dispatch: Dispatch, launched: Launched, device: Device) -> None:
    """Keep on the device the outputs that runs asked for."""
    first = 0
    for part in dispatch.slices:
        if isinstance(part, CallSlice):
            for index, number in part.keep.items():
                tensor = dispatch.variant.outputs.tensors[index]
                batched = tensor.batch_axis is not None
                at, size = (first, dispatch.execute.size) if batched else (0, 1)
                part.made[number] = Kept(device.keep(launched, index), tensor, at, part.rows, size)
        first += part.rows


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs and copy them to shared memory; return the execution's seconds."""
    pool = flight.dispatch.model.pool
    if pool is None:
        outputs, seconds = device.read(flight.launched)
    else:
        outputs, seconds = pool.read(device, flight.launched, flight.losses)
    scatter(flight.dispatch, outputs)
    # Not after a failure: the device may still read them.
    if flight.staged is not None:
        staging.give(flight.staged)
    return seconds


def gather(dispatch: Dispatch, staged: Array | None, device: Device) -> list[Array | Buffer]:
    """Return the inputs at the compiled size: in place if one request fills it, else stacked.

    Shorter requests are padded with the manifest's values, and missing rows are zeros.
    """
    groups = [] if staged is None else find_contiguous_runs(dispatch.slices)
    indices = range(len(dispatch.variant.inputs.tensors))
    return [_input(dispatch, index, staged, groups, device) for index in indices]


def _input(
    dispatch: Dispatch, index: int, staged: Array | None, groups: list[ContiguousRun], device: Device
) -> Array | Buffer:
    block, size = dispatch.variant.inputs, dispatch.execute.size
    kept = dispatch.kept(index)
    if kept is not None and dispatch.covered(index, kept):
        assert kept[0] is not None
        return kept[0].buffer
    if staged is None or block.tensors[index].batch_axis is None:
        # The request is alone: its tensor is used here, unless it is a part of a larger one on the device.
        source = dispatch.slices[0].source(index, block)
        if isinstance(source, np.ndarray):
            if staged is None or source.nbytes < LARGE:
                return source
            # A transfer from the request's segment, which is not page-locked, would wait for the execution before.
            copied = _staged(dispatch, index, staged)
            copied[...] = source
            return copied
    if staged is None:
        stacked = np.zeros(block.tensors[index].shape(size), numpy_dtype(block.tensors[index].dtype))
    else:
        stacked = _stack(dispatch, index, groups, staged)
    if kept is None:
        return stacked
    kept_rows, at = [], 0
    for part, one in zip(dispatch.slices, kept, strict=True):
        if one is not None:
            kept_rows.append(DeviceRows(one.buffer, one.first, part.rows, at))
        at += part.rows
    return device.merge(stacked, block.tensors[index].batch_axis or 0, kept_rows)


def _staged(dispatch: Dispatch, index: int, staged: Array) -> Array:
    """Return the place of an input in the memory of the assembled batch."""
    block, size = dispatch.variant.inputs, dispatch.execute.size
    return view(block.tensors[index], size, staged, block.places(size)[0][index])


def _stack(dispatch: Dispatch, index: int, groups: list[ContiguousRun], staged: Array) -> Array:
    block = dispatch.variant.inputs
    stacked = _staged(dispatch, index, staged)
    tensor = block.tensors[index]
    rows_first = _rows_first(stacked, tensor)
    if tensor.padded_axis is not None:
        pad = dispatch.model.bundle.manifest.pad
        assert pad is not None, "the interface is the bundle's"
        rows_first[: dispatch.execute.rows] = pad.values[tensor.name]
    at = 0
    for group in groups:
        at = group.copy(rows_first, at, index, block, outputs=False)
    if at < dispatch.execute.size:
        rows_first[at:] = 0
    return stacked


def scatter(dispatch: Dispatch, outputs: Sequence[Array]) -> None:
    """Copy each slice's rows into its place; an output without rows is copied to every slice."""
    groups = find_contiguous_runs(dispatch.slices)
    block, unread = dispatch.variant.outputs, dispatch.unread
    for index, tensor in enumerate(block.tensors):
        if index in unread:
            continue
        if tensor.batch_axis is None:
            for part in dispatch.slices:
                target = part.target(index, block)
                if target is not None:
                    target[...] = outputs[index]
            continue
        result = _rows_first(outputs[index], tensor)
        at = 0
        for group in groups:
            at = group.copy(result, at, index, block, outputs=True)


def _rows_first(array: Array, tensor: Tensor) -> Array:
    """Move the batch axis to the front: then one slice per request selects its rows."""
    return np.moveaxis(array, tensor.batch_axis, 0) if tensor.batch_axis else array


log = logging.getLogger("rsrv.executor")

#: seconds of wall time above which an execution on the loop is slow: forty times the longest that is expected there
SLOW_S = 0.02
#: seconds that a model's slow executions may take together within WINDOW_S seconds; more ban it for BAN_S seconds
BLOCKED_S = 0.1
WINDOW_S = 10.0
BAN_S = 60.0


class LoopBans:
    """Bans of models from the loop: their executions there took far longer than predicted.

    Some models' costs depend on their inputs, and while the loop executes, it notices no deadline, cancellation or arrival.
    But a descheduled CPU makes any single execution slow. So what counts is for how long a model's slow executions blocked
    the loop recently: one that takes a tenth of a second is evidence enough, one of 30 ms is not. And a ban expires.
    Times are in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        #: bans since the start, of all models
        self.count = 0
        #: by the model's key: the ends and durations of its latest slow executions; and the end of its ban
        self._slow: dict[str, deque[tuple[float, float]]] = {}
        self.until: dict[str, float] = {}

    def banned(self, model: str, now: float) -> bool:
        return now < self.until.get(model, now)

    def executed(self, model: str, seconds: float, now: float) -> bool:
        """Note an execution on the loop; return whether it bans the model."""
        if seconds <= SLOW_S:
            return False
        slow = self._slow.setdefault(model, deque())
        slow.append((now, seconds))
        while now - slow[0][0] > WINDOW_S:
            slow.popleft()
        if sum(took for _, took in slow) < BLOCKED_S:
            return False
        del self._slow[model]
        self.until[model] = now + BAN_S
        self.count += 1
        return True

    def forget(self, model: str) -> None:
        self._slow.pop(model, None)
        self.until.pop(model, None)


#: seconds of expected execution up to which the loop executes by itself: handing over to a thread and back
#: costs about 0.1 ms, and reading sockets that much later does no harm
_SHORT_S = 0.0005


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """An execution is over; `error` is None, or says why it failed."""

    dispatch: Dispatch
    seconds: float
    error: str | None = None
    #: another try may succeed when there is more memory
    out_of_memory: bool = False


class Executor:
    """Runs dispatches in order. Each ends in an `ExecutionEnded`: posted by a thread, or returned by `run_short`."""

    def __init__(self, inbox: Inbox, activity: Activity, clock: Callable[[], float] = time.monotonic) -> None:
        self._inbox = inbox
        self._activity = activity
        self._clock = clock
        self._launch_thread = WorkerThread("launch")
        self._read_thread = WorkerThread("read")
        self._staging = Staging()
        #: the dispatch that the loop is to execute itself, and its device
        self.short: tuple[Dispatch, Device] | None = None
        self.bans = LoopBans()

    def start(self, dispatch: Dispatch, device: Device, *, depth: int, contended: bool) -> None:
        """Start an execution, or leave a short one to the loop.

        `contended`: other work may hold the device, and the loop must not wait for it.
        """
        if depth > 1:
            self._launch_thread.put(partial(self._launch, dispatch, device))
        elif (
            dispatch.execute.seconds <= _SHORT_S
            and not contended
            and not (self.bans.until and self.bans.banned(dispatch.model.key, self._clock()))
        ):
            self.short = dispatch, device
        else:
            self._launch_thread.put(partial(self._execute_and_post, dispatch, device))

    def run_short(self) -> ExecutionEnded:
        """Execute the loop's own dispatch."""
        assert self.short is not None
        (dispatch, device), self.short = self.short, None
        started = self._clock()
        ended = self._execute(dispatch, device, self._activity.short)
        now = self._clock()
        if self.bans.executed(dispatch.model.key, now - started, now):
            log.warning(
                "%s: slow executions took more than %.0f ms within %.0f s, though less than 1 ms was expected of each. A thread "
                "executes the model for the next %.0f s. Either its cost depends on its inputs, or the CPUs are overloaded",
                dispatch.model.key,
                1e3 * BLOCKED_S,
                WINDOW_S,
                BAN_S,
                extra=about(dispatch.model),
            )
        return ended

    def forget(self, model: str) -> None:
        """Drop the records of a model that is gone."""
        self._staging.clear()
        self.bans.forget(model)

    # --- on the loop or a thread --------------------------------------------------------------------------

    def _execute(self, dispatch: Dispatch, device: Device, slot: ActivitySlot) -> ExecutionEnded:
        """Execute from the inputs to the outputs."""
        _begin(slot, dispatch)
        try:
            return ExecutionEnded(
                dispatch, finish(launch(dispatch, device, self._staging), device, self._staging)
            )
        except Exception as error:  # noqa: BLE001 - logged by _failed
            return _failed(dispatch, error)
        finally:
            slot.end()

    def _execute_and_post(self, dispatch: Dispatch, device: Device) -> None:
        self._inbox.post(self._execute(dispatch, device, self._activity.launch))

    def _launch(self, dispatch: Dispatch, device: Device) -> None:
        """Launch; the reading thread does the rest, even of failures, so that executions end in order."""
        slot = self._activity.launch
        number = _begin(slot, dispatch)
        flight: Flight | ExecutionEnded
        try:
            flight = launch(dispatch, device, self._staging)
        except Exception as error:  # noqa: BLE001 - logged by _failed
            flight = _failed(dispatch, error)
        slot.end()
        self._read_thread.put(partial(self._read, flight, device, number))

    def _read(self, flight: Flight | ExecutionEnded, device: Device, number: int) -> None:
        dispatch, slot = flight.dispatch, self._activity.read
        _begin(slot, dispatch, number)
        if isinstance(flight, Flight):
            try:
                ended = ExecutionEnded(dispatch, finish(flight, device, self._staging))
            except Exception as error:  # noqa: BLE001 - logged by _failed
                ended = _failed(dispatch, error)
        else:
            ended = flight
        slot.end()
        self._inbox.post(ended)


def _begin(slot: ActivitySlot, dispatch: Dispatch, number: int = 0) -> int:
    """Begin the task of an execution, or continue it; return its number."""
    key, execute = dispatch.model.key, dispatch.execute
    return slot.begin(Phase.EXECUTING, key, execute.size, execute.seconds, number, alone=execute.exclusive)


def _failed(dispatch: Dispatch, error: Exception) -> ExecutionEnded:
    """Log an error that is being handled, and turn it into text: a kept error would keep the execution's tensors."""
    size = dispatch.execute.size
    if isinstance(error, OutOfMemory):
        log.warning(
            "%s: no memory on the device for an execution of %d rows: %s",
            dispatch.model.key,
            size,
            str(error),
            extra=about(dispatch.model, rows=size),
        )
        return ExecutionEnded(dispatch, 0.0, str(error), out_of_memory=True)
    log.exception("%s: execution failed", dispatch.model.key, extra=about(dispatch.model, rows=size))
    return ExecutionEnded(dispatch, 0.0, f"{type(error).__name__}: {error}")

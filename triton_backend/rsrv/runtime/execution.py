"""An execution: gather the requests' inputs, launch, read, scatter the outputs. Any thread may run it.

`call_execution` extends this module for sub-calls of meta models, and `state_execution` for models with state.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from rsrv.runtime.allocation import LARGE, PageLocks, aligned
from rsrv.runtime.device import Array, Buffer, Device, Executable, Launched, Targets
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.slices import RequestSlice, Slice, view
from rsrv.scheduler import events as ev
from rsrv.wire.layout import Block, Tensor, Variant
from rsrv.wire.memory import Bytes


@dataclass(slots=True)
class Staging:
    """Memory in which batches are assembled and large outputs arrive.

    An execution takes one block, unless all its tensors are in the requests' memory. Blocks serve all models, and grow with the
    largest batch. The loop and the executor's threads share the idle blocks. Each access to them is one atomic step.
    """

    #: Blocks that no execution uses.
    _idle: list[Array] = field(default_factory=list)
    #: Page locks of the blocks, and of the segments that the device reads or writes directly.
    _locks: PageLocks = field(default_factory=PageLocks)

    def lock(self, device: Device, memory: Bytes) -> bool:
        """Page-lock a block or a segment for both directions. Return whether it is locked."""
        return self._locks.add(memory, partial(device.page_lock, written=True))

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
    """`count` slices with the same number of rows, each `stride` bytes after the previous one."""

    first: Slice
    last: Slice
    count: int = 1
    stride: int = 0

    def take(self, part: Slice) -> bool:
        """Append a slice if it continues the run. Return whether it does."""
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
        """Copy between the slices' tensors and the rows of `batch` from `at` on. Return the row after the last one.

        The first axis of `batch` is the batch axis. If `outputs` is true, copy from the batch, otherwise to it.
        """
        tensor, part = block.tensors[index], self.first
        first = part.target(index, block) if outputs else part.source(index, block)
        end = at + self.count * part.rows
        if not isinstance(first, np.ndarray):
            return end  # The tensor stays on the device, or nobody needs it.
        rows = batch[at:end]
        if self.count == 1:
            parts = _rows_first(first, tensor)
            if tensor.padded_axis is not None:
                # The remaining part of the rows is padding.
                rows = rows[tuple(map(slice, parts.shape))]
        else:
            assert isinstance(part, RequestSlice)
            shape, strides = (self.count, *first.shape), (self.stride, *first.strides)
            start = part.outputs_at if outputs else part.inputs_at
            start += block.places[part.rows].offsets[index]
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
    """Group slices with equal numbers of rows that lie in one segment at equal distances, like the requests of one execute().

    Each group is copied at once. This makes large batches of small tensors cheap.
    """
    groups: list[ContiguousRun] = []
    group: ContiguousRun | None = None
    for part in slices:
        if group is None or not group.take(part):
            group = ContiguousRun(part, part)
            groups.append(group)
    return groups


@dataclass(slots=True, eq=False)
class Dispatch:
    """An `Execute` instruction with everything that its execution needs."""

    execute: ev.Execute
    model: CompiledModel
    #: The variant that the instruction's number stands for.
    variant: Variant
    slices: tuple[Slice, ...]
    #: Outputs that no slice wants on the host.
    unread: Collection[int] = field(default=(), init=False)
    #: True if the execution may compile a program first.
    compiles: bool = field(default=False, init=False)

    def launch(
        self,
        device: Device,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: list[Array | Buffer],
        targets: Targets,
    ) -> Launched:
        return device.launch(executable, weights, inputs, (), None, targets)

    def read(self, device: Device, launched: Launched) -> tuple[list[Array], float]:
        return device.read(launched)

    def gather(self, staged: Array | None, device: Device) -> list[Array | Buffer]:
        """Return the inputs at the compiled size: in place if one request fills this size, otherwise stacked in `staged`.

        Shorter requests are padded with the manifest's values, and missing rows are zeros.
        """
        groups = [] if staged is None else find_contiguous_runs(self.slices)
        indices = range(len(self.variant.inputs.tensors))
        return [self._input(index, staged, groups, device) for index in indices]

    def _input(
        self, index: int, staged: Array | None, groups: list[ContiguousRun], device: Device
    ) -> Array | Buffer:
        block = self.variant.inputs
        if staged is not None and block.tensors[index].batch_axis is not None:
            return self._stack(index, groups, staged)
        # The request is alone, or the input has no batch axis and is the same in all requests. So use the first one.
        source = self.slices[0].source(index, block)
        assert isinstance(source, np.ndarray), "plain requests lie in shared memory"
        if staged is None or source.nbytes < LARGE:
            return source
        # The request's segment may not be page-locked. A transfer from such memory would wait for the previous execution.
        copied = self._staged(index, staged)
        copied[...] = source
        return copied

    def _staged(self, index: int, staged: Array) -> Array:
        """Return the place of an input in the memory of the assembled batch."""
        return view(self.variant.inputs, index, self.execute.size, staged, 0)

    def _stack(self, index: int, groups: list[ContiguousRun], staged: Array) -> Array:
        block = self.variant.inputs
        stacked = self._staged(index, staged)
        tensor = block.tensors[index]
        rows_first = _rows_first(stacked, tensor)
        if tensor.padded_axis is not None:
            pad = self.model.bundle.manifest.pad
            assert pad is not None, "the interface is the bundle's"
            rows_first[: self.execute.rows] = pad.values[tensor.name]
        at = 0
        for group in groups:
            at = group.copy(rows_first, at, index, block, outputs=False)
        if at < self.execute.size:
            rows_first[at:] = 0
        return stacked

    def find_large_outputs(self) -> list[int]:
        """Return the indices of the outputs for the host that are large enough for their own transfer."""
        block, size = self.variant.outputs, self.execute.size
        if block.places[size].nbytes < LARGE:
            return []
        tensors = enumerate(block.tensors)
        return [i for i, tensor in tensors if i not in self.unread and tensor.nbytes(size) >= LARGE]

    def find_targets(
        self, large: Sequence[int], lock: Callable[[Bytes], bool], *, alone: bool
    ) -> dict[int, Sequence[Array]]:
        """Return, by output, the places in the requests' memory to which the device can copy large outputs.

        A request's rows must be contiguous in the output, and large enough for their own transfer. `lock` page-locks a segment
        and returns whether it is locked. `alone`: one request fills the execution.
        """
        if not large:
            return {}
        segments: list[Bytes] = []
        for part in self.slices:
            if part.segment is None or not (part.shapes is None or part.shapes is self.variant):
                return {}
            if not any(part.segment is segment for segment in segments):
                segments.append(part.segment)
        block = self.variant.outputs
        targets: dict[int, Sequence[Array]] = {}
        for index in large:
            tensor = block.tensors[index]
            rows_are_large = all(tensor.nbytes(part.rows) >= LARGE for part in self.slices)
            if alone or (tensor.batch_axis == 0 and rows_are_large):
                places = [part.target(index, block) for part in self.slices]
                targets[index] = [place for place in places if place is not None]
        return targets if targets and all(map(lock, segments)) else {}

    def scatter(self, outputs: Sequence[Array], in_place: Collection[int] = ()) -> None:
        """Copy each slice's rows into its place. An output without a batch axis is copied to every slice.

        The outputs in `in_place` are already there.
        """
        groups = find_contiguous_runs(self.slices)
        block, unread = self.variant.outputs, self.unread
        for index, tensor in enumerate(block.tensors):
            if index in unread or index in in_place:
                continue
            if tensor.batch_axis is None:
                for part in self.slices:
                    target = part.target(index, block)
                    if target is not None:
                        target[...] = outputs[index]
                continue
            result = _rows_first(outputs[index], tensor)
            at = 0
            for group in groups:
                at = group.copy(result, at, index, block, outputs=True)


@dataclass(slots=True, eq=False)
class Flight:
    """A dispatch that was launched on the device."""

    dispatch: Dispatch
    launched: Launched
    #: Block with the assembled inputs and the large outputs. None: all of these are in the requests' memory.
    staged: Array | None
    #: Outputs that the device copies to the requests' memory.
    in_place: Collection[int]
    #: Places in `staged` of outputs that the device copies there, by index.
    gathered: Mapping[int, Array]


def launch(dispatch: Dispatch, device: Device, staging: Staging) -> Flight:
    """Launch a dispatch on the device."""
    weights = dispatch.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    execute, first = dispatch.execute, dispatch.slices[0]
    for part in dispatch.slices:
        part.mark()
    alone = len(dispatch.slices) == 1 and execute.rows == execute.size
    alone = alone and (first.shapes is None or first.shapes is dispatch.variant)
    nbytes = dispatch.variant.inputs.places[execute.size].nbytes
    lock = partial(staging.lock, device)
    if alone and nbytes >= LARGE and first.segment is not None:
        lock(first.segment)  # The device reads the inputs in place.
    large = dispatch.find_large_outputs() if device.writes_host else []
    in_place = dispatch.find_targets(large, lock, alone=alone)
    others = [index for index in large if index not in in_place]
    # The inputs of a batch are at the beginning of the block, and the outputs follow.
    outputs, outputs_at = dispatch.variant.outputs, 0 if alone else nbytes
    nbytes = outputs_at + (outputs.places[execute.size].nbytes if others else 0)
    staged = staging.take(nbytes) if others or not alone else None
    gathered: dict[int, Array] = {}
    if staged is not None and nbytes >= LARGE and lock(staged):
        gathered = {index: view(outputs, index, execute.size, staged, outputs_at) for index in others}
    targets: dict[int, Sequence[Array]] = in_place | {index: [array] for index, array in gathered.items()}
    inputs = dispatch.gather(None if alone else staged, device)
    executable = dispatch.model.executables[execute.variant, execute.size]
    launched = dispatch.launch(device, executable, weights, inputs, targets)
    return Flight(dispatch, launched, staged, in_place.keys(), gathered)


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs, and copy them to shared memory. Return the execution's seconds on the device."""
    outputs, seconds = flight.dispatch.read(device, flight.launched)
    for index, array in flight.gathered.items():
        outputs[index] = array
    flight.dispatch.scatter(outputs, flight.in_place)
    # After a failure, this is not reached: the device may still use the block, so no other execution may get it.
    if flight.staged is not None:
        staging.give(flight.staged)
    return seconds


def _rows_first(array: Array, tensor: Tensor) -> Array:
    """Move the batch axis to the front, so that one slice selects the rows of a request."""
    return np.moveaxis(array, tensor.batch_axis, 0) if tensor.batch_axis else array

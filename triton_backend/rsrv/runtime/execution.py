"""An execution: gather the requests' inputs, launch, read, scatter the outputs. Any thread may run it.

`call_execution` and `state_execution` add what sub-calls of meta models and models with state need.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.allocation import LARGE, PageLocks, aligned
from rsrv.runtime.device import Array, Buffer, Device, Executable, Launched
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.slices import RequestSlice, Slice, view
from rsrv.scheduler import events as ev
from rsrv.wire.layout import Block, Tensor, Variant


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
class Dispatch:
    """An `Execute` instruction with everything that its execution needs."""

    execute: ev.Execute
    model: CompiledModel
    #: of the model, by the instruction's number
    variant: Variant
    slices: tuple[Slice, ...]
    #: Outputs that no slice wants on the host.
    unread: Collection[int] = field(default=(), init=False)
    #: Whether the execution may have to compile something first.
    compiles: bool = field(default=False, init=False)

    def launch(
        self, device: Device, executable: Executable, weights: Sequence[Buffer], inputs: list[Array | Buffer]
    ) -> Launched:
        return device.launch(executable, weights, inputs)

    def read(self, device: Device, launched: Launched) -> tuple[list[Array], float]:
        return device.read(launched)

    def gather(self, staged: Array | None, device: Device) -> list[Array | Buffer]:
        """Return the inputs at the compiled size: in place if one request fills it, else stacked in `staged`.

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
        # The request is alone, or the input is the same for all: the tensor of the first is used here.
        source = self.slices[0].source(index, block)
        assert isinstance(source, np.ndarray), "plain requests lie in shared memory"
        if staged is None or source.nbytes < LARGE:
            return source
        # A transfer from the request's segment, which is not page-locked, would wait for the execution before.
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

    def scatter(self, outputs: Sequence[Array]) -> None:
        """Copy each slice's rows into its place; an output without rows is copied to every slice."""
        groups = find_contiguous_runs(self.slices)
        block, unread = self.variant.outputs, self.unread
        for index, tensor in enumerate(block.tensors):
            if index in unread:
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
    #: the block of its assembled inputs; None: they are read in place
    staged: Array | None


def launch(dispatch: Dispatch, device: Device, staging: Staging) -> Flight:
    """Launch a dispatch on the device."""
    weights = dispatch.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    execute, first = dispatch.execute, dispatch.slices[0]
    for part in dispatch.slices:
        part.mark()
    alone = len(dispatch.slices) == 1 and execute.rows == execute.size
    in_place = alone and (first.shapes is None or first.shapes is dispatch.variant)
    nbytes = dispatch.variant.inputs.places(execute.size)[1]
    staged = None if in_place else staging.take(nbytes)
    if nbytes >= LARGE:
        # What the device reads: the assembled batch, or the segment of a request that is read in place.
        if staged is not None:
            staging.locks.add(staged, device.page_lock)
        elif first.segment is not None:
            staging.locks.add(first.segment, device.page_lock)
    inputs = dispatch.gather(staged, device)
    executable = dispatch.model.executables[execute.variant, execute.size]
    return Flight(dispatch, dispatch.launch(device, executable, weights, inputs), staged)


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs and copy them to shared memory; return the execution's seconds."""
    outputs, seconds = flight.dispatch.read(device, flight.launched)
    flight.dispatch.scatter(outputs)
    # Not after a failure: the device may still read them.
    if flight.staged is not None:
        staging.give(flight.staged)
    return seconds


def _rows_first(array: Array, tensor: Tensor) -> Array:
    """Move the batch axis to the front: then one slice per request selects its rows."""
    return np.moveaxis(array, tensor.batch_axis, 0) if tensor.batch_axis else array

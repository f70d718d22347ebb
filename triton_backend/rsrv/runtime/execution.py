"""One dispatch: gather the requests' inputs, launch, read, scatter the outputs. Runs on the executor's threads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.aligned import aligned
from rsrv.runtime.connection import Connection
from rsrv.runtime.device import Array, Device, Launched
from rsrv.runtime.models import Model
from rsrv.wire.layout import Block, Tensor
from rsrv.wire.memory import Bytes
from rsrv_bundle.dtypes import numpy_dtype


@dataclass(slots=True, eq=False)
class Part:
    """One request's share: whose it is, where its inputs lie and where its outputs go."""

    connection: Connection
    request: int  # the connection's own id
    rows: int
    segment: Bytes
    inputs_at: int
    outputs_at: int

    def start(self, outputs: bool) -> int:
        return self.outputs_at if outputs else self.inputs_at

    def view(self, tensor: Tensor, offset: int, *, outputs: bool) -> Array:
        """A tensor in shared memory, `offset` bytes into the block of inputs or outputs."""
        at = self.start(outputs) + offset
        return np.ndarray(tensor.shape(self.rows), numpy_dtype(tensor.dtype), self.segment, at)


@dataclass(frozen=True, slots=True)
class Job:
    """An `Execute` instruction with everything that carrying it out needs."""

    dispatch: int
    model: Model
    variant: int
    size: int
    rows: int
    requests: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(slots=True)
class Staging:
    """Memory that batches are assembled in: a block for each execution that may still read its own.

    Blocks serve all models, and grow with the largest batch. Used by the loop and the executor's threads: what they
    share is touched in single steps only.
    """

    #: blocks that nobody uses
    _idle: list[Array] = field(default_factory=list)

    def take(self, nbytes: int) -> Array:
        try:
            block = self._idle.pop()
        except IndexError:
            return aligned(nbytes)
        return block if block.nbytes >= nbytes else aligned(nbytes)

    def give(self, block: Array) -> None:
        """Back for the next batch: the execution is over."""
        self._idle.append(block)

    def clear(self) -> None:
        """Give the memory back; the next batches take what they need."""
        self._idle.clear()


class Run:
    """`count` parts of `rows` rows each, `stride` bytes apart."""

    __slots__ = ("_inputs_at", "_outputs_at", "count", "first", "rows", "stride")

    def __init__(self, first: Part) -> None:
        self.first = first
        self.rows = first.rows
        self.count = 1
        self.stride = 0
        self._inputs_at = first.inputs_at
        self._outputs_at = first.outputs_at

    def take(self, part: Part) -> bool:
        """Whether the part continues the run; then it belongs to it."""
        stride = part.inputs_at - self._inputs_at
        if (
            part.rows != self.rows
            or part.segment is not self.first.segment
            or stride <= 0
            or (self.count > 1 and stride != self.stride)
            or part.outputs_at - self._outputs_at != stride
        ):
            return False
        self.stride = stride
        self.count += 1
        self._inputs_at, self._outputs_at = part.inputs_at, part.outputs_at
        return True

    def copy(self, batch: Array, at: int, tensor: Tensor, offset: int, *, outputs: bool) -> int:
        """Between rows `at` and following of `batch` (rows first) and the parts' tensors; returns where it ends."""
        first = self.first.view(tensor, offset, outputs=outputs)
        end = at + self.count * self.rows
        rows = batch[at:end]
        if self.count == 1:
            parts = _rows_first(first, tensor)
        else:
            shape, strides = (self.count, *first.shape), (self.stride, *first.strides)
            parts = np.ndarray(
                shape, first.dtype, self.first.segment, self.first.start(outputs) + offset, strides
            )
            if tensor.batch_axis:
                parts = np.moveaxis(parts, tensor.batch_axis + 1, 1)
            rows = rows.reshape(self.count, self.rows, *rows.shape[1:])
        if outputs:
            parts[...] = rows
        else:
            rows[...] = parts
        return end


def find_runs(parts: Sequence[Part]) -> list[Run]:
    """Parts that lie in one segment at equal distances with equally many rows, as those of one execute() do.

    A run is copied at once, which for small tensors is what makes a large batch cheap.
    """
    runs: list[Run] = []
    run: Run | None = None
    for part in parts:
        if run is None or not run.take(part):
            run = Run(part)
            runs.append(run)
    return runs


@dataclass(slots=True, eq=False)
class Flight:
    """A job that the device was given."""

    job: Job
    launched: Launched
    #: where its inputs were assembled; None: they are read in place
    staged: Array | None


def launch(job: Job, device: Device, staging: Staging) -> Flight:
    """Give the device a job's inputs."""
    weights = job.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    block = job.model.interface.variants[job.variant].inputs
    alone = len(job.parts) == 1 and job.rows == job.size
    staged = None if alone else staging.take(block.places(job.size)[1])
    inputs = gather(job, block, staged)
    executable = job.model.executables[job.variant, job.size]
    return Flight(job, device.launch(executable, weights, inputs), staged)


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs; they are in shared memory when this returns. Returns the execution's seconds."""
    job = flight.job
    outputs, seconds = device.read(flight.launched)
    scatter(job, job.model.interface.variants[job.variant].outputs, outputs)
    # Not after a failure: who knows then whether the device is done with them.
    if flight.staged is not None:
        staging.give(flight.staged)
    return seconds


def gather(job: Job, block: Block, staged: Array | None) -> list[Array]:
    """The inputs at the compiled size: read in place if one request fills it, else stacked and padded with zeros."""
    first = job.parts[0]
    places, _ = block.places(first.rows)
    if staged is None:
        return [
            first.view(tensor, at, outputs=False) for tensor, at in zip(block.tensors, places, strict=True)
        ]
    runs = find_runs(job.parts)
    targets, _ = block.places(job.size)
    return [
        first.view(tensor, places[index], outputs=False)
        if tensor.batch_axis is None
        else _stack(job, index, block, runs, staged, targets[index])
        for index, tensor in enumerate(block.tensors)
    ]


def _stack(job: Job, index: int, block: Block, runs: list[Run], staged: Array, target: int) -> Array:
    tensor = block.tensors[index]
    stacked: Array = np.ndarray(tensor.shape(job.size), numpy_dtype(tensor.dtype), staged, target)
    rows_first = _rows_first(stacked, tensor)
    at = 0
    for run in runs:
        at = run.copy(rows_first, at, tensor, block.places(run.rows)[0][index], outputs=False)
    if at < job.size:
        rows_first[at:] = 0
    return stacked


def scatter(job: Job, block: Block, outputs: Sequence[Array]) -> None:
    """Each request's rows into its place; an output without rows goes to everyone."""
    runs = find_runs(job.parts)
    for index, tensor in enumerate(block.tensors):
        if tensor.batch_axis is None:
            for part in job.parts:
                part.view(tensor, block.places(part.rows)[0][index], outputs=True)[...] = outputs[index]
            continue
        result = _rows_first(outputs[index], tensor)
        at = 0
        for run in runs:
            at = run.copy(result, at, tensor, block.places(run.rows)[0][index], outputs=True)


def _rows_first(array: Array, tensor: Tensor) -> Array:
    """The batch axis in front: then one slice per request says where its rows go."""
    return np.moveaxis(array, tensor.batch_axis, 0) if tensor.batch_axis else array

"""One dispatch: gather the requests' inputs, launch, read, scatter the outputs. Runs on the executor's threads."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

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


#: of one execution, by the input's index; made on first use
Buffers = dict[int, Array]


@dataclass(slots=True)
class Staging:
    """Buffers that batches are assembled in, a set for each execution that may still read its own.

    Used by the loop and the executor's threads: what they share is touched in single steps only.
    """

    #: sets that nobody uses, by (model, variant, size)
    _idle: dict[tuple[str, int, int], list[Buffers]] = field(default_factory=dict)

    def take(self, job: Job) -> Buffers:
        idle = self._idle.get((job.model.key, job.variant, job.size))
        if not idle:
            return {}
        try:
            return idle.pop()
        except IndexError:  # another thread was faster
            return {}

    def give(self, job: Job, buffers: Buffers) -> None:
        """Back for the next batch: the execution is over."""
        if buffers:
            self._idle.setdefault((job.model.key, job.variant, job.size), []).append(buffers)

    def forget(self, model: str) -> None:
        # A snapshot, for the threads may be giving back buffers of other models meanwhile.
        for key in list(self._idle):
            if key[0] == model:
                del self._idle[key]


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
    buffers: Buffers


def launch(job: Job, device: Device, staging: Staging) -> Flight:
    """Give the device a job's inputs."""
    weights = job.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    buffers = staging.take(job)
    inputs = gather(job, job.model.interface.variants[job.variant].inputs, buffers)
    executable = job.model.executables[job.variant, job.size]
    return Flight(job, device.launch(executable, weights, inputs), buffers)


def finish(flight: Flight, device: Device, staging: Staging) -> float:
    """Wait for the outputs; they are in shared memory when this returns. Returns the execution's seconds."""
    job = flight.job
    outputs, seconds = device.read(flight.launched)
    scatter(job, job.model.interface.variants[job.variant].outputs, outputs)
    # Not after a failure: who knows then whether the device is done with them.
    staging.give(job, flight.buffers)
    return seconds


def gather(job: Job, block: Block, buffers: Buffers) -> list[Array]:
    """The inputs at the compiled size: read in place if one request fills it, else stacked and padded with zeros."""
    alone = len(job.parts) == 1 and job.rows == job.size
    runs = [] if alone else find_runs(job.parts)
    return [
        job.parts[0].view(tensor, block.places(job.parts[0].rows)[0][index], outputs=False)
        if alone or tensor.batch_axis is None
        else _stack(job, index, block, runs, buffers)
        for index, tensor in enumerate(block.tensors)
    ]


def _stack(job: Job, index: int, block: Block, runs: list[Run], buffers: Buffers) -> Array:
    tensor = block.tensors[index]
    buffer = buffers.get(index)
    if buffer is None:
        buffer = buffers[index] = np.zeros(tensor.shape(job.size), numpy_dtype(tensor.dtype))
    rows_first = _rows_first(buffer, tensor)
    at = 0
    for run in runs:
        at = run.copy(rows_first, at, tensor, block.places(run.rows)[0][index], outputs=False)
    if at < job.size:
        rows_first[at:] = 0
    return buffer


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

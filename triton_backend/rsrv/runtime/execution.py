"""One dispatch: gather the requests' inputs, execute, scatter the outputs. Runs on the device's thread."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rsrv.runtime.connection import Connection
from rsrv.runtime.device import Array, Device
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
    """Buffers that batches are assembled in, one per (model, variant, size, input), made on first use."""

    _buffers: dict[tuple[str, int, int, int], Array] = field(default_factory=dict)

    def buffer(self, job: Job, index: int, tensor: Tensor) -> Array:
        key = (job.model.key, job.variant, job.size, index)
        found = self._buffers.get(key)
        if found is None:
            found = self._buffers[key] = np.zeros(tensor.shape(job.size), numpy_dtype(tensor.dtype))
        return found

    def forget(self, model: str) -> None:
        # A snapshot, for the device's thread may be making buffers of other models meanwhile.
        for key in list(self._buffers):
            if key[0] == model:
                del self._buffers[key]


def execute(job: Job, device: Device, staging: Staging) -> float:
    """Carry out a job; its outputs are in shared memory when this returns. Returns the execution's seconds."""
    variant = job.model.interface.variants[job.variant]
    weights = job.model.weights
    assert weights is not None, "the scheduler executes on resident weights only"
    inputs = gather(job, variant.inputs, staging)
    outputs, seconds = device.run(job.model.executables[job.variant, job.size], weights, inputs)
    scatter(job, variant.outputs, outputs)
    return seconds


def gather(job: Job, block: Block, staging: Staging) -> list[Array]:
    """The inputs at the compiled size: read in place if one request fills it, else stacked and padded with zeros."""
    alone = len(job.parts) == 1 and job.rows == job.size
    return [
        view(job.parts[0], index, block, outputs=False) if alone else _stack(job, index, block, staging)
        for index in range(len(block.tensors))
    ]


def _stack(job: Job, index: int, block: Block, staging: Staging) -> Array:
    tensor = block.tensors[index]
    if tensor.batch_axis is None:
        return view(job.parts[0], index, block, outputs=False)
    buffer = staging.buffer(job, index, tensor)
    # The batch axis in front: then one slice per request says where its rows go.
    rows_first = buffer if tensor.batch_axis == 0 else np.moveaxis(buffer, tensor.batch_axis, 0)
    at = 0
    for part in job.parts:
        source = view(part, index, block, outputs=False)
        if tensor.batch_axis:
            source = np.moveaxis(source, tensor.batch_axis, 0)
        rows_first[at : at + part.rows] = source
        at += part.rows
    if at < job.size:
        rows_first[at:] = 0
    return buffer


def scatter(job: Job, block: Block, outputs: Sequence[Array]) -> None:
    """Each request's rows into its place; an output without rows goes to everyone."""
    for index, tensor in enumerate(block.tensors):
        result = outputs[index]
        if tensor.batch_axis:
            result = np.moveaxis(result, tensor.batch_axis, 0)
        at = 0
        for part in job.parts:
            target = view(part, index, block, outputs=True)
            if tensor.batch_axis is None:
                target[...] = result
                continue
            if tensor.batch_axis:
                target = np.moveaxis(target, tensor.batch_axis, 0)
            target[...] = result[at : at + part.rows]
            at += part.rows


def view(part: Part, index: int, block: Block, *, outputs: bool) -> Array:
    """A request's tensor in its shared memory."""
    tensor = block.tensors[index]
    start = part.outputs_at if outputs else part.inputs_at
    return np.ndarray(
        tensor.shape(part.rows),
        numpy_dtype(tensor.dtype),
        buffer=part.segment,
        offset=start + block.places(part.rows)[0][index],
    )

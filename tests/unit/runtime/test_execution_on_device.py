"""Inputs from host and device in one execution: each request gets its rows."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.call_execution import CallDispatch, CallSlice
from rsrv.runtime.device import Array
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.runs import Kept, MetaRun
from rsrv.runtime.slices import RequestSlice, Slice
from rsrv.scheduler.events import Execute
from rsrv.wire.layout import NUMPY, Block, Tensor, Variant
from tests.fakes import FakeBuffer, FakeDevice
from tests.unit.runtime.test_execution import NO_PEER, FakeModel

BLOCKS = {
    "rows first": Block((Tensor("x", "f32", (-1, 3), 0), Tensor("u", "i16", (-1,), 0))),
    "rows in the middle": Block((Tensor("x", "f32", (2, -1, 3), 1), Tensor("u", "i16", (-1,), 0))),
    "rows last": Block((Tensor("x", "f32", (2, 3, -1), 2), Tensor("u", "i16", (-1,), 0))),
}


class World:
    """Requests, the data that they sent (by tensor, rows first), and the outputs of earlier executions that they share."""

    def __init__(self, block: Block, data: st.DataObject, device: FakeDevice) -> None:
        self.block, self.data, self.device = block, data, device
        self.rng = np.random.default_rng(data.draw(st.integers(0, 9)))
        self.sent: list[list[Array]] = []
        self.outputs: dict[tuple[int, int], Array] = {}
        self.buffers: dict[tuple[int, int], Any] = {}
        #: For each output, the row after the last slice that was taken. The next request's rows may begin there.
        self.ends: dict[tuple[int, int], int] = {}

    def make(self, tensor: Tensor, rows: int) -> Array:
        return self.rng.integers(1, 100, tensor.shape(rows)).astype(NUMPY[tensor.dtype])

    def plain(self, rows: int) -> RequestSlice:
        part = RequestSlice(NO_PEER, 0, rows, np.zeros(8192, np.uint8), 64, 4096)
        values = [self.make(tensor, rows) for tensor in self.block.tensors]
        for index, value in enumerate(values):
            part.source(index, self.block)[...] = value
        self.sent.append(values)
        return part

    def call(self, rows: int) -> CallSlice:
        values: list[Array] = []
        sources: list[Array | Kept] = []
        targets: list[Array | None] = []
        for index, tensor in enumerate(self.block.tensors):
            if self.data.draw(st.booleans()):
                kept_rows, value = self.keep(index, tensor, rows)
                sources.append(kept_rows)
            else:
                value = self.make(tensor, rows)
                sources.append(value)
            values.append(value)
            on_host = self.data.draw(st.booleans())
            targets.append(np.zeros(tensor.shape(rows), NUMPY[tensor.dtype]) if on_host else None)
        self.sent.append(values)
        return CallSlice(NO_PEER, 0, rows, cast(MetaRun, None), sources, targets, {})

    def keep(self, index: int, tensor: Tensor, rows: int) -> tuple[Kept, Array]:
        size = self.data.draw(st.sampled_from([4, 8, 16]))
        key = index, size
        if key not in self.buffers:
            self.outputs[key] = self.make(tensor, size)
            (self.buffers[key],) = self.device.upload([self.outputs[key]])
        follow = self.ends.get(key, 0)
        first = follow if follow + rows <= size else self.data.draw(st.integers(0, size - rows))
        self.ends[key] = first + rows
        value = np.moveaxis(self.outputs[key], tensor.batch_axis or 0, 0)[first : first + rows]
        return Kept(self.buffers[key], tensor, first, rows, size), np.moveaxis(
            value, 0, tensor.batch_axis or 0
        )


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@given(data=st.data())
def test_rows_from_anywhere_are_put_together_and_given_back(block: Block, data: st.DataObject) -> None:
    """Rows from the host and from the device, in any number, are merged into one batch. Each request gets its own rows."""
    device = FakeDevice(lambda inputs, weights: list(inputs))
    world = World(block, data, device)
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    parts: list[Slice] = [
        world.call(rows) if data.draw(st.booleans()) else world.plain(rows) for rows in counts
    ]
    total = sum(counts)
    size = data.draw(st.sampled_from([size for size in (total, 4, 8, 16, 32) if size >= total]))
    variant = Variant(block, block, (size,))
    model: Any = FakeModel()
    execute = Execute(1, model.key, 0, size, total, tuple(range(len(parts))))
    job = CallDispatch(execute, cast(CompiledModel, model), variant, tuple(parts))
    # The buffer holds content of an earlier batch, which must not appear.
    staged = None if len(parts) == 1 and total == size else np.full(block.places[size].nbytes, 77, np.uint8)

    gathered = [
        value.array if isinstance(value, FakeBuffer) else np.asarray(value)
        for value in job.gather(staged, device)
    ]
    job.scatter(gathered)

    for index, tensor in enumerate(block.tensors):
        axis = tensor.batch_axis or 0
        together = np.concatenate([values[index] for values in world.sent], axis)
        assert gathered[index].shape == tensor.shape(size)
        np.testing.assert_array_equal(np.take(gathered[index], range(total), axis), together)
        for part, values in zip(parts, world.sent, strict=True):
            target = part.target(index, block)
            if target is not None:
                np.testing.assert_array_equal(target, values[index])

"""Gathering and scattering: each request gets its rows, for any layout of memory."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.allocation import LARGE
from rsrv.runtime.executor import (
    Dispatch,
    RequestSlice,
    Staging,
    find_contiguous_runs,
    gather,
    launch,
    scatter,
)
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.state_pool import StatePool
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler.events import Execute
from rsrv.wire.layout import Block, Tensor, Variant, aligned
from tests.fakes import FakeDevice

NO_PEER = cast(PeerConnection, None)

BLOCKS = {
    "rows first": Block((Tensor("x", "f32", (-1, 3), 0), Tensor("y", "i16", (-1,), 0))),
    "rows in the middle": Block((Tensor("x", "f64", (2, -1, 3), 1),)),
    "rows last, and one without": Block((Tensor("x", "u8", (5, -1), 1), Tensor("all", "f32", (4,), None))),
}


@dataclass
class FakeModel:
    key = "model"
    pool: StatePool | None = None


def lay_out(block: Block, rows: list[int], gaps: list[int]) -> list[RequestSlice]:
    """Return one segment with inputs and outputs of each request in order, with gaps between some."""
    parts, at = [], 0
    for count, gap in zip(rows, gaps, strict=True):
        nbytes = block.places(count)[1]
        parts.append((count, at, at + nbytes))
        at += 2 * nbytes + aligned(gap)
    segment = np.zeros(max(at, 64), np.uint8)
    return [RequestSlice(NO_PEER, i, n, segment, a, b) for i, (n, a, b) in enumerate(parts)]


def job(parts: list[RequestSlice], size: int, block: Block) -> Dispatch:
    """Return a dispatch of a model that returns its inputs."""
    model: Any = FakeModel()
    execute = Execute(1, model.key, 0, size, sum(part.rows for part in parts), tuple(range(len(parts))))
    return Dispatch(execute, cast(CompiledModel, model), Variant(block, block, (size,)), tuple(parts))


def tensor_of(part: RequestSlice, block: Block, index: int, *, outputs: bool) -> np.ndarray[Any, Any]:
    return part.target(index, block) if outputs else part.source(index, block)


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
@given(data=st.data())
def test_what_is_gathered_and_scattered_is_what_was_sent(block: Block, data: st.DataObject) -> None:
    """For any requests and gaps, rows are stacked in order, padded with zeros, and returned in order."""
    rows = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 64, 200]), min_size=len(rows), max_size=len(rows)))
    parts = lay_out(block, rows, gaps)
    rng = np.random.default_rng(1)
    for part in parts:
        for index in range(len(block.tensors)):
            view = tensor_of(part, block, index, outputs=False)
            view[...] = rng.integers(0, 100, view.shape)
    padding = data.draw(st.integers(0, 3))
    size = max(1, sum(rows) + padding)

    work = job(parts, size, block)
    alone = len(parts) == 1 and not padding and rows != [0]
    # Content of an earlier batch must not show.
    staged = None if alone else np.full(block.places(size)[1], 77, np.uint8)
    gathered: Any = gather(work, staged, FakeDevice(lambda inputs, weights: []))
    scatter(work, gathered)

    for index, tensor in enumerate(block.tensors):
        axis = tensor.batch_axis
        sent = [tensor_of(part, block, index, outputs=False) for part in parts]
        if axis is None:
            expected = sent[0]
        else:
            pad = np.zeros(tensor.shape(size - sum(rows)), sent[0].dtype)
            expected = np.concatenate([*sent, pad], axis)
        np.testing.assert_array_equal(gathered[index], expected)
        for part, view in zip(parts, sent, strict=True):
            wanted = view if axis is not None else sent[0]
            np.testing.assert_array_equal(tensor_of(part, block, index, outputs=True), wanted)


def test_requests_of_one_batch_are_one_run() -> None:
    """Adjacent equal requests are one run of copies; different ones split it."""
    block = BLOCKS["rows first"]

    assert [run.count for run in find_contiguous_runs(lay_out(block, [1] * 5, [0] * 5))] == [5]
    assert [run.count for run in find_contiguous_runs(lay_out(block, [1, 1, 2, 2, 1], [0] * 5))] == [2, 2, 1]
    assert [run.count for run in find_contiguous_runs(lay_out(block, [1] * 4, [0, 64, 0, 0]))] == [2, 2]


@pytest.mark.parametrize("rows", [[8], [4, 4], [7]])
def test_only_the_memory_that_the_device_reads_is_page_locked(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of one request's segment, or that of the assembled batch: locking takes the driver a while."""
    block = Block((Tensor("x", "f32", (-1, 10_000), 0),))
    parts = lay_out(block, rows, [0] * len(rows))
    work = job(parts, 8, block)
    model: Any = work.model
    model.weights, model.executables = [], {(0, 8): None}
    device: Any = FakeDevice(lambda inputs, weights: [])
    monkeypatch.setattr(device, "launch", lambda *_: None)

    flight = launch(work, device, Staging())

    read = parts[0].segment if rows == [8] else flight.staged
    assert read is not None
    assert device.locked == {read.ctypes.data: read.nbytes}


def test_a_large_input_without_rows_is_copied_beside_the_assembled_batch() -> None:
    """The batch's memory is page-locked and the request's is not, so its transfer would wait for the execution before."""
    block = Block((Tensor("x", "f32", (-1, 3), 0), Tensor("table", "f32", (LARGE // 4,), None)))
    (part,) = lay_out(block, [1], [0])
    table = tensor_of(part, block, 1, outputs=False)
    table[...] = np.arange(len(table))
    staged = np.zeros(block.places(2)[1], np.uint8)

    gathered: Any = gather(job([part], 2, block), staged, FakeDevice(lambda inputs, weights: []))

    np.testing.assert_array_equal(gathered[1], table)
    assert np.shares_memory(gathered[1], staged)


def test_batches_of_all_models_are_assembled_in_the_same_memory() -> None:
    """Batches reuse a large enough block; two executions under way have two."""
    staging = Staging()
    small = staging.take(1000)
    staging.give(small)
    large = staging.take(100_000)
    other = staging.take(10)
    assert not np.shares_memory(large, other)
    staging.give(large)

    assert staging.take(99_000) is large
    staging.clear()
    assert staging.take(10) is not other

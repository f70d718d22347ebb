"""Gathering and scattering: each request gets its rows, for any layout of memory."""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.allocation import LARGE
from rsrv.runtime.device import Array
from rsrv.runtime.execution import Dispatch, Staging, find_contiguous_runs, finish, launch
from rsrv.runtime.models import CompiledModel
from rsrv.runtime.slices import RequestSlice
from rsrv.runtime.state_pool import StatePool
from rsrv.runtime.transport import PeerConnection
from rsrv.scheduler.events import Execute
from rsrv.wire.layout import Block, Interface, Tensor, Variant, aligned
from rsrv_bundle.spec import PadSpec
from tests.fakes import FakeDevice

NO_PEER = cast(PeerConnection, None)

BLOCKS = {
    "rows first": Block((Tensor("x", "f32", (-1, 3), 0), Tensor("y", "i16", (-1,), 0))),
    "rows in the middle": Block((Tensor("x", "f64", (2, -1, 3), 1),)),
    "rows last, and one without": Block((Tensor("x", "u8", (5, -1), 1), Tensor("all", "f32", (4,), None))),
}


@dataclass
class FakeModel:
    """A model for a device that does not use its executables."""

    key = "model"
    pool: StatePool | None = None
    bundle: Any = None
    weights: tuple[Array, ...] = ()
    executables: defaultdict[tuple[int, int], None] = field(default_factory=lambda: defaultdict(lambda: None))


def lay_out(block: Block, rows: list[int], gaps: list[int]) -> list[RequestSlice]:
    """Return slices of one segment: inputs and outputs of each request in order, with gaps in between."""
    parts, at = [], 0
    for count, gap in zip(rows, gaps, strict=True):
        nbytes = block.places[count].nbytes
        parts.append((count, at, at + nbytes))
        at += 2 * nbytes + aligned(gap)
    segment = np.zeros(max(at, 64), np.uint8)
    return [RequestSlice(NO_PEER, i, n, segment, a, b) for i, (n, a, b) in enumerate(parts)]


def job(parts: list[RequestSlice], size: int, block: Block) -> Dispatch:
    """Return a dispatch of these requests for a model that returns its inputs."""
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
    # The buffer holds content of an earlier batch, which must not appear.
    staged = None if alone else np.full(block.places[size].nbytes, 77, np.uint8)
    gathered: Any = work.gather(staged, FakeDevice(lambda inputs, weights: []))
    work.scatter(gathered)

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
            expected_values = view if axis is not None else sent[0]
            np.testing.assert_array_equal(tensor_of(part, block, index, outputs=True), expected_values)


def lengths(extent: int) -> Variant:
    """Return a variant whose outputs equal its inputs.

    The padded axis is the second axis of `x` and the first axis of `mask`. `one` has no padded axis.
    """
    block = Block(
        (
            Tensor("x", "f32", (-1, extent, 2), 0, 1),
            Tensor("mask", "i16", (extent, -1), 1, 0),
            Tensor("one", "f32", (-1, 3), 0),
        )
    )
    return Variant(block, block, (1, 2, 4, 8))


@given(data=st.data())
def test_requests_of_several_lengths_are_padded_and_cut_back(data: st.DataObject) -> None:
    """Requests of several lengths are padded with the manifest's values, and missing rows are zeros.

    Each request gets its own rows back at its own length.
    """
    interface = Interface((lengths(3), lengths(6)), exact=False)
    sent = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), min_size=1, max_size=4))
    shapes = [interface.at_length(length)[1] for length, _ in sent]
    parts, start = [], 0
    for number, ((_, rows), shape) in enumerate(zip(sent, shapes, strict=True)):
        nbytes = shape.inputs.places[rows].nbytes
        parts.append(
            RequestSlice(NO_PEER, number, rows, np.zeros(0, np.uint8), start, start + nbytes, shapes=shape)
        )
        start += 2 * nbytes
    segment = np.zeros(max(start, 64), np.uint8)
    rng = np.random.default_rng(1)
    for part in parts:
        part.segment = segment
        for index in range(3):
            view = part.source(index, interface.variants[1].inputs)
            view[...] = rng.integers(1, 100, view.shape)

    model: Any = FakeModel(
        bundle=SimpleNamespace(manifest=SimpleNamespace(pad=PadSpec("t", {"x": -5, "mask": 9}, "mask")))
    )
    total = sum(rows for _, rows in sent)
    execute = Execute(1, model.key, 1, 8, total, tuple(range(len(parts))))
    work = Dispatch(execute, cast(CompiledModel, model), interface.variants[1], tuple(parts))
    staged = np.full(interface.variants[1].inputs.places[8].nbytes, 77, np.uint8)
    gathered: Any = work.gather(staged, FakeDevice(lambda inputs, weights: []))
    work.scatter(gathered)

    x, mask, constant = gathered[0], gathered[1].T, gathered[2]
    at = 0
    for part, (length, rows) in zip(parts, sent, strict=True):
        mine, block = slice(at, at + rows), interface.variants[1].inputs
        np.testing.assert_array_equal(x[mine, :length], part.source(0, block))
        np.testing.assert_array_equal(mask[mine, :length], part.source(1, block).T)
        assert (x[mine, length:] == -5).all()
        assert (mask[mine, length:] == 9).all()
        for index in range(3):
            np.testing.assert_array_equal(part.target(index, block), part.source(index, block))
        at += rows
    assert not x[at:].any()
    assert not constant[at:].any()


@pytest.mark.parametrize(("length", "staged"), [(6, False), (5, True)])
def test_a_request_is_read_in_place_only_if_it_fills_its_variant(
    length: int, staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the compiled size and length needs no copy; a shorter one is padded in the assembled batch."""
    interface = Interface((lengths(6),), exact=False)
    shapes = interface.at_length(length)[1]
    nbytes = shapes.inputs.places[1].nbytes
    part = RequestSlice(NO_PEER, 0, 1, np.zeros(2 * nbytes, np.uint8), 0, nbytes, shapes=shapes)
    pad = PadSpec("t", {"x": 0, "mask": 0}, "mask")
    model: Any = FakeModel(bundle=SimpleNamespace(manifest=SimpleNamespace(pad=pad)))
    device: Any = FakeDevice(lambda inputs, weights: [])
    monkeypatch.setattr(device, "launch", lambda *_: None)

    work = Dispatch(
        Execute(1, "model", 0, 1, 1, (0,)), cast(CompiledModel, model), interface.variants[0], (part,)
    )
    assert (launch(work, device, Staging()).staged is not None) == staged


def test_requests_of_one_batch_are_one_run() -> None:
    """Adjacent requests of equal size are copied as one run. Another size or a gap begins a new run."""
    block = BLOCKS["rows first"]

    assert [run.count for run in find_contiguous_runs(lay_out(block, [1] * 5, [0] * 5))] == [5]
    assert [run.count for run in find_contiguous_runs(lay_out(block, [1, 1, 2, 2, 1], [0] * 5))] == [2, 2, 1]
    assert [run.count for run in find_contiguous_runs(lay_out(block, [1] * 4, [0, 64, 0, 0]))] == [2, 2]


@pytest.mark.parametrize("rows", [[8], [4, 4], [7]])
def test_only_the_memory_that_the_device_reads_is_page_locked(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only memory that the device reads is page-locked: one request's segment, or the assembled batch.

    Locking takes the driver a while.
    """
    block = Block((Tensor("x", "f32", (-1, 10_000), 0),))
    parts = lay_out(block, rows, [0] * len(rows))
    work = job(parts, 8, block)
    device: Any = FakeDevice(lambda inputs, weights: [])
    monkeypatch.setattr(device, "launch", lambda *_: None)

    flight = launch(work, device, Staging())

    read = parts[0].segment if rows == [8] else flight.staged
    assert read is not None
    assert device.locked == {read.ctypes.data: read.nbytes}


def test_a_large_input_without_rows_is_copied_into_the_assembled_batch() -> None:
    """A large input without rows is copied into the assembled batch, which is page-locked.

    The request's memory is not page-locked, so a transfer from there would wait for the previous execution.
    """
    block = Block((Tensor("x", "f32", (-1, 3), 0), Tensor("table", "f32", (LARGE // 4,), None)))
    (part,) = lay_out(block, [1], [0])
    table = tensor_of(part, block, 1, outputs=False)
    table[...] = np.arange(len(table))
    staged = np.zeros(block.places[2].nbytes, np.uint8)

    gathered: Any = job([part], 2, block).gather(staged, FakeDevice(lambda inputs, weights: []))

    np.testing.assert_array_equal(gathered[1], table)
    assert np.shares_memory(gathered[1], staged)


def test_requests_whose_outputs_lie_otherwise_than_their_inputs_are_copied_apart() -> None:
    """Requests are copied one by one if their outputs are not at equal distances in memory, even if their inputs are."""
    block = BLOCKS["rows first"]
    parts = lay_out(block, [1] * 3, [0] * 3)
    parts[1] = replace(parts[1], outputs_at=parts[1].outputs_at + 64)

    assert [run.count for run in find_contiguous_runs(parts)] == [1, 1, 1]


def test_the_next_batch_is_assembled_where_the_one_before_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an execution has ended, the next batch is assembled in the same memory.

    The memory of an execution in progress is not reused.
    """
    block = BLOCKS["rows first"]
    work = job(lay_out(block, [1] * 3, [0] * 3), 4, block)
    device: Any = FakeDevice(lambda inputs, weights: [])
    outputs = [np.zeros(tensor.shape(4), np.float32) for tensor in block.tensors]
    monkeypatch.setattr(device, "launch", lambda *_: None)
    monkeypatch.setattr(device, "read", lambda _: (outputs, 0.001))
    staging = Staging()

    first = launch(work, device, staging)
    beside = launch(work, device, staging)
    assert finish(first, device, staging) == 0.001
    second = launch(work, device, staging)

    assert second.staged is first.staged
    assert second.staged is not beside.staged
    assert launch(work, device, staging).staged is not second.staged


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize(
    ("block", "rows", "in_place", "gathered"),
    [
        (Block((Tensor("x", "f32", (-1, LARGE), 0), Tensor("y", "i16", (-1,), 0))), [4], [0], []),
        (Block((Tensor("x", "f32", (-1, LARGE), 0), Tensor("y", "i16", (-1,), 0))), [2, 1], [0], []),
        (Block((Tensor("x", "f32", (-1, LARGE // 8), 0),)), [1, 1, 1], [], [0]),
        (Block((Tensor("x", "f32", (5, -1, LARGE), 1),)), [4], [0], []),
        (Block((Tensor("x", "f32", (5, -1, LARGE), 1),)), [2, 1], [], [0]),
        (Block((Tensor("x", "f32", (-1, 3), 0), Tensor("all", "f32", (LARGE,), None))), [1, 2], [], [1]),
        (BLOCKS["rows first"], [2, 1], [], []),
    ],
)
def test_the_device_copies_large_outputs_to_page_locked_memory(
    block: Block, rows: list[int], in_place: list[int], gathered: list[int], locks: bool
) -> None:
    """The device copies large outputs to page-locked memory.

    The target is the requests' own memory, if each request's rows are contiguous and large, or else the memory of the
    batch. If memory cannot be locked, jax copies the outputs, because a transfer to such memory would wait for the
    execution.
    """
    parts = lay_out(block, rows, [0] * len(rows))
    rng = np.random.default_rng(1)
    for part in parts:
        for index in range(len(block.tensors)):
            view = tensor_of(part, block, index, outputs=False)
            view[...] = rng.integers(0, 100, view.shape)
    work = job(parts, 4, block)
    device: Any = FakeDevice(lambda inputs, weights: [array.copy() for array in inputs])
    device.writes_host = True
    if not locks:
        device.fail_next("page_lock", times=9)
    staging = Staging()

    flight = launch(work, device, staging)
    finish(flight, device, staging)

    assert [*flight.in_place] == in_place * locks
    assert [*flight.gathered] == gathered * locks
    for part in parts:
        for index, tensor in enumerate(block.tensors):
            sent = tensor_of(part if tensor.batch_axis is not None else parts[0], block, index, outputs=False)
            np.testing.assert_array_equal(tensor_of(part, block, index, outputs=True), sent)


def test_batches_of_all_models_are_assembled_in_the_same_memory() -> None:
    """Batches reuse a block that is large enough. Two executions in progress have two blocks."""
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

"""Copies between the memory of requests and the card: how many there are, of which bytes, and whether they use DMA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.allocation import LARGE
from rsrv.stub.endpoint import WireTensor
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeRequest
from tests.gpu.conftest import StartServed
from tests.gpu.fake_gpu import FakeGpu

#: Bytes of the pieces in which the runtime makes large copies.
PIECE = 16 << 20


def export_passing(path: Path, columns: int, batch_sizes: list[int]) -> Path:
    """Export a bundle that returns its input. The fake driver can copy within the device, so the answers are right."""
    export_bundle(
        lambda params, x: {"y": x},
        {"w": np.ones((3,), np.float32)},
        {"x": np.zeros((1, columns), np.float32)},
        batch_sizes=batch_sizes,
        out_dir=path,
    )
    return path


def copies(gpu: FakeGpu, serve: StartServed, path: Path, rows: list[int], columns: int) -> dict[str, object]:
    """Answer requests with these numbers of rows in one batch. Return the copies in each direction."""
    runtime, outputs = "{platform: cuda}\nscheduler: {depth: 2}", [WireTensor("y", "f32", (-1, columns))]
    bundle = export_passing(path, columns, [1] if rows == [1] else [1, 4])
    engine = serve(bundle, "passing", runtime, outputs=outputs)
    random = np.random.default_rng(0)
    values = [random.random((count, columns), np.float32) for count in rows]
    requests = [FakeRequest({"x": value}) for value in values]
    before = len(gpu.calls())

    answers = engine.execute(requests) or [request.answers.get(timeout=60) for request in requests]

    for value, answer in zip(values, answers, strict=True):
        assert answer.error is None
        np.testing.assert_array_equal(answer.arrays["y"], value)
    by_kind: dict[str, object] = {}
    for kind in ("h2d", "d2h"):
        calls = [call for call in gpu.calls()[before:] if call.kind == kind]
        by_kind[kind] = [(call.bytes, call.detail) for call in calls]
    return by_kind


@pytest.mark.parametrize(
    ("columns", "to_card", "from_card"),
    [
        (250, [(1000, "copied")], [(1000, "pageable")]),
        (150_000, [(600_000, "page-locked")], [(600_000, "page-locked")]),
        (
            15_000_000,
            [(60_000_000, "page-locked")],
            [(PIECE, "page-locked")] * 3 + [(60_000_000 - 3 * PIECE, "page-locked")],
        ),
    ],
)
def test_one_request_is_copied_once_in_each_direction(
    gpu: FakeGpu,
    serve: StartServed,
    tmp_path: Path,
    columns: int,
    to_card: list[tuple[int, str]],
    from_card: list[tuple[int, str]],
) -> None:
    """A request's tensors are copied once in each direction. Large ones use DMA from and to the memory that the stub shares."""
    by_kind = copies(gpu, serve, tmp_path / "passing", [1], columns)

    assert by_kind == {"h2d": to_card, "d2h": from_card}


def test_rows_of_a_batch_go_to_their_requests_without_a_copy_on_the_host(
    gpu: FakeGpu, serve: StartServed, tmp_path: Path
) -> None:
    """The rows of a batch's answers are copied directly to their requests. The row that pads the batch stays on the card."""
    row = 4 * LARGE

    by_kind = copies(gpu, serve, tmp_path / "passing", [1, 2], LARGE)

    assert by_kind == {
        "h2d": [(4 * row, "page-locked")],
        "d2h": [(row, "page-locked"), (2 * row, "page-locked")],
    }


def test_small_rows_of_a_large_batch_leave_the_card_together(
    gpu: FakeGpu, serve: StartServed, tmp_path: Path
) -> None:
    """Small rows of several requests leave the card in one transfer.

    Separate transfers would take longer than a copy on the host.
    """
    nbytes = 4 * (LARGE // 2)

    by_kind = copies(gpu, serve, tmp_path / "passing", [1, 1, 1], LARGE // 8)

    assert by_kind == {"h2d": [(nbytes, "page-locked")], "d2h": [(nbytes, "page-locked")]}


def test_memory_is_locked_once_for_many_requests(gpu: FakeGpu, serve: StartServed, tmp_path: Path) -> None:
    """Memory for requests is locked only once, because locking takes the driver longer than a copy."""
    outputs = [WireTensor("y", "f32", (-1, LARGE))]
    engine = serve(export_passing(tmp_path / "passing", LARGE, [1]), "passing", outputs=outputs)

    locked = []
    for _ in range(4):
        request = FakeRequest({"x": np.zeros((1, LARGE), np.float32)})
        assert (engine.execute([request]) or [request.answers.get(timeout=60)])[0].error is None
        locked.append(len(gpu.calls("register")))

    assert locked[0]
    assert locked[-1] == locked[0]

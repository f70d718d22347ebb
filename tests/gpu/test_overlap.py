"""Transfers during executions, on a card whose copies and kernels take time: which of them wait for each other."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime.allocation import aligned
from rsrv.runtime.jax_device import JaxDevice
from rsrv_bundle.export import export_bundle
from tests.fakes import FakeRequest
from tests.gpu.conftest import StartServed
from tests.gpu.fake_gpu import FakeGpu, settings_here
from tests.unit.runtime.conftest import build_here
from tests.waiting import wait_until

#: Number of columns of a row. CUDA's driver copies pageable memory at once only up to 64 kB, and a row is larger.
COLUMNS = 64 << 10
ROW_BYTES = 4 * COLUMNS
#: Seconds that each kernel takes. Even on a busy machine, a launch is much shorter.
KERNEL_S = 0.5


@pytest.fixture(scope="module")
def summing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with rows of 256 kB, and batch sizes 1 and 4."""
    path = tmp_path_factory.mktemp("bundles") / "summing"
    export_bundle(
        lambda params, x: {"y": x.sum(axis=1, keepdims=True) + params["w"]},
        {"w": np.ones((3,), np.float32)},
        {"x": np.zeros((1, COLUMNS), np.float32)},
        batch_sizes=[1, 4],
        out_dir=path,
    )
    return path


def test_inputs_come_from_page_locked_memory(gpu: FakeGpu, serve: StartServed, summing: Path) -> None:
    """Inputs are in page-locked memory, both where the stub has written them and where the runtime has assembled a batch.

    From pageable memory, the transfer for the next batch would make its launch wait for the previous execution.
    """
    engine = serve(summing, "summing", "{platform: cuda}\nscheduler: {depth: 2}")
    warmed_up = len(gpu.calls("h2d"))
    single, triple = (FakeRequest({"x": np.ones((rows, COLUMNS), np.float32)}) for rows in (1, 3))

    for request in (single, triple):
        answers = engine.execute([request]) or [request.answers.get(timeout=30)]
        assert answers[0].error is None

    large = [call for call in gpu.calls("h2d")[warmed_up:] if call.bytes >= ROW_BYTES]
    assert [(call.bytes, call.detail) for call in large] == [
        (ROW_BYTES, "page-locked"),
        (4 * ROW_BYTES, "page-locked"),
    ]


def launch_beside_an_execution(bundle: Path, locked: bool) -> float:
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    x = aligned(ROW_BYTES).view(np.float32).reshape(1, COLUMNS)
    if locked:
        device.page_lock(x.ctypes.data, x.nbytes)
    settings_here().kernel_ns = int(KERNEL_S * 1e9)
    first = device.launch(model.executables[0, 1], model.weights, [x])
    started = time.monotonic()
    second = device.launch(model.executables[0, 1], model.weights, [x])
    seconds = time.monotonic() - started
    device.read(first)
    device.read(second)
    return seconds


@pytest.mark.parametrize("locked", [True, False])
def test_a_launch_does_not_wait_for_the_execution_before(gpu: FakeGpu, summing: Path, locked: bool) -> None:
    """With page-locked inputs, a launch does not wait for the previous execution. With pageable inputs, it does."""
    seconds = gpu.run(launch_beside_an_execution, summing, locked)

    assert (seconds < KERNEL_S / 2) == locked


#: Bytes of weights, and speed of the link. A load takes 3 s.
WEIGHTS_BYTES, LINK_BYTES_PER_S = 600_000_000, 200_000_000


def execute_beside_a_load(bundle: Path, record: Path) -> None:
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    x = aligned(ROW_BYTES).view(np.float32).reshape(1, COLUMNS)
    weights = aligned(WEIGHTS_BYTES)
    for array in (x, weights):
        device.page_lock(array.ctypes.data, array.nbytes)
    settings = settings_here()
    settings.moved_bytes_max, settings.pinned_bytes_per_s = ROW_BYTES, LINK_BYTES_PER_S
    before = record.stat().st_size
    load = threading.Thread(target=device.upload, args=([weights],))
    load.start()
    wait_until(lambda: record.stat().st_size > before)
    device.read(device.launch(model.executables[0, 1], model.weights, [x]))
    load.join()


def test_inputs_do_not_wait_for_the_weights_of_a_load(gpu: FakeGpu, summing: Path) -> None:
    """An input's transfer waits for at most one piece of the weights. In jax's stream, it would come after all weights."""
    gpu.run(execute_beside_a_load, summing, gpu.record)

    moved = [call.bytes for call in gpu.calls("h2d") if call.bytes >= ROW_BYTES]
    beside = moved[moved.index(max(moved)) :]
    assert max(moved) == 16 << 20
    assert beside.count(ROW_BYTES) == 1
    assert beside[-1] > ROW_BYTES

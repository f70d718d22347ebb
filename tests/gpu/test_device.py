"""rsrv's device on XLA's CUDA client: models load, execute and leave, by the calls that reach the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rsrv.runtime.device import run
from rsrv.runtime.jax_device import JaxDevice
from tests.gpu.fake_gpu import GIB, FakeGpu
from tests.unit.runtime.conftest import build_here
from tests.waiting import wait_until


def execute(bundle: Path) -> dict[str, Any]:
    """Load a bundle, execute each of its sizes, and free its weights."""
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    loaded = device.memory_in_use() or 0
    shapes = [
        run(device, executable, model.weights, [np.ones((size, 3), np.float32)])[0][0].shape
        for (_, size), executable in model.executables.items()
    ]
    device.free(model.weights)
    # XLA frees the memory on a thread of its own.
    wait_until(lambda: (device.memory_in_use() or 0) < loaded)
    return {
        "hardware": str(device.hardware),
        "limit": device.memory_limit,
        "shapes": shapes,
        "freed": loaded - (device.memory_in_use() or 0),
    }


def test_a_bundle_loads_and_executes_on_the_card(gpu: FakeGpu, doubling: Path) -> None:
    """The device takes nine tenths of the card, launches each execution, and keeps nothing of a freed model."""
    found = gpu.run(execute, doubling)

    assert found["hardware"] == "a CUDA device of compute capability 9.0"
    assert found["limit"] == 72 * GIB
    assert found["shapes"] == [(1, 3), (4, 3), (8, 3)]
    assert found["freed"] == 256, "the allocator rounds 12 bytes up"
    assert [call.bytes for call in gpu.calls("alloc")] == [72 * GIB]
    assert len(gpu.calls("kernel")) >= 3

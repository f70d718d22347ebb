"""rsrv's device on XLA's CUDA client. Models load, execute and are freed, as the driver's record of calls shows."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from bisect import bisect
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rsrv.extras import install_command
from rsrv.runtime import cuda
from rsrv.runtime.device import Abandoned, Array, DeviceError, run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.state_pool import SequenceTensors, SlotRow
from rsrv_bundle.export import export_bundle
from tests.builders import export_sums
from tests.gpu.fake_gpu import EXCLUSIVE_PROCESS, GIB, FakeGpu
from tests.unit.runtime.conftest import build_here
from tests.waiting import wait_until


def execute(bundle: Path) -> dict[str, Any]:
    """Load a bundle, execute each of its sizes, and free its weights. Return what the test checks."""
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    shapes = [
        run(device, executable, model.weights, [np.ones((size, 3), np.float32)])[0][0].shape
        for (_, size), executable in model.executables.items()
    ]
    device.free(model.weights)
    # XLA frees the memory on its own thread.
    wait_until(lambda: device.memory_in_use() == 0)
    return {"hardware": str(device.hardware), "limit": device.memory_limit, "shapes": shapes}


def test_a_bundle_loads_and_executes_on_the_card(gpu: FakeGpu, doubling: Path) -> None:
    """The device allocates nine tenths of the card's memory, launches kernels for each batch size, and frees all memory of a freed model."""
    result = gpu.run(execute, doubling)

    assert result["hardware"] == "a CUDA device of compute capability 9.0"
    assert result["limit"] == 72 * GIB
    assert result["shapes"] == [(1, 3), (4, 3), (8, 3)]
    assert [call.bytes for call in gpu.calls("alloc")] == [72 * GIB]
    assert len(gpu.calls("kernel")) >= 3


def move_tensors() -> tuple[bool, int]:
    """Return True if tensors of all types arrive right, and the bytes that they take."""
    device = JaxDevice("cuda")
    sources: list[Array] = [
        np.arange(5_000_000, dtype=np.float32).reshape(5, -1),
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.array(2.5, np.float64),
        np.array([True, False, True]),
        np.zeros((0, 3), np.float32),
        np.full((5, 2), 1.5, ml_dtypes.bfloat16),
        np.full(4, 2, ml_dtypes.float8_e5m2),
    ]
    before = device.memory_in_use() or 0
    answers = iter([False, False, True])
    with pytest.raises(Abandoned):
        device.upload(sources, lambda: next(answers))
    wait_until(lambda: device.memory_in_use() == before)
    buffers: list[Any] = device.upload(sources)
    arrived = all(
        (buffer.dtype, buffer.shape, np.asarray(buffer).tobytes())
        == (source.dtype, source.shape, source.tobytes())
        for buffer, source in zip(buffers, sources, strict=True)
    )
    loaded = device.memory_in_use() or 0
    device.free(buffers)
    wait_until(lambda: device.memory_in_use() == before)
    return arrived, loaded - before


def test_tensors_of_every_type_come_and_go(gpu: FakeGpu) -> None:
    """Tensors of all types are in the memory of jax's allocator. A load that is abandoned frees its memory there."""
    arrived, taken = gpu.run(move_tensors)

    assert arrived
    assert 20_000_000 <= taken < 20_010_000
    assert [call.bytes for call in gpu.calls("alloc")] == [72 * GIB]


def refusal(platform: str, signs: tuple[str, ...] = ()) -> str:
    cuda.CARD_SIGNS = signs
    with pytest.raises(DeviceError) as refused:
        JaxDevice(platform)
    return str(refused.value)


@pytest.mark.parametrize("platform", ["auto", "cuda"])
def test_a_driver_that_does_not_start_is_named_and_the_cpu_serves_nothing(
    gpu: FakeGpu, platform: str
) -> None:
    """If the driver does not start, the error names the reason, and the model is not served.

    With `auto`, jax would otherwise use the CPU, a hundred times slower, and only print a traceback.
    """
    gpu.settings.count = 0

    text = gpu.run(refusal, platform, ("/proc",))

    assert "No visible GPU devices" in text
    assert (
        "the machine has a card (/proc; cuInit: CUDA_ERROR_NO_DEVICE (100)), so NVIDIA's driver or a library of CUDA is missing"
        in text
    )
    assert text.endswith("To serve from the CPU, set runtime.platform to cpu")


def start_beside_a_process_with_a_context() -> tuple[str, int | None]:
    program = "from rsrv.runtime.cuda import Driver; Driver(0); print(flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    try:
        text = refusal("cuda")
        other.kill()
        # A zombie has no context, even before its parent waits for it.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        return text, JaxDevice("cuda").memory_limit
    finally:
        other.kill()
        other.wait()


def test_a_card_for_one_process_is_refused_beside_another_and_taken_after_it(gpu: FakeGpu) -> None:
    """A card admits only one process. While another process has this card, a device is refused with this reason.

    When the other process has ended, the refused process gets the card. jax itself only reports that it supports no device.
    """
    gpu.settings.compute_mode = EXCLUSIVE_PROCESS

    text, limit = gpu.run(start_beside_a_process_with_a_context)

    assert (
        "(cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE (46)), because another process has it"
        in text
    )
    assert "run nvidia-smi -c DEFAULT" in text
    assert limit == 72 * GIB


def test_a_card_without_virtual_memory_management_is_named(gpu: FakeGpu) -> None:
    """A card without virtual memory management is refused with this reason. XLA itself only logs it."""
    gpu.settings.without_vmm = 1

    assert "the card has no virtual memory management, which XLA needs to allocate memory" in gpu.run(
        refusal, "cuda"
    )


@pytest.fixture(scope="module")
def alternating(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose kernels XLA cannot fuse, so it puts them into a CUDA graph."""
    path = tmp_path_factory.mktemp("bundles") / "alternating"

    def normalize(params: Any, x: Any) -> Any:
        for _ in range(6):
            x = x * params["w"] / x.sum(axis=1, keepdims=True)
            x = x / x.sum(axis=2, keepdims=True)
        return {"y": x}

    export_bundle(
        normalize,
        {"w": np.ones((64, 64), np.float32)},
        {"x": np.ones((1, 64, 64), np.float32)},
        batch_sizes=[1],
        out_dir=path,
    )
    return path


def execute_and_reload(bundle: Path) -> list[float]:
    """Execute a model four times, and return the times of the ends. Before the third execution, other weights are loaded."""
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    weights, (executable,) = model.weights, model.executables.values()
    ends = []
    for number in range(4):
        if number == 2:
            other = device.upload([np.ones((64, 64), np.float32)])
            device.free(weights)
            weights = other
        # When all memory except the weights is free, inputs and outputs get the same addresses as in the previous execution.
        wait_until(lambda: device.memory_in_use() == 4 * 64 * 64)
        run(device, executable, weights, [np.ones((1, 64, 64), np.float32)])
        ends.append(time.monotonic())
    return ends


def test_a_graph_follows_reloaded_weights_to_their_place(gpu: FakeGpu, alternating: Path) -> None:
    """A graph contains addresses. XLA updates it in the first execution after a load of weights, and in no other execution."""
    # Without this flag, XLA would time kernels for most of the test.
    ends = gpu.run(execute_and_reload, alternating, XLA_FLAGS="--xla_gpu_autotune_level=0")

    updated = [bisect(ends, call.end) for call in gpu.calls("graph-update")]
    assert gpu.calls("graph")
    assert {execution for execution in updated if execution} == {2}


@pytest.mark.parametrize(
    ("platform", "signs", "remedy"),
    [
        ("cuda", (), f"it has no CUDA plugin: run {install_command('serve', 'cuda13')}"),
        ("auto", ("/proc",), f"it has no CUDA plugin: run {install_command('serve', 'cuda13')}"),
    ],
)
def test_a_machine_without_jaxs_plugin_is_told_what_to_install(
    gpu: FakeGpu, platform: str, signs: tuple[str, ...], remedy: str
) -> None:
    """Without jax's CUDA plugin, the error says what to install. jax itself raises an error without a text, or silently uses the CPU."""
    assert remedy in gpu.run(refusal, platform, signs, PYTHONPATH="")


def platform_of(signs: tuple[str, ...]) -> str:
    cuda.CARD_SIGNS = signs
    return JaxDevice("auto").hardware.platform


@pytest.mark.parametrize(
    ("signs", "variables"),
    [((), {}), (("/proc",), {"CUDA_VISIBLE_DEVICES": ""}), (("/proc",), {"JAX_PLATFORMS": "cpu"})],
)
def test_a_machine_without_a_card_serves_from_the_cpu(
    gpu: FakeGpu, signs: tuple[str, ...], variables: dict[str, str]
) -> None:
    """A machine without a card serves from the CPU, and so does a machine whose environment hides the cards."""
    assert gpu.run(platform_of, signs, PYTHONPATH="", **variables) == "cpu"


def step_sequences(bundle: Path) -> dict[str, Any]:
    """Execute steps of two sequences that take turns in a slot. Then free the pools, and allocate them again."""
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    pool, executable = model.pool, model.executables[0, 1]
    assert pool is not None
    assert model.weights is not None

    def addresses() -> list[int]:
        return [array.unsafe_buffer_pointer() for array in pool._pools.arrays]  # type: ignore[union-attr]

    before, first, second = addresses(), SequenceTensors(), SequenceTensors()
    loaded = device.memory_in_use() or 0
    x = np.ones((1, 3), np.float32)
    for row in (SlotRow(1, first, True), SlotRow(1, second, True), SlotRow(1, first, False)):
        pool.read(device, *pool.launch(device, executable, model.weights, [x], 1, [row]))
    stayed = addresses() == before
    wait_until(lambda: (device.memory_in_use() or 0) <= loaded)
    saved = second.arrays is not None and [array.shape for array in second.arrays]
    pool.unload(device)
    device.free(model.weights)
    wait_until(lambda: device.memory_in_use() == 0)
    pieces = device.largest_free()
    pool.load(device)
    return {"stayed": stayed, "saved": saved, "largest": (pieces, device.largest_free())}


def test_state_stays_in_its_place_on_the_card(gpu: FakeGpu, tmp_path: Path) -> None:
    """Executions use the pools of states without copying them. Only single slots are copied, and all memory is freed."""
    slots = 50_000
    result = gpu.run(step_sequences, export_sums(tmp_path / "sums", slots=slots))

    assert result["stayed"]
    assert result["saved"] == [(), (3,)]
    free, remaining = result["largest"]
    assert free == 72 * GIB
    assert free > remaining >= free - slots * 16 - 4096
    assert max((call.bytes for call in gpu.calls("d2h", "h2d", "d2d")), default=0) < slots

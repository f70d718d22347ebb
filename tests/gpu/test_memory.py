"""A card with too little memory. Weights and executions that do not fit are refused at once, and the free memory is known."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime import device_memory
from rsrv.runtime.device import Array, DeviceError, OutOfMemory
from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv_bundle.export import export_bundle
from rsrv_bundle.precision import product
from tests.gpu.fake_gpu import GIB, MIB, FakeGpu, settings_here
from tests.unit.runtime.conftest import build_here

#: Seconds for which XLA's allocator waits for memory before it refuses.
XLA_WAIT_S = 10.0


@pytest.fixture(scope="module")
def widening(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose execution needs 64 MiB of device memory for its output."""
    path = tmp_path_factory.mktemp("bundles") / "widening"
    columns = 64 * MIB // 4
    export_bundle(
        lambda params, x: {"y": (x + params["w"]) * np.ones((1, columns), np.float32)},
        {"w": np.ones((1,), np.float32)},
        {"x": np.zeros((1, 1), np.float32)},
        batch_sizes=[1],
        out_dir=path,
    )
    return path


def refused(action: Callable[[], object]) -> tuple[str, float]:
    """Run an action that must raise OutOfMemory. Return the error's text, and the seconds until it was raised."""
    started = time.monotonic()
    with pytest.raises(OutOfMemory) as raised:
        action()
    return str(raised.value), time.monotonic() - started


def logged() -> list[str]:
    """Return a list to which all later log lines of the device are added."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("rsrv.runtime").addHandler(handler)
    return lines


def upload_too_much() -> tuple[str, float]:
    device = JaxDevice("cuda")
    # The allocator splits a chunk only if at least 128 MiB or half of it remain.
    half = np.zeros(210 * MIB, np.uint8)
    uploaded = device.upload([half])
    refusal = refused(lambda: device.upload([half, half]))
    device.free(uploaded)
    device.upload([half, half])
    return refusal


def upload_into_pieces() -> list[tuple[str, float]]:
    device = JaxDevice("cuda")
    mib = np.zeros(MIB, np.uint8)

    def tensor(count: int) -> Array:
        return np.broadcast_to(mib, (count, MIB))

    (uploaded,) = device.upload([tensor(246)])
    refusals = [refused(lambda: device.upload([tensor(210), tensor(100)]))]
    device.free([uploaded])
    pieces = device.upload([tensor(60)] * 8)
    device.free(pieces[1:7:2])
    refusals.append(refused(lambda: device.upload([tensor(100)])))
    device.free(pieces[::2])
    device.upload([tensor(100)])
    return refusals


def execute_too_much(bundle: Path) -> tuple[str, float]:
    device = JaxDevice("cuda")
    model = build_here(bundle, device)
    assert model.weights is not None
    weights, (executable,) = model.weights, model.executables.values()
    uploaded = device.upload([np.zeros(MIB, np.uint8)] * 180)
    refusal = refused(lambda: device.launch(executable, weights, [np.zeros((1, 1), np.float32)]))
    device.free(uploaded)
    device.read(device.launch(executable, weights, [np.zeros((1, 1), np.float32)]))
    return refusal


def test_weights_without_room_are_refused_at_once(gpu: FakeGpu) -> None:
    """Weights that do not fit are refused at once. XLA itself would wait ten seconds.

    After other weights are freed, the same load succeeds.
    """
    gpu.settings.cards[0].memory_bytes = 640 * MIB

    text, seconds = gpu.run(upload_too_much)

    assert " bytes are needed, and " in text
    assert seconds < XLA_WAIT_S / 2


def test_weights_without_room_in_one_piece_are_refused_at_once(gpu: FakeGpu) -> None:
    """Enough memory is free, but not in one piece, so the weights are refused at once.

    In the first case, the allocator gives a tensor of 210 MiB a whole free piece of 330 MiB, so no piece is left for 100 MiB.
    In the second case, four pieces of 60 to 96 MiB are free, and none of them has 100 MiB.
    """
    gpu.settings.cards[0].memory_bytes = 640 * MIB

    for text, seconds in gpu.run(upload_into_pieces):
        assert text.endswith(" are free, but in pieces that are too small")
        assert seconds < XLA_WAIT_S / 2


def test_an_execution_without_room_is_refused_at_once(gpu: FakeGpu, widening: Path) -> None:
    """An execution whose output does not fit is refused at once, so other launches do not wait. After an eviction, it succeeds."""
    gpu.settings.cards[0].memory_bytes = 256 * MIB

    text, seconds = gpu.run(execute_too_much, widening)

    assert "bytes are needed, and " in text
    assert seconds < XLA_WAIT_S / 2


def build_on_a_full_device(cache: Path | None) -> tuple[float, list[str]]:
    """Compile a program on a full device. Return the seconds and the log. With a cache, it was compiled before with enough memory."""
    lines = logged()
    device = JaxDevice("cuda", ExecutableSources(cache))
    if cache is not None:
        device.compile(*product(1024))
        assert device.cache_counts.compiled == 1
    free = (device.memory_limit or 0) - (device.memory_in_use() or 0)
    # The tensors are small, because the allocator would not split a chunk for a large one.
    uploaded = device.upload([np.zeros(MIB, np.uint8)] * (free // MIB - 2))
    started = time.monotonic()
    device.compile(*product(1024))
    seconds = time.monotonic() - started
    device.free(uploaded)
    return seconds, lines


def test_a_model_is_compiled_on_a_full_device_without_timing_kernels(gpu: FakeGpu) -> None:
    """On a full device, a model is compiled without timing kernels.

    XLA's autotuner would wait ten seconds for each allocation, and then fail.
    """
    gpu.settings.cards[0].memory_bytes = 256 * MIB

    seconds, lines = gpu.run(build_on_a_full_device, None)

    assert seconds < XLA_WAIT_S
    assert "the device has no memory to time kernels on" in lines[-1]


def test_a_full_device_gets_the_tuned_executable_of_the_compilation_cache(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """On a full device, the tuned executable comes from the compilation cache, because this needs no memory for timing kernels.

    Compiled without tuning, the model would be slower until the next start.
    """
    gpu.settings.cards[0].memory_bytes = 512 * MIB

    seconds, lines = gpu.run(build_on_a_full_device, tmp_path / "cache")

    assert seconds < XLA_WAIT_S
    assert not [line for line in lines if "no memory to time kernels" in line]


def limit_and_log() -> tuple[int | None, list[str]]:
    lines = logged()
    device_memory.RELEASE_S = 0.1
    return JaxDevice("cuda").memory_limit, lines


def test_memory_that_other_processes_hold_is_not_in_the_budget(gpu: FakeGpu) -> None:
    """Other processes hold a part of the card. XLA's allocator gets less memory, and reports the limit that it was given.

    The budget is what the allocator got.
    """
    gpu.settings.cards[0].others_bytes = 20 * GIB

    limit, lines = gpu.run(limit_and_log)

    (taken,) = (call.bytes for call in gpu.calls("alloc"))
    assert limit == taken < 60 * GIB
    assert f"jax's allocator got {taken} of the {72 * GIB} bytes" in lines[0]


def refusal_and_limit() -> tuple[str, int | None]:
    device_memory.RELEASE_S = 0.1
    with pytest.raises(DeviceError) as raised:
        JaxDevice("cuda")
    settings_here().cards[0].others_bytes = 0
    return str(raised.value), JaxDevice("cuda").memory_limit


def test_a_full_card_is_refused_before_the_allocator_asks_for_memory(gpu: FakeGpu) -> None:
    """A full card is refused before XLA's allocator asks for memory. On a full card, the allocator logs 5 MB of lines per second.

    After other processes have freed their memory, the next model gets the card.
    """
    gpu.settings.cards[0].others_bytes = 80 * GIB

    text, limit = gpu.run(refusal_and_limit)

    assert "other processes hold the memory of NVIDIA H100 80GB HBM3: 0 bytes are free" in text
    assert limit == 72 * GIB
    assert not gpu.calls("no-room")

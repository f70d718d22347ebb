"""From the host to the device, without a runtime: the speed of the product's way beside the fastest one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from rsrv.runtime.allocation import aligned_copy
from rsrv.runtime.device import Array, Device, Executable
from rsrv.runtime.jax_device import JaxDevice
from tests.bench.gpu.raw import raw

#: The ways, in the order of the table.
LIMIT, LOCKED, PAGEABLE, PINNED = "limit", "page-locked", "pageable", "pinned_host"
BUSY, LIMIT_BUSY = "page-locked, busy", "limit, busy"


@dataclass(frozen=True)
class Rate:
    """Bytes per second over some rounds."""

    way: str
    tensors: int
    nbytes: int
    best: float
    median: float


def measure(device: JaxDevice, nbytes: int, tensors: int, rounds: int) -> list[Rate]:
    """Measure every way with the same `nbytes` in so many tensors.

    Raises AssertionError if a tensor arrives wrong.
    """
    memory = aligned_copy(np.arange(nbytes // 4, dtype=np.uint32))
    arrays = _slices(memory, tensors)

    def rate(way: str, move: Callable[[], float]) -> Rate:
        move()  # The first one allocates.
        seconds = [move() for _ in range(rounds)]
        total = sum(array.nbytes for array in arrays)
        return Rate(way, tensors, nbytes, total / min(seconds), total / median(seconds))

    def upload() -> float:
        started = time.perf_counter()
        buffers = device.upload(arrays)
        seconds = time.perf_counter() - started
        device.free(buffers)
        return seconds

    _check(device, arrays)
    rates = [rate(PAGEABLE, upload)]
    unlock = device.page_lock(memory.ctypes.data, memory.nbytes)
    try:
        _check(device, arrays)
        rates.append(rate(LOCKED, upload))
        with _executing(device):
            rates.append(rate(BUSY, upload))
        with raw(arrays) as own:
            rates.append(rate(LIMIT, own.copy))
            with _executing(device):
                rates.append(rate(LIMIT_BUSY, own.copy))
    finally:
        unlock()
    try:
        rates.append(rate(PINNED, _pinned(arrays)))
    except Exception as error:  # noqa: BLE001 - not every client has it, and the product does not use it
        print(f"{PINNED}: {type(error).__name__}: {error}")
    return rates


def _slices(memory: Array, tensors: int) -> list[Array]:
    """Return equal parts at multiples of 64 bytes, as weights lie in the host tier."""
    step = len(memory) // tensors // 16 * 16
    return [memory[i * step : (i + 1) * step] for i in range(tensors)]


def _check(device: Device, arrays: Sequence[Array]) -> None:
    buffers = device.upload(arrays)
    for array, buffer in zip(arrays, buffers, strict=True):
        assert np.array_equal(np.asarray(buffer), array), "a tensor arrived with other contents"
    device.free(buffers)


@contextmanager
def _executing(device: JaxDevice) -> Iterator[None]:
    """Keep two executions of some milliseconds on the device at a time."""
    size = 128 if jax.devices()[0].platform == "cpu" else 4096

    def compute(m: Any) -> Any:
        return jax.lax.fori_loop(0, 8, lambda _, x: x @ m, m)

    struct: Any = jax.ShapeDtypeStruct
    compiled = jax.jit(lambda m: (compute(m)[:1, :1],)).lower(struct((size, size), np.float32)).compile()
    buffers = device.upload([np.eye(size, dtype=np.float32)])
    stop = threading.Event()

    def execute() -> None:
        launched = [device.launch(Executable(compiled), buffers, ())]
        while not stop.is_set():
            launched.append(device.launch(Executable(compiled), buffers, ()))
            device.read(launched.pop(0))
        device.read(launched.pop())

    thread = threading.Thread(target=execute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        device.free(buffers)


def _pinned(arrays: Sequence[Array]) -> Callable[[], float]:
    """Return jax's own page-locked memory, for comparison: a copy of the weights that only jax can hold."""
    device = jax.devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    sources = jax.block_until_ready([jax.device_put(array, sharding) for array in arrays])
    target = jax.sharding.SingleDeviceSharding(device, memory_kind="device")

    def move() -> float:
        started = time.perf_counter()
        buffers = jax.block_until_ready([jax.device_put(source, target) for source in sources])
        seconds = time.perf_counter() - started
        for buffer in buffers:
            buffer.delete()
        return seconds

    return move


@dataclass(frozen=True)
class Scratch:
    """Memory of an execution beside its weights: by the compiler, and by the rise of the peak (None: unknown)."""

    said: int
    seen: int | None


def measure_scratch(device: JaxDevice, elements: int) -> Scratch:
    """Measure a program with intermediates as large as its input, which the compiler cannot remove.

    Only the first such measurement in a process is valid, because the allocator's peak never falls.
    """

    def compute(w: Any, x: Any) -> tuple[Any, ...]:
        y = (x + w).reshape(len(x) // 1024, 1024)
        return (jax.lax.sort(y @ (y.T @ y) + y),)

    struct: Any = jax.ShapeDtypeStruct
    shape = struct((elements,), np.float32)
    compiled = Executable(jax.jit(compute).lower(shape, shape).compile())
    said = device.scratch_bytes(compiled, 4 * elements)
    before = _figure("peak_bytes_in_use")
    weights = device.upload([np.ones(elements, np.float32)])
    held = _figure("bytes_in_use")
    device.read(device.launch(compiled, weights, [np.ones(elements, np.float32)]))
    after = _figure("peak_bytes_in_use")
    device.free(weights)
    if before is None or after is None or held is None or after == before:
        return Scratch(said, None)
    return Scratch(said, after - held)


def _figure(name: str) -> int | None:
    """Return a figure of jax's allocator."""
    figures = jax.devices()[0].memory_stats() or {}
    figure: int | None = figures.get(name)
    return figure


def describe() -> dict[str, str]:
    """Return the measured device and software."""
    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}

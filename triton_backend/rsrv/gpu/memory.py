"""Parts `budget` and `out-of-memory`: how much memory jax's allocator has, how much tensors can fill, and what happens then."""

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pynvml

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.runtime.device import Buffer, DeviceError, OutOfMemory, run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.text import amount, duration, percent
from rsrv_bundle.precision import product

#: Bytes of the largest and of the smallest tensor with which `_fill` fills the device.
_LARGEST, _SMALLEST = 1 << 30, 1 << 20
#: Tensors must fill at least this share of the allocator's limit.
_SHARE = 0.98
#: Maximum number of seconds until a refusal. XLA's allocator alone would wait for ten seconds.
_REFUSAL_S = 2.0
_SIDE = 1024
_NO_LIMIT = "a CPU has no allocator with a limit"


def budget(part_input: PartInput, tell: Tell) -> None:
    """Compare the limit of jax's allocator with the free memory that NVML reports, and with the bytes that tensors can fill."""
    if part_input.on_cpu:
        tell(Finding("memory", "NOT RUN", reason=_NO_LIMIT))
        return
    free, total = card_memory()
    device = JaxDevice(part_input.device.platform)
    limit = device.memory_limit
    if limit is None:
        tell(Finding("bytes_limit", "FAIL", reason="jax does not say how much memory its allocator may take"))
        return
    tell(
        check(
            "NVML's free memory",
            free >= limit,
            f"{amount(free)} of {amount(total)}",
            f"at least the allocator's {amount(limit)} (runtime.memory_fraction of the card); else other processes hold it",
            {"free": free, "total": total, "bytes_limit": limit},
        )
    )
    left, _ = card_memory()
    outside = free - left - limit
    tell(
        Finding(
            "outside of the allocator",
            "MEASURED",
            amount(max(0, outside)),
            "taken by libraries when the device starts, in addition to the CUDA context",
            {"bytes": outside},
        )
    )
    buffers, filled = _fill(device, limit)
    device.free(buffers)
    value = f"{amount(filled)}, {percent(filled / limit)} of bytes_limit"
    tell(
        check(
            "tensors that fit",
            filled >= _SHARE * limit,
            value,
            f"at least {percent(_SHARE)}",
            {"bytes": filled},
        )
    )


def out_of_memory(part_input: PartInput, tell: Tell) -> None:
    """Fill the device, load and execute beyond that, and check that the device works once memory is free again."""
    device = JaxDevice(part_input.device.platform)
    limit = device.memory_limit
    if limit is None:
        tell(Finding("memory", "NOT RUN", reason=_NO_LIMIT))
        return
    executable = device.compile(*product(_SIDE))
    matrix = device.upload([np.eye(_SIDE, dtype=np.float32)])
    buffers, first = _fill(device, limit)
    tell(_refusal("a load beyond the memory", lambda: device.upload([np.zeros(_SIDE * _SIDE * 8, np.uint8)])))
    tell(
        _refusal("an execution beyond the memory", lambda: device.launch(executable, [], [*matrix, *matrix]))
    )
    device.free(buffers)
    pattern = np.arange(_SIDE * _SIDE, dtype=np.float32)
    (buffer,) = device.upload([pattern])
    same = np.array_equal(np.asarray(buffer), pattern)
    device.free([buffer])
    tell(
        check(
            "a load after that", same, "contents compared", "the device continues when memory is free again"
        )
    )
    run(device, executable, [], [pattern.reshape(_SIDE, _SIDE)] * 2)
    tell(check("an execution after that", True, "done", "the device continues when memory is free again"))
    buffers, again = _fill(device, limit)
    device.free(buffers)
    value = f"{percent(again / first)} of the first time"
    tell(check("the memory after that", again >= _SHARE * first, value, "nothing is lost", {"bytes": again}))


def _fill(device: JaxDevice, limit: int) -> tuple[Sequence[Buffer], int]:
    """Allocate tensors until less than twice `_SMALLEST` bytes are free. Return the tensors and their number of bytes.

    Each tensor takes at most half of the free bytes. If a free piece were hardly larger than the tensor, XLA's allocator would
    use all of it, and the next allocation would wait for the missing rest.
    """
    zeros = np.zeros(_LARGEST, np.uint8)
    buffers: list[Buffer] = []
    filled = 0
    with suppress(OutOfMemory):  # The caller sees from the filled bytes when memory ran out.
        while (size := min(_LARGEST, (limit - (device.memory_in_use() or 0)) // 2)) >= _SMALLEST:
            buffers += device.upload([zeros[:size]])
            filled += size
    return buffers, filled


def _refusal(title: str, action: Callable[[], object]) -> Finding:
    started = time.perf_counter()
    try:
        action()
    except OutOfMemory as error:
        took = time.perf_counter() - started
        limit = f"within {duration(_REFUSAL_S)}: {error}"
        return check(title, took < _REFUSAL_S, f"refused after {duration(took)}", limit, {"seconds": took})
    return check(
        title, False, "not refused", "the device was full", {"seconds": time.perf_counter() - started}
    )


def card_memory() -> tuple[int, int]:
    """Return the free and the total bytes of the first card that CUDA sees."""
    with nvml_card() as card:
        memory = pynvml.nvmlDeviceGetMemoryInfo(card)
    return int(memory.free), int(memory.total)


@contextmanager
def nvml_card() -> Iterator[Any]:
    """Yield NVML's handle of the first card that CUDA sees. This creates no context on the card."""
    cuda, device, bus = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.create_string_buffer(32)
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetPCIBusId(bus, len(bus), device)
    ):
        raise DeviceError("CUDA's driver has no card for this process")
    pynvml.nvmlInit()
    try:
        yield pynvml.nvmlDeviceGetHandleByPciBusId(bus.value)
    finally:
        pynvml.nvmlShutdown()

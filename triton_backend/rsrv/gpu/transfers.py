"""Parts `bandwidth` and `overlap`: transfers between host and device, alone and during executions."""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import numpy as np

from rsrv.gpu.report import Finding, PartInput, Tell, check
from rsrv.runtime.allocation import aligned_copy
from rsrv.runtime.cuda import Driver, MemoryShare
from rsrv.runtime.device import Array, Buffer, Executable, Launched
from rsrv.runtime.jax_device import JaxDevice
from rsrv.text import amount, duration, percent
from rsrv_bundle.precision import product

_TENSORS = 16
#: Minimum rate of loading weights from page-locked memory, as a share of the driver's own rate. XLA's staging would halve the
#: rate, so rsrv turns it off.
_SHARE = 0.5


def bandwidth(part_input: PartInput, tell: Tell) -> None:
    """Measure the rates of loading weights and of reading outputs, with the same number of bytes.

    On CUDA, also measure the copies of the driver alone.
    """
    device = JaxDevice(part_input.device.platform, memory=MemoryShare(preallocate=False))
    memory = aligned_copy(np.arange(part_input.amounts.transfer // 4, dtype=np.uint32))
    arrays = np.split(memory[: len(memory) // _TENSORS // 16 * _TENSORS * 16], _TENSORS)
    nbytes = sum(array.nbytes for array in arrays)

    def measure(title: str, move: Callable[[], float], reason: str = "") -> float:
        move()  # The first move allocates memory.
        rate = nbytes / median(move() for _ in range(part_input.amounts.rounds))
        tell(Finding(title, "MEASURED", f"{amount(rate)}/s", reason, {"bytes_per_s": rate}))
        return rate

    def read() -> float:
        buffers = device.upload(arrays)
        started = time.perf_counter()
        copies = [np.asarray(buffer) for buffer in buffers]
        seconds = time.perf_counter() - started
        if not all(map(np.array_equal, copies, arrays)):
            raise ValueError("a tensor came back from the device with other contents")
        del copies
        device.free(buffers)
        return seconds

    reason = f"{_TENSORS} tensors, {amount(nbytes)}"
    measure("weights to the device, pageable", lambda: _upload(device, arrays), reason)
    with _page_locked(device, memory):
        locked = measure("weights to the device, page-locked", lambda: _upload(device, arrays), reason)
    measure("outputs from the device", read, "contents compared; XLA allocates the host's memory")
    if part_input.on_cpu:
        tell(Finding("the driver's own copies", "NOT RUN", reason="a CPU has no driver"))
        return
    driver = Driver(0)
    locked_memory = _page_locked(driver, memory, written=True)
    for kind, locking in (("pageable", nullcontext()), ("page-locked", locked_memory)):
        with locking:
            limit = measure(f"driver to the device, {kind}", lambda: _copy(driver, memory, "cuMemcpyHtoD_v2"))
            measure(f"driver from the device, {kind}", lambda: _copy(driver, memory, "cuMemcpyDtoH_v2"))
    share = locked / limit
    title = "page-locked weights compared to the driver's own rate"
    tell(check(title, share >= _SHARE, percent(share), f"at least {percent(_SHARE)}: no copy on the way"))


def overlap(part_input: PartInput, tell: Tell) -> None:
    """Measure how a second launch overlaps with an execution, and a load of weights with executions."""
    device = JaxDevice(part_input.device.platform)
    execute = _Products(device, part_input.amounts.side)
    execute.once()
    alone = median(execute.once() for _ in range(part_input.amounts.rounds))
    title = "a second launch during an execution"
    if device.asynchronous:
        started = time.perf_counter()
        launched = [execute.launch(), execute.launch()]
        submitted = time.perf_counter() - started
        for execution in launched:
            device.read(execution)
        both = time.perf_counter() - started
        value = f"both launched in {duration(submitted)}, both done in {duration(both)}"
        figures = {"submit_s": submitted, "both_s": both, "one_s": alone}
        limit = f"launched in less than half of one execution, {duration(alone)}"
        tell(check(title, submitted < alone / 2, value, limit, figures))
    else:
        tell(Finding(title, "NOT RUN", reason="a CPU executes within the launch"))
    memory = aligned_copy(np.ones(part_input.amounts.transfer, np.uint8))
    arrays = np.split(memory[: len(memory) // _TENSORS * _TENSORS], _TENSORS)
    with _page_locked(device, memory):
        _upload(device, arrays)
        idle = median(_upload(device, arrays) for _ in range(part_input.amounts.rounds))
        with execute.all_the_time() as seconds:
            busy = median(_upload(device, arrays) for _ in range(part_input.amounts.rounds))
    beside = median(seconds)
    tell(
        Finding(
            "a load during executions",
            "MEASURED",
            f"{percent(idle / busy)} of the idle rate",
            f"{duration(idle)} idle, {duration(busy)} during executions of {duration(alone)}",
            {"idle_s": idle, "busy_s": busy},
        )
    )
    value, reason = (
        f"{beside / alone:.2f} times as long",
        f"{duration(alone)} alone, {duration(beside)} during loads",
    )
    figures = {"alone_s": alone, "beside_s": beside}
    tell(Finding("executions during a load", "MEASURED", value, reason, figures))


class _Products:
    """Repeated executions of one product of matrices. The matrices are on the device."""

    def __init__(self, device: JaxDevice, side: int) -> None:
        self._device = device
        self._executable: Executable = device.compile(*product(side))
        self._matrix: Buffer = device.upload([np.eye(side, dtype=np.float32)])[0]

    def launch(self) -> Launched:
        """Launch one execution. Its result stays on the device, so that no transfer counts."""
        return self._device.launch(self._executable, [], [self._matrix, self._matrix], unread=(0,))

    def once(self) -> float:
        """Return the seconds of one execution, including its launch."""
        started = time.perf_counter()
        self._device.read(self.launch())
        return time.perf_counter() - started

    @contextmanager
    def all_the_time(self) -> Iterator[list[float]]:
        """Always have two executions on the device until the block ends. Yield a list that collects their seconds."""
        stop, seconds = threading.Event(), [self.once()]

        def work() -> None:
            waiting = [self.launch()]
            while not stop.is_set():
                waiting.append(self.launch())
                seconds.append(self._device.read(waiting.pop(0))[1])
            self._device.read(waiting.pop())

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield seconds
        finally:
            stop.set()
            thread.join()


def _upload(device: JaxDevice, arrays: Sequence[Array]) -> float:
    started = time.perf_counter()
    buffers = device.upload(arrays)
    seconds = time.perf_counter() - started
    device.free(buffers)
    return seconds


@contextmanager
def _page_locked(device: JaxDevice | Driver, memory: Array, *, written: bool = False) -> Iterator[None]:
    unlock = device.page_lock(memory.ctypes.data, memory.nbytes, written=written)
    try:
        yield
    finally:
        unlock()


def _copy(driver: Driver, memory: Array, function: str) -> float:
    """Copy between `memory` and memory of the device, with a function of the driver. Return the seconds."""
    target, nbytes = ctypes.c_uint64(), ctypes.c_size_t(memory.nbytes)
    host: Any = ctypes.c_void_p(memory.ctypes.data)
    with driver.current():
        driver.call("cuMemAlloc_v2", ctypes.byref(target), nbytes)
        try:
            started = time.perf_counter()
            driver.call(function, *((target, host) if "HtoD" in function else (host, target)), nbytes)
            return time.perf_counter() - started
        finally:
            driver.call("cuMemFree_v2", target)

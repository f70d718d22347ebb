"""Memory of jax's device: the part of it that this process has, and whether an allocation finds room."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from rsrv.limits import spare_memory
from rsrv.runtime.allocation import prepare_heap, restore_heap
from rsrv.runtime.cuda import Driver
from rsrv.runtime.device import Array, DeviceError, OutOfMemory
from rsrv.runtime.free_pieces import FreePieces, rounded

log = logging.getLogger(__name__)

#: Seconds after which the memory of freed buffers is free. XLA's client frees it on its own thread.
_FREEING_S = 0.2
#: Seconds after which the driver has freed the memory of a process that has ended.
RELEASE_S = 10.0
#: Bytes that are prepared in the heap in addition to the allocator's table, because other allocations take some of them.
_HEAP_REST = 64 << 20
#: A device with fewer free bytes can serve nothing.
_LEAST_BYTES = 64 << 20


class DeviceMemory:
    """Memory of one device of jax. The memory of a CPU is not limited here."""

    def __init__(self, device: Any, name: str, driver: Driver | None, *, preallocates: bool) -> None:
        """`device` is jax's device, and `name` its name for operators. `driver`: None for a CPU.

        `preallocates`: True if jax's allocator takes all its memory with the first allocation.
        """
        self._device = device
        self._name = name
        self._driver = driver
        self._preallocates = preallocates
        #: Bytes that jax's allocator may take in total. None: unknown, or not claimed yet.
        self.limit: int | None = None
        #: False while another process may hold the device's memory.
        self.claimed = driver is None
        #: Free pieces of the allocator's memory. None: they are not known.
        self._pieces: FreePieces | None = None
        self._has_prepared_heap = False

    def prepare_claim(self) -> None:
        """Make `claim` faster, at the cost of host memory until `claim` ends.

        jax's allocator writes a table of 8 bytes for each 256 bytes of its memory: 2.3 GB for 72 GiB. The allocator spends most
        of its time on getting the pages for this table.
        """
        nbytes = (self._figure("bytes_limit") or 0) // 32 + _HEAP_REST
        if self._preallocates and spare_memory() > 2 * nbytes:
            self._has_prepared_heap = True
            prepare_heap(nbytes)

    def claim(self, put: Callable[[Array], Any]) -> None:
        """Take the memory once the previous process has ended. `put` copies an array to the device. Raises DeviceError."""
        try:
            self.limit = self._measure_limit(put)
        finally:
            if self._has_prepared_heap:
                self._has_prepared_heap = False
                restore_heap()
        self.claimed = True

    def _measure_limit(self, put: Callable[[Array], Any]) -> int | None:
        """Return the bytes that jax's allocator may take. If the allocator preallocates, make it take them now.

        If other processes hold too much of the card, the allocator takes less than `bytes_limit`, and never takes more later.
        So wait first, because the driver may still be freeing the memory of a runtime that crashed. Raises DeviceError.
        """
        limit = self._figure("bytes_limit")
        if limit is None or self._driver is None:
            return None
        self._wait_for_others(self._driver, limit)
        first = put(np.zeros(1, np.uint8))
        pool = self._figure("pool_bytes") or limit
        if self._preallocates and self._figure("num_allocs") == 1:
            self._pieces = FreePieces(first.unsafe_buffer_pointer(), pool)
        if not self._preallocates or pool >= limit:
            return limit
        log.warning(
            "other processes hold memory of the device: jax's allocator got %d of the %d bytes of "
            "runtime.memory_fraction, and only these are used. End the other processes and restart the server, "
            "or lower runtime.memory_fraction",
            pool,
            limit,
        )
        return pool

    def _wait_for_others(self, driver: Driver, limit: int) -> None:
        """Wait until other processes leave enough of a card's memory, or until a time limit. Raises DeviceError."""
        deadline, full_until = time.monotonic() + RELEASE_S, _full_until()
        enough = limit if self._preallocates else _LEAST_BYTES
        while (free := driver.free_bytes()) < enough:
            if time.monotonic() >= (full_until if free < _LEAST_BYTES else deadline):
                break
            time.sleep(RELEASE_S / 500)
        if free < _LEAST_BYTES:
            # XLA would ask for the memory again and again, and write a line to the log each time: 5 MB per second.
            raise DeviceError(
                f"other processes hold the memory of {self._name}: {free} bytes are free, and {_LEAST_BYTES} are needed. "
                "End them (nvidia-smi lists them), or leave the GPU out of runtime.devices"
            )

    def require(self, sizes: Sequence[int]) -> None:
        """Raise OutOfMemory if jax's allocator has no room for allocations of these sizes, in bytes.

        The allocator itself would wait for room for ten seconds before it fails.
        """
        if self.limit is None:
            return
        needed = sum(map(rounded, sizes))
        deadline = time.monotonic() + _FREEING_S
        while needed > (free := self.limit - (self.in_use() or 0)):
            if time.monotonic() > deadline:
                raise OutOfMemory(f"{needed} bytes are needed, and {free} of {self.limit} are free")
            time.sleep(_FREEING_S / 100)
        if self._pieces is not None and not self._pieces.fits(sizes):
            raise OutOfMemory(
                f"{needed} bytes are needed, and {free} of {self.limit} are free, but in pieces that are too small"
            )

    def note(self, key: int, array: Any) -> None:
        """Record an array of jax that stays on the device, under a key of the caller."""
        if self._pieces is not None:
            self._pieces.add(key, array.unsafe_buffer_pointer(), array.nbytes)

    def forget(self, key: int) -> None:
        """Forget an array that is freed. Unknown keys are ignored."""
        if self._pieces is not None:
            self._pieces.remove(key)

    def in_use(self) -> int | None:
        return self._figure("bytes_in_use")

    def largest_free(self) -> int | None:
        return None if self._pieces is None else self._pieces.largest

    def _figure(self, name: str) -> int | None:
        figures: dict[str, int] | None = self._device.memory_stats()
        return None if figures is None else figures.get(name)


@cache
def _full_until() -> float:
    """Return the time until which this process waits for a full card.

    It is computed once per process. Otherwise, each model's load would wait as long again.
    """
    return time.monotonic() + RELEASE_S

"""Without jax's client: the driver's own copies to its own memory, the limit for the product's way."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import jax
import numpy as np

from rsrv.runtime.allocation import aligned_copy
from rsrv.runtime.cuda import Driver
from rsrv.runtime.device import Array

#: Alignment in bytes of tensors in memory that XLA is given.
_ALIGNMENT = 256
_STREAM_NON_BLOCKING = 1  # Waits for no other stream.


class Raw(Protocol):
    """Memory of its own for some arrays."""

    def copy(self) -> float:
        """Copy all arrays there, and return the seconds."""


class _Memcpy:
    """On a CPU: to memory that exists already."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        places, nbytes = _places(arrays)
        self._memory = aligned_copy(np.zeros(nbytes, np.uint8))
        self._targets = [self._memory[at : at + a.nbytes] for at, a in zip(places, arrays, strict=True)]

    def copy(self) -> float:
        started = time.perf_counter()
        for target, array in zip(self._targets, self._arrays, strict=True):
            target[:] = array.view(np.uint8)
        return time.perf_counter() - started


class _Copies:
    """On CUDA: from page-locked memory, on a stream of its own."""

    def __init__(self, driver: Driver, arrays: Sequence[Array]) -> None:
        self._driver = driver
        places, nbytes = _places(arrays)
        self._memory, self._stream = ctypes.c_uint64(), ctypes.c_void_p()
        driver.call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(nbytes))
        driver.call("cuStreamCreate", ctypes.byref(self._stream), _STREAM_NON_BLOCKING)
        self._copies = [
            (
                ctypes.c_uint64(self._memory.value + at),
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_size_t(array.nbytes),
            )
            for at, array in zip(places, arrays, strict=True)
        ]

    def copy(self) -> float:
        started = time.perf_counter()
        for copy in self._copies:
            self._driver.call("cuMemcpyHtoDAsync_v2", *copy, self._stream)
        self._driver.call("cuStreamSynchronize", self._stream)
        return time.perf_counter() - started

    def close(self) -> None:
        self._driver.call("cuStreamDestroy_v2", self._stream)
        self._driver.call("cuMemFree_v2", self._memory)


@contextmanager
def raw(arrays: Sequence[Array]) -> Iterator[Raw]:
    """Return the copier for jax's first device, for one thread."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        yield _Memcpy(arrays)
        return
    driver = Driver(device.local_hardware_id)
    with driver.current():
        copies = _Copies(driver, arrays)
        try:
            yield copies
        finally:
            copies.close()


def _places(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Return successive offsets, and the bytes of all."""
    places, at = [], 0
    for array in arrays:
        places.append(at)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, at

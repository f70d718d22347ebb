"""Without jax's client: copies of the driver's own to memory of its own, and jax arrays around that memory.

The copies are the limit that the product's way is measured against. The arrays say whether another way is open:
weights in memory that XLA's allocator knows nothing of, whose transfers need not wait for executions.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np

from rsrv.runtime.aligned import aligned_copy
from rsrv.runtime.cuda import Driver
from rsrv.runtime.device import Array

#: bytes; where tensors may start in memory that XLA is given
_ALIGNMENT = 256
_CPU, _CUDA = 1, 2  # DLPack's types of device
_STREAM_NON_BLOCKING = 1  # waits for no other stream


class Raw(Protocol):
    """Memory of its own for some arrays, each at `addresses`."""

    addresses: list[int]

    def copy(self) -> float:
        """Bring all arrays there; the seconds that it took."""


class _Memcpy:
    """On a CPU: to memory that is there already."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        places, nbytes = _places(arrays)
        self._memory = aligned_copy(np.zeros(nbytes, np.uint8))
        self._targets = [self._memory[at : at + a.nbytes] for at, a in zip(places, arrays, strict=True)]
        self.addresses = [target.ctypes.data for target in self._targets]

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
        self.addresses = [self._memory.value + at for at in places]
        self._copies = [
            (ctypes.c_uint64(to), ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes))
            for to, array in zip(self.addresses, arrays, strict=True)
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
    """For jax's first device. One thread may use it."""
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
    """Offsets one behind the other, and the bytes of all."""
    places, at = [], 0
    for array in arrays:
        places.append(at)
        at += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, at


class _Tensor(ctypes.Structure):
    """dlpack.h, version 0.x: DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
#: what jax calls with the structure when it drops the tensor, on any thread: no Python may run there
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


class Around:
    """`nbytes` of device memory at `address`, as bytes, for `jax.dlpack.from_dlpack`. Owns nothing."""

    def __init__(self, address: int, nbytes: int) -> None:
        device = jax.devices()[0]
        self._place = address, nbytes
        self._device = _CPU if device.platform == "cpu" else _CUDA, device.local_hardware_id or 0

    def __dlpack__(self, **_: object) -> Any:
        """One that the consumer frees."""
        address, nbytes = self._place
        block = _libc.malloc(ctypes.sizeof(_Tensor) + 8)
        extent = ctypes.c_int64.from_address(block + ctypes.sizeof(_Tensor))
        extent.value = nbytes
        unsigned, bits, lanes = 1, 8, 1
        tensor = _Tensor.from_address(block)
        tensor.data, tensor.byte_offset = address, 0
        tensor.device_type, tensor.device_id = self._device
        tensor.code, tensor.bits, tensor.lanes = unsigned, bits, lanes
        tensor.ndim, tensor.shape, tensor.strides = 1, ctypes.pointer(extent), None
        tensor.manager_ctx, tensor.deleter = None, _FREE
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(block, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def computes_with(memory: Raw, arrays: Sequence[Array]) -> str:
    """Whether an executable gives the right answer on arrays around the memory: "yes", or what jax says."""
    memory.copy()
    function = jax.jit(lambda *tensors: [tensor.astype(np.uint64).sum() for tensor in tensors])
    try:
        around = [Around(at, a.nbytes) for at, a in zip(memory.addresses, arrays, strict=True)]
        tensors = [jax.dlpack.from_dlpack(one) for one in around]
        in_place = [t.unsafe_buffer_pointer() for t in tensors] == memory.addresses
        sums = [int(total) for total in function(*tensors)]
        del tensors
    except Exception as error:  # noqa: BLE001 - it is the answer
        return f"{type(error).__name__}: {error}"
    if sums != [int(array.view(np.uint8).sum(dtype=np.uint64)) for array in arrays]:
        return "no: the answer is wrong"
    return "yes" if in_place else "no: jax copies it"

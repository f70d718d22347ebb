"""Device memory for weights from CUDA's driver, with a separate stream, as DLPack tensors.

XLA's client makes every transfer wait for the executions launched before it, and has one stream for all transfers, so
inputs queue up behind weights (docs/scheduler.md). Transfers of this module do neither.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.runtime.cuda import CudaError, Driver

_STREAM_NON_BLOCKING = 1  # waits for no other stream
_EVENT_BLOCKING, _EVENT_WITHOUT_TIMING = 1, 2
_RELEASE_THRESHOLD = 4  # CU_MEMPOOL_ATTR_RELEASE_THRESHOLD

#: dlpack.h: device types, and codes of types by numpy's names
CPU, CUDA = 1, 2
_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5, "bool": 6}


class _ManagedTensor(ctypes.Structure):
    """dlpack.h, version 0.x: DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
#: the consumer calls it with the structure when it drops the tensor, on any thread, where no Python may run
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True, slots=True)
class Around:
    """Row-major tensor in memory at `address`, for `jax.dlpack.from_dlpack`. Its maker frees the memory."""

    address: int
    shape: Sequence[int]
    dtype: np.dtype[Any]
    #: (type, ordinal)
    device: tuple[int, int]

    def __dlpack__(self, **_: object) -> Any:
        ndim = len(self.shape)
        block = _libc.malloc(ctypes.sizeof(_ManagedTensor) + 8 * ndim)
        if not block:
            raise MemoryError("the host has no memory for the description of a tensor")
        extents = block + ctypes.sizeof(_ManagedTensor)
        (ctypes.c_int64 * ndim).from_address(extents)[:] = list(self.shape)
        tensor = _ManagedTensor.from_address(block)
        tensor.data, tensor.byte_offset = self.address, 0
        tensor.device_type, tensor.device_id = self.device
        tensor.code, tensor.bits, tensor.lanes = _CODES[_kind(self.dtype)], 8 * self.dtype.itemsize, 1
        tensor.ndim, tensor.shape, tensor.strides = ndim, extents, None
        tensor.manager_ctx, tensor.deleter = None, _FREE
        return _new_capsule(block, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def _kind(dtype: np.dtype[Any]) -> str:
    return dtype.name.rstrip("0123456789")


@dataclass(frozen=True, slots=True)
class Moving:
    """Transfer of a tensor in flight."""

    array: npt.NDArray[Any]
    address: int
    event: ctypes.c_void_p


class WeightMemory:
    """Driver's memory of weights. Every method may be called from any thread. `device_type` differs only in tests."""

    def __init__(self, driver: Driver, device_type: int = CUDA) -> None:
        self._driver = driver
        self._device = device_type, driver.ordinal
        self._stream = ctypes.c_void_p()
        self._lock = Lock()
        #: address -> bytes
        self._taken: dict[int, int] = {}
        self._pool, everything = ctypes.c_void_p(), ctypes.c_uint64(-1)
        with driver.current():
            driver.call("cuStreamCreate", ctypes.byref(self._stream), _STREAM_NON_BLOCKING)
            driver.call("cuDeviceGetDefaultMemPool", ctypes.byref(self._pool), driver.device)
            # Keep freed memory for the next model: otherwise each load waits for the driver to map memory.
            driver.call("cuMemPoolSetAttribute", self._pool, _RELEASE_THRESHOLD, ctypes.byref(everything))

    @property
    def in_use(self) -> int:
        """Allocated bytes."""
        with self._lock:
            return sum(self._taken.values())

    @staticmethod
    def takes(array: npt.NDArray[Any]) -> bool:
        """Return whether the array is not empty, and of a type that DLPack and jax support."""
        return array.nbytes > 0 and _kind(array.dtype) in _CODES

    def start(self, array: npt.NDArray[Any]) -> Moving:
        """Allocate memory and enqueue the copy. The array must stay until `finish`."""
        source = np.asarray(array, order="C")
        address, event = ctypes.c_uint64(), ctypes.c_void_p()
        nbytes = ctypes.c_size_t(source.nbytes)
        call = self._driver.call
        with self._driver.current():
            call("cuMemAllocAsync", ctypes.byref(address), nbytes, self._stream)
            with self._lock:
                self._taken[address.value] = source.nbytes
            try:
                call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING | _EVENT_WITHOUT_TIMING)
                from_host = ctypes.c_void_p(source.ctypes.data)
                call("cuMemcpyHtoDAsync_v2", address, from_host, nbytes, self._stream)
                call("cuEventRecord", event, self._stream)
            except CudaError:
                # The copy may be in flight, and reads an array that the caller drops next.
                with suppress(CudaError):
                    call("cuStreamSynchronize", self._stream)
                with suppress(CudaError):
                    self.free(address.value)
                raise
        return Moving(source, address.value, event)

    def finish(self, moving: Moving) -> Around:
        """Wait until the transfer is complete, and return the tensor."""
        with self._driver.current():
            try:
                self._driver.call("cuEventSynchronize", moving.event)
            finally:
                self._driver.call("cuEventDestroy_v2", moving.event)
        return Around(moving.address, moving.array.shape, moving.array.dtype, self._device)

    def free(self, address: int) -> bool:
        """Free the tensor at an address that no execution uses; return False if it is not of this memory."""
        with self._lock:
            if self._taken.pop(address, None) is None:
                return False
        with self._driver.current():
            self._driver.call("cuMemFreeAsync", ctypes.c_uint64(address), self._stream)
        return True

    def trim(self) -> None:
        """Return memory that was freed and is kept for the next load to the driver."""
        with self._driver.current():
            # Wait for the frees that are still enqueued.
            self._driver.call("cuStreamSynchronize", self._stream)
            self._driver.call("cuMemPoolTrimTo", self._pool, ctypes.c_size_t(0))

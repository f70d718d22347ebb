"""DLPack capsules by hand: the way in and out of Triton for what its numpy bridge cannot do.

Triton's Python backend gives BF16 only as DLPack, and the stub of release 24.10 corrupts every tensor when
numpy is version 2. A capsule that is built and read here works in each of these cases, at some tens of
microseconds each. Structures and codes: dlpack.h, version 0.x ("dltensor" capsules).
"""

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

_KDLCPU = 1
_NAME = b"dltensor"

#: token -> (DLPack type code, bits). Codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
_TYPES = {
    "bool": (6, 8),
    "i8": (0, 8), "i16": (0, 16), "i32": (0, 32), "i64": (0, 64),
    "u8": (1, 8), "u16": (1, 16), "u32": (1, 32), "u64": (1, 64),
    "f16": (2, 16), "f32": (2, 32), "f64": (2, 64), "bf16": (4, 16),
}  # fmt: skip
_TOKENS = {code_and_bits: token for token, code_and_bits in _TYPES.items()}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
# The consumer frees the structure with C's free(): no Python runs when Triton drops a tensor.
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


def make_capsule(address: int, dtype: str, shape: Sequence[int]) -> Any:
    """A capsule that owns a copy of the elements at `address`: nobody knows when Triton reads them."""
    ndim = len(shape)
    code, bits = _TYPES[dtype]
    nbytes = prod(shape) * bits // 8
    data_at = ctypes.sizeof(_DLManagedTensor) + 8 * max(ndim, 1)
    block = _libc.malloc(data_at + max(nbytes, 1))
    if not block:
        raise MemoryError(f"no memory for a tensor of {nbytes} bytes")
    ctypes.memmove(block + data_at, address, nbytes)
    extents = (ctypes.c_int64 * max(ndim, 1)).from_address(block + ctypes.sizeof(_DLManagedTensor))
    extents[:ndim] = list(shape)
    managed = _DLManagedTensor.from_address(block)
    managed.tensor.data = block + data_at
    managed.tensor.device_type = _KDLCPU
    managed.tensor.device_id = 0
    managed.tensor.ndim = ndim
    managed.tensor.code, managed.tensor.bits, managed.tensor.lanes = code, bits, 1
    managed.tensor.shape = ctypes.cast(extents, ctypes.POINTER(ctypes.c_int64))
    managed.tensor.strides = None
    managed.tensor.byte_offset = 0
    managed.manager_ctx = None
    managed.deleter = _FREE
    return _new_capsule(block, _NAME, None)


def read_capsule(capsule: Any) -> tuple[int, tuple[int, ...], int, str]:
    """(address, shape, bytes, dtype) of a row-major tensor on the CPU, valid while the capsule's tensor lives.

    Raises ValueError for a tensor elsewhere, with gaps, or of elements that have no token.
    """
    tensor = _DLManagedTensor.from_address(_get_pointer(capsule, _NAME)).tensor
    if tensor.device_type != _KDLCPU:
        raise ValueError(f"a tensor lies on device type {tensor.device_type}, not in host memory")
    dtype = _TOKENS.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise ValueError(
            f"a tensor's elements are of a type unknown here (DLPack {tensor.code}, {tensor.bits} bits)"
        )
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        step = 1
        for axis in reversed(range(tensor.ndim)):
            if shape[axis] != 1 and tensor.strides[axis] != step and prod(shape):
                raise ValueError("a tensor is not row-major")
            step *= shape[axis]
    return (tensor.data or 0) + tensor.byte_offset, shape, prod(shape) * tensor.bits // 8, dtype

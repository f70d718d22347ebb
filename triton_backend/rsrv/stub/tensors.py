"""Conversion of Triton's tensors to numpy and back, by numpy or by DLPack capsules."""

import contextlib
import ctypes
import logging
import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.wire.layout import NUMPY

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

#: Element type of strings, which clients and hooks have but modules do not.
BYTES = "bytes"
#: numpy's dtypes of the tensors of clients and hooks, by token.
CLIENT_DTYPES: Mapping[str, np.dtype[Any]] = {**NUMPY, BYTES: np.dtype(object)}
#: rsrv's types by numpy's types. Types that are sent as uint8 or uint16 bits are left out, because
#: arrays of uint8 and uint16 have the types u8 and u16.
_TOKENS = {dtype: token for token, dtype in NUMPY.items() if token not in ("bf16", "f8_e5m2", "f8_e4m3")}


class BrokenPairing(Exception):
    """Triton and numpy cannot exchange tensors correctly."""


class Tensors:
    """Converts tensors by numpy where that works, and otherwise through hand-made DLPack capsules.

    numpy has no bf16, so bf16 tensors are arrays of their bits (uint16).
    """

    def __init__(self, pb_utils: Any) -> None:
        self._tensor = pb_utils.Tensor
        self._from_dlpack = pb_utils.Tensor.from_dlpack
        self._numpy_works = self._probe(self._by_numpy)
        if not self._numpy_works:
            if not self._probe(self._by_capsule):
                raise BrokenPairing(
                    f"this Triton's Python stub and numpy {np.__version__} exchange no tensors correctly: install "
                    "numpy<2 for the Python that the stubs run in (Triton up to 24.10), or a newer Triton"
                )
            log.warning(
                "numpy %s and this Triton's stub do not work together. rsrv works around it, which costs about 0.1 ms per tensor, "
                "but plain Python models that use this Python return empty tensors with the status OK. Install numpy<2 into %s, "
                "or use Triton 24.11 or later",
                np.__version__,
                sys.prefix,
            )

    @property
    def carries_text(self) -> bool:
        """True if BYTES tensors can be read and made. With numpy 2, a process of Triton 24.10 crashes when it reads one."""
        return self._numpy_works

    def check_text(self) -> None:
        """Raise BrokenPairing if `carries_text` is False."""
        if not self.carries_text:
            raise BrokenPairing(
                f"this Triton's Python stub and numpy {np.__version__} exchange no text: install numpy<2 for the Python that "
                "the stubs run in (Triton up to 24.10), or a newer Triton"
            )

    def read(self, tensor: Any, dtype: str) -> Array:
        """Return the tensor's elements; they are valid while `tensor` is held.

        Strings are returned as objects of type bytes; call `check_text` before. Raises ValueError if the bytes of the tensor
        are not strings in Triton's format.
        """
        if dtype == BYTES:
            try:
                strings: Array = tensor.as_numpy()
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - such as struct.error; it depends on how Triton reads strings
                raise ValueError(f"holds no strings: {error}") from None
            return strings
        if self._numpy_works and dtype != "bf16":
            array: Array = tensor.as_numpy()
            return array
        return _in_place(tensor)

    def take(self, tensor: Any) -> Array:
        """Return a copy of the elements of a tensor of any type. The copy outlives `tensor`.

        For BYTES, Triton's error is raised if this Triton and numpy do not work together.
        """
        if self._numpy_works:
            with contextlib.suppress(Exception):  # An error means that the tensor is bf16.
                array: Array = tensor.as_numpy()  # Triton makes a copy, which outlives the tensor.
                return array
        return _in_place(tensor).copy()

    def make(self, name: str, array: Array, dtype: str | None = None) -> Any:
        """Return a Triton tensor with the elements of `array`. It may refer to `array` until the response is sent.

        Without `dtype`, the type of the elements follows from `array`. Raises ValueError, or Triton's error, for elements that
        cannot be sent.
        """
        if self._numpy_works and dtype != "bf16":
            return self._tensor(name, array)
        if dtype is None:
            dtype = _TOKENS.get(array.dtype)
            if dtype is None:
                raise ValueError(
                    f"elements of {array.dtype} cannot be handed to this Triton from numpy {np.__version__}"
                )
        array = np.ascontiguousarray(array).reshape(array.shape)
        return self._from_dlpack(name, make_capsule(array.ctypes.data, dtype, array.shape))

    # --- self-check of numpy with this Triton -------------------------------------------------------------

    def _by_numpy(self, array: Array) -> tuple[Array, Array]:
        made = self._tensor("probe", array)
        arrived = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _in_place(made).copy(), arrived.as_numpy()

    def _by_capsule(self, array: Array) -> tuple[Array, Array]:
        made = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _in_place(made).copy(), _in_place(made).copy()

    @staticmethod
    def _probe(way: Any) -> bool:
        """Return True if no value changes on the way from an array to a tensor, or from a tensor to an array.

        The array's elements differ, because equal elements would hide the fault.
        """
        array = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
        try:
            out, back = way(array)
        except Exception:
            log.exception("the self-check of tensors failed")
            return False
        return bool(np.array_equal(out, array) and np.array_equal(back, array))


def as_array(value: Any) -> Array:
    """Return the value that a hook made as an array. A list of strings becomes an array of objects.

    numpy's own string types would pad each string to the length of the longest one, and lose zeros at the end.
    """
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if first is not value and isinstance(first, str | bytes):
        return np.array(value, object)
    return np.asarray(value)


def encode_strings(array: Array) -> Array | None:
    """Return an array of strings as objects of type bytes, with text in UTF-8. None: an element is neither bytes nor text.

    Each element has the type bytes itself, and not a subclass. For another object, Triton would send the result of `str()`.
    """
    if array.size and array.dtype.kind not in "SUO":
        return None
    encoded = np.empty(array.size, object)
    for at, value in enumerate(array.flat if array.size else ()):
        if isinstance(value, str):
            try:
                encoded[at] = str.encode(value)
            except UnicodeEncodeError:  # The text contains half of a surrogate pair.
                return None
        elif isinstance(value, bytes):
            encoded[at] = b"".join((value,))
        else:
            return None
    return encoded.reshape(array.shape)


def strings_encoded(array: Array) -> Array:
    """Return `encode_strings` of an array, or the array as it is if an element is neither bytes nor text."""
    strings = encode_strings(array)
    return array if strings is None else strings


def size_of(array: Array) -> int:
    """Return the size of an array in bytes, including its strings."""
    return array.nbytes + (sum(map(len, array.flat)) if array.dtype == object else 0)


def _in_place(tensor: Any) -> Array:
    """Return the tensor's elements in place, valid while `tensor` is held."""
    address, shape, nbytes, dtype = read_capsule(tensor.to_dlpack())
    buffer = memoryview((ctypes.c_char * nbytes).from_address(address)) if nbytes else b""
    return np.frombuffer(buffer, NUMPY[dtype]).reshape(shape)


# --- hand-made DLPack capsules ------------------------------------------------------------------------------
#
# Triton's Python backend gives BF16 only as DLPack, and the stub of release 24.10 corrupts every tensor when numpy is
# version 2. A capsule that is built and read here works in each of these cases, and takes some tens of microseconds.
# Structures and codes: dlpack.h, version 0.x ("dltensor" capsules).

_KDLCPU = 1
_NAME = b"dltensor"

#: DLPack type code and bits, by token. Codes: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool.
_TYPES = {
    "bool": (6, 8),
    "i8": (0, 8), "i16": (0, 16), "i32": (0, 32), "i64": (0, 64),
    "u8": (1, 8), "u16": (1, 16), "u32": (1, 32), "u64": (1, 64),
    "f16": (2, 16), "f32": (2, 32), "f64": (2, 64), "bf16": (4, 16),
}  # fmt: skip
_TOKENS_OF_CODES = {code_and_bits: token for token, code_and_bits in _TYPES.items()}


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
# The consumer frees the structure with C's free(), so no Python code runs when Triton drops a tensor.
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value


def make_capsule(address: int, dtype: str, shape: Sequence[int]) -> Any:
    """Return a capsule that owns a copy of the elements at `address`, because Triton may read them at any time."""
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
    """Return (address, shape, bytes, dtype) of a row-major tensor on the CPU, valid while the capsule's tensor exists.

    Raises ValueError for a tensor that is elsewhere, is not row-major, or has elements of a type that rsrv does not have.
    """
    tensor = _DLManagedTensor.from_address(_get_pointer(capsule, _NAME)).tensor
    if tensor.device_type != _KDLCPU:
        raise ValueError(f"a tensor lies on device type {tensor.device_type}, not in host memory")
    dtype = _TOKENS_OF_CODES.get((tensor.code, tensor.bits))
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

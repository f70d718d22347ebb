"""Triton's tensors to numpy and back, whatever the stub's pairing with numpy can do."""

import ctypes
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.stub.dlpack import make_capsule, read_capsule
from rsrv.wire.layout import NUMPY

log = logging.getLogger("rsrv.stub")

Array = npt.NDArray[Any]


class BrokenPairing(Exception):
    """This Triton and this numpy exchange no tensors correctly."""


class Tensors:
    """Converts tensors by numpy where that works, else through hand-made DLPack capsules.

    bf16 tensors are arrays of their bits (uint16): numpy has no such type.
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
                "numpy %s and this Triton's stub do not work together; going around them costs about 0.1 ms "
                "per tensor. numpy<2 in the stubs' environment, or Triton 24.11, avoids that",
                np.__version__,
            )

    def read(self, tensor: Any, dtype: str) -> Array:
        """The tensor's elements; valid while `tensor` is held."""
        if self._numpy_works and dtype != "bf16":
            array: Array = tensor.as_numpy()
            return array
        address, shape, nbytes = read_capsule(tensor.to_dlpack())
        buffer = memoryview((ctypes.c_char * nbytes).from_address(address)) if nbytes else b""
        return np.frombuffer(buffer, NUMPY[dtype]).reshape(shape)

    def make(self, name: str, array: Array, dtype: str) -> Any:
        """A Triton tensor of `array`, which it may refer to until the response is sent."""
        if self._numpy_works and dtype != "bf16":
            return self._tensor(name, array)
        array = np.ascontiguousarray(array).reshape(array.shape)
        return self._from_dlpack(name, make_capsule(array.ctypes.data, dtype, array.shape))

    # --- the pairing's self-check -------------------------------------------------------------------------

    def _by_numpy(self, array: Array) -> tuple[Array, Array]:
        made = self._tensor("probe", array)
        arrived = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _elements(made), arrived.as_numpy()

    def _by_capsule(self, array: Array) -> tuple[Array, Array]:
        made = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _elements(made), _elements(made)

    @staticmethod
    def _probe(way: Any) -> bool:
        """Whether a tensor of different elements survives both directions; equal ones would hide the fault."""
        array = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
        try:
            out, back = way(array)
        except Exception:
            log.exception("tensor self-check")
            return False
        return bool(np.array_equal(out, array) and np.array_equal(back, array))


def _elements(tensor: Any) -> Array:
    address, shape, nbytes = read_capsule(tensor.to_dlpack())
    return np.frombuffer(ctypes.string_at(address, nbytes), np.float32).reshape(shape)

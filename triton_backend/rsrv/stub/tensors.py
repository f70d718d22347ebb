"""Triton's tensors to numpy and back, whatever the stub's pairing with numpy can do."""

import contextlib
import ctypes
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from rsrv.stub.dlpack import make_capsule, read_capsule
from rsrv.wire.layout import NUMPY

log = logging.getLogger("rsrv.stub")

Array = npt.NDArray[Any]

#: numpy's types -> ours. Not those that travel as their bits: uint8 and uint16 stand for themselves.
_TOKENS = {dtype: token for token, dtype in NUMPY.items() if token not in ("bf16", "f8_e5m2", "f8_e4m3")}


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
        return _in_place(tensor)

    def take(self, tensor: Any) -> Array:
        """A copy of the elements of a tensor of whatever type: when nobody knows it before, and `tensor` is to go.

        Raises what Triton raises for BYTES where the pairing with numpy does not work.
        """
        if self._numpy_works:
            with contextlib.suppress(Exception):  # of a bf16 tensor
                array: Array = tensor.as_numpy()  # Triton's copy, which stays when the tensor goes
                return array
        return _in_place(tensor).copy()

    def make(self, name: str, array: Array, dtype: str | None = None) -> Any:
        """A Triton tensor of `array`, which it may refer to until the response is sent.

        Without `dtype` it is what numpy says. Raises ValueError, or what Triton raises, for elements that cannot be
        sent.
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

    # --- the pairing's self-check -------------------------------------------------------------------------

    def _by_numpy(self, array: Array) -> tuple[Array, Array]:
        made = self._tensor("probe", array)
        arrived = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _in_place(made).copy(), arrived.as_numpy()

    def _by_capsule(self, array: Array) -> tuple[Array, Array]:
        made = self._from_dlpack("probe", make_capsule(array.ctypes.data, "f32", array.shape))
        return _in_place(made).copy(), _in_place(made).copy()

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


def _in_place(tensor: Any) -> Array:
    """The tensor's elements, valid while `tensor` is held."""
    address, shape, nbytes, dtype = read_capsule(tensor.to_dlpack())
    buffer = memoryview((ctypes.c_char * nbytes).from_address(address)) if nbytes else b""
    return np.frombuffer(buffer, NUMPY[dtype]).reshape(shape)

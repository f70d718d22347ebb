"""Capsules made and read by hand agree with numpy's own."""

from typing import Any

import numpy as np
import pytest

from rsrv.stub.dlpack import make_capsule, read_capsule
from rsrv.stub.tensors import BrokenPairing, Tensors
from tests.fakes import FakePbUtils, FakeTensor

DTYPES = {
    "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "bool": np.bool_,
}  # fmt: skip


class Holder:
    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.parametrize("token", DTYPES)
def test_numpy_understands_our_capsules(token: str) -> None:
    """Every dtype arrives with its values and shape."""
    array: np.typing.NDArray[Any] = (np.arange(24).reshape(2, 3, 4) % 7).astype(DTYPES[token])

    back = np.from_dlpack(Holder(make_capsule(array.ctypes.data, token, array.shape)))

    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_capsule_outlives_the_array_that_it_was_made_of() -> None:
    """Triton reads the elements when it sends the response, long after the array may be gone."""
    array = np.arange(1000, dtype=np.int32)
    capsule = make_capsule(array.ctypes.data, "i32", array.shape)

    array[:] = -1

    np.testing.assert_array_equal(np.from_dlpack(Holder(capsule)), np.arange(1000))


@pytest.mark.parametrize("shape", [(), (5,), (2, 0, 3), (1, 1), (4, 3)])
def test_we_understand_numpys_capsules(shape: tuple[int, ...]) -> None:
    """Scalars and empty tensors included."""
    array = np.ones(shape, np.float32)

    _, found, nbytes, dtype = read_capsule(array.__dlpack__())

    assert (found, nbytes, dtype) == (shape, array.nbytes, "f32")


def test_a_tensor_with_gaps_is_refused() -> None:
    """Its bytes are not what its shape says."""
    with pytest.raises(ValueError, match="row-major"):
        read_capsule(np.ones((4, 6), np.float32)[:, ::2].__dlpack__())


class Numpy2UnderOldTriton(FakeTensor):
    """Release 24.10's fault: every element reads as the first one, and what is sent is empty."""

    def as_numpy(self) -> Any:
        return np.full_like(self._array, self._array.flat[0])

    def to_dlpack(self) -> Any:
        return (self._array if self._received else np.zeros(0, np.float32)).__dlpack__()

    def __init__(self, name: str, array: Any, received: bool = False) -> None:
        super().__init__(name, array)
        self._received = received

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> "Numpy2UnderOldTriton":
        return Numpy2UnderOldTriton(name, FakeTensor.from_dlpack(name, capsule)._array, received=True)


class NothingWorks(FakeTensor):
    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> "NothingWorks":
        return NothingWorks(name, FakeTensor.from_dlpack(name, capsule)._array)

    def to_dlpack(self) -> Any:
        return np.zeros(3, np.float32).__dlpack__()


def pb_utils(tensor: type) -> Any:
    return type("PbUtils", (FakePbUtils,), {"Tensor": tensor})


def test_a_broken_pairing_is_noticed_and_gone_around() -> None:
    """Tensors are right although the stub's numpy bridge is not."""
    tensors = Tensors(pb_utils(Numpy2UnderOldTriton))
    array = np.arange(6, dtype=np.int64).reshape(2, 3)

    made = tensors.make("y", array, "i64")
    arrived = Numpy2UnderOldTriton("x", array, received=True)

    np.testing.assert_array_equal(made._array, array)
    np.testing.assert_array_equal(tensors.read(arrived, "i64"), array)


def test_a_pairing_that_nothing_helps_is_refused_with_what_to_do() -> None:
    """Wrong answers would be worse than none."""
    with pytest.raises(BrokenPairing, match="numpy<2"):
        Tensors(pb_utils(NothingWorks))


def test_a_working_pairing_uses_numpy() -> None:
    """No copy of ours is made then."""
    tensors = Tensors(FakePbUtils)
    tensor = FakeTensor("x", np.arange(3))

    assert tensors.read(tensor, "i64") is tensor._array

"""DLPack capsules that rsrv makes and reads itself agree with numpy's own capsules."""

import sys
from typing import Any

import numpy as np
import pytest

from rsrv.stub.tensors import BrokenPairing, Tensors, make_capsule, read_capsule
from tests.fakes import FakePbUtils, FakeTensor
from tests.logged import logged_here

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
    """For each dtype, numpy reads the right values and the right shape from rsrv's capsule."""
    array: np.typing.NDArray[Any] = (np.arange(24).reshape(2, 3, 4) % 7).astype(DTYPES[token])

    back = np.from_dlpack(Holder(make_capsule(array.ctypes.data, token, array.shape)))

    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_capsule_outlives_the_array_that_it_was_made_of() -> None:
    """A capsule keeps a copy of its elements.

    Triton reads them when it sends the response, and the array may be gone then.
    """
    array = np.arange(1000, dtype=np.int32)
    capsule = make_capsule(array.ctypes.data, "i32", array.shape)

    array[:] = -1

    np.testing.assert_array_equal(np.from_dlpack(Holder(capsule)), np.arange(1000))


@pytest.mark.parametrize("shape", [(), (5,), (2, 0, 3), (1, 1), (4, 3)])
def test_we_understand_numpys_capsules(shape: tuple[int, ...]) -> None:
    """Capsules of numpy are read, including scalars and empty tensors."""
    array = np.ones(shape, np.float32)

    _, read_shape, nbytes, dtype = read_capsule(array.__dlpack__())

    assert (read_shape, nbytes, dtype) == (shape, array.nbytes, "f32")


def test_a_tensor_with_gaps_is_refused() -> None:
    """A tensor with gaps between its elements is refused, because its elements are not one row-major block of bytes."""
    with pytest.raises(ValueError, match="row-major"):
        read_capsule(np.ones((4, 6), np.float32)[:, ::2].__dlpack__())


class Numpy2UnderOldTriton(FakeTensor):
    """The fault of release 24.10: every element of a received tensor reads as the first one, and sent tensors are empty."""

    def as_numpy(self) -> Any:
        return np.full_like(self._array, self._array.flat[0])

    def to_dlpack(self) -> Any:
        return (self._array if self._received else np.zeros(0, np.float32)).__dlpack__()

    def __init__(self, name: str, array: Any, received: bool = False) -> None:
        super().__init__(name, array)
        self._received = received

    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> "Numpy2UnderOldTriton":
        return Numpy2UnderOldTriton(name, FakeTensor.from_dlpack(name, capsule).as_numpy(), received=True)


class NothingWorks(FakeTensor):
    @staticmethod
    def from_dlpack(name: str, capsule: Any) -> "NothingWorks":
        return NothingWorks(name, FakeTensor.from_dlpack(name, capsule).as_numpy())

    def to_dlpack(self) -> Any:
        return np.zeros(3, np.float32).__dlpack__()


def pb_utils(tensor: type) -> Any:
    return type("PbUtils", (FakePbUtils,), {"Tensor": tensor})


def test_a_broken_pairing_is_noticed_and_worked_around(caplog: pytest.LogCaptureFixture) -> None:
    """If numpy does not work with this Triton, tensors are still exchanged correctly, and text is refused.

    One warning says what plain Python models would get wrong, and what to install.
    """
    tensors = Tensors(pb_utils(Numpy2UnderOldTriton))
    (warning,) = [record.getMessage() for record in logged_here(caplog) if record.levelname == "WARNING"]
    assert "plain Python models that use this Python return empty tensors with the status OK" in warning
    assert f"Install numpy<2 into {sys.prefix}, or use Triton 24.11 or later" in warning
    array = np.arange(6, dtype=np.int64).reshape(2, 3)

    with pytest.raises(BrokenPairing, match="exchange no text: install numpy<2"):
        tensors.check_text()
    made = tensors.make("y", array, "i64")
    arrived = Numpy2UnderOldTriton("x", array, received=True)

    np.testing.assert_array_equal(FakeTensor.as_numpy(made), array)
    np.testing.assert_array_equal(tensors.read(arrived, "i64"), array)


def test_a_pairing_without_a_workaround_is_refused_with_what_to_do() -> None:
    """If tensors cannot be exchanged in any way, the model is refused. The error says what to install."""
    with pytest.raises(BrokenPairing, match="numpy<2"):
        Tensors(pb_utils(NothingWorks))


def test_a_working_pairing_uses_numpy(caplog: pytest.LogCaptureFixture) -> None:
    """If numpy works with this Triton, as from 24.11 on, tensors are not copied, text is exchanged, and nothing is logged."""
    tensors = Tensors(FakePbUtils)
    tensor = FakeTensor("x", np.arange(3))
    tensors.check_text()
    assert logged_here(caplog) == []

    assert tensors.read(tensor, "i64") is tensor.as_numpy()


class Bf16Tensor(FakeTensor):
    """A tensor of a type that numpy lacks, as Triton reports it."""

    def as_numpy(self) -> Any:
        raise RuntimeError("Tensor dtype is BF16 and cannot be converted to NumPy.")

    def to_dlpack(self) -> Any:
        return make_capsule(self._array.ctypes.data, "bf16", self._array.shape)


@pytest.mark.parametrize("token", DTYPES)
@pytest.mark.parametrize("tensor", [FakeTensor, Numpy2UnderOldTriton])
def test_a_tensor_is_taken_without_knowing_its_dtype(tensor: type[FakeTensor], token: str) -> None:
    """The dtype of a tensor is read from the tensor itself, whether or not numpy works with this Triton."""
    tensors = Tensors(pb_utils(tensor))
    array: np.typing.NDArray[Any] = (np.arange(6).reshape(2, 3) % 2).astype(DTYPES[token])

    made = tensors.make("x", array)
    back = tensors.take(made)

    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_a_bf16_tensor_is_taken_as_its_bits() -> None:
    """A bf16 tensor is copied as its bits."""
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    tensor = Bf16Tensor("x", bits)

    taken = Tensors(FakePbUtils).take(tensor)
    del tensor

    assert taken.dtype == np.uint16
    assert taken.flags.owndata
    np.testing.assert_array_equal(taken, bits)


@pytest.mark.parametrize(
    "array", [np.array([b"a"], object), np.array(["a"]), np.zeros(2, ">f4"), np.zeros(2, "c8")]
)
def test_elements_that_a_capsule_cannot_hold_are_refused(array: Any) -> None:
    """Strings, other byte orders and complex numbers are refused."""
    with pytest.raises(ValueError, match="cannot be handed"):
        Tensors(pb_utils(Numpy2UnderOldTriton)).make("x", array)


def test_a_capsule_of_an_unknown_type_is_refused() -> None:
    """A capsule of complex numbers, which Triton does not have, is refused."""
    with pytest.raises(ValueError, match="unknown here"):
        read_capsule(np.zeros(2, np.complex64).__dlpack__())

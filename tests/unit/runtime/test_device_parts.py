"""Parts of jax's device: its memory, executions without room, and executables on a full device."""

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from rsrv.runtime import device_executables
from rsrv.runtime.compile_cache import CompileCache
from rsrv.runtime.cuda import Driver
from rsrv.runtime.device import Abandoned, Array, DeviceRows, Executable, OutOfMemory
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_executables import DeviceExecutables, ExecutableSources
from rsrv.runtime.device_executions import DeviceExecutions
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.device_transfers import CpuTransfers, CudaTransfers
from rsrv.runtime.jax_compiler import HelperPrograms
from rsrv.runtime.stored_executables import CompileTarget, write_executables
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import check_signatures, read_module
from tests.logged import logged_here
from tests.unit.runtime.fake_cuda import FakeCuda

LIMIT = 256


class Card:
    """A fake of jax's device. Each call of `memory_stats` reports the next value of `in_use`."""

    def __init__(self, *in_use: int) -> None:
        self._in_use = iter(in_use)

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": next(self._in_use)}


def limited(*in_use: int) -> DeviceMemory:
    memory = DeviceMemory(Card(*in_use), "card", None, preallocates=False)
    memory.limit = LIMIT
    return memory


def executions(memory: DeviceMemory, programs: Any, launching: Lock) -> DeviceExecutions:
    examiner = ErrorExaminer(lambda reason: None)
    transfers = CpuTransfers(np.asarray, examiner)
    return DeviceExecutions(
        memory, lambda executable: (), transfers, programs, launching, examiner, asynchronous=False
    )


def test_an_allocation_waits_for_the_memory_of_freed_buffers() -> None:
    """An allocation waits for memory that XLA frees on its own thread, soon after the call that frees it."""
    card = limited(LIMIT, LIMIT, 0)

    card.require([LIMIT])

    with pytest.raises(StopIteration):
        card.in_use()  # The card was asked for all values.


def test_a_launch_that_waits_for_memory_does_not_hold_up_others() -> None:
    """A thread that waits for memory does not hold the launch lock, so other threads can launch."""
    launching, locked = Lock(), list[bool]()

    class Memory(DeviceMemory):
        def require(self, sizes: Any) -> None:
            locked.append(launching.locked())

    memory = Memory(Card(), "card", None, preallocates=False)
    memory.limit = LIMIT

    launched = executions(memory, HelperPrograms(CompileCache(None)), launching).launch(
        Executable(lambda x: [jnp.asarray(x)]), [], [np.zeros(8, np.float32)]
    )

    assert launched
    assert locked == [False]


def test_a_device_without_room_to_put_tensors_together_says_so() -> None:
    """A merge without room raises OutOfMemory, so that weights are evicted and the merge is retried."""

    class Programs:
        @staticmethod
        def merge(*_: object) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: told to")

    device = executions(DeviceMemory(Card(), "card", None, preallocates=False), Programs, Lock())
    buffer: Any = jnp.zeros((2, 3), np.float32)

    with pytest.raises(OutOfMemory, match="told to"):
        device.merge(np.zeros((4, 3), np.float32), 0, [DeviceRows(buffer, 0, 2, 0)])


class CardArray:
    """An array of jax on a card. `content` is what it held when it was deleted."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self._memory = np.zeros(shape, dtype)
        self.content: list[float] = []

    def unsafe_buffer_pointer(self) -> int:
        return self._memory.ctypes.data

    def delete(self) -> None:
        self.content = self._memory.tolist()

    def __dlpack__(self, stream: int) -> None:
        """Do nothing: no execution uses the array."""


@pytest.mark.parametrize("broken", [False, True])
def test_an_upload_that_ends_early_waits_for_the_copies_in_flight(broken: bool) -> None:
    """An upload that fails or is abandoned waits for its copies in flight.

    Afterwards, the caller may unmap the sources, and the card's memory may be used for something else.
    """
    made: list[CardArray] = []

    class Programs:
        @staticmethod
        def allocator(kinds: Any) -> Any:
            made.extend(CardArray(*kind) for kind in kinds)
            return lambda: [*made, CardArray((), np.uint8)]

    def sources() -> Iterator[Array]:
        yield from (np.full(2, number, np.float32) for number in (1, 2))
        if broken:
            raise OSError("told to")
        yield np.full(2, 3, np.float32)

    library, examiner = FakeCuda(), ErrorExaminer(lambda reason: None)
    memory = DeviceMemory(Card(), "card", None, preallocates=False)
    programs: Any = Programs
    transfers = CudaTransfers(Driver(0, library), memory, programs, np.asarray, examiner)
    answers = iter([False, False, True])

    with pytest.raises(OSError if broken else Abandoned):
        transfers.upload(sources(), lambda: next(answers), 3 * [((2,), np.dtype(np.float32))])

    assert [array.content for array in made] == [[1, 1], [2, 2], [0, 0]]
    assert library.events == 0


def test_a_stored_executable_is_loaded_on_a_full_device(
    doubling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A stored executable is loaded on a full device, because loading does not time kernels and needs no memory."""
    bundle = read_bundle(doubling)
    key, signature = next(iter(check_signatures(bundle).items()))
    target = CompileTarget("card", "9.0", "jax 1", "")
    write_executables(tmp_path / "card.executables", target, False, {signature.digest: b"machine code"})

    class FullMemory(DeviceMemory):
        def require(self, sizes: Any) -> None:
            raise OutOfMemory("told to")

    def cannot_lower(_: object) -> None:
        raise RuntimeError("told to")

    # With a placeholder, an executable that is not machine code of this CPU would already fail here.
    monkeypatch.setattr(device_executables, "lower_placeholder", cannot_lower)
    monkeypatch.setattr(device_executables, "use_cache", lambda cache: False)
    examiner = ErrorExaminer(lambda reason: None)
    memory = FullMemory(Card(), "card", None, preallocates=False)
    made = DeviceExecutables(
        ExecutableSources(repository=tmp_path), CompileCache(None), target, "", memory, examiner
    )

    executable = made.compile(read_module(bundle, key, signature), signature)

    (y,) = cast("Any", executable)(np.ones((1, 3), np.float32), np.ones(3, np.float32))
    assert np.asarray(y).shape == (1, 3)
    assert not logged_here(caplog)

"""The CUDA driver interface with a fake driver, and the options of jax's client."""

from pathlib import Path

import numpy as np
import pytest

from rsrv.runtime import cuda
from rsrv.runtime.cuda import (
    CopyStream,
    CudaError,
    DeviceCopy,
    Driver,
    MemoryShare,
    client_options,
    find_card,
    memory_fraction,
)
from tests.unit.runtime.fake_cuda import FakeCuda


@pytest.mark.parametrize(
    ("read_only", "written", "flags"), [(True, False, 9), (True, True, 1), (False, False, 1)]
)
def test_memory_is_page_locked_for_all_contexts_until_it_is_undone(
    read_only: bool, written: bool, flags: int
) -> None:
    """Memory is page-locked for all contexts, and unlocked later.

    The lock is read-only if the device supports this and does not write to the memory.
    """
    library = FakeCuda(read_only=read_only)
    driver = Driver(0, library)

    unlock = driver.page_lock(1 << 40, 5 << 30, written=written)

    assert library.locked == {1 << 40: (5 << 30, flags)}
    unlock()
    assert library.locked == {}
    assert library.depth == 0


def test_a_refusal_has_the_drivers_name_for_it() -> None:
    """An error of the driver has the driver's name for it, and the thread's context is restored."""
    library = FakeCuda(failing={"cuMemHostRegister_v2": 712})

    with pytest.raises(
        CudaError, match=r"cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"
    ):
        Driver(0, library).page_lock(4096, 4096)

    assert library.depth == 0


def test_a_machine_without_a_driver_is_told_so() -> None:
    """If the driver or the device is missing, the error names the failed call."""
    with pytest.raises(CudaError, match="cuInit"):
        Driver(0, FakeCuda(failing={"cuInit": 100}))


def test_a_large_array_is_copied_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large array is copied in pieces, so that transfers of other streams wait for one piece only.

    The whole array arrives.
    """
    monkeypatch.setattr(cuda, "_PIECE_BYTES", 1000)
    library = FakeCuda()
    stream = CopyStream(Driver(0, library))
    source, target = np.arange(2500, dtype=np.uint8), np.zeros(2500, np.uint8)

    event = stream.start([DeviceCopy(source, target.ctypes.data)])
    stream.finish(event)

    assert library.copied == [1000, 1000, 500]
    np.testing.assert_array_equal(target, source)
    assert (library.events, library.depth) == (0, 0)


def test_one_event_follows_all_copies_to_the_host() -> None:
    """Consecutive bytes of the device are copied to several arrays, and one event follows all copies."""
    library = FakeCuda()
    stream = CopyStream(Driver(0, library))
    source, first, second = np.arange(9, dtype=np.uint8), np.zeros(4, np.uint8), np.zeros(5, np.uint8)
    address = source.ctypes.data

    event = stream.start(
        [DeviceCopy(first, address, to_host=True), DeviceCopy(second, address + 4, to_host=True)]
    )

    assert library.events == 1
    assert not first.any()
    stream.finish(event)
    np.testing.assert_array_equal(np.concatenate([first, second]), source)
    assert (library.events, library.depth) == (0, 0)


@pytest.mark.parametrize("function", ["cuMemcpyHtoDAsync_v2", "cuEventRecord"])
def test_a_copy_that_fails_no_longer_reads_its_source(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a copy fails, all pieces that were enqueued before are complete, and no event is left."""
    monkeypatch.setattr(cuda, "_PIECE_BYTES", 1000)
    library = FakeCuda(failing={function: 700})
    source, target = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)

    with pytest.raises(CudaError, match=f"{function}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        CopyStream(Driver(0, library)).start([DeviceCopy(source, target.ctypes.data)])

    assert target.all() == (function == "cuEventRecord")
    assert (library.events, library.depth) == (0, 0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"memory_fraction": 0.8, "preallocate": True}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"preallocate": True}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {}),
        (
            {"XLA_CLIENT_MEM_FRACTION": "", "XLA_PYTHON_CLIENT_PREALLOCATE": ""},
            {"memory_fraction": 0.8, "preallocate": True},
        ),
    ],
)
def test_jaxs_own_variables_win(environment: dict[str, str], expected: dict[str, object]) -> None:
    """jax's environment variables take precedence over the options. Transfers are never staged."""
    options = client_options(MemoryShare(0.8), environment)

    assert options == {"should_stage_host_to_device_transfers": False, **expected}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0.8),
        ({"XLA_CLIENT_MEM_FRACTION": ".4"}, 0.4),
        ({"XLA_CLIENT_MEM_FRACTION": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".3"}, 0.3),
        ({"XLA_CLIENT_MEM_FRACTION": "half"}, 0.8),
    ],
)
def test_two_servers_share_a_card_by_jaxs_variables(environment: dict[str, str], expected: float) -> None:
    """Each of jax's two variables sets the share of the card's memory.

    An empty value is ignored. jax itself refuses a value that is not a number.
    """
    assert memory_fraction(0.8, environment) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((), None),
        (("dxg", "nvidia-uvm", "nvidia-caps"), None),
        (("nvidiactl",), "nvidiactl"),
        (("nvidia3",), "nvidia3"),
    ],
)
def test_a_card_is_known_by_its_device_node(
    nodes: tuple[str, ...], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device node, not necessarily that of the first card, shows that there is a card.

    WSL2's node dxg does not show this, because it exists without a card.
    """
    monkeypatch.setattr(
        cuda, "CARD_SIGNS", tuple(f"{tmp_path}/{Path(sign).name}" for sign in cuda.CARD_SIGNS)
    )
    for node in nodes:
        (tmp_path / node).touch()

    assert find_card({}) == (None if expected is None else str(tmp_path / expected))
    assert find_card({"CUDA_VISIBLE_DEVICES": "-1"}) is None


def test_a_container_that_refuses_cards_is_not_warned_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If NVIDIA_VISIBLE_DEVICES is "void" or "none", there is no warning about a hidden card.

    With "void", a container may still have a card through CDI, which also sets this value.
    """
    sign = tmp_path / "card"
    sign.touch()
    monkeypatch.setattr(cuda, "CARD_SIGNS", (str(sign),))
    monkeypatch.setattr(cuda, "HIDDEN_CARD_SIGNS", (str(sign),))

    signs = [cuda.find_hidden_card({"NVIDIA_VISIBLE_DEVICES": value}) for value in ("all", "void", "none")]

    assert signs == [str(sign), None, None]
    assert find_card({"NVIDIA_VISIBLE_DEVICES": "void"}) == str(sign)

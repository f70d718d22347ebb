"""CUDA's side without CUDA: a driver that counts, and the options that jax's client is created with."""

import pytest

from rsrv.runtime.cuda import CudaError, Driver, client_options
from tests.unit.runtime.fake_cuda import FakeCuda


@pytest.mark.parametrize(("read_only", "flags"), [(True, 9), (False, 1)])
def test_memory_is_page_locked_for_all_contexts_until_it_is_undone(read_only: bool, flags: int) -> None:
    """As memory that the device only reads, where the device knows of that."""
    library = FakeCuda(read_only=read_only)
    driver = Driver(0, library)

    unlock = driver.page_lock(1 << 40, 5 << 30)

    assert library.locked == {1 << 40: (5 << 30, flags)}
    unlock()
    assert library.locked == {}
    assert library.depth == 0


def test_a_refusal_has_the_drivers_name_for_it() -> None:
    """And leaves the thread without a context, as it was."""
    library = FakeCuda(failing={"cuMemHostRegister_v2": 712})

    with pytest.raises(
        CudaError, match=r"cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"
    ):
        Driver(0, library).page_lock(4096, 4096)

    assert library.depth == 0


def test_a_machine_without_a_driver_is_told_so() -> None:
    """The library is not there, or has no device."""
    with pytest.raises(CudaError, match="cuInit"):
        Driver(0, FakeCuda(failing={"cuInit": 100}))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {"memory_fraction": 0.8, "preallocate": True}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"preallocate": True}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {}),
    ],
)
def test_jaxs_own_variables_win(environment: dict[str, str], expected: dict[str, object]) -> None:
    """What they say is not said again; transfers are never staged."""
    options = client_options(0.8, True, environment)

    assert options == {"should_stage_host_to_device_transfers": False, **expected}

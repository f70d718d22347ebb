"""CUDA's side without CUDA: a driver that counts, and the options that jax's client is created with."""

import ctypes
from typing import Any

import pytest

from rsrv.runtime.cuda import CudaError, Driver, client_options


class FakeDriver:
    """Has the functions that `Driver` calls. `failing` {function: CUresult}; `calls` are those that tell something."""

    def __init__(self, *, read_only: bool = True, failing: dict[str, int] | None = None) -> None:
        self._read_only = read_only
        self._failing = failing or {}
        self.depth = 0
        self.locked: dict[int | None, tuple[int, int]] = {}

    def __getattr__(self, function: str) -> Any:
        def called(*arguments: Any) -> int:
            does = vars(FakeDriver).get(f"_{function}")
            if code := self._failing.get(function):
                return code
            if does is not None:
                does(self, *arguments)
            return 0

        return called

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context._obj.value = 7

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, device: Any) -> None:
        assert attribute == 113
        value._obj.value = int(self._read_only)

    def _cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> None:
        assert context.value == 7
        self.depth += 1

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.depth -= 1

    def _cuMemHostRegister_v2(self, location: ctypes.c_void_p, nbytes: ctypes.c_size_t, flags: int) -> None:
        assert self.depth == 1
        self.locked[location.value] = (nbytes.value, flags)

    def _cuMemHostUnregister(self, location: ctypes.c_void_p) -> None:
        assert self.depth == 1
        del self.locked[location.value]

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"


@pytest.mark.parametrize(("read_only", "flags"), [(True, 9), (False, 1)])
def test_memory_is_page_locked_for_all_contexts_until_it_is_undone(read_only: bool, flags: int) -> None:
    """As memory that the device only reads, where the device knows of that."""
    library = FakeDriver(read_only=read_only)
    driver = Driver(0, library)

    unlock = driver.page_lock(1 << 40, 5 << 30)

    assert library.locked == {1 << 40: (5 << 30, flags)}
    unlock()
    assert library.locked == {}
    assert library.depth == 0


def test_a_refusal_has_the_drivers_name_for_it() -> None:
    """And leaves the thread without a context, as it was."""
    library = FakeDriver(failing={"cuMemHostRegister_v2": 712})

    with pytest.raises(
        CudaError, match=r"cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED \(712\)"
    ):
        Driver(0, library).page_lock(4096, 4096)

    assert library.depth == 0


def test_a_machine_without_a_driver_is_told_so() -> None:
    """The library is not there, or has no device."""
    with pytest.raises(CudaError, match="cuInit"):
        Driver(0, FakeDriver(failing={"cuInit": 100}))


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

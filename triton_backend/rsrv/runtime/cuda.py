"""What is particular to CUDA, and needs no jax: how jax's client is made, and page-locking host memory."""

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

#: CU_MEMHOSTREGISTER_PORTABLE: for every context of the process, not only the one that asks
_PORTABLE = 0x01
#: CU_MEMHOSTREGISTER_READ_ONLY: without it, memory that is mapped read-only is refused
_READ_ONLY = 0x08
#: CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_READ_ONLY_SUPPORTED = 113


def has_plugin() -> bool:
    """Whether jax can use a CUDA device, if there is one."""
    return any(find_spec(name) is not None for name in _PLUGINS)


def client_options(
    memory_fraction: float, preallocate: bool, environment: Mapping[str, str]
) -> dict[str, float | bool]:
    """What jax's client for a CUDA device is created with; jax's own variables for memory in `environment` win.

    Without staging, XLA hands the driver the memory that it is given: page-locked memory goes to the device by DMA,
    and the driver stages what is not. XLA's own staging copies either on one thread, unless memory was page-locked
    through a call of XLA's which jax does not offer (docs/scheduler.md has the sources).
    """
    options: dict[str, float | bool] = {"should_stage_host_to_device_transfers": False}
    if not ({"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & environment.keys()):
        options["memory_fraction"] = memory_fraction
    if "XLA_PYTHON_CLIENT_PREALLOCATE" not in environment:
        options["preallocate"] = preallocate
    return options


class CudaError(Exception):
    """The driver is not there, or refused; the message has its name of the error."""


class Driver:
    """One device of the driver, in its primary context, which is the one that jax uses.

    `ordinal` counts the devices that CUDA_VISIBLE_DEVICES leaves, as jax's `local_hardware_id` does. Any thread
    may call; the calls release the interpreter while they wait.
    """

    def __init__(self, ordinal: int, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver cannot be loaded: {error}") from None
        self.ordinal = ordinal
        self.call("cuInit", 0)
        #: the driver's handle of it
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), ordinal)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)
        supported = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(supported), _READ_ONLY_SUPPORTED, self.device)
        # Only ever read by the device, so the flag is right for writable memory, too.
        self._flags = _PORTABLE | (_READ_ONLY if supported.value else 0)

    def call(self, function: str, *arguments: Any) -> None:
        """Any function of the driver that returns a CUresult. Raises CudaError."""
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'unknown error').decode()} ({code})")

    @contextmanager
    def current(self) -> Iterator[None]:
        """The calls inside are for this device."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def page_lock(self, address: int, nbytes: int) -> Callable[[], None]:
        """Keep mapped memory where it is; returns what undoes it, once. No page may be locked twice."""
        location = ctypes.c_void_p(address)
        with self.current():
            self.call("cuMemHostRegister_v2", location, ctypes.c_size_t(nbytes), self._flags)

        def unlock() -> None:
            with self.current():
                self.call("cuMemHostUnregister", location)

        return unlock

"""CUDA without jax: options of jax's client, calls of the driver, and page-locking of host memory."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import glob
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy.typing as npt

from rsrv.extras import install_command

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")

#: Patterns of device nodes. If one exists, this process may use an NVIDIA card. WSL2 has /dev/dxg even without such a card.
CARD_SIGNS: tuple[str, ...] = ("/dev/nvidiactl", "/dev/nvidia[0-9]*")
#: Patterns of files that the machine's driver shows in every container.
HIDDEN_CARD_SIGNS: tuple[str, ...] = ("/proc/driver/nvidia/gpus/*",)

#: CU_MEMHOSTREGISTER_PORTABLE: the lock is valid in every context of the process, not only in the current one.
_PORTABLE = 0x01
#: CU_MEMHOSTREGISTER_READ_ONLY: required for memory that is mapped read-only.
_READ_ONLY = 0x08
#: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_VMM_SUPPORTED = 102
_NO_VMM = "virtual memory management is missing"
#: CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
_READ_ONLY_SUPPORTED = 113


def has_plugin() -> bool:
    """Return whether jax has a plugin for CUDA."""
    return any(find_spec(name) is not None for name in _PLUGINS)


def find_card(environment: Mapping[str, str]) -> str | None:
    """Return the device node of an NVIDIA card. None: there is none, or the environment chooses the CPU."""
    return _find(CARD_SIGNS, environment)


def find_hidden_card(environment: Mapping[str, str]) -> str | None:
    """Return a sign that the machine has an NVIDIA card that this container may not use.

    None: there is no sign, the environment chooses the CPU, or NVIDIA_VISIBLE_DEVICES refuses all cards. `find_card` does not
    read that variable: containers that get their card by CDI have "void" there, so that NVIDIA's older hook does not add the
    card a second time.
    """
    if environment.get("NVIDIA_VISIBLE_DEVICES") in ("void", "none"):
        return None
    return _find(HIDDEN_CARD_SIGNS, environment)


def _find(patterns: tuple[str, ...], environment: Mapping[str, str]) -> str | None:
    if environment.get("JAX_PLATFORMS") or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return next((path for pattern in patterns for path in glob(pattern)), None)


def explain_no_gpu(reason: str, *, plugin: bool, card: str | None, refusal: str = "") -> str:
    """Return a text that says why jax has no GPU, and what to do.

    `reason`: jax's message, or "". `plugin`: result of `has_plugin`. `card`: result of `find_card`. `refusal`: result of
    `find_refusal`.
    """
    why = f"jax finds no GPU{f': {reason}' if reason else ''}; "
    if not plugin:
        why += f"it has no CUDA plugin: run {install_command('serve', 'cuda13')} (or cuda12)"
    elif "CUDA_ERROR_DEVICE_UNAVAILABLE" in refusal:
        why += (
            f"the driver refuses the card ({refusal}), because another process has it and its compute mode admits only one, or "
            "none. tritonserver and the runtime both use the card: run nvidia-smi -c DEFAULT as root"
        )
    elif refusal == _NO_VMM:
        why += (
            "the card has no virtual memory management, which XLA needs to allocate memory: use a whole card, a MIG instance, or "
            "a vGPU profile that has it"
        )
    elif card is None:
        why += "this machine or container has no device node of an NVIDIA card: start the container with --gpus all"
    else:
        why += (
            f"the machine has a card ({card}{refusal and f'; {refusal}'}), "
            "so NVIDIA's driver or a library of CUDA is missing or too old: look for jax's "
            f"messages above, try nvidia-smi, and run {install_command('serve', 'cuda13')} again (or cuda12)"
        )
    return f"{why}. To serve from the CPU, set runtime.platform to cpu"


class MemoryShare(NamedTuple):
    """A GPU's memory that jax may take."""

    fraction: float = 0.9
    #: True if jax takes all of this memory at its start.
    preallocate: bool = True


def _jaxs_fraction(environment: Mapping[str, str]) -> str:
    """Return the share of a GPU's memory that one of jax's two variables sets, or "". jax refuses to start if both are set."""
    variables = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return next(filter(None, map(environment.get, variables)), "")


def memory_fraction(setting: float, environment: Mapping[str, str]) -> float:
    """Return the share of a GPU's memory that jax takes. jax's own variables take precedence over the setting."""
    try:
        return float(_jaxs_fraction(environment) or setting)
    except ValueError:  # jax will refuse it.
        return setting


def client_options(share: MemoryShare, environment: Mapping[str, str]) -> dict[str, float | bool]:
    """Return the options of jax's client for a CUDA device. jax's memory variables in `environment` take precedence.

    Without staging, XLA passes host memory to the driver as it is: page-locked memory goes to the device by DMA, and
    the driver stages other memory. XLA's own staging would copy both kinds of memory on one thread, unless the memory was
    page-locked through a call of XLA that jax does not offer.
    """
    options: dict[str, float | bool] = {"should_stage_host_to_device_transfers": False}
    if not _jaxs_fraction(environment):
        options["memory_fraction"] = share.fraction
    if not environment.get("XLA_PYTHON_CLIENT_PREALLOCATE"):
        options["preallocate"] = share.preallocate
    return options


class CudaError(Exception):
    """The driver is missing, or a call failed. The message has the driver's name of the error."""


def find_refusal() -> str:
    """Return why this process cannot use CUDA's first device: the driver's error, or what the device lacks for XLA.

    The result is empty if the process can use the device.
    """
    try:
        driver = Driver(0)
        return "" if driver.attribute(_VMM_SUPPORTED) else _NO_VMM
    except CudaError as error:
        return str(error)


class Driver:
    """One device of CUDA's driver, in its primary context, which jax uses as well.

    `ordinal` counts the devices in CUDA_VISIBLE_DEVICES, like jax's `local_hardware_id`. Every method may be called
    from any thread, and releases the interpreter's lock while it waits.
    """

    def __init__(self, ordinal: int, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaError(f"CUDA's driver cannot be loaded: {error}") from None
        self.call("cuInit", 0)
        #: The driver's handle of the device.
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), ordinal)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self.device)
        #: Flag of memory that the device only reads. It also suits memory that is mapped writable.
        self._read_only = _READ_ONLY if self.attribute(_READ_ONLY_SUPPORTED) else 0

    def attribute(self, number: int) -> int:
        """Return an attribute of the device. `number` is a CUdevice_attribute."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self.device)
        return value.value

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver that returns a CUresult. Raises CudaError."""
        code = getattr(self._library, function)(*arguments)
        if code:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise CudaError(f"{function}: {(name.value or b'unknown error').decode()} ({code})")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device's context current for the calls inside."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def free_bytes(self) -> int:
        """Return the bytes of the device that no process holds."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current():
            self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        """Page-lock mapped memory. Return a function that unlocks it; call it once. No page may be locked twice.

        `written`: the device also writes to the memory, which must be mapped writable.
        """
        location = ctypes.c_void_p(address)
        flags = _PORTABLE | (0 if written else self._read_only)
        with self.current():
            self.call("cuMemHostRegister_v2", location, ctypes.c_size_t(nbytes), flags)

        def unlock() -> None:
            with self.current():
                self.call("cuMemHostUnregister", location)

        return unlock


#: Maximum bytes of one copy. Other transfers wait for the link at most for one such copy (0.7 ms at 25 GB/s).
_PIECE_BYTES = 16 << 20
_STREAM_NON_BLOCKING = 1  # This stream waits for no other stream.
_EVENT_BLOCKING, _EVENT_WITHOUT_TIMING = 1, 2


class DeviceCopy(NamedTuple):
    """A copy between a contiguous array and the device's memory at an address. If `to_host` is true, it fills the array."""

    array: npt.NDArray[Any]
    address: int
    to_host: bool = False


class CopyStream:
    """Stream of copies to or from the device. The copies are made one after the other.

    The copies wait for an execution only if the event of the execution was added to the stream (`handle`). Every method may be
    called from any thread.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._stream = ctypes.c_void_p()
        with driver.current():
            driver.call("cuStreamCreate", ctypes.byref(self._stream), _STREAM_NON_BLOCKING)

    @property
    def handle(self) -> int:
        """The driver's handle."""
        return self._stream.value or 0

    def start(self, copies: Iterable[DeviceCopy]) -> ctypes.c_void_p:
        """Enqueue copies, and return an event. The arrays and the device's memory must stay until `finish` has returned."""
        event, call = ctypes.c_void_p(), self._driver.call
        with self._driver.current():
            call("cuEventCreate", ctypes.byref(event), _EVENT_BLOCKING | _EVENT_WITHOUT_TIMING)
            try:
                for array, address, to_host in copies:
                    host_address = array.ctypes.data
                    for at in range(0, array.nbytes, _PIECE_BYTES):
                        nbytes = ctypes.c_size_t(min(_PIECE_BYTES, array.nbytes - at))
                        device, host = ctypes.c_uint64(address + at), ctypes.c_void_p(host_address + at)
                        if to_host:
                            call("cuMemcpyDtoHAsync_v2", host, device, nbytes, self._stream)
                        else:
                            call("cuMemcpyHtoDAsync_v2", device, host, nbytes, self._stream)
                call("cuEventRecord", event, self._stream)
            except CudaError:
                # Wait for copies in flight, because the caller drops their arrays next.
                with suppress(CudaError):
                    call("cuStreamSynchronize", self._stream)
                call("cuEventDestroy_v2", event)
                raise
        return event

    def finish(self, event: ctypes.c_void_p) -> None:
        """Wait until the copies before an event are complete."""
        with self._driver.current():
            try:
                self._driver.call("cuEventSynchronize", event)
            finally:
                self._driver.call("cuEventDestroy_v2", event)

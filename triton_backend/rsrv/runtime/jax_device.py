"""jax's device, which is assembled from its parts."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from rsrv.runtime.compile_cache import CompileCacheError, open_cache
from rsrv.runtime.cuda import (
    CudaError,
    Driver,
    MemoryShare,
    client_options,
    explain_no_gpu,
    find_card,
    find_hidden_card,
    find_refusal,
    has_plugin,
)
from rsrv.runtime.device import Array, CacheCounts, DeviceError
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_executables import DeviceExecutables, ExecutableSources
from rsrv.runtime.device_executions import DeviceExecutions
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.device_pools import DevicePools
from rsrv.runtime.device_transfers import CpuTransfers, CudaTransfers, Transfers
from rsrv.runtime.jax_compiler import HelperPrograms, target_of
from rsrv.runtime.numerics import OVERRIDE, hardware_of
from rsrv.settings import Numerics

log = logging.getLogger(__name__)

_NO_SOURCES, _MOST_MEMORY = ExecutableSources(), MemoryShare()


class JaxDevice:
    """First device of a platform of jax. Importing jax takes seconds, so a worker thread creates it.

    A CPU executes within `launch`. With `asynchronous_cpu`, it executes like a GPU. jax decides this once per process, at its
    first use. jax's own environment variables take precedence over `memory`. `numerics` applies to CUDA's libraries and to
    functions traced in this process, but models' modules are compiled as they are. `lost` is called on the thread that uses
    the device, with an error of CUDA after which the process cannot use the device any more.

    If `claims` is false, the device takes none of a GPU's memory for weights and executions until `claim`, so that another
    process may still hold the memory. Until then, `compile` only loads stored executables.
    """

    def __init__(
        self,
        platform: str = "auto",
        sources: ExecutableSources = _NO_SOURCES,
        *,
        memory: MemoryShare = _MOST_MEMORY,
        numerics: Numerics = "auto",
        asynchronous_cpu: bool = False,
        lost: Callable[[str], object] = lambda reason: None,
        claims: bool = True,
    ) -> None:
        try:
            cache = open_cache(sources.cache, sources.own_cache)
        except CompileCacheError as error:
            raise DeviceError(str(error)) from None
        preallocates = _configure(platform, memory, numerics, asynchronous_cpu=asynchronous_cpu)
        self._device = device = _find_device(platform)
        on_cpu, version = device.platform == "cpu", device.client.platform_version
        self.hardware = hardware_of(device.platform, version, getattr(device, "compute_capability", None))
        selector = os.environ.get("CUDA_VISIBLE_DEVICES") if self.hardware.platform == "cuda" else None
        self.name: str = f"{device.device_kind} ({selector})" if selector else device.device_kind
        self.asynchronous = asynchronous_cpu or not on_cpu
        self.writes_host = not on_cpu
        #: Target for which an executable must have been compiled.
        self.target = target_of(device.device_kind, self.hardware.capability)
        try:
            driver = None if on_cpu else Driver(device.local_hardware_id or 0)
            # The device's parts follow. Their public methods are the device's own.
            self._examiner = examiner = ErrorExaminer(lost)
            self._memory = DeviceMemory(device, self.name, driver, preallocates=preallocates)
            programs, launching = HelperPrograms(cache), Lock()
            transfers: Transfers = CpuTransfers(self._put, examiner)
            if driver is not None:
                transfers = CudaTransfers(driver, self._memory, programs, self._put, examiner)
        except CudaError as error:
            raise DeviceError(f"weights cannot be copied to {device.device_kind}: {error}") from None
        self.memory_in_use, self.largest_free = self._memory.in_use, self._memory.largest_free
        self.prepare_claim = self._memory.prepare_claim
        self.upload, self.free, self.page_lock = transfers.upload, transfers.free, transfers.page_lock
        self.prepare_upload = transfers.prepare_upload

        circumstances = repr((self.target, version, numerics))
        self._executables = made = DeviceExecutables(
            sources, cache, self.target, circumstances, self._memory, examiner
        )
        self.compile, self.scratch_bytes = made.compile, made.scratch_bytes
        self.known_costs, self.keep_costs = made.known_costs, made.keep_costs
        self.known_start, self.keep_start = made.known_start, made.keep_start
        self.has_executables = made.has_executables

        pools = DevicePools(self._memory, programs, launching, examiner)
        self.make_pools, self.free_pools, self.holds = pools.make_pools, pools.free_pools, pools.holds
        self.read_slot, self.write_slot = pools.read_slot, pools.write_slot

        self._executions = executions = DeviceExecutions(
            self._memory,
            made.working_bytes,
            transfers,
            programs,
            launching,
            examiner,
            asynchronous=self.asynchronous,
        )
        self.launch, self.read = executions.launch, executions.read
        self.keep, self.merge = executions.keep, executions.merge
        if claims:
            self.claim(lost)
        log.info("device %s (%s), jax %s", device, device.device_kind, _jax_version())

    def claim(self, lost: Callable[[str], object]) -> None:
        """Take the device's memory once the previous process has ended. `lost`: see the class. Raises DeviceError."""
        self._examiner.lost = lost
        self._memory.claim(self._put)

    def _put(self, array: Array) -> Any:
        import jax

        return jax.block_until_ready(jax.device_put(array, self._device))

    @property
    def memory_limit(self) -> int | None:
        return self._memory.limit

    @property
    def launcher(self) -> int | None:
        return self._executions.launcher

    @property
    def cache_counts(self) -> CacheCounts:
        return self._executables.cache_counts()

    def card(self) -> str:
        """Return the description of a CUDA device and its driver as text of XLA's GpuTargetConfigProto. Raises DeviceError."""
        from jaxlib import _jax

        topology = _jax.get_topology_for_devices([self._device])
        config: str | None = getattr(topology, "target_config", None)
        if config is None:
            raise DeviceError(f"{self._device.device_kind} is not a CUDA device that XLA describes")
        return config

    @staticmethod
    def start_profile(directory: Path) -> None:
        import jax

        jax.profiler.start_trace(str(directory))

    @staticmethod
    def stop_profile() -> None:
        import jax

        jax.profiler.stop_trace()


def _configure(platform: str, memory: MemoryShare, numerics: Numerics, *, asynchronous_cpu: bool) -> bool:
    """Configure jax before its first use. Return whether its allocator takes all of a GPU's memory at once."""
    import jax

    if platform != "auto":
        jax.config.update("jax_platforms", platform)
    preallocates = False
    if platform == "cuda" or (platform == "auto" and has_plugin()):
        options = client_options(memory, os.environ)
        preallocates = options.get("preallocate") is True
        jax.config.update("jax_pjrt_client_create_options", options)
    if numerics == "f32":
        # Set this variable before jax creates its client.
        os.environ[OVERRIDE] = "0"
    # This overrides JAX_DEFAULT_MATMUL_PRECISION.
    jax.config.update("jax_default_matmul_precision", "highest" if numerics == "f32" else None)
    # Without this, jax narrows f64 and i64 tensors to 32 bits.
    jax.config.update("jax_enable_x64", True)
    # A CPU normally executes on the calling thread. Another thread would not make it faster, and would add two context switches.
    jax.config.update("jax_cpu_enable_async_dispatch", asynchronous_cpu)
    return preallocates


def _find_device(platform: str) -> Any:
    """Return jax's first device of the platform. Raises DeviceError."""
    import jax

    card, reason, device = find_card(os.environ), "", None
    try:
        device = jax.devices()[0]
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # An AssertionError without text means an unknown platform.
        reason = str(error) or "no plugin for this platform works"
    if reason and platform == "cpu":
        raise DeviceError(f"jax finds no device: {reason}")
    fell_back = device is not None and platform == "auto" and device.platform == "cpu"
    if reason or (fell_back and card is not None):
        raise DeviceError(explain_no_gpu(reason, plugin=has_plugin(), card=card, refusal=find_refusal()))
    if fell_back and (hidden := find_hidden_card(os.environ)) is not None:
        log.warning(
            "models are served from the CPU: the machine has an NVIDIA card (%s), which this container cannot see. "
            "Start it with --gpus all, or set runtime.platform to cpu",
            hidden,
        )
    return device


def _jax_version() -> str:
    import jax

    return jax.__version__

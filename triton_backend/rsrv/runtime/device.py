"""The device: compile, hold weights, execute. The one file of the runtime that imports jax."""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NewType, Protocol

import numpy as np
import numpy.typing as npt

from rsrv_bundle.modules import Signature

log = logging.getLogger("rsrv.device")

Array = npt.NDArray[Any]
#: a compiled module, and weights in device memory: opaque to everyone but the device that made them
Executable = NewType("Executable", object)
Weights = NewType("Weights", object)


class DeviceError(Exception):
    """The device refused or failed; the message is for the log, not for clients."""


class Device(Protocol):
    """What the runtime needs of a device. Every method may block and be called from any thread."""

    def compile(self, module: bytes, signature: Signature) -> Executable: ...

    def upload(self, arrays: Sequence[Array]) -> Weights:
        """Copy weights, in argument order, to the device; returns when they are there."""

    def free(self, weights: Weights) -> None:
        """Give the memory back at once. Nothing may execute on these weights."""

    def run(
        self, executable: Executable, weights: Weights, inputs: Sequence[Array]
    ) -> tuple[list[Array], float]:
        """Outputs on the host, read-only, and the seconds that it took. One execution runs at a time."""


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Executables since the start: compiled anew, and read from the compilation cache."""

    compiled: int
    from_cache: int


class JaxDevice:
    """jax's first device of a platform. Importing jax takes seconds, so this is made on a worker thread."""

    def __init__(self, platform: str = "auto", cache_dir: Path | None = None) -> None:
        import jax
        import jax.monitoring

        if platform != "auto":
            jax.config.update("jax_platforms", platform)
        # f64 and i64 tensors are what the manifest says, not what jax narrows them to.
        jax.config.update("jax_enable_x64", True)
        # `run` waits for its outputs anyway; handing a CPU execution to another thread only adds two switches.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        self._counts = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}
        if cache_dir is not None:
            cache_dir = cache_dir.expanduser()
            cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            if cache_dir.stat().st_uid != os.getuid() or cache_dir.stat().st_mode & 0o022:
                raise DeviceError(
                    f"runtime.compilation_cache_dir {cache_dir} must belong to uid {os.getuid()} and be writable "
                    "by nobody else: whoever can write it can run code here"
                )
            jax.config.update("jax_compilation_cache_dir", str(cache_dir))
            # jax's defaults keep only what took a second to compile; small models would never be kept.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            jax.monitoring.register_event_listener(self._count)
        self._jax = jax
        try:
            self._device = jax.devices()[0]
        except RuntimeError as error:
            raise DeviceError(f"jax finds no device: {error}") from None
        self._lock = Lock()
        log.info("device %s (%s), jax %s", self._device, self._device.device_kind, jax.__version__)

    def _count(self, event: str, **_: object) -> None:
        if event in self._counts:
            self._counts[event] += 1

    @property
    def cache_counts(self) -> CacheCounts:
        hits, misses = self._counts.values()
        return CacheCounts(compiled=misses, from_cache=hits)

    def compile(self, module: bytes, signature: Signature) -> Executable:
        from rsrv_bundle.modules import as_exported

        exported = as_exported(module, signature)
        structs = [self._jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
        compiled = self._jax.jit(exported.call).lower(*structs).compile()
        # jax keeps what it traced and lowered in case the same function comes again; none ever does, and for
        # a small model of six sizes that is 6 MB of host memory.
        self._jax.clear_caches()
        return Executable(compiled)

    def upload(self, arrays: Sequence[Array]) -> Weights:
        if self._device.platform == "cpu":
            # jax would use an aligned array in place, here a file's mapping, which whoever writes the file changes.
            arrays = [np.array(array) for array in arrays]
        buffers = [self._jax.device_put(array, self._device) for array in arrays]
        return Weights(self._jax.block_until_ready(buffers))

    def free(self, weights: Weights) -> None:
        for buffer in _buffers(weights):
            buffer.delete()

    def run(
        self, executable: Executable, weights: Weights, inputs: Sequence[Array]
    ) -> tuple[list[Array], float]:
        call: Callable[..., Sequence[Any]] = executable  # type: ignore[assignment]
        with self._lock:
            started = time.perf_counter()
            outputs = [np.asarray(out) for out in call(*inputs, *_buffers(weights))]
            return outputs, time.perf_counter() - started


def _buffers(weights: Weights) -> list[Any]:
    assert isinstance(weights, list)
    return weights

"""The device: compile, hold weights, execute. The one file of the runtime that imports jax."""

import errno
import gc
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from rsrv.histogram import LONG_SECONDS, Histogram
from rsrv.runtime.allocation import Reuse
from rsrv.runtime.compile_cache import CompileCache, CompileCacheError, prepare_cache_directory
from rsrv.runtime.cuda import CudaError, Driver, client_options, has_plugin
from rsrv.runtime.cuda_memory import Moving, WeightMemory
from rsrv.runtime.device import (
    Abandoned,
    Array,
    Buffer,
    CacheCounts,
    DeviceError,
    DeviceRows,
    Executable,
    Launched,
    OutOfMemory,
    never,
)
from rsrv.runtime.numerics import OVERRIDE, hardware_of
from rsrv.settings import Numerics
from rsrv_bundle.modules import Signature

log = logging.getLogger("rsrv.device")

#: bytes that may be on their way to the device at once, and tensors that may be in any case. A GPU's transfers wait
#: for the executions that were launched before them: many must be under way to keep a link busy beside those
#: executions. And giving up an upload waits for them: 20 ms at 50 GB/s.
_IN_FLIGHT_BYTES = 1 << 30
_IN_FLIGHT_TENSORS = 2
#: in the place of an output that stays on the device
_UNREAD = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class _LaunchedExecution:
    """What `Launched` is to a `JaxDevice`."""

    started: float
    outputs: Sequence[Any]
    unread: Collection[int]
    #: the one launched before, until this one is read
    previous: "_LaunchedExecution | None" = None
    #: when it was done, as far as anyone has noticed
    ready: float | None = None


class JaxDevice:
    """jax's first device of a platform. Importing jax takes seconds, so this is made on a worker thread.

    A CPU executes within `launch`; with `asynchronous_cpu` it does as a GPU does. jax decides that once per
    process, when it is first used. Of a GPU's memory it may take `memory_fraction`, if `preallocate` at once,
    unless the environment has jax's own variables for that. With the `weight_memory` of the driver, weights lie
    outside of jax's allocator, which then takes its share as it needs it. `numerics` is what libraries, and whatever
    is traced in this process, keep to; modules of models are compiled as they are.
    """

    def __init__(
        self,
        platform: str = "auto",
        cache_dir: Path | None = None,
        *,
        memory_fraction: float = 0.9,
        preallocate: bool = True,
        weight_memory: Literal["jax", "driver"] = "jax",
        numerics: Numerics = "auto",
        asynchronous_cpu: bool = False,
    ) -> None:
        import jax
        import jax.dlpack
        import jax.monitoring

        if platform != "auto":
            jax.config.update("jax_platforms", platform)
        if platform == "cuda" or (platform == "auto" and has_plugin()):
            preallocate = preallocate and weight_memory == "jax"
            options = client_options(memory_fraction, preallocate, os.environ)
            jax.config.update("jax_pjrt_client_create_options", options)
        if numerics == "f32":
            # Before there is a client.
            os.environ[OVERRIDE] = "0"
        # Whatever JAX_DEFAULT_MATMUL_PRECISION says.
        jax.config.update("jax_default_matmul_precision", "highest" if numerics == "f32" else None)
        # f64 and i64 tensors are what the manifest says, not what jax narrows them to.
        jax.config.update("jax_enable_x64", True)
        # A CPU that executes is not free for anything else; another thread would only add two switches.
        jax.config.update("jax_cpu_enable_async_dispatch", asynchronous_cpu)
        self._counts = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}
        if cache_dir is not None:
            try:
                directory = prepare_cache_directory(cache_dir)
            except CompileCacheError as error:
                raise DeviceError(str(error)) from None
            if directory is not None:
                _use_cache(directory)
            jax.monitoring.register_event_listener(self._count)
        #: what is compiled and in use, by what it was compiled from
        self._executables: WeakValueDictionary[tuple[bytes, Signature], Any] = WeakValueDictionary()
        self._shared = 0
        self._compile_seconds = Histogram(LONG_SECONDS)
        self._jax = jax
        # Compiled for each pair of shapes when it first comes up, however many rows are merged.
        self._merge = jax.jit(_merge, static_argnums=3)
        try:
            self._device = jax.devices()[0]
        except RuntimeError as error:
            raise DeviceError(f"jax finds no device: {error}") from None
        self.hardware = hardware_of(
            self._device.platform,
            self._device.client.platform_version,
            getattr(self._device, "compute_capability", None),
        )
        self.asynchronous = asynchronous_cpu or self._device.platform != "cpu"
        self.launcher: int | None = None
        self._lock = Lock()
        self._latest: _LaunchedExecution | None = None
        self._noticing = Lock()
        self._cuda: Driver | None = None
        #: for weights, unless jax has them
        self._own: WeightMemory | None = None
        self._reuse = Reuse()
        if weight_memory == "driver":
            try:
                self._own = WeightMemory(self._driver())
            except CudaError as error:
                raise DeviceError(f"runtime.weight_memory 'driver' is for CUDA devices: {error}") from None
        log.info("device %s (%s), jax %s", self._device, self._device.device_kind, jax.__version__)

    def _count(self, event: str, **_: object) -> None:
        if event in self._counts:
            self._counts[event] += 1

    @property
    def cache_counts(self) -> CacheCounts:
        hits, misses = self._counts.values()
        return CacheCounts(misses, hits, self._shared, self._compile_seconds)

    def compile(self, module: bytes, signature: Signature) -> Executable:
        from rsrv_bundle.modules import as_exported

        # Versions of a model that differ in their weights, or in their names, are the same program.
        key = hashlib.sha256(module).digest(), signature
        if (shared := self._executables.get(key)) is not None:
            self._shared += 1
            return Executable(shared)
        started, found = time.perf_counter(), self.cache_counts.from_cache
        exported = as_exported(module, signature)
        structs = [self._jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
        compiled = self._jax.jit(exported.call).lower(*structs).compile()
        if self.cache_counts.from_cache == found:
            self._compile_seconds.observe(time.perf_counter() - started)
        # jax keeps what it traced and lowered in case the same function comes again; none ever does, and for
        # a small model of six sizes that is 6 MB of host memory.
        self._jax.clear_caches()
        self._executables[key] = compiled
        return Executable(compiled)

    @property
    def memory_limit(self) -> int | None:
        return self._memory("bytes_limit")

    def memory_in_use(self) -> int | None:
        jaxs = self._memory("bytes_in_use")
        return jaxs if jaxs is None or self._own is None else jaxs + self._own.in_use

    def _memory(self, figure: str) -> int | None:
        figures: dict[str, int] | None = self._device.memory_stats()
        return None if figures is None else figures.get(figure)

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        """Return the scratch bytes, from the compiler's own account of the program's buffers, on a CPU and on a GPU.

        argument_size - weight_bytes (leaves the inputs) + output_size + temp_size - alias_size (an output in an
        argument's place, which both count). A GPU's code and constants are outside of its allocator. An allocator
        rounds each buffer up, to 256 bytes on a GPU, which is not in here.
        """
        compiled: Any = executable
        size = compiled.memory_analysis()
        if size is None:
            raise DeviceError("the compiler does not say how much memory an execution takes")
        outside = size.argument_size_in_bytes - weight_bytes
        return int(outside + size.output_size_in_bytes + size.temp_size_in_bytes - size.alias_size_in_bytes)

    def upload(self, arrays: Iterable[Array], abandoned: Callable[[], bool] = never) -> list[Buffer]:
        arrived: list[Buffer] = []
        moving: deque[tuple[Any, int]] = deque()
        moving_bytes = 0
        try:
            for array in arrays:
                while len(moving) >= _IN_FLIGHT_TENSORS and moving_bytes + array.nbytes > _IN_FLIGHT_BYTES:
                    oldest, nbytes = moving.popleft()
                    arrived.append(self._arrive(oldest))
                    moving_bytes -= nbytes
                if abandoned():
                    raise Abandoned
                moving.append((self._start(array), array.nbytes))
                moving_bytes += array.nbytes
            while moving:
                if abandoned():
                    raise Abandoned
                arrived.append(self._arrive(moving.popleft()[0]))
        except BaseException as error:
            # A transfer under way reads host memory that the caller may be about to unmap.
            for one, _ in moving:
                with suppress(Exception):
                    arrived.append(self._arrive(one))
            self.free(arrived)
            if _exhausted(error):
                raise self._no_room(error) from None
            if isinstance(error, CudaError):
                raise DeviceError(str(error)) from None
            raise
        finally:
            if self._reuse.give_back():
                gc.collect(0)  # as in `free`
        return arrived

    def _start(self, array: Array) -> Any:
        """Send a tensor on its way; for `_arrive`."""
        if self._own is not None and self._own.takes(array):
            return self._own.start(array)
        if self._device.platform == "cpu":
            # jax would use an aligned array in place, here one that the host keeps.
            return self._reuse.put(array, lambda copy: self._jax.device_put(copy, self._device))
        return self._jax.device_put(array, self._device)

    def _arrive(self, moving: Any) -> Buffer:
        """Wait until it is there."""
        if self._own is None or not isinstance(moving, Moving):
            return Buffer(self._jax.block_until_ready(moving))
        try:
            return Buffer(self._jax.dlpack.from_dlpack(self._own.finish(moving)))
        except BaseException:
            self._own.free(moving.address)
            raise

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        buffer: Any
        on_cpu = self._device.platform == "cpu"
        for buffer in buffers:
            address = buffer.unsafe_buffer_pointer() if self._own is not None else 0
            buffer.delete()
            if self._own is not None:
                self._own.free(address)
            if on_cpu:
                self._reuse.free(buffer, reuse=reuse)
        if on_cpu and not reuse:
            # jax lets go of the arrays that it used in place with the next collection, of the youngest will do.
            gc.collect(0)

    def page_lock(self, address: int, nbytes: int) -> Callable[[], None]:
        if self._device.platform == "cpu":
            return lambda: None
        try:
            return self._driver().page_lock(address, nbytes)
        except CudaError as error:
            raise DeviceError(f"{nbytes} bytes cannot be page-locked: {error}") from None

    def _no_room(self, error: BaseException) -> OutOfMemory:
        """What to raise, having given up what is only kept for later: jax may need it for an execution."""
        if self._own is not None:
            with suppress(CudaError):
                self._own.trim()
        return OutOfMemory(str(error))

    def _driver(self) -> Driver:
        self._cuda = self._cuda or Driver(self._device.local_hardware_id or 0)
        return self._cuda

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
    ) -> Launched:
        call: Callable[..., Sequence[Any]] = executable  # type: ignore[assignment]
        # Locked: the order of the launches is that of the executions, and on a CPU one executes at a time.
        with self._lock:
            if not self.asynchronous:
                self.launcher = get_ident()
            started = time.perf_counter()
            try:
                outputs = call(*inputs, *weights)
            except Exception as error:
                if _exhausted(error):
                    raise self._no_room(error) from None
                raise
            if not self.asynchronous:
                for out in outputs:
                    out.block_until_ready()
                return Launched(_LaunchedExecution(started, outputs, unread, ready=time.perf_counter()))
            execution = self._latest = _LaunchedExecution(started, outputs, unread, self._latest)
            for index, out in enumerate(outputs):
                if index not in unread:
                    # So that copying them to the host waits for this execution and not for the next one.
                    out.copy_to_host_async()
            return Launched(execution)

    def keep(self, launched: Launched, index: int) -> Buffer:
        assert isinstance(launched, _LaunchedExecution)
        return Buffer(launched.outputs[index])

    def merge(self, base: Array, axis: int, pieces: Sequence[DeviceRows]) -> Buffer:
        merged: Any = base
        for buffer in {id(piece.buffer): piece.buffer for piece in pieces}.values():
            rows = np.full(base.shape[axis], -1, np.int32)
            for piece in pieces:
                if piece.buffer is buffer:
                    rows[piece.at : piece.at + piece.rows] = np.arange(piece.first, piece.first + piece.rows)
            try:
                merged = self._merge(merged, buffer, rows, axis)
            except Exception as error:
                if _exhausted(error):
                    raise self._no_room(error) from None
                raise
        return Buffer(merged)

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        execution = launched
        assert isinstance(execution, _LaunchedExecution)
        previous = execution.previous
        try:
            ready = self._wait(execution)
            if execution.unread:
                # Copying is where a failure shows, and there may be nothing to copy.
                self._jax.block_until_ready(execution.outputs)
            outputs = [
                _UNREAD if index in execution.unread else np.asarray(out)
                for index, out in enumerate(execution.outputs)
            ]
        except Exception as error:
            if _exhausted(error):
                raise self._no_room(error) from None
            raise
        finally:
            # The next one remembers this one: not its memory, and not its own predecessors.
            execution.outputs, execution.previous = (), None
        free = execution.started if previous is None else max(execution.started, self._wait(previous))
        return outputs, ready - free

    def start_profile(self, directory: Path) -> None:
        self._jax.profiler.start_trace(str(directory))

    def stop_profile(self) -> None:
        self._jax.profiler.stop_trace()

    def _wait(self, execution: _LaunchedExecution) -> float:
        """When the execution was done; noticed for its predecessors first, or they would seem to end after it.

        Several threads may wait for one: a model that is built warms up between executions of others. Whether
        it failed is for its own reader to find out.
        """
        # Before the look at `ready`: whoever empties these has set it.
        outputs, previous = execution.outputs, execution.previous
        if execution.ready is None:
            if previous is not None:
                self._wait(previous)
            with suppress(Exception):
                self._jax.block_until_ready(outputs)
            with self._noticing:
                execution.ready = execution.ready or time.perf_counter()
        return execution.ready


def _use_cache(directory: Path) -> None:
    """Have jax keep what it compiles there, if it can. Once per process, before anything is compiled."""
    import jax
    from jax._src import compilation_cache

    if not hasattr(compilation_cache, "get_file_cache"):
        log.warning("every start compiles anew: rsrv does not know how jax %s keeps entries", jax.__version__)
        return
    # jax has no public way to say how entries are kept, only where. This is the function that it asks.
    compilation_cache.get_file_cache = lambda path: (CompileCache(Path(path)), path)  # type: ignore[assignment,return-value]
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # jax's defaults keep only what took a second to compile; small models would never be kept.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # The compiler's own files beside them are not checked, and a full disk may fail it.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def _merge(base: Any, source: Any, rows: Any, axis: int) -> Any:
    """`base` with its row i replaced by row `rows[i]` of `source`, unless that is negative."""
    import jax.numpy as jnp

    along = [1] * base.ndim
    along[axis] = -1
    return jnp.where((rows >= 0).reshape(along), jnp.take(source, rows, axis=axis, mode="clip"), base)


def _exhausted(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    names = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, MemoryError) or any(name in str(error) for name in names)

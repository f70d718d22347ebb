"""jax's device: compile, hold weights, execute."""

import ctypes
import errno
import gc
import hashlib
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from threading import Lock, get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from rsrv.histogram import LONG_SECONDS, Histogram
from rsrv.limits import spare_memory
from rsrv.runtime.allocation import Reuse, prepare_heap, restore_heap
from rsrv.runtime.compile_cache import CompileCacheError, open_cache
from rsrv.runtime.cuda import (
    CopyStream,
    CudaError,
    DeviceCopy,
    Driver,
    MemoryShare,
    client_options,
    explain_no_gpu,
    find_card,
    find_hidden_card,
    find_refusal,
    has_plugin,
)
from rsrv.runtime.device import (
    NO_TARGETS,
    Abandoned,
    Array,
    ArrayKind,
    Buffer,
    CacheCounts,
    DeviceError,
    DeviceRows,
    Executable,
    Launched,
    OutOfMemory,
    Pools,
    Targets,
    never,
)
from rsrv.runtime.free_pieces import FreePieces, rounded
from rsrv.runtime.jax_compiler import LIBRARY_PRODUCTS, lower, lower_placeholder, target_of, use_cache
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.numerics import OVERRIDE, hardware_of
from rsrv.runtime.stored_executables import find_executables
from rsrv.settings import Numerics
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature

log = logging.getLogger("rsrv.device")

#: bytes of an upload whose copies may be enqueued: enough to keep PCIe busy while this thread waits for the interpreter,
#: and few enough that abandoning the upload, which waits for them, takes 10 ms at 25 GB/s
_IN_FLIGHT_BYTES = 256 << 20
#: allocations of uploads that stay compiled: each takes 170 kB of host memory
_ALLOCATORS = 256
#: CUDA errors after which every call of the process fails: errors that "leave the process in an inconsistent state"
#: by CUresult in NVIDIA's driver API, uncorrectable memory errors, and a context or a driver that is gone.
_LOST = re.compile(
    r"CUDA_ERROR_(ILLEGAL_(ADDRESS|INSTRUCTION)|MISALIGNED_ADDRESS|INVALID_(ADDRESS_SPACE|PC)|LAUNCH_(FAILED|TIMEOUT)|"
    r"HARDWARE_STACK_ERROR|ASSERT|TENSOR_MEMORY_LEAK|CONTAINED|EXTERNAL_DEVICE|(ECC|NVLINK)_UNCORRECTABLE|"
    r"CONTEXT_IS_DESTROYED|DEINITIALIZED|MPS_CLIENT_TERMINATED|UNKNOWN)\b"
)
#: seconds after which the memory of freed buffers is free: XLA's client frees it on a thread of its own
_FREEING_S = 0.2
#: seconds after which the driver has freed the memory of a process that has ended
_RELEASE_S = 10.0
#: Bytes that other allocations may take of the heap that is prepared for jax's allocator.
_HEAP_REST = 64 << 20
#: A device with fewer free bytes can serve nothing.
_LEAST_BYTES = 64 << 20
#: bytes that XLA allocates to time a product's kernels, beside its largest operand: the others, results, and workspaces
_TUNING_BYTES = 128 << 20
#: On a CPU, check that the host has room for weights of at least this many bytes.
_LARGE_BYTES = 1 << 20
#: how XLA reports that it has no memory to time kernels
_UNTUNED = re.compile("Autotuning failed|Failed to get configs|Out of memory while trying to allocate")
#: array whose allocation ends that of an upload's arrays
_END: ArrayKind = ((1,), np.dtype(np.uint8))
#: placeholder of an output that stays on the device, or has targets
_UNREAD = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class _LaunchedExecution:
    """Execution behind a `Launched`."""

    started: float
    outputs: Sequence[Any]
    unread: Collection[int]
    #: the execution launched before, until this one is read
    previous: "_LaunchedExecution | None" = None
    #: time of its end, once a thread has observed it
    ready: float | None = None
    #: outputs that are copied to targets, and the event after these copies
    written: Collection[int] = ()
    copied: ctypes.c_void_p | None = None


@dataclass(slots=True, eq=False)
class _SlotPools:
    """Arrays behind a `Pools`."""

    arrays: Sequence[Any]
    kinds: tuple[ArrayKind, ...]
    #: Keys of the pools' memory in `FreePieces`. The memory stays reserved: each execution writes its results there.
    pieces: Sequence[int]


class ExecutableSources(NamedTuple):
    """Sources of executables that need not be compiled."""

    #: directory of the compilation cache
    cache: Path | None = None
    #: model repository whose files of executables may have some for the device
    repository: Path | None = None
    #: modules whose entries in the cache are known, so that they need not be lowered
    known: KnownModules | None = None
    #: Folder of the server for entries that cannot be written to the cache's directory.
    own_cache: Path | None = None


_NO_SOURCES, _MOST_MEMORY = ExecutableSources(), MemoryShare()


class JaxDevice:
    """First device of a platform of jax. Importing jax takes seconds, so a worker thread creates it.

    A CPU executes within `launch`; with `asynchronous_cpu` it executes like a GPU. jax decides that once per
    process, at its first use. jax's own environment variables take precedence over `memory`. `numerics` applies to
    CUDA's libraries and to functions traced in this process; models' modules are compiled as they are. `lost` is called,
    on the thread that uses the device, with an error of CUDA after which the process can do nothing more with the device.
    With `claims` False it takes none of a GPU's memory for weights and executions until `claim`, so another process may
    still hold that. Until then, `compile` only loads executables that are stored.
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
        import jax
        import jax.dlpack
        import jax.monitoring

        if platform != "auto":
            jax.config.update("jax_platforms", platform)
        self._lost = lost
        self._preallocates = False
        if platform == "cuda" or (platform == "auto" and has_plugin()):
            options = client_options(memory, os.environ)
            self._preallocates = options.get("preallocate") is True
            jax.config.update("jax_pjrt_client_create_options", options)
        if numerics == "f32":
            # Set it before jax creates its client.
            os.environ[OVERRIDE] = "0"
        # Overrides JAX_DEFAULT_MATMUL_PRECISION.
        jax.config.update("jax_default_matmul_precision", "highest" if numerics == "f32" else None)
        # Otherwise jax narrows f64 and i64 tensors to 32 bits.
        jax.config.update("jax_enable_x64", True)
        # An execution occupies the CPU in any case; another thread would only add two context switches.
        jax.config.update("jax_cpu_enable_async_dispatch", asynchronous_cpu)
        self._counts = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}
        try:
            self._cache = open_cache(sources.cache, sources.own_cache)
        except CompileCacheError as error:
            raise DeviceError(str(error)) from None
        #: executables in use, by the module's digest and its signature
        self._executables: WeakValueDictionary[tuple[bytes, Signature], Any] = WeakValueDictionary()
        self._shared = 0
        self._compile_seconds = Histogram(LONG_SECONDS)
        self._jax = jax
        # Compiled once for each pair of shapes, regardless of the number of rows merged.
        self._merge = jax.jit(_merge, static_argnums=3)
        card, reason = find_card(os.environ), ""
        try:
            self._device = jax.devices()[0]
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # the latter without a text, if the platform is unknown
            reason = str(error) or "no plugin for this platform works"
        if reason and platform == "cpu":
            raise DeviceError(f"jax finds no device: {reason}")
        fell_back = not reason and platform == "auto" and self._device.platform == "cpu"
        if reason or (fell_back and card is not None):
            raise DeviceError(explain_no_gpu(reason, plugin=has_plugin(), card=card, refusal=find_refusal()))
        if fell_back and (hidden := find_hidden_card(os.environ)) is not None:
            log.warning(
                "models are served from the CPU: the machine has an NVIDIA card (%s), which this container cannot see. "
                "Start it with --gpus all, or set runtime.platform to cpu",
                hidden,
            )
        self.hardware = hardware_of(
            self._device.platform,
            self._device.client.platform_version,
            getattr(self._device, "compute_capability", None),
        )
        selector = os.environ.get("CUDA_VISIBLE_DEVICES") if self.hardware.platform == "cuda" else None
        self.name = f"{self._device.device_kind} ({selector})" if selector else self._device.device_kind
        self.asynchronous = asynchronous_cpu or self._device.platform != "cpu"
        self.writes_host = self._device.platform != "cpu"
        self.launcher: int | None = None
        self._lock = Lock()
        #: what an executable must have been compiled for
        self.target = target_of(self._device.device_kind, self.hardware.capability)
        self._stored = None
        if sources.repository is not None:
            self._stored = find_executables(sources.repository, self.target)
        self._known = KnownModules() if sources.known is None else sources.known
        self._circumstances = repr((self.target, self._device.client.platform_version, numerics))
        #: True if jax reads a cache on disk
        self._caches = False
        if self._cache.keeps or self._stored is not None:
            self._caches = use_cache(self._cache) and self._cache.keeps
            jax.monitoring.register_event_listener(self._count)
        self._latest: _LaunchedExecution | None = None
        self._noticing = Lock()
        self._cuda: Driver | None = None
        self._reuse = Reuse()
        #: Streams of weights and of large outputs. None: the CPU copies.
        self._copies: CopyStream | None = None
        self._outward: CopyStream | None = None
        if self._device.platform != "cpu":
            try:
                self._copies, self._outward = CopyStream(self._driver()), CopyStream(self._driver())
            except CudaError as error:
                raise DeviceError(
                    f"weights cannot be copied to {self._device.device_kind}: {error}"
                ) from None
        self._allocator = lru_cache(_ALLOCATORS)(self._compile_allocator)
        self._pool_maker = lru_cache(_ALLOCATORS)(self._compile_pool_maker)
        self._slot_reader = lru_cache(_ALLOCATORS)(self._compile_slot_reader)
        self._slot_writer = lru_cache(_ALLOCATORS)(self._compile_slot_writer)
        #: names of the pools' pieces: no id of an object is negative
        self._pool_pieces = count(-1, -1)
        #: bytes that an execution allocates for its intermediates and for each output, by executable
        self._working_bytes: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        #: None: the allocator's pieces are not known
        self._pieces: FreePieces | None = None
        self.memory_limit: int | None = None
        self._claimed = self._device.platform == "cpu"
        self._has_prepared_heap = False
        if claims:
            self.claim(lost)
        log.info("device %s (%s), jax %s", self._device, self._device.device_kind, jax.__version__)

    def claim(self, lost: Callable[[str], object]) -> None:
        """Take the device's memory, once the process before has ended; `lost` as at the start. Raises DeviceError."""
        self._lost = lost
        try:
            self.memory_limit = self._measure_limit()
        finally:
            if self._has_prepared_heap:
                self._has_prepared_heap = False
                restore_heap()
        self._claimed = True

    def prepare_claim(self) -> None:
        """Make `claim` faster, at the cost of host memory until then.

        jax's allocator writes a table of 8 bytes for each 256 bytes of its memory: 2.3 GB for 72 GiB. Getting the pages for it
        is most of what the allocator does.
        """
        nbytes = (self._memory("bytes_limit") or 0) // 32 + _HEAP_REST
        if self._preallocates and spare_memory() > 2 * nbytes:
            self._has_prepared_heap = True
            prepare_heap(nbytes)

    def _count(self, event: str, **_: object) -> None:
        if event in self._counts and not self._cache.bypassed:
            self._counts[event] += 1

    @property
    def cache_counts(self) -> CacheCounts:
        hits, compiled = self._counts.values()
        return CacheCounts(compiled, hits, self._shared, self._cache.obstacle, self._compile_seconds)

    def compile(self, module: bytes, signature: Signature) -> Executable:
        from rsrv_bundle.modules import as_exported

        # Versions of a model that differ only in their weights, or in their names, share an executable.
        key = hashlib.sha256(module).digest(), signature
        if (shared := self._executables.get(key)) is not None:
            self._shared += 1
            return Executable(shared)
        started, found = time.perf_counter(), self.cache_counts.from_cache
        stored = None if self._stored is None else self._stored.get(key[0].hex())
        try:
            compiled = self._load_known(key[0].hex(), signature, stored)
            if compiled is None:
                if not self._claimed:
                    raise DeviceError(
                        "the executable is not stored, and compiling would take memory of the device"
                    )
                with self._cache.offering(stored):
                    exported, digest = as_exported(module, signature), key[0].hex()
                    compiled = self._compile(exported, digest, signature.donated, stored=stored is not None)
        except Exception as error:
            self._examine(error)
            raise
        if self.cache_counts.from_cache == found:
            self._compile_seconds.observe(time.perf_counter() - started)
        # jax caches traced and lowered functions for a second use, which never happens here; for a small model of six
        # sizes the caches take 6 MB of host memory.
        self._jax.clear_caches()
        self._executables[key] = compiled
        if (size := compiled.memory_analysis()) is not None:
            made = signature.outputs[: len(signature.outputs) - signature.donated]
            outputs = (math.prod(shape) * numpy_dtype(token).itemsize for token, shape in made)
            self._working_bytes[compiled] = [size.temp_size_in_bytes, *outputs]
        return Executable(compiled)

    def known_costs(self, model: str) -> Mapping[tuple[int, int], float] | None:
        return self._known.costs(model, self._circumstances)

    def keep_costs(self, model: str, costs: Mapping[tuple[int, int], float]) -> None:
        self._known.add_costs(model, self._circumstances, costs)

    def known_start(self, model: str) -> float | None:
        return self._known.start_seconds(model, self._circumstances)

    def has_executables(self, model: str, name: str) -> bool:
        if self._stored is not None and name in self._stored.contents.models:
            return True
        return self._caches and self.known_start(model) is not None

    def keep_start(self, model: str, seconds: float) -> None:
        self._known.add_start(model, self._circumstances, seconds)

    def _load_known(self, module: str, signature: Signature, stored: bytes | None) -> Any:
        """Return the executable that the repository (`stored`) or the cache has; None: it has none that can be loaded.

        `module` is a digest.
        """
        from jax._src import config

        if stored is None and (key := self._known.entry(module, self._circumstances)) is not None:
            stored = self._cache.get(key)
        if stored is None:
            return None
        try:
            lowered = lower_placeholder(signature)
            # jax also keeps what it compiled in memory, by the lowered module, and models of equal signature share that:
            # without this one would get another one's executable.
            self._jax.clear_caches()
            with config.raise_persistent_cache_errors(True), self._cache.offering(stored):
                return lowered.compile({})
        except Exception:  # noqa: BLE001 - damaged entries raise XLA's errors of any type
            return None

    def _compile(self, exported: Any, module: str, donated: int = 0, *, stored: bool) -> Any:
        """Compile, and let XLA choose kernels by timing them on the device, unless that has no memory for it.

        `module` is a digest. `stored`: jax is offered an executable and only loads it.
        """
        lowered = lower(exported, donated)
        largest = max(map(_bytes, exported.in_avals), default=0)
        try:
            if not stored:
                try:
                    self._require([largest, _TUNING_BYTES])
                except OutOfMemory:
                    if (cached := self._load_cached(lowered)) is not None:
                        return cached
                    raise
            compiled = lowered.compile()
            if self._caches and not stored:
                self._known.add_entry(module, self._circumstances, self._cache.key)
            return compiled
        except Exception as error:
            if not (isinstance(error, OutOfMemory) or _UNTUNED.search(str(error))):
                raise
            log.warning(
                "the device has no memory to time kernels on (%s), so XLA chooses some without: the model may be slower. Pin "
                "fewer models, and load this one again",
                error,
            )
            return lowered.compile({**LIBRARY_PRODUCTS, "xla_gpu_autotune_level": 0})

    def _load_cached(self, lowered: Any) -> Any:
        """Return the executable that the compilation cache has on disk; None: it has none that can be loaded."""
        from jax._src import config

        if not self._caches:
            return None
        # Otherwise jax takes an error of the cache for a miss, and compiles.
        with config.raise_persistent_cache_errors(True), self._cache.requiring():
            try:
                return lowered.compile()
            except Exception:  # noqa: BLE001 - damaged entries raise XLA's errors of any type
                return None

    def card(self) -> str:
        """Return a CUDA device and its driver as text of XLA's GpuTargetConfigProto. Raises DeviceError."""
        from jaxlib import _jax

        topology = _jax.get_topology_for_devices([self._device])
        found: str | None = getattr(topology, "target_config", None)
        if found is None:
            raise DeviceError(f"{self._device.device_kind} is no CUDA device that XLA describes")
        return found

    def _measure_limit(self) -> int | None:
        """Return the bytes that jax's allocator may take. If the allocator preallocates, make it take them now.

        If other processes hold too much of the card, the allocator settles for less than `bytes_limit`, for good. The
        driver may still be freeing the memory of a runtime that crashed, so wait for that. Raises DeviceError.
        """
        limit = self._memory("bytes_limit")
        if limit is None:
            return None
        deadline, full_until = time.monotonic() + _RELEASE_S, _full_until()
        enough = limit if self._preallocates else _LEAST_BYTES
        while (free := self._driver().free_bytes()) < enough:
            if time.monotonic() >= (full_until if free < _LEAST_BYTES else deadline):
                break
            time.sleep(_RELEASE_S / 500)
        if free < _LEAST_BYTES:
            # XLA would ask for it again and again, and write a line of its log each time: 5 MB a second.
            raise DeviceError(
                f"other processes hold the memory of {self.name}: {free} bytes are free, and {_LEAST_BYTES} are needed. "
                "End them (nvidia-smi lists them), or leave the GPU out of runtime.devices"
            )
        first: Any = self._jax.block_until_ready(self._jax.device_put(np.zeros(1, np.uint8), self._device))
        pool = self._memory("pool_bytes") or limit
        if self._preallocates and self._memory("num_allocs") == 1:
            self._pieces = FreePieces(first.unsafe_buffer_pointer(), pool)
        if not self._preallocates or pool >= limit:
            return limit
        log.warning(
            "other processes hold memory of the device: jax's allocator got %d of the %d bytes of "
            "runtime.memory_fraction, and weights are placed in these. End the other processes and restart the server, "
            "or lower runtime.memory_fraction",
            pool,
            limit,
        )
        return pool

    def _require(self, sizes: Sequence[int]) -> None:
        """Raise OutOfMemory if jax's allocator has no room for these: it would wait ten seconds for it first."""
        if self.memory_limit is None:
            return
        needed = sum(map(rounded, sizes))
        deadline = time.monotonic() + _FREEING_S
        while needed > (free := self.memory_limit - (self._memory("bytes_in_use") or 0)):
            if time.monotonic() > deadline:
                raise OutOfMemory(f"{needed} bytes are needed, and {free} of {self.memory_limit} are free")
            time.sleep(_FREEING_S / 100)
        if self._pieces is not None and not self._pieces.fits(sizes):
            raise OutOfMemory(
                f"{needed} bytes are needed, and {free} of {self.memory_limit} are free, but in pieces that are too small"
            )

    def memory_in_use(self) -> int | None:
        return self._memory("bytes_in_use")

    def largest_free(self) -> int | None:
        return None if self._pieces is None else self._pieces.largest

    def _memory(self, figure: str) -> int | None:
        figures: dict[str, int] | None = self._device.memory_stats()
        return None if figures is None else figures.get(figure)

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        """Return the scratch bytes by the compiler's analysis of the program's buffers, on a CPU and on a GPU.

        argument_size - weight_bytes (the inputs remain) + output_size + temp_size - alias_size (outputs in the place of
        an argument, counted in both). A GPU's code and constants lie outside of its allocator. Not included: the
        allocator rounds each buffer up, to 256 bytes on a GPU.
        """
        compiled: Any = executable
        size = compiled.memory_analysis()
        if size is None:
            raise DeviceError("the compiler does not report the memory of an execution")
        outside = size.argument_size_in_bytes - weight_bytes
        return int(outside + size.output_size_in_bytes + size.temp_size_in_bytes - size.alias_size_in_bytes)

    def upload(
        self,
        arrays: Iterable[Array],
        abandoned: Callable[[], bool] = never,
        kinds: Sequence[ArrayKind] | None = None,
    ) -> list[Buffer]:
        if self._copies is None:
            self._require_host(kinds or ())
            return self._upload_on_cpu(arrays, abandoned)
        if kinds is None:
            arrays = list(arrays)
            kinds = [(array.shape, array.dtype) for array in arrays]
        if not kinds:
            return []  # other models have all of its tensors
        buffers: list[Any] = []
        copying: deque[tuple[Array, ctypes.c_void_p]] = deque()
        copying_bytes = 0
        try:
            buffers = self._allocate(self._copies, tuple(kinds))
            for array, buffer in zip(arrays, buffers, strict=True):
                while copying and copying_bytes + array.nbytes > _IN_FLIGHT_BYTES:
                    copying_bytes -= self._finish(self._copies, copying)
                if abandoned():
                    raise Abandoned
                if array.nbytes:
                    source = np.asarray(array, order="C")
                    copy = DeviceCopy(source, buffer.unsafe_buffer_pointer())
                    copying.append((source, self._copies.start([copy])))
                    copying_bytes += array.nbytes
            while copying:
                if abandoned():
                    raise Abandoned
                self._finish(self._copies, copying)
        except BaseException as error:
            # Copies in flight read host memory that the caller may unmap next.
            while copying:
                with suppress(CudaError):
                    self._finish(self._copies, copying)
            try:
                self.free(buffers)
            finally:  # in a lost context this fails, too
                self._examine(error)
            if isinstance(error, CudaError):
                raise DeviceError(str(error)) from None
            raise
        return buffers

    def _allocate(self, copies: CopyStream, kinds: tuple[ArrayKind, ...]) -> list[Any]:
        """Return arrays without contents, in which copies that `copies` starts from now on may be placed.

        jax's allocator hands out memory that executions launched before may still use, so the stream waits for these,
        once for all arrays. A `device_put` would enqueue in the one stream of jax that inputs of executions take, too.
        """
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in (*kinds, _END)]
        # Beside the arrays, the allocation returns a table of their addresses.
        self._require([*sizes, 8 * len(sizes)])
        allocated: list[Any]
        *allocated, end = self._allocator(tuple(kind for kind in kinds if math.prod(kind[0])))()
        end.__dlpack__(stream=copies.handle)
        following = iter(allocated)
        # An executable cannot return an array without elements that nothing has written (jaxlib 0.10.2).
        arrays = [
            next(following)
            if math.prod(shape)
            else self._jax.device_put(np.empty(shape, dtype), self._device)
            for shape, dtype in kinds
        ]
        # Do this last: only arrays that are returned are ever freed.
        if self._pieces is not None:
            for array in allocated:
                self._pieces.add(id(array), array.unsafe_buffer_pointer(), array.nbytes)
        return arrays

    def _compile_allocator(self, kinds: tuple[ArrayKind, ...]) -> Any:
        empty: Any = self._jax.lax.empty  # has no types
        # Do not cache this function. It compiles in milliseconds, is no module of a model, and there is one for each
        # set of tensors that a load finds absent.
        with self._cache.bypassing():
            return self._jax.jit(lambda: [empty(*kind) for kind in (*kinds, _END)]).lower().compile()

    @staticmethod
    def _finish(copies: CopyStream, copying: deque[tuple[Array, ctypes.c_void_p]]) -> int:
        """Wait until the oldest copy is complete; return its bytes."""
        source, event = copying.popleft()
        copies.finish(event)
        return source.nbytes

    def _require_host(self, kinds: Sequence[ArrayKind]) -> None:
        """Raise OutOfMemory if the host has no room for these arrays: the kernel would kill a process."""
        needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)
        if needed < _LARGE_BYTES or needed <= spare_memory():
            return
        # For a large upload, the memory of the evicted weights is in the way.
        if self._reuse.give_back():
            gc.collect(0)  # as in `free`
        if needed > (spare := spare_memory()):
            raise OutOfMemory(f"{needed} bytes are needed, and the host has {spare}")

    def _upload_on_cpu(self, arrays: Iterable[Array], abandoned: Callable[[], bool]) -> list[Buffer]:
        arrived: list[Buffer] = []
        try:
            for array in arrays:
                if abandoned():
                    raise Abandoned
                # jax would use an aligned array in place: the host copy itself.
                put = self._reuse.put(array, lambda copy: self._jax.device_put(copy, self._device))
                arrived.append(Buffer(self._jax.block_until_ready(put)))
            if abandoned():
                raise Abandoned
        except BaseException as error:
            self.free(arrived)
            self._examine(error)
            raise
        finally:
            if self._reuse.give_back():
                gc.collect(0)  # as in `free`
        return arrived

    def free(self, buffers: Iterable[Buffer], *, reuse: bool = False) -> None:
        buffer: Any
        on_cpu = self._device.platform == "cpu"
        for buffer in buffers:
            if self._pieces is not None:
                self._pieces.remove(id(buffer))
            buffer.delete()
            if on_cpu:
                self._reuse.free(buffer, reuse=reuse)
        if on_cpu and not reuse:
            # jax drops arrays that it used in place in the next garbage collection; that of generation 0 suffices.
            gc.collect(0)

    # --- state of sequences -------------------------------------------------------------------------------

    def make_pools(self, kinds: Sequence[ArrayKind]) -> Pools:
        kinds = tuple(kinds)
        try:
            self._require([math.prod(shape) * dtype.itemsize for shape, dtype in kinds])
            arrays = self._jax.block_until_ready(self._pool_maker(kinds)())
        except Exception as error:
            self._examine(error)
            raise
        names = [next(self._pool_pieces) for _ in arrays]
        if self._pieces is not None:
            for name, array in zip(names, arrays, strict=True):
                self._pieces.add(name, array.unsafe_buffer_pointer(), array.nbytes)
        return Pools(_SlotPools(arrays, kinds, names))

    def free_pools(self, pools: Pools) -> None:
        assert isinstance(pools, _SlotPools)
        for array in pools.arrays:
            array.delete()
        if self._pieces is not None:
            for name in pools.pieces:
                self._pieces.remove(name)

    def holds(self, pools: Pools) -> bool:
        assert isinstance(pools, _SlotPools)
        return not any(array.is_deleted() for array in pools.arrays)

    def read_slot(self, pools: Pools, slot: int) -> list[Array]:
        assert isinstance(pools, _SlotPools)
        try:
            with self._lock:
                return list(
                    map(np.asarray, self._slot_reader(pools.kinds)(list(pools.arrays), np.int32(slot)))
                )
        except Exception as error:
            self._examine(error)
            raise

    def write_slot(self, pools: Pools, slot: int, values: Sequence[Array]) -> None:
        assert isinstance(pools, _SlotPools)
        try:
            with self._lock:
                pools.arrays = self._slot_writer(pools.kinds)(
                    list(pools.arrays), np.int32(slot), list(values)
                )
        except Exception as error:
            self._examine(error)
            raise

    def _compile_pool_maker(self, kinds: tuple[ArrayKind, ...]) -> Any:
        zeros: Any = self._jax.numpy.zeros  # has no types
        with self._cache.bypassing():
            return self._jax.jit(lambda: [zeros(*kind) for kind in kinds]).lower().compile()

    def _compile_slot_reader(self, kinds: tuple[ArrayKind, ...]) -> Any:
        pools, slot, _ = self._slot_structs(kinds)
        with self._cache.bypassing():
            return self._jax.jit(lambda pools, at: [pool[at] for pool in pools]).lower(pools, slot).compile()

    def _compile_slot_writer(self, kinds: tuple[ArrayKind, ...]) -> Any:
        def write(pools: Sequence[Any], at: Any, values: Sequence[Any]) -> list[Any]:
            return [pool.at[at].set(value) for pool, value in zip(pools, values, strict=True)]

        with self._cache.bypassing():
            return self._jax.jit(write, donate_argnums=0).lower(*self._slot_structs(kinds)).compile()

    def _slot_structs(self, kinds: tuple[ArrayKind, ...]) -> tuple[list[Any], Any, list[Any]]:
        """Return the types of pools, of a slot's number, and of a slot's tensors."""
        struct: Any = self._jax.ShapeDtypeStruct  # has no types
        pools = [struct(*kind) for kind in kinds]
        return pools, struct((), np.int32), [struct(shape[1:], dtype) for shape, dtype in kinds]

    def page_lock(self, address: int, nbytes: int, *, written: bool = False) -> Callable[[], None]:
        if self._device.platform == "cpu":
            return lambda: None
        try:
            return self._driver().page_lock(address, nbytes, written=written)
        except CudaError as error:
            raise DeviceError(f"{nbytes} bytes cannot be page-locked: {error}") from None

    def _examine(self, error: BaseException) -> None:
        """Raise OutOfMemory if the error means that, and report a device that is lost."""
        if _exhausted(error):
            raise OutOfMemory(str(error)) from None
        if _LOST.search(str(error)):
            self._lost(str(error))

    def _driver(self) -> Driver:
        self._cuda = self._cuda or Driver(self._device.local_hardware_id or 0)
        return self._cuda

    def launch(
        self,
        executable: Executable,
        weights: Sequence[Buffer],
        inputs: Sequence[Array | Buffer],
        unread: Collection[int] = (),
        pools: Pools | None = None,
        targets: Targets = NO_TARGETS,
    ) -> Launched:
        call: Callable[..., Sequence[Any]] = executable  # type: ignore[assignment]
        assert pools is None or isinstance(pools, _SlotPools)
        try:
            if self.memory_limit is not None:
                # It may wait, so other launches go first.
                moved = [one.nbytes for one in inputs if isinstance(one, np.ndarray)]
                self._require([*moved, *self._working_bytes.get(executable, ())])
            # The lock makes the order of launches that of executions, and lets a CPU execute one at a time.
            with self._lock:
                if not self.asynchronous:
                    self.launcher = get_ident()
                started = time.perf_counter()
                outputs = call(*inputs, *weights, *(() if pools is None else pools.arrays))
                if not self.asynchronous:
                    for out in outputs:
                        out.block_until_ready()
                if pools is not None:
                    taken = len(pools.arrays)
                    # Remove the pools from the outputs: the next execution takes their memory, perhaps before this
                    # one is read.
                    pools.arrays, outputs = outputs[:taken], outputs[taken:]
                if not self.asynchronous:
                    return Launched(_LaunchedExecution(started, outputs, unread, ready=time.perf_counter()))
                execution = self._latest = _LaunchedExecution(started, outputs, unread, self._latest)
                # Enqueued now, the copies to the host wait for this execution and not for the next one.
                for index, out in enumerate(outputs):
                    if index not in unread and index not in targets:
                        out.copy_to_host_async()
                if targets:
                    execution.written = targets
                    execution.copied = self._copy_out(outputs, targets)
                return Launched(execution)
        except Exception as error:
            self._examine(error)
            raise

    def _copy_out(self, outputs: Sequence[Any], targets: Targets) -> ctypes.c_void_p:
        """Enqueue the copies of outputs to `targets`; return the event after them, until which the outputs must stay.

        jax itself copies to fresh memory, which no DMA reaches. An executable whose outputs are in jax's memory space
        `pinned_host` would fill memory of jax, from which the host would copy them once more.
        """
        assert self._outward is not None, "a CPU has no targets"
        copies = []
        for index, arrays in targets.items():
            # The stream waits for the execution, and this thread does not.
            outputs[index].__dlpack__(stream=self._outward.handle)
            address = outputs[index].unsafe_buffer_pointer()
            for array in arrays:
                copies.append(DeviceCopy(array, address, to_host=True))
                address += array.nbytes
        return self._outward.start(copies)

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
                self._require([base.nbytes] * 2)
                merged = self._merge(merged, buffer, rows, axis)
            except Exception as error:
                self._examine(error)
                raise
        return Buffer(merged)

    def read(self, launched: Launched) -> tuple[list[Array], float]:
        execution = launched
        assert isinstance(execution, _LaunchedExecution)
        previous = execution.previous
        try:
            ready = self._wait(execution)
            if execution.copied is not None:
                assert self._outward is not None
                self._outward.finish(execution.copied)
            if execution.unread or execution.written:
                # jax raises a failure when it copies outputs, and here there may be none to copy.
                self._jax.block_until_ready(execution.outputs)
            outputs = [
                _UNREAD if index in execution.unread or index in execution.written else np.asarray(out)
                for index, out in enumerate(execution.outputs)
            ]
        except Exception as error:
            self._examine(error)
            raise
        finally:
            # The next execution refers to this one: drop its outputs and its predecessors.
            execution.outputs, execution.previous = (), None
        free = execution.started if previous is None else max(execution.started, self._wait(previous))
        return outputs, ready - free

    def start_profile(self, directory: Path) -> None:
        self._jax.profiler.start_trace(str(directory))

    def stop_profile(self) -> None:
        self._jax.profiler.stop_trace()

    def _wait(self, execution: _LaunchedExecution) -> float:
        """Wait for an execution and return the time of its end; the ends of its predecessors are observed first.

        Several threads may wait for one execution: a new model warms up between executions of others. A failure is
        raised to the reader of that execution only.
        """
        # Read these before `ready`: a thread that empties them has set `ready` before.
        outputs, previous = execution.outputs, execution.previous
        if execution.ready is None:
            if previous is not None:
                self._wait(previous)
            with suppress(Exception):
                self._jax.block_until_ready(outputs)
            with self._noticing:
                execution.ready = execution.ready or time.perf_counter()
        return execution.ready


@cache
def _full_until() -> float:
    """Return the time until which this process waits for a full card: once, or each model's load would take as long."""
    return time.monotonic() + _RELEASE_S


def _merge(base: Any, source: Any, rows: Any, axis: int) -> Any:
    """Replace row i of `base` by row `rows[i]` of `source`, unless that is negative."""
    import jax.numpy as jnp

    along = [1] * base.ndim
    along[axis] = -1
    return jnp.where((rows >= 0).reshape(along), jnp.take(source, rows, axis=axis, mode="clip"), base)


def _bytes(aval: Any) -> int:
    """Return the bytes of an array with this shape and type."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)


def _exhausted(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, OutOfMemory):
        return True
    names = ("RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
    return isinstance(error, MemoryError) or any(name in str(error) for name in names)

"""Executables of jax's device: shared, loaded from a model repository or the compilation cache, or compiled."""

import hashlib
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

from rsrv.histogram import LONG_SECONDS, Histogram
from rsrv.runtime.compile_cache import CompileCache
from rsrv.runtime.device import CacheCounts, DeviceError, Executable, OutOfMemory
from rsrv.runtime.device_errors import ErrorExaminer
from rsrv.runtime.device_memory import DeviceMemory
from rsrv.runtime.jax_compiler import (
    LIBRARY_PRODUCTS,
    drop_traces,
    listen_to_events,
    lower,
    lower_placeholder,
    raising_cache_errors,
    use_cache,
)
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.stored_executables import CompileTarget, find_executables
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature

log = logging.getLogger(__name__)

#: Bytes that XLA allocates, in addition to the largest operand, to time the kernels of a matrix product. They are for the other
#: operand, results and workspaces.
_TUNING_BYTES = 128 << 20
#: Messages by which XLA reports that it has no memory to time kernels.
_UNTUNED = re.compile("Autotuning failed|Failed to get configs|Out of memory while trying to allocate")


class ExecutableSources(NamedTuple):
    """Sources of executables that need not be compiled."""

    #: Directory of the compilation cache.
    cache: Path | None = None
    #: Model repository. It may have a file of executables for the device.
    repository: Path | None = None
    #: Modules whose entries in the cache are known, so that they need not be lowered.
    known: KnownModules | None = None
    #: Folder of the server for entries that cannot be written to the cache's directory.
    own_cache: Path | None = None


class DeviceExecutables:
    """Compiles modules for one device, or finds their executables, and keeps what is known about them."""

    def __init__(
        self,
        sources: ExecutableSources,
        cache: CompileCache,
        target: CompileTarget,
        circumstances: str,
        memory: DeviceMemory,
        examiner: ErrorExaminer,
    ) -> None:
        """`cache` is the opened cache of `sources`. `target`: the target for which an executable must have been compiled.

        `circumstances`: everything on which the known costs of a model depend, except the model.
        """
        self._cache = cache
        self._circumstances = circumstances
        self._memory = memory
        self._examiner = examiner
        self._counts = {"/jax/compilation_cache/cache_hits": 0, "/jax/compilation_cache/cache_misses": 0}
        self._shared = 0
        self._compile_seconds = Histogram(LONG_SECONDS)
        #: Executables in use, by the module's digest and its signature.
        self._executables: WeakValueDictionary[tuple[bytes, Signature], Any] = WeakValueDictionary()
        #: Bytes that an execution allocates for its intermediates and for each output, by executable.
        self._working_bytes: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
        self._stored = None
        if sources.repository is not None:
            self._stored = find_executables(sources.repository, target)
        self._known = KnownModules() if sources.known is None else sources.known
        #: True if jax reads a cache on disk.
        self._caches = False
        if cache.keeps or self._stored is not None:
            self._caches = use_cache(cache) and cache.keeps
            listen_to_events(self._count)

    def _count(self, event: str, **_: object) -> None:
        if event in self._counts and not self._cache.bypassed:
            self._counts[event] += 1

    def cache_counts(self) -> CacheCounts:
        hits, compiled = self._counts.values()
        return CacheCounts(compiled, hits, self._shared, self._cache.obstacle, self._compile_seconds)

    # --- compiling ----------------------------------------------------------------------------------------

    def compile(self, module: bytes, signature: Signature) -> Executable:
        # Versions of a model that differ only in their weights, or in their names, share an executable.
        key = hashlib.sha256(module).digest(), signature
        if (shared := self._executables.get(key)) is not None:
            self._shared += 1
            return Executable(shared)
        started, hits_before = time.perf_counter(), self.cache_counts().from_cache
        digest = key[0].hex()
        stored = None if self._stored is None else self._stored.get(digest)
        with self._examiner:
            compiled = self._load_known(digest, signature, stored)
            if compiled is None:
                compiled = self._compile(module, digest, signature, stored)
        if self.cache_counts().from_cache == hits_before:
            self._compile_seconds.observe(time.perf_counter() - started)
        drop_traces()
        self._executables[key] = compiled
        if (size := compiled.memory_analysis()) is not None:
            made = signature.outputs[: len(signature.outputs) - signature.donated]
            outputs = (math.prod(shape) * numpy_dtype(token).itemsize for token, shape in made)
            self._working_bytes[compiled] = [size.temp_size_in_bytes, *outputs]
        return Executable(compiled)

    def _load_known(self, digest: str, signature: Signature, stored: bytes | None) -> Any:
        """Return the executable of the repository (`stored`) or of the cache.

        None: there is no such executable, or it cannot be loaded.
        """
        if stored is None and (key := self._known.entry(digest, self._circumstances)) is not None:
            stored = self._cache.get(key)
        if stored is None:
            return None
        try:
            lowered = lower_placeholder(signature)
            # jax also caches executables in memory by the lowered module. Models with equal signatures have the same
            # placeholder, so without this call a model would get another model's executable.
            drop_traces()
            with raising_cache_errors(), self._cache.offering(stored):
                return lowered.compile({})
        except Exception:  # noqa: BLE001 - damaged entries raise XLA's errors of any type
            return None

    def _compile(self, module: bytes, digest: str, signature: Signature, stored: bytes | None) -> Any:
        """Compile a module. XLA chooses kernels by timing them on the device, unless the device has no memory for that.

        If an executable is `stored`, jax only loads it.
        """
        from rsrv_bundle.modules import as_exported

        if not self._memory.claimed:
            raise DeviceError("the executable is not stored, and compiling would take memory of the device")
        with self._cache.offering(stored):
            exported = as_exported(module, signature)
            lowered = lower(exported, signature.donated)
            try:
                if stored is None:
                    largest = max(map(_bytes, exported.in_avals), default=0)
                    try:
                        self._memory.require([largest, _TUNING_BYTES])
                    except OutOfMemory:
                        if (cached := self._load_cached(lowered)) is not None:
                            return cached
                        raise
                compiled = lowered.compile()
                if self._caches and stored is None:
                    self._known.add_entry(digest, self._circumstances, self._cache.key)
                return compiled
            except Exception as error:
                if not (isinstance(error, OutOfMemory) or _UNTUNED.search(str(error))):
                    raise
                log.warning(
                    "the device has no memory to time kernels on (%s), so XLA chooses kernels without timing them: the "
                    "model may be slower. Pin fewer models, and load this one again",
                    error,
                )
                return lowered.compile({**LIBRARY_PRODUCTS, "xla_gpu_autotune_level": 0})

    def _load_cached(self, lowered: Any) -> Any:
        """Return the executable of the compilation cache on disk. None: the cache does not have it, or it cannot be loaded."""
        if not self._caches:
            return None
        with raising_cache_errors(), self._cache.requiring():
            try:
                return lowered.compile()
            except Exception:  # noqa: BLE001 - damaged entries raise XLA's errors of any type
                return None

    # --- facts about executables --------------------------------------------------------------------------

    def scratch_bytes(self, executable: Executable, weight_bytes: int) -> int:
        """Return the scratch bytes by the compiler's analysis of the program's buffers, on a CPU and on a GPU.

        The result is argument_size - weight_bytes (the inputs remain) + output_size + temp_size - alias_size. The last term
        subtracts outputs in the place of an argument, which are counted twice. A GPU's code and constants lie outside of its
        allocator. The allocator rounds each buffer up, to 256 bytes on a GPU; the result does not include this rounding.
        """
        compiled: Any = executable
        size = compiled.memory_analysis()
        if size is None:
            raise DeviceError("the compiler does not report the memory of an execution")
        outside = size.argument_size_in_bytes - weight_bytes
        return int(outside + size.output_size_in_bytes + size.temp_size_in_bytes - size.alias_size_in_bytes)

    def working_bytes(self, executable: Executable) -> Sequence[int]:
        """Return the bytes that an execution allocates for its intermediates and for each output. Empty: unknown."""
        return self._working_bytes.get(executable, ())

    def known_costs(self, model: str) -> Mapping[tuple[int, int], float] | None:
        return self._known.costs(model, self._circumstances)

    def keep_costs(self, model: str, costs: Mapping[tuple[int, int], float]) -> None:
        self._known.add_costs(model, self._circumstances, costs)

    def known_start(self, model: str) -> float | None:
        return self._known.start_seconds(model, self._circumstances)

    def keep_start(self, model: str, seconds: float) -> None:
        self._known.add_start(model, self._circumstances, seconds)

    def has_executables(self, model: str, name: str) -> bool:
        if self._stored is not None and name in self._stored.contents.models:
            return True
        return self._caches and self.known_start(model) is not None


def _bytes(aval: Any) -> int:
    """Return the bytes of an array with this shape and type."""
    return int(math.prod(aval.shape) * aval.dtype.itemsize)

"""Compilation with jax for a device that this machine need not have, and parts that `jax_device` also uses."""

import dataclasses
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from importlib import metadata
from typing import Any

import numpy as np

from rsrv.runtime.compile_cache import CompileCache
from rsrv.runtime.device import ArrayKind, DeviceError
from rsrv.runtime.numerics import hardware_of
from rsrv.runtime.stored_executables import CompileTarget
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature, Value

log = logging.getLogger(__name__)

#: Options of a compilation that leave products to cuBLAS, which chooses kernels by itself. XLA's own kernels have small tiles
#: unless they are tuned on a card. For some products, XLA finds no tiling at all (jaxlib 0.10.2).
LIBRARY_PRODUCTS: Mapping[str, Any] = {"xla_gpu_enable_triton_gemm": False}
#: In a compiled module, the algorithm of a convolution that was not tuned on a card. cuDNN has no such engine.
_NO_ENGINE = '"algo_id":"-1"'
#: Instruction of a compiled module that is a kernel or a call of a library.
_KERNEL = re.compile(r" = \S.* (?:fusion|custom-call|copy|sort|while|reduce|scatter|dot|convolution)\(")

#: Maximum number of cached placeholders. Each takes a megabyte, most of it for a context of MLIR.
_PLACEHOLDERS = 8
#: Maximum number of cached helper programs of each kind. Each takes 170 kB of host memory.
_PROGRAMS = 256
#: Additional array after the arrays of an upload. It marks the end of their memory.
ALLOCATION_END: ArrayKind = ((1,), np.dtype(np.uint8))


class AheadCompiler:
    """Compiler for a CUDA device that this machine need not have. Use it in a separate process, whose device is the CPU.

    `target` is the text of XLA's GpuTargetConfigProto. The compiler needs jax's plugin for CUDA and NVIDIA's ptxas and
    libdevice (the packages nvidia-cuda-nvcc and nvidia-nvvm). Raises DeviceError if one of these is missing.
    """

    def __init__(self, target: str) -> None:
        # The plugin would refuse to start if NVIDIA's libraries find no driver. A compilation calls none of these libraries.
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        import jax
        from jax.experimental import topologies

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_x64", True)
        self._jax = jax
        try:
            topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
        except (NotImplementedError, RuntimeError) as error:
            raise DeviceError(
                f"jax {jax.__version__} cannot compile for CUDA: {error}. Install the plugin of that version, for "
                f"example jax-cuda13-plugin=={jax.__version__}, and jax-cuda13-pjrt, nvidia-cuda-nvcc and nvidia-nvvm"
            ) from None
        self._device: Any = topology.devices[0]
        self.hardware = hardware_of("gpu", "cuda", getattr(self._device, "compute_capability", None))

    def target(self) -> CompileTarget:
        """Return the target for which the executables are compiled."""
        return target_of(self._device.device_kind, self.hardware.capability)

    @staticmethod
    def entry(compiled: Any, seconds: float) -> bytes:
        """Return an executable that took this long to compile, in the form of jax's compilation cache."""
        from jax._src import compilation_cache

        blob = compiled.runtime_executable().serialize()
        combined = compilation_cache.combine_executable_and_time(blob, int(seconds))
        return compilation_cache.compress_executable(combined)

    def compile(self, module: bytes, signature: Signature, options: Mapping[str, Any] | None = None) -> Any:
        """Return jax's `Compiled`, which cannot be called. `options`: flags of XLA for this module."""
        compiled = self._lowered(module, signature).compile(dict(options or {}))
        self._jax.clear_caches()
        return compiled

    @staticmethod
    def lacks_engine(compiled: Any) -> bool:
        """Return whether cuDNN would refuse a convolution, because XLA has named no engine for it.

        This happens if the module was compiled without a card and without a card's tuning.
        """
        return _NO_ENGINE in compiled.as_text()

    def work(self, module: bytes, signature: Signature, compiled: Any) -> tuple[float, float, int]:
        """Return the FLOP of an execution, an estimate of the bytes that it moves, and the number of its kernels.

        FLOP are counted in the module before compilation, because calls of libraries have no FLOP. The body of a loop is
        counted once. Bytes are the "bytes accessed" of XLA's cost analysis of the compiled module, plus those of the arguments
        and results.
        """
        from jaxlib import _jax

        client = self._jax.devices("cpu")[0].client
        before = self._lowered(module, signature).compiler_ir("hlo").as_hlo_module()
        flop = _jax.hlo_module_cost_analysis(client, before).get("flops", 0.0)
        after = _jax.hlo_module_cost_analysis(client, compiled.runtime_executable().hlo_modules()[0])
        size = compiled.memory_analysis()
        nbytes = (
            size.argument_size_in_bytes
            + size.output_size_in_bytes
            + max(0.0, after.get("bytes accessed", 0.0))
        )
        entry = compiled.as_text().partition("\nENTRY ")[2]
        return max(0.0, flop), nbytes, len(_KERNEL.findall(entry))

    def _lowered(self, module: bytes, signature: Signature) -> Any:
        from rsrv_bundle.modules import as_exported

        # `as_exported` names this process's platform, which is the CPU. jax would refuse to lower such an export for CUDA.
        exported = dataclasses.replace(as_exported(module, signature), platforms=("cuda",))
        sharding = self._jax.sharding.SingleDeviceSharding(self._device)
        return lower(exported, signature.donated, sharding)


def target_of(kind: str, capability: tuple[int, int] | None) -> CompileTarget:
    """Return the target of executables for a device of this name: everything on which they depend, except the module.

    The versions and XLA's flags are those of this process.
    """
    versions = []
    for package in ("jax", "jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return CompileTarget(
        card=kind,
        capability="" if capability is None else "{}.{}".format(*capability),
        versions=", ".join(versions),
        flags=" ".join(sorted(os.environ.get("XLA_FLAGS", "").split())),
    )


def lower(exported: Any, donated: int, sharding: Any = None) -> Any:
    """Return jax's `Lowered` of an export, for the default device or a sharding. `donated`: see `Signature`.

    The last results come first, because jax gives the memory of a donated argument to the first result of equal type.
    """
    import jax

    struct: Any = jax.ShapeDtypeStruct  # has no types
    structs = [struct(a.shape, a.dtype, sharding=sharding) for a in exported.in_avals]

    def call(*arguments: Any) -> tuple[Any, ...]:
        return _last_first(donated, exported.call(*arguments))

    return jax.jit(call, donate_argnums=_last(donated, structs)).lower(*structs)


def lower_placeholder(signature: Signature) -> Any:
    """Return jax's `Lowered` of a function with this signature, to describe an executable that the compilation cache has.

    The placeholder itself cannot be compiled. Models of equal signature share it, because making one holds the interpreter's
    lock for milliseconds. So before each `compile`, jax must forget the earlier executable: call `jax.clear_caches`, and pass
    options, at least empty ones (`compile({})`). Without options, `Lowered` would keep its first executable.
    """
    return _placeholder(signature.inputs, signature.outputs, signature.donated)


@lru_cache(_PLACEHOLDERS)
def _placeholder(inputs: Sequence[Value], outputs: Sequence[Value], donated: int) -> Any:
    import jax

    struct: Any = jax.ShapeDtypeStruct  # has no types
    arguments, results = (
        [struct(shape, numpy_dtype(token)) for token, shape in side] for side in (inputs, outputs)
    )
    call = jax.ffi.ffi_call("rsrv_placeholder", _last_first(donated, results))
    function: Any = jax.jit(
        lambda *taken: tuple(call(*taken)), keep_unused=True, donate_argnums=_last(donated, arguments)
    )
    return function.lower(*arguments)


def _last(count: int, arguments: Sequence[object]) -> tuple[int, ...]:
    return tuple(range(len(arguments) - count, len(arguments)))


def _last_first(count: int, values: Sequence[Any]) -> tuple[Any, ...]:
    at = len(values) - count
    return (*values[at:], *values[:at])


def drop_traces() -> None:
    """Drop the functions that jax has traced and lowered.

    jax keeps them for a second use, which never happens here. For a small model of six sizes they take 6 MB of host memory.
    """
    import jax

    jax.clear_caches()


def raising_cache_errors() -> AbstractContextManager[object]:
    """Make the calling thread raise errors of the compilation cache. Otherwise, jax treats an error as a miss and compiles."""
    from jax._src import config

    raising: AbstractContextManager[object] = config.raise_persistent_cache_errors(True)
    return raising


def listen_to_events(listener: Callable[..., None]) -> None:
    """Make jax call `listener` with the name of each of its events, such as a hit of the compilation cache."""
    import jax.monitoring

    jax.monitoring.register_event_listener(listener)


def use_cache(cache: CompileCache) -> bool:
    """Make jax store executables in this cache. Return whether jax will use the cache.

    Call this once per process, before the first compilation.
    """
    import jax
    from jax._src import compilation_cache

    if not hasattr(compilation_cache, "get_file_cache"):
        log.warning(
            "rsrv does not know the interface of the compilation cache in jax %s, so every start compiles all modules",
            jax.__version__,
        )
        return False
    # jax has a public setting for the cache's directory, but none for its implementation. So replace the function by which jax
    # opens the cache.
    compilation_cache.get_file_cache = lambda path: (cache, path)  # type: ignore[assignment,return-value]
    # The value is not used. It only turns the cache on.
    jax.config.update("jax_compilation_cache_dir", "rsrv")
    # By default, jax keeps only executables that took a second to compile. Small models take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # XLA's own cache files have no digest, and a full disk may fail the compilation.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    return True


class HelperPrograms:
    """The runtime's own programs: they allocate arrays, and read and write slots of pools. They compile in milliseconds.

    The compilation cache does not keep them, because they are not modules of models, and because there are many: loads need an
    allocator for each set of absent tensors.
    """

    def __init__(self, cache: CompileCache) -> None:
        import jax

        self._jax = jax
        self._cache = cache
        self.allocator = lru_cache(_PROGRAMS)(self._compile_allocator)
        self.pool_maker = lru_cache(_PROGRAMS)(self._compile_pool_maker)
        self.slot_reader = lru_cache(_PROGRAMS)(self._compile_slot_reader)
        self.slot_writer = lru_cache(_PROGRAMS)(self._compile_slot_writer)
        # This program is compiled once for each pair of shapes, regardless of the number of rows merged.
        self.merge: Callable[..., Any] = jax.jit(_merge, static_argnums=3)

    def _compile_allocator(self, kinds: tuple[ArrayKind, ...]) -> Any:
        """Return a program that returns arrays without contents, followed by an array of the kind `ALLOCATION_END`."""
        empty: Any = self._jax.lax.empty  # has no types
        with self._cache.bypassing():
            return (
                self._jax.jit(lambda: [empty(*kind) for kind in (*kinds, ALLOCATION_END)]).lower().compile()
            )

    def _compile_pool_maker(self, kinds: tuple[ArrayKind, ...]) -> Any:
        """Return a program that returns arrays of zeros."""
        zeros: Any = self._jax.numpy.zeros  # has no types
        with self._cache.bypassing():
            return self._jax.jit(lambda: [zeros(*kind) for kind in kinds]).lower().compile()

    def _compile_slot_reader(self, kinds: tuple[ArrayKind, ...]) -> Any:
        """Return a program that takes pools and a slot, and returns the slot's tensors."""
        pools, slot, _ = self._slot_structs(kinds)
        with self._cache.bypassing():
            return self._jax.jit(lambda pools, at: [pool[at] for pool in pools]).lower(pools, slot).compile()

    def _compile_slot_writer(self, kinds: tuple[ArrayKind, ...]) -> Any:
        """Return a program that takes pools, a slot and tensors, and returns the pools with these tensors in the slot."""

        def write(pools: Sequence[Any], at: Any, values: Sequence[Any]) -> list[Any]:
            return [pool.at[at].set(value) for pool, value in zip(pools, values, strict=True)]

        with self._cache.bypassing():
            return self._jax.jit(write, donate_argnums=0).lower(*self._slot_structs(kinds)).compile()

    def _slot_structs(self, kinds: tuple[ArrayKind, ...]) -> tuple[list[Any], Any, list[Any]]:
        """Return the types of pools, of a slot's number, and of a slot's tensors."""
        struct: Any = self._jax.ShapeDtypeStruct  # has no types
        pools = [struct(*kind) for kind in kinds]
        return pools, struct((), np.int32), [struct(shape[1:], dtype) for shape, dtype in kinds]


def _merge(base: Any, source: Any, rows: Any, axis: int) -> Any:
    """Replace row i of `base` by row `rows[i]` of `source`, unless `rows[i]` is negative."""
    import jax.numpy as jnp

    along = [1] * base.ndim
    along[axis] = -1
    return jnp.where((rows >= 0).reshape(along), jnp.take(source, rows, axis=axis, mode="clip"), base)

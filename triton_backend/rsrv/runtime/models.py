"""Models from their bundles: read, check, compile, identify the weights, warm up."""

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from rsrv.logs import fields
from rsrv.runtime.activity import ActivitySlot
from rsrv.runtime.device import Buffer, Device, Executable, Hardware
from rsrv.runtime.host_weights import HostStore, HostWeights
from rsrv.runtime.numerics import treatment
from rsrv.runtime.policy import terms
from rsrv.runtime.state_pool import StatePool
from rsrv.scheduler.events import Program
from rsrv.settings import Residency, Settings
from rsrv.wire.blackbox import Phase
from rsrv.wire.layout import Block, Interface, Tensor, Variant
from rsrv_bundle import Bundle, BundleError, read_bundle
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature, SignatureReader, check_signatures, module_file, read_module
from rsrv_bundle.precision import Treatment, treat
from rsrv_bundle.products import Precision
from rsrv_bundle.spec import TensorSpec

log = logging.getLogger(__name__)

#: Number of timed executions of each batch size at warm-up. One is not enough, because other work on the machine can disturb it.
_TIMED_EXECUTIONS = 3
#: Lower bound of a measured cost. A disturbed clock may show less.
_MIN_COST_S = 1e-7
#: Assumed cost of an execution until the warm-up has measured it.
_INITIAL_COST_S = 1e-3
#: Expected duration of a compilation. The watchdog allows a hundred times as much, because XLA may time kernels for minutes.
_COMPILATION_S = 18.0
#: Maximum number of cached values of each kind. Models with equal values share the cached value.
_SHARED = 1024
_NOTHING: Mapping[Any, Any] = {}
#: Fields of the manifest's `generate` that are sent to stubs.
_OF_GENERATION = ("context", "stop", "max_tokens", "tokenizer", "template")


@dataclass(slots=True)
class CompiledModel:
    """A compiled model. Only `program`, `residency` and `weights` change, and only on the loop."""

    key: str
    name: str
    bundle: Bundle
    interface: Interface
    program: Program
    executables: Mapping[tuple[int, int], Executable]
    #: The fields of each compiled module's `Precision`, by (variant, size).
    precisions: Mapping[tuple[int, int], Mapping[str, Any]]
    #: Name of the clients' input that determines the rows of a request, and its batch axis. None: no input has a batch axis.
    batch_input: tuple[str, int] | None
    #: Device bytes of the model's largest execution, without the weights.
    scratch: int
    residency: Residency
    host: HostWeights
    #: True if an earlier warm-up measured the costs.
    measured: bool
    #: Weights in argument order. None: they are not on the device.
    weights: Sequence[Buffer] | None = None
    #: State of sequences, or None if the model has none.
    pool: StatePool | None = None

    @property
    def tensors(self) -> Mapping[Any, int]:
        """Bytes of each distinct tensor that a load brings to the device: weights and state."""
        assert self.program.tensors is not None
        return self.program.tensors

    @property
    def shortest_ns(self) -> int:
        """Measured duration of the shortest execution, in nanoseconds."""
        return int(min(self.program.costs.values()) * 1e9)


def about(model: CompiledModel, **more: Any) -> dict[str, Any]:
    """Return `extra` of a log line about a model."""
    return fields(model=model.name, version=model.key, **more)


def model_key(name: str, bundle: Bundle) -> str:
    """Return the key of a version of a model. Versions have different keys, so that one warms up while another one serves.

    `name` is the model's name. The path of the bundle does not end with it, because every bundle in a model repository is in a
    directory named `bundle`.
    """
    return f"{name}@{bundle.digest[:12]}"


@dataclass(frozen=True, slots=True)
class RequestedModels:
    """Models that a stub registers: one model, or the callees of a meta model."""

    key: str
    name: str
    bundle: Bundle
    #: Name and bundle of each model, by key.
    models: Mapping[str, tuple[str, Bundle]]


def identify(name: str, path: str, calls: Mapping[str, str]) -> RequestedModels:
    """Read and check the bundle of a model, or of a meta model and its callees, without compiling.

    Files with a checksum in the manifest are not read, because `compile_model` checks the bytes when it reads them. `calls`
    maps the callees' names to their paths. The result has the callees in the order of `calls`. Raises BundleError.
    """
    bundle = read_bundle(Path(path), verify=False)
    key = model_key(name, bundle)
    if bundle.manifest.kind != "meta":
        return RequestedModels(key, name, bundle, {key: (name, bundle)})
    declared = bundle.manifest.meta_calls
    if set(declared) != set(calls):
        raise BundleError(
            f"manifest.yaml: meta.calls lists {', '.join(declared) or 'none'}, but the model repository has "
            f"{', '.join(calls) or 'none'}; run rsrv-gen again"
        )
    models = {}
    for callee, place in calls.items():
        called = read_bundle(Path(place), verify=False)
        if called.manifest.kind == "meta" or called.manifest.state is not None:
            kind = "is a meta model" if called.manifest.kind == "meta" else "keeps state for sequences"
            raise BundleError(f"manifest.yaml: meta.calls: '{callee}' {kind}, so it cannot be called")
        models[model_key(callee, called)] = callee, called
    # The version of a meta model includes the versions of its callees.
    version = hashlib.sha256("".join(sorted((key, *models))).encode()).hexdigest()[:12]
    return RequestedModels(f"{name}@{version}", name, bundle, models)


def compile_model(
    bundle: Bundle,
    device: Device,
    host: HostStore,
    settings: Settings,
    name: str,
    signatures: Mapping[tuple[int, int], Signature],
    slot: ActivitySlot | None = None,
    progress: Callable[[int, int], object] = lambda done, of: None,
) -> CompiledModel:
    """Compile every module, and read the weights to identify them by content. No weights are on the device yet.

    `slot` records each compilation for the watchdog. Reading has no time limit, because storage may be slow. `progress` is
    called after each module with the number of compiled modules and the number of all modules. A module is compiled as it was
    when its signature was read, except for the changes of `runtime.numerics`. The costs of executions are unknown before
    `warm_up`, unless the device knows them from an earlier start. Raises BundleError, HostMemoryError, DeviceError, and the
    compiler's errors.
    """
    started = time.perf_counter()
    slot = slot or ActivitySlot()
    of_model = settings.for_model(name)
    executables, precisions = {}, dict[tuple[int, int], Mapping[str, Any]]()
    keys = usable(signatures, of_model.max_batch_size)
    how = treatment(settings.runtime.numerics, device.hardware)
    own = {"model": name, "version": model_key(name, bundle)}
    for done, key in enumerate(keys, 1):
        began = time.perf_counter()
        module, precision = _treated(bundle, key, signatures[key], how)
        products = precisions[key] = _described(precision)
        slot.begin(Phase.BUILDING, own["version"], key[1], _COMPILATION_S)
        executables[key] = device.compile(module, signatures[key])
        slot.begin(Phase.BUILDING, own["version"], expected=inf)
        progress(done, len(keys))
        seconds = time.perf_counter() - began
        log.info(
            "%s: compiled %d/%d in %.2f s (variant %d, size %d): %s",
            name,
            done,
            len(keys),
            seconds,
            *key,
            precision,
            extra=fields(
                **own,
                event="compiled",
                variant=key[0],
                size=key[1],
                seconds=round(seconds, 6),
                done=done,
                of=len(keys),
                products=products,
            ),
        )
    compiled = time.perf_counter() - started
    state = bundle.manifest.state
    pool = None if state is None else StatePool(own["version"], state)
    nbytes = bundle.weight_bytes + (0 if pool is None else pool.nbytes)
    scratch = max(device.scratch_bytes(executable, nbytes) for executable in executables.values())
    interface = _shared(describe(bundle, {key: signatures[key] for key in keys}, of_model.max_batch_size))
    # Open the weights after the steps above, because no code would close them if one of these steps failed.
    weights = host.open(bundle, keep=of_model.residency == "system")
    known = device.known_costs(own["version"])
    measured = known is not None and known.keys() == executables.keys()
    program = Program(
        model=own["version"],
        name=name,
        costs=known if known is not None and measured else dict.fromkeys(executables, _INITIAL_COST_S),
        coalesce=bundle.manifest.coalesces,
        feeds_back=bundle.manifest.generate is not None,
        padded=bundle.manifest.pad is not None,
        max_batch_rows=of_model.max_batch_size,
        weight_bytes=nbytes,
        tensors=weights.distinct if pool is None else {**weights.distinct, **pool.tensors},
        **terms(settings, name),
    )
    took = time.perf_counter() - started
    log.info(
        "%s: built in %.2f s (compiling %.2f s), %d bytes of weights, %d of scratch",
        name,
        took,
        compiled,
        weights.nbytes,
        scratch,
        extra=fields(
            **own,
            event="built",
            seconds=round(took, 6),
            compile_seconds=round(compiled, 6),
            bytes=weights.nbytes,
            scratch_bytes=scratch,
        ),
    )
    return CompiledModel(
        program.model,
        name,
        _lean(bundle),
        interface,
        program,
        executables,
        precisions,
        batch_input(bundle),
        scratch,
        of_model.residency,
        weights,
        measured,
        pool=pool,
    )


def _lean(bundle: Bundle) -> Bundle:
    """Return a bundle without the parts that only its build or people need. These parts take kilobytes per model."""
    manifest = replace(bundle.manifest, provenance=_NOTHING, numerics=_NOTHING, sha256=_NOTHING)
    return replace(bundle, manifest=manifest, modules=_NOTHING)


@lru_cache(_SHARED)
def _shared(interface: Interface) -> Interface:
    """Return the equal interface of an earlier model if there is one. Fine-tunes of one model have equal interfaces."""
    return interface


@lru_cache(_SHARED)
def _described(precision: Precision) -> Mapping[str, Any]:
    """Return the fields of a precision. Equal precisions share one mapping."""
    return asdict(precision)


def modules_of(
    folder: Path, settings: Settings, name: str, hardware: Hardware, read_signature: SignatureReader
) -> Iterator[tuple[tuple[int, int], bytes, Signature]]:
    """Yield (variant, batch size), module and signature for each module of a bundle, as it is compiled on this hardware.

    A meta model has no modules. Raises BundleError, and the errors of `read_signature`.
    """
    bundle = read_bundle(folder, verify=False)
    if bundle.manifest.kind == "meta":
        return
    signatures = check_signatures(bundle, read_signature)
    how = treatment(settings.runtime.numerics, hardware)
    for key in usable(signatures, settings.for_model(name).max_batch_size):
        yield key, _treated(bundle, key, signatures[key], how)[0], signatures[key]


def _treated(
    bundle: Bundle, key: tuple[int, int], signature: Signature, how: Treatment
) -> tuple[bytes, Precision]:
    """Return a module in the form in which it is compiled, and the precision of its products. Raises BundleError."""
    blob = read_module(bundle, key, signature)
    return treat(blob, module_file(bundle, key).name, how, signature.precision)


def usable(sizes: Iterable[tuple[int, int]], max_rows: int | None) -> list[tuple[int, int]]:
    """Return each (variant, size) that can execute.

    Of a variant's sizes of at least `max_rows`, only the smallest can execute. So a limit on the rows of an execution also
    limits its scratch memory.
    """
    every = sorted(sizes)
    if max_rows is None:
        return every
    largest: dict[int, int] = {}
    for variant, size in every:
        if size >= max_rows:
            largest.setdefault(variant, size)
    return [(variant, size) for variant, size in every if size <= largest.get(variant, size)]


def warm_up(
    model: CompiledModel, device: Device, slot: ActivitySlot | None = None
) -> dict[tuple[int, int], float]:
    """Execute every size several times on zeros with resident weights. Return the seconds of one execution of each size.

    The first execution allocates memory. The fastest of the other executions is the scheduler's initial cost. Executions of a
    model with state use no slot of its pool. `slot` records each execution for the watchdog.
    """
    weights = model.weights
    assert weights is not None, "the scheduler warms up on resident weights only"
    slot = slot or ActivitySlot()
    started = time.perf_counter()
    costs = {}
    for key, executable in model.executables.items():
        variant, size = key
        block = model.interface.variants[variant].inputs
        inputs = [np.zeros(tensor.shape(size), numpy_dtype(tensor.dtype)) for tensor in block.tensors]
        seconds = []
        for _ in range(1 + _TIMED_EXECUTIONS):
            with slot.doing(Phase.WARMING, model.key, size):
                if model.pool is None:
                    _, took = device.read(device.launch(executable, weights, inputs))
                else:
                    launched, losses = model.pool.launch(device, executable, weights, inputs, size)
                    _, took = model.pool.read(device, launched, losses)
                seconds.append(took)
        costs[key] = max(min(seconds[1:]), _MIN_COST_S)
    _smooth(costs)
    took = time.perf_counter() - started
    log.info(
        "%s: warmed up in %.2f s, costs %s",
        model.name,
        took,
        {f"{v}/{s}": f"{c * 1e6:.0f}us" for (v, s), c in costs.items()},
        extra=about(
            model,
            event="warmed_up",
            seconds=round(took, 6),
            costs={f"{v}/{s}": round(c, 9) for (v, s), c in costs.items()},
        ),
    )
    return costs


def _smooth(costs: dict[tuple[int, int], float]) -> None:
    """If a size costs more than a larger size of the same variant, lower its cost to that of the larger size.

    The timing of the smaller size was disturbed. With the measured cost, the scheduler would never use this size.
    """
    for key in sorted(costs, reverse=True):
        larger = (cost for (variant, size), cost in costs.items() if variant == key[0] and size > key[1])
        costs[key] = min(costs[key], *larger, float("inf"))


def describe(
    bundle: Bundle, signatures: Mapping[tuple[int, int], Signature], max_rows: int | None = None
) -> Interface:
    """Return the interface of a bundle's modules. Output shapes come from the modules, because a manifest may leave them open.

    `max_rows`: maximum rows of an execution. A larger size is reported as this number, because fronts need the number of rows
    that fit.
    """
    manifest = bundle.manifest
    most = max_rows if max_rows is not None and manifest.coalesces else sys.maxsize
    variants = []
    for index in range(max(1, len(manifest.input_shapes))):
        sizes = tuple(sorted(size for variant, size in signatures if variant == index))
        results = signatures[index, sizes[0]].outputs
        sizes = tuple(min(size, most) for size in sizes)
        inputs = tuple(
            _tensor(spec, bundle.input_shape(i, index, 1), manifest.padded_axis(spec))
            for i, spec in enumerate(manifest.inputs)
        )
        outputs = tuple(
            _tensor(spec, results[i][1], manifest.padded_axis(spec))
            for i, spec in enumerate(manifest.outputs)
        )
        variants.append(Variant(Block(inputs), Block(outputs), sizes))
    return Interface(tuple(variants), exact=not manifest.coalesces)


def _tensor(spec: TensorSpec, shape: tuple[int, ...], padded_axis: int | None) -> Tensor:
    return Tensor(spec.name, spec.dtype, _open(shape, spec.batch_axis), spec.batch_axis, padded_axis)


def _open(shape: tuple[int, ...], batch_axis: int | None) -> tuple[int, ...]:
    return tuple(-1 if axis == batch_axis else extent for axis, extent in enumerate(shape))


def wire_tensors(bundle: Bundle) -> dict[str, list[tuple[str, str, tuple[int, ...]]]]:
    """Return the clients' tensors: (name, dtype, row-major dims, -1 for axes that vary, such as the batch axis)."""
    sides = {"inputs": bundle.manifest.wire_inputs, "outputs": bundle.manifest.wire_outputs}
    return {
        side: [(spec.name, spec.dtype, _open(spec.dims, spec.batch_axis)) for spec in specs]
        for side, specs in sides.items()
    }


def batch_input(bundle: Bundle) -> tuple[str, int] | None:
    """Return the clients' first input with a batch axis, and that axis as the client sends it."""
    axes = ((spec.name, spec.batch_axis) for spec in bundle.manifest.wire_inputs)
    return next(((name, axis) for name, axis in axes if axis is not None), None)


def to_json(model: CompiledModel) -> dict[str, Any]:
    """Return the description of a model for the frame REGISTERED."""
    generate = model.bundle.manifest.generate
    return {
        "name": model.name,
        "interface": model.interface.to_json(),
        "client": wire_tensors(model.bundle),
        "batched": model.bundle.manifest.rows_first,
        "stateful": model.pool is not None,
        "generate": None if generate is None else {key: getattr(generate, key) for key in _OF_GENERATION},
        "costs_ns": [
            [int(seconds * 1e9) for key, seconds in sorted(model.program.costs.items()) if key[0] == index]
            for index in range(len(model.interface.variants))
        ],
    }

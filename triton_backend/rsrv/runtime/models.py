"""From a bundle on disk to a model that can execute: read, check, compile, load, warm."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rsrv.runtime.device import Array, Buffer, Device, Executable, run
from rsrv.runtime.scheduler.events import Program
from rsrv.settings import Settings
from rsrv.wire.layout import Block, Interface, Tensor, Variant
from rsrv_bundle import Bundle, BundleError, load_weights, read_bundle
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.modules import Signature, check_signatures, module_file

log = logging.getLogger("rsrv.models")

#: timed executions of each size at warm-up; other work on the machine disturbs single ones
_WARM_RUNS = 3
#: seconds; nothing is faster, but a disturbed clock may say so
_LEAST_COST = 1e-7


@dataclass(slots=True)
class Model:
    """A compiled model. Only `weights` changes, and only on the loop."""

    key: str
    bundle: Bundle
    interface: Interface
    program: Program
    executables: Mapping[tuple[int, int], Executable]
    #: in argument order; mapped from the bundle's file, or converted once (format 2.0)
    host_weights: list[Array]
    weights: Sequence[Buffer] | None


def model_key(name: str, bundle: Bundle) -> str:
    """Two versions of a model are two models here: the new one warms up while the old one serves.

    `name` is the model's: in a model repository every bundle's directory is called `bundle`.
    """
    return f"{name}@{bundle.digest[:12]}"


def identify(path: str) -> Bundle:
    """Read and check a bundle, without compiling anything. Raises BundleError."""
    bundle = read_bundle(Path(path))
    if bundle.manifest.kind != "model":
        raise BundleError(
            [f"manifest.yaml: kind: {bundle.manifest.kind!r} cannot be served yet, only 'model'"]
        )
    return bundle


def build(bundle: Bundle, device: Device, settings: Settings, name: str) -> Model:
    """Compile every module, put the weights on the device, and run every executable some times on zeros.

    The first run allocates; the fastest of the others is the cost that the scheduler starts from.
    Raises BundleError, DeviceError and whatever the compiler raises.
    """
    started = time.perf_counter()
    weight_bytes = sum(w.nbytes for w in bundle.weights)
    budget = settings.runtime.weight_budget_bytes
    if budget is not None and weight_bytes > budget:
        raise BundleError(
            [
                f"its {weight_bytes} bytes of weights are more than runtime.weight_budget_bytes ({budget}) allows"
            ]
        )
    signatures = check_signatures(bundle)
    interface = describe(bundle, signatures)
    executables = {}
    for done, (key, signature) in enumerate(sorted(signatures.items()), 1):
        executables[key] = device.compile(module_file(bundle, key).read_bytes(), signature)
        log.info("%s: compiled %d/%d (variant %d, size %d)", name, done, len(signatures), *key)
    compiled = time.perf_counter() - started
    host_weights = load_weights(bundle)
    uploading = time.perf_counter()
    weights = device.upload(host_weights)
    load_seconds = time.perf_counter() - uploading
    costs = {}
    for (variant, size), executable in executables.items():
        inputs = zeros(interface.variants[variant].inputs, size)
        run(device, executable, weights, inputs)
        fastest = min(run(device, executable, weights, inputs)[1] for _ in range(_WARM_RUNS))
        costs[variant, size] = max(fastest, _LEAST_COST)
    _smooth(costs)
    of_model = settings.for_model(name)
    program = Program(
        model=model_key(name, bundle),
        costs=costs,
        coalesce=coalesces(bundle),
        max_queue_depth=of_model.max_queue_depth or settings.scheduler.max_queue_depth,
        max_batch_rows=of_model.max_batch_size,
        weight_bytes=weight_bytes,
        load_seconds=load_seconds,
        weight=of_model.weight,
        max_delay=of_model.max_delay_us / 1e6,
    )
    log.info(
        "%s: ready in %.2f s (compiling %.2f s), %d bytes of weights, costs %s",
        name,
        time.perf_counter() - started,
        compiled,
        program.weight_bytes,
        {f"{v}/{s}": f"{c * 1e6:.0f}us" for (v, s), c in costs.items()},
    )
    return Model(program.model, bundle, interface, program, executables, host_weights, weights)


def _smooth(costs: dict[tuple[int, int], float]) -> None:
    """A size that seems dearer than a larger one was disturbed while it was timed; else it would never be tried."""
    for key in sorted(costs, reverse=True):
        larger = (cost for (variant, size), cost in costs.items() if variant == key[0] and size > key[1])
        costs[key] = min(costs[key], *larger, float("inf"))


def coalesces(bundle: Bundle) -> bool:
    """Whether requests may share an execution: every tensor has rows, so that each gets its own back."""
    tensors = (*bundle.manifest.inputs, *bundle.manifest.outputs)
    return bool(bundle.manifest.inputs) and all(t.batch_axis is not None for t in tensors)


def describe(bundle: Bundle, signatures: Mapping[tuple[int, int], Signature]) -> Interface:
    """The executable side of a bundle. Output shapes come from the modules: a manifest may leave them open."""
    manifest = bundle.manifest
    variants = []
    for index in range(max(1, len(manifest.input_shapes))):
        sizes = tuple(sorted(size for variant, size in signatures if variant == index))
        results = signatures[index, sizes[0]].outputs
        inputs = [
            Tensor(
                spec.name,
                spec.dtype,
                _open(bundle.input_shape(i, index, 1), spec.batch_axis),
                spec.batch_axis,
            )
            for i, spec in enumerate(manifest.inputs)
        ]
        outputs = [
            Tensor(spec.name, spec.dtype, _open(results[i][1], spec.batch_axis), spec.batch_axis)
            for i, spec in enumerate(manifest.outputs)
        ]
        variants.append(Variant(Block(tuple(inputs)), Block(tuple(outputs)), sizes))
    return Interface(tuple(variants), exact=not coalesces(bundle))


def _open(shape: tuple[int, ...], batch_axis: int | None) -> tuple[int, ...]:
    return tuple(-1 if axis == batch_axis else extent for axis, extent in enumerate(shape))


def zeros(block: Block, rows: int) -> list[Array]:
    return [np.zeros(t.shape(rows), numpy_dtype(t.dtype)) for t in block.tensors]


def wire_ranks(bundle: Bundle) -> dict[str, int]:
    """{name: number of axes} of the client-facing tensors. Triton gives those without any of their own one more."""
    return {
        spec.name: len(spec.dims) for spec in (*bundle.manifest.wire_inputs, *bundle.manifest.wire_outputs)
    }

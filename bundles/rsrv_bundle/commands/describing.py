"""Description of a bundle as data, for `rsrv-bundle show` and, with `--json`, for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from rsrv_bundle import dtypes
from rsrv_bundle import weights as weights_file
from rsrv_bundle.errors import Problems
from rsrv_bundle.hooks import check_hooks
from rsrv_bundle.manifest import FILE
from rsrv_bundle.modules import (
    Signature,
    SignatureReader,
    artifact_version,
    check_signatures,
    module_file,
    read_module,
)
from rsrv_bundle.narrowing import bytes_before
from rsrv_bundle.padding import section_of
from rsrv_bundle.reader import HOOKS_FILE, list_files
from rsrv_bundle.spec import Bundle, TensorSpec, WeightSpec
from rsrv_bundle.state_sections import sections_of
from rsrv_bundle.task_section import task_entry

#: Source of the figures about a module's work. stablehlo: XLA's count for the stored module. compiled: the compiler's figures for
#: the module compiled on this machine, including scratch memory. none: there are no figures.
Costs = Literal["stablehlo", "compiled", "none"]
#: Number of the largest weights that are listed.
_LARGEST = 5


def describe(bundle: Bundle, read_signature: SignatureReader, costs: Costs = "stablehlo") -> dict[str, Any]:
    """Return what `rsrv-bundle show` prints about a bundle, as dicts, lists, strings and numbers.

    `read_signature` reads each module. Without jax, the figures about the modules' work are missing.

    Raises BundleError if the modules disagree with the manifest, or cannot be compiled here.
    """
    manifest = bundle.manifest
    description: dict[str, Any] = {
        "name": bundle.name,
        "format_version": manifest.format_version,
        "kind": manifest.kind,
        "description": manifest.description,
        "internal": manifest.internal,
        "sha256": bundle.digest,
        # For a generation, the section `generate` describes the clients' inputs and outputs.
        "client_inputs": [] if manifest.generate else [_tensor(spec) for spec in manifest.wire_inputs],
        "client_outputs": [] if manifest.generate else [_tensor(spec) for spec in manifest.wire_outputs],
    }
    if manifest.kind == "meta":
        description["meta"] = {
            "calls": list(manifest.meta_calls),
            "external": list(manifest.meta_external),
            "restartable": manifest.meta_restartable,
        }
    else:
        description["executable_inputs"] = [_tensor(spec) for spec in manifest.inputs]
        description["executable_outputs"] = [_tensor(spec) for spec in manifest.outputs]
        description["variants"] = [_variant(bundle, sizes) for sizes in manifest.input_shapes]
        if find_spec("jax") is None:
            costs = "none"
        description["costs"] = costs
        signatures = check_signatures(bundle, read_signature)
        description["modules"] = [
            _module(bundle, key, signature, costs) for key, signature in signatures.items()
        ]
        description["weights"] = _weights(bundle.weights)
        if (before := bytes_before(manifest)) is not None:
            description["weights"]["bytes_before"] = before
        description |= sections_of(manifest.state, manifest.generate) | section_of(manifest.pad)
        if manifest.state is not None:
            sizes = {"slot_bytes": manifest.state.slot_bytes, "pool_bytes": manifest.state.pool_bytes}
            description["state"] |= sizes
    if manifest.task is not None:
        description["task"] = task_entry(manifest.task)
    description["hooks"] = [] if bundle.hooks is None else list(check_hooks(bundle.hooks, manifest.kind))
    description["files"] = _other_files(bundle)
    description["numerics"] = dict(manifest.numerics)
    description["provenance"] = dict(manifest.provenance)
    return description


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "dtype": spec.dtype,
        "shape": spec.letters,
        "dims": list(spec.dims),
        "batch_axis": spec.batch_axis,
    }


def _variant(bundle: Bundle, sizes: tuple[int, ...]) -> dict[str, int]:
    inputs = bundle.manifest.inputs
    letters = (inputs[index].letters[axis] for index, axis in bundle.manifest.variable_axes)
    return dict(zip(letters, sizes, strict=True))


def _module(bundle: Bundle, key: tuple[int, int], signature: Signature, costs: Costs) -> dict[str, Any]:
    file = module_file(bundle, key)
    blob = read_module(bundle, key, signature)
    taken = signature.inputs[: len(bundle.manifest.inputs)]
    state = bundle.manifest.state
    # The pools are the last outputs.
    outputs = signature.outputs[: len(signature.outputs) - (len(state.tensors) if state else 0)]
    return {
        "file": file.name,
        "variant": key[0],
        "batch_size": key[1] if bundle.manifest.batched else None,
        "bytes": len(blob),
        "stablehlo": artifact_version(blob),
        "input_bytes": sum(map(_bytes, taken)),
        "output_bytes": sum(map(_bytes, outputs)),
        **_cost(bundle, key, signature, costs),
    }


def _bytes(value: tuple[str, tuple[int, ...]]) -> int:
    return math.prod(value[1]) * dtypes.itemsize(value[0])


def _cost(bundle: Bundle, key: tuple[int, int], signature: Signature, costs: Costs) -> dict[str, Any]:
    """Return one execution's floating-point operations, bytes read and written, and bytes of scratch memory."""
    if costs == "none":
        return {}
    from rsrv_bundle.numerics import compiled, lowered

    if costs == "stablehlo":
        return _counted(lowered(bundle, key, signature).cost_analysis())
    executable = compiled(bundle, key, signature)
    memory = executable.memory_analysis()
    scratch = {} if memory is None else {"scratch_bytes": int(memory.temp_size_in_bytes)}
    return {**_counted(executable.cost_analysis()), **scratch}


def _counted(analysis: Mapping[str, float] | None) -> dict[str, int]:
    names = {"flops": "flops", "bytes accessed": "bytes_accessed"}
    return {ours: int(analysis[name]) for name, ours in names.items() if analysis and name in analysis}


def _weights(weights: tuple[WeightSpec, ...]) -> dict[str, Any]:
    by_dtype: dict[str, dict[str, int]] = {}
    for weight in weights:
        totals = by_dtype.setdefault(weight.dtype, {"count": 0, "bytes": 0})
        totals["count"] += 1
        totals["bytes"] += weight.nbytes
    largest = sorted(weights, key=lambda weight: -weight.nbytes)[:_LARGEST]
    return {
        "count": len(weights),
        "bytes": sum(weight.nbytes for weight in weights),
        "dtypes": by_dtype,
        "largest": [
            {"name": weight.name, "dtype": weight.dtype, "dims": list(weight.shape), "bytes": weight.nbytes}
            for weight in largest
        ],
    }


def _other_files(bundle: Bundle) -> dict[str, int]:
    """Return the sizes, by name, of all files except the manifest, model.py, the weights and the modules."""
    known = {FILE, HOOKS_FILE, weights_file.FILE, *(file.name for file in bundle.modules.values())}
    files = list_files(bundle.path, Problems())
    return {name: path.stat().st_size for name, path in sorted(files.items()) if name not in known}

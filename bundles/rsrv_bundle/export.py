"""Export of a JAX function and its parameters as a bundle, with a check that the bundle agrees."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from rsrv.progress import steps
from rsrv_bundle import provenance, writer
from rsrv_bundle.calling import Results
from rsrv_bundle.errors import BundleError, PaddingError
from rsrv_bundle.hooks import check_hooks, source_of
from rsrv_bundle.inputs import acceptable
from rsrv_bundle.interface import InputPlan, Value, plan_inputs, plan_outputs, value_of
from rsrv_bundle.manifest import CURRENT
from rsrv_bundle.modules import Stripped, artifact_version, strip_locations
from rsrv_bundle.narrow import narrow_into
from rsrv_bundle.narrowing import KEEP
from rsrv_bundle.numerics import TOLERANCE, Judge, ModuleRunner, compare
from rsrv_bundle.padding import plan_pad, section_of
from rsrv_bundle.padding_check import check_padding
from rsrv_bundle.reader import HOOKS_FILE, read_bundle, sha256_of
from rsrv_bundle.spec import Bundle, GenerateSpec, StateSpec, TensorSpec
from rsrv_bundle.state_sections import sections_of

Array = np.ndarray[Any, Any]

#: Platforms of a bundle, by jax.export's names.
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True, slots=True)
class Original:
    """The author's model, if `fn` was made from another object."""

    #: Runs the model on numpy arrays by name, without compiling. Returns the results of `fn` as arrays of the model's framework.
    run: Callable[..., Any]
    #: Python packages whose versions the provenance stores, in addition to rsrv, jax, jaxlib and numpy.
    packages: Sequence[str] = ()
    #: Converts an array of the framework to numpy. It gets the array's name for errors, and the array.
    to_numpy: Callable[[str, Any], Array] = lambda _, value: np.asarray(value)
    #: Further facts for the provenance.
    facts: Mapping[str, str] = field(default_factory=dict)

    def eager(self, **inputs: Any) -> Results:
        """Run the model on numpy arrays by name. Return numpy arrays."""
        return Results.of(self.run(**inputs)).convert(self.to_numpy)


@dataclass(frozen=True, slots=True)
class StatefulParts:
    """State of a function that is being exported, with its checks and files; see `rsrv_bundle.stateful`."""

    state: StateSpec
    #: Runs the modules, and compares their results. Its arguments are the modules, tolerances, example arrays, and a callback for
    #: each finished module. It returns the manifest's `numerics`.
    compare: Callable[
        [ModuleRunner, Mapping[str, float], Mapping[str, Array], Callable[[str], None]], dict[str, Any]
    ]
    generate: GenerateSpec | None = None
    #: Writes further files into the bundle's directory.
    add_files: Callable[[Path], Any] = lambda _: None

    def structs(self, rows: int) -> tuple[list[Any], list[Any]]:
        """Return the shapes of the slots and of the pools, as arguments of a module."""
        struct: Any = jax.ShapeDtypeStruct
        pools = [struct((self.state.slots, *t.dims), _dtype(t.dtype)) for t in self.state.tensors]
        return [struct((rows,), np.int32)], pools


def export_bundle(
    fn: Callable[..., Any],
    params: Any,
    example_inputs: Mapping[str, Any],
    *,
    batch_sizes: Sequence[int],
    out_dir: str | os.PathLike[str],
    batch_axis: int | Mapping[str, int] | None = 0,
    axes: Mapping[str, str] | None = None,
    input_shapes: Sequence[Mapping[str, int]] = (),
    pad: str = "",
    output_names: Sequence[str] | None = None,
    outputs: Sequence[str] | None = None,
    hooks: Path | str | None = None,
    files: Sequence[Path | str] = (),
    client_inputs: Sequence[Mapping[str, Any]] | None = None,
    client_outputs: Sequence[Mapping[str, Any]] | None = None,
    task: Mapping[str, Any] | None = None,
    description: str = "",
    internal: bool = False,
    platform: str = "cpu",
    exported_at: str | None = None,
    max_constant_bytes: int = 2**20,
    tolerance: Mapping[str, float] | None = None,
    weights: str | None = None,
    compute: str | None = None,
    overwrite: bool = False,
    code: Any = None,
    working_tree_patch: bool = False,
    original: Original | None = None,
    stateful: StatefulParts | None = None,
) -> Bundle:
    """Write `fn(params, **inputs)` as the bundle `out_dir`, check it by running it, and return it as read back.

    fn: any function that jax.jit takes. It gets its inputs by name, so that inputs cannot be swapped by mistake. It returns a mapping
        of arrays, a tuple of arrays, or one array. The names of a tuple are `output_0` and so on, the name of a lone array is `output`,
        unless `output_names` has other names. Nested containers are flattened.
    params: pytree of arrays, the weights. Their names are their paths in the tree, joined by "/".
    example_inputs: input name -> array or jax.ShapeDtypeStruct, in the order of the manifest. The extents of batch axes and variable
        axes do not matter.
    batch_sizes: sizes to compile, in rows, or empty for a function without a batch axis.
    out_dir: the bundle's directory. Its last part is the model's name.
    batch_axis: the batch axis of every input, or a mapping from input names to batch axes (0 for other inputs), or None if no
        input has a batch axis.
    axes: input or output name -> one letter per axis, `n` or `b` for the batch, e.g. {"image": "nhwc"}. Inputs
        named here ignore `batch_axis`. Other tensors get letters automatically.
    input_shapes: variants, as the manifest writes them. Each maps the letters of the variable axes to their sizes.
    pad: `LETTER=VALUE,mask=INPUT`, such as "t=0,mask=attention_mask". The server then takes requests of any length along this axis,
        and fills them with the value up to a compiled length. `INPUT=VALUE` gives one input another value. The mask is filled with 0.
        The export fails if an answer depends on the padding, on other rows, or, with a mask, on the values of the padding.
    outputs: names of the outputs to keep, in this order. Default: all outputs.
    hooks: the path of the file to store as model.py, or its text.
    files: files and folders to copy into the bundle, such as modules that model.py imports, or a vocabulary.
    client_inputs, client_outputs: the clients' tensors if the hooks change them, as entries of a manifest.
    task: the task of the model, as the section of a manifest.
    internal: True if only meta models may call the model. Clients then get NOT_FOUND.
    platform: cpu, cuda, rocm or tpu.
    exported_at: a date for the provenance. Without a date, equal exports write equal bytes.
    max_constant_bytes: maximum number of bytes of constants in one module. Arrays that `fn` captures become constants, and each
        batch size has a separate copy of them.
    tolerance: largest allowed error by element type, relative to an output's largest magnitude. It replaces entries of
        `numerics.TOLERANCE`.
    weights: the type in which weights are stored, and types of weights whose names fit a pattern, such as "i8,*norm*=keep". See
        `rsrv_bundle.narrow.narrow_bundle`. The narrow modules are compared with the wide ones.
    compute: "bf16" or "f16", the type in which products are computed.
    overwrite: True to replace an existing bundle. Otherwise, an existing bundle is an error.
    code: the function or class whose file's commit is stored in the provenance. Default: `fn`.
    working_tree_patch: store the uncommitted changes of tracked files around that file as working_tree.patch, unless
        they exceed 20 MiB. Check the patch for secrets, because it is a part of the bundle.
    original: the model that the modules are compared with, in place of `jax.jit(fn)`.
    stateful: only for `rsrv_bundle.stateful.export_stateful`. The state of a function `fn(params, pools, slots, **inputs) -> (outputs,
        pools)`.

    Every module is run on random inputs and compared with `fn`, and the manifest stores the errors under `numerics`. This is
    skipped if `platform` is not the platform of this process. Nothing appears at `out_dir` unless all checks pass. Raises
    FileExistsError, and BundleError if `fn` cannot be exported or the modules differ from it.
    """
    target = writer.free_target(out_dir, overwrite)
    if platform not in PLATFORMS:
        raise BundleError(f"platform: '{platform}' is none of {', '.join(PLATFORMS)}")
    narrow = weights is not None or compute is not None
    if narrow and platform != jax.export.default_export_platform():
        raise BundleError(
            f"weights, compute: modules for {platform} cannot be compared on this machine; export the bundle without these options, and narrow it on a machine with {platform}"
        )
    names, leaves, tree = _weights(params)
    examples = {name: _example(name, value) for name, value in example_inputs.items()}
    inputs = plan_inputs(
        examples, batch_sizes=batch_sizes, batch_axis=batch_axis, axes=axes or {}, input_shapes=input_shapes
    )
    padding = plan_pad(pad, inputs)
    if padding is not None and platform != jax.export.default_export_platform():
        raise PaddingError(
            f"pad: the proof that padding changes no answer runs the modules, which are for {platform}; export for"
            f" {jax.export.default_export_platform()}"
        )
    function = _Flat(fn, tuple(examples), tree, output_names, outputs, stateful is not None)

    def structs(variant: int, size: int) -> list[Any]:
        struct: Any = jax.ShapeDtypeStruct
        tokens = [
            (spec.dtype, shape)
            for spec, shape in zip(inputs.specs, inputs.shapes(variant, size), strict=True)
        ]
        slots, pools = ([], []) if stateful is None else stateful.structs(size)
        return [
            *(struct(shape, _dtype(token)) for token, shape in tokens),
            *slots,
            *(struct(leaf.shape, leaf.dtype) for leaf in leaves),
            *pools,
        ]

    def outputs_at(variant: int, size: int) -> Mapping[str, Value]:
        results = jax.eval_shape(function, *structs(variant, size))
        return {
            name: value_of(f"outputs: {name}", out.dtype, out.shape)
            # The remaining results are the pools.
            for name, out in zip(function.output_names, results, strict=stateful is None)
        }

    results = plan_outputs(inputs, axes or {}, outputs_at, padding.axis if padding else None)
    with writer.scratch_beside(target) as scratch:
        work = Path(scratch, target.name)
        work.mkdir()
        version = ""
        keys = list(inputs.keys())
        with steps(f"lower {target.name}", len(keys)) as lowered:
            for key in keys:
                module = _lower(function, structs(*key), platform, max_constant_bytes)
                version = artifact_version(module.blob)
                name = _module_name(inputs, *key)
                (work / name).write_bytes(module.blob)
                lowered.step(name)
        if leaves:
            writer.write_weights(work / "weights.safetensors", list(zip(names, leaves, strict=True)))
        document = _document(inputs, results, description, client_inputs, client_outputs)
        if internal:
            document["internal"] = True
        if stateful is not None:
            document |= sections_of(stateful.state, stateful.generate)
        if task is not None:
            document["task"] = dict(task)
        document |= section_of(padding)
        document["sha256"] = sha256_of(sorted(work.iterdir()))
        if stateful is not None:
            stateful.add_files(work)
        document["provenance"] = provenance.collect(
            fn if code is None else code,
            packages=original.packages if original else (),
            platform=platform,
            stablehlo=version,
            exported_at=exported_at,
        ) | dict(original.facts if original else {})
        if working_tree_patch and (patch := provenance.working_tree_patch(fn if code is None else code)):
            (work / provenance.PATCH_FILE).write_bytes(patch)
        writer.write_manifest(work / "manifest.yaml", document)
        if hooks is not None:
            (work / HOOKS_FILE).write_text(source_of(hooks), encoding="utf-8")
            check_hooks(work / HOOKS_FILE, "model")
        writer.copy_files(files, work)
        written = read_bundle(work, digest=False)
        if platform == jax.export.default_export_platform():
            allowed = {**TOLERANCE, **(tolerance or {})}
            arrays = {
                n: np.asarray(v) for n, v in example_inputs.items() if isinstance(v, np.ndarray | jax.Array)
            }
            run = ModuleRunner(written)
            with steps(f"compare {target.name}", len(keys)) as compared:
                if stateful is not None:
                    arrays = acceptable(written, arrays)
                    document["numerics"] = stateful.compare(run, allowed, arrays, compared.step)
                else:
                    direct = function.eager(original) if original else function.jitted(leaves)
                    arrays = acceptable(written, arrays, lambda inputs: direct(*inputs))

                    def further(judge: Judge) -> None:
                        check_padding(run, judge, arrays, direct)

                    document["numerics"] = compare(run, direct, allowed, arrays, compared.step, further)
            writer.write_manifest(work / "manifest.yaml", document)
            if narrow:
                wide, work = run, Path(scratch, "narrowed", target.name)
                narrow_into(wide, work, weights or KEEP, compute, examples=arrays, tolerance=tolerance or {})
        writer.put_in_place(work, target, Path(scratch, ".replaced"))
    return read_bundle(target)


def eager_jax(fn: Callable[..., Any], params: Any) -> Callable[..., Results]:
    """Return `jax.jit(fn)` with these parameters as a function from numpy arrays by name to numpy arrays."""
    compiled = jax.jit(fn)

    def answer(**inputs: Any) -> Results:
        return Results.of(compiled(params, **inputs)).convert(lambda _, value: np.asarray(value))

    return answer


class _Flat:
    """`fn` with the calling convention of a module: positional arguments, and a tuple of results. See `modules.check_signatures`."""

    # jax uses this as the name of the module. Without it, the name would contain the address of this object.
    __name__ = "main"

    def __init__(
        self,
        fn: Callable[..., Any],
        inputs: tuple[str, ...],
        tree: Any,
        output_names: Sequence[str] | None,
        keep: Sequence[str] | None,
        stateful: bool,
    ) -> None:
        self.fn = fn
        self.stateful = stateful
        self.inputs = inputs
        self.tree = tree
        self.given = None if output_names is None else tuple(output_names)
        self.keep = keep
        #: Names of the outputs. Empty before the first call.
        self.output_names: tuple[str, ...] = ()

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        count = len(self.inputs)
        inputs = dict(zip(self.inputs, arguments[:count], strict=True))
        pools: Sequence[Any] = ()
        if self.stateful:
            slots, *arrays = arguments[count:]
            params = self.tree.unflatten(arrays[: self.tree.num_leaves])
            result, pools = self.fn(params, arrays[self.tree.num_leaves :], slots, **inputs)
        else:
            result = self.fn(self.tree.unflatten(arguments[count:]), **inputs)
        named = Results.of(result).named(self.given, self.keep)
        self.output_names = tuple(named)
        return (*named.values(), *pools)

    def jitted(self, leaves: Sequence[Any]) -> Callable[..., tuple[Any, ...]]:
        """Return the compiled `fn` with these weights, as a function of the inputs."""
        compiled = jax.jit(self)
        return lambda *inputs: compiled(*inputs, *leaves)

    def eager(self, original: Original) -> Callable[..., tuple[Any, ...]]:
        """Return the original model as a function of the inputs, with the results in the order of `output_names`."""

        def direct(*inputs: Any) -> tuple[Any, ...]:
            try:
                result = original.run(**dict(zip(self.inputs, inputs, strict=True)))
            except BundleError:
                raise
            except Exception as e:
                raise BundleError(
                    f"the model itself fails on random inputs ({type(e).__name__}: {e}); if the model accepts only"
                    " some integers, give an example input with such values (--samples for an ONNX file)"
                ) from e
            # Do this outside of the `try` block, because a failure here is not the model's fault.
            converted = Results.of(result).convert(original.to_numpy)
            return tuple(converted.named(self.given, self.output_names).values())

        return direct


def _dtype(token: str) -> Any:
    from rsrv_bundle.dtypes import numpy_dtype

    return numpy_dtype(token)


def named_leaves(subject: str, tree: Any) -> tuple[list[str], list[Any], Any]:
    """Return names, leaves and structure of a tree of arrays.

    The leaves are in jax's order, which is the same in every process, because jax sorts the keys of dicts. Raises BundleError if
    two names are equal, or if a leaf is not an array. `subject` is the name of the tree in this error.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or subject for path, _ in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BundleError(f"{subject}: {', '.join(twice)}: two leaves have this path; rename one of the keys")
    leaves = [leaf for _, leaf in paths]
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct):
            raise BundleError(f"{subject}: {name}: is a {type(leaf).__name__}; make it an array")
        _example(f"{subject}: {name}", leaf)
    return names, leaves, structure


def _weights(params: Any) -> tuple[list[str], list[Array], Any]:
    names, leaves, tree = named_leaves("params", params)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise BundleError(f"params: {name}: is a ShapeDtypeStruct; make it an array")
    return names, [np.asarray(leaf) for leaf in leaves], tree


def _example(name: str, value: Any) -> Value:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise BundleError(f"{name}: is a {type(value).__name__}; give an array or a jax.ShapeDtypeStruct")
    token, shape = value_of(name, value.dtype, value.shape)
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        raise BundleError(
            f"{name}: is {token}, which jax narrows to 32 bits; call jax.config.update('jax_enable_x64', True) or"
            " give a narrower array"
        )
    return token, shape


def _lower(function: _Flat, structs: Sequence[Any], platform: str, max_constant_bytes: int) -> Stripped:
    # Keep unused arguments, because without them the positions of later arguments would change.
    exported = jax.export.export(jax.jit(function, keep_unused=True), platforms=[platform])(*structs)
    module = strip_locations(bytes(exported.mlir_module_serialized))
    total = sum(size for size, _ in module.constants)
    if total > max_constant_bytes:
        largest = ", ".join(kind for _, kind in module.constants[:3])
        raise BundleError(
            f"model: captures {total} bytes of constants (largest: {largest}), the limit is {max_constant_bytes}; pass"
            " these arrays as params (in a PyTorch module, as buffers), so that all batch sizes share one copy"
        )
    return module


def _module_name(inputs: InputPlan, variant: int, size: int) -> str:
    prefix = f"model.v{variant}" if inputs.input_shapes else "model"
    return f"{prefix}.b{size}.mlir" if inputs.batched else f"{prefix}.mlir"


def _document(
    inputs: InputPlan,
    outputs: Sequence[TensorSpec],
    description: str,
    client_inputs: Sequence[Mapping[str, Any]] | None,
    client_outputs: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    document: dict[str, Any] = {"format_version": CURRENT}
    if description:
        document["description"] = description
    document["executable_inputs"] = [writer.tensor_entry(spec) for spec in inputs.specs]
    document["executable_outputs"] = [writer.tensor_entry(spec) for spec in outputs]
    for section, entries in (("client_inputs", client_inputs), ("client_outputs", client_outputs)):
        if entries is not None:
            document[section] = [dict(entry) for entry in entries]
    if inputs.batch_sizes:
        document["batching"] = {"compiled_batch_sizes": list(inputs.batch_sizes)}
    if inputs.input_shapes:
        document["input_shapes"] = [dict(entry) for entry in inputs.input_shapes]
    return document

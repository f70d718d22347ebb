"""Compiled modules: their signatures, and the check that these agree with the manifest.

A module is a StableHLO portable artifact. All files of the package that read or change the content of modules parse it with
`parsed`. jaxlib, and jax for running modules, are imported only when a function needs them.

A bundle is untrusted. The check of a signature parses a module, and does not run it. But the parser is native code, which a
damaged module can crash. `rsrv_bundle.inspection` therefore parses modules in a process that may crash.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError, Problems, mismatch
from rsrv_bundle.operations import check_extent, check_operations
from rsrv_bundle.products import Precision, precision_of
from rsrv_bundle.spec import Bundle, TensorSpec

if TYPE_CHECKING:
    import jax.export

#: (element type token, row-major shape) of one argument or result.
Value = tuple[str, tuple[int, ...]]

MAX_MODULE_BYTES = 512 * 2**20

# MLIR bytecode's magic number, followed by the producer's name with a zero byte at its end.
_ARTIFACT = re.compile(rb"ML\xefR.{1,9}?StableHLO_v(\d+\.\d+\.\d+)\x00", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Signature:
    """Arguments and results of a module's `main`, in order, with the module's digest and precision."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    #: SHA-256, hexadecimal, of the module from which the signature was read.
    digest: str = field(default="", compare=False)
    #: Precision of the unchanged module's f32 products.
    precision: Precision = field(default_factory=Precision, compare=False)
    #: Number of the last arguments whose memory the last results reuse. These are the pools of a bundle with state.
    donated: int = 0


#: A function that returns the signature of a module, from its bytes and its file's name. Raises BundleError.
SignatureReader = Callable[[bytes, str], Signature]


def module_file(bundle: Bundle, key: tuple[int, int]) -> Path:
    """Return the file of the module for a (variant, size) of `check_signatures`. Raises KeyError without such a module."""
    variant, _ = key
    unsuffixed = bundle.modules.get((variant, 0))
    return bundle.modules[key] if unsuffixed is None else unsuffixed


def read_module(bundle: Bundle, key: tuple[int, int], signature: Signature) -> bytes:
    """Return the bytes of the module of a (variant, size), from which `signature` was read.

    Raises BundleError if the file cannot be read, or if it has changed since the signature was read.
    """
    file = module_file(bundle, key)
    blob = _read(file)
    if hashlib.sha256(blob).hexdigest() != signature.digest:
        raise BundleError(f"{file.name}: was written to while the model was loaded; load it again")
    return blob


def _read(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > MAX_MODULE_BYTES:
            raise BundleError(f"{file.name}: holds {size} bytes; the limit is {MAX_MODULE_BYTES}")
        return file.read_bytes()
    except OSError as e:
        raise BundleError(f"{file.name}: cannot be read: {e.strerror}") from e


def signature_of(blob: bytes, file: str) -> Signature:
    """Return the signature of a module. `file` is the name of its file, for errors.

    Raises BundleError if the module is not a StableHLO portable artifact, is newer than this jaxlib reads, has no public `main`, has
    dynamic shapes, is partitioned over devices, calls functions that are not in known libraries, or is larger than any model.
    Damaged bytes may crash the process, or make the parser run forever.
    """
    problems = Problems()
    signature = Signature((), ())
    try:
        with parsed(blob) as module:
            signature = _signature(module, file, problems)
    except ValueError as e:
        problems.add(file, "", str(e))
    except Exception as e:  # noqa: BLE001 - for damaged bytes, the bindings may raise anything
        problems.add(file, "", f"cannot be looked into: {type(e).__name__}: {str(e).partition(chr(10))[0]}")
    problems.raise_if_any()
    return dataclasses.replace(signature, digest=hashlib.sha256(blob).hexdigest())


@contextlib.contextmanager
def parsed(blob: bytes) -> Iterator[Any]:
    """Parse an artifact in a separate MLIR context. Raises ValueError, with one line of text, if `blob` is not an artifact."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, sdy, stablehlo

    version = artifact_version(blob)
    known = stablehlo.get_current_version()
    if _numbers(version) > _numbers(known):
        raise ValueError(
            f"is StableHLO {version}, but this jaxlib reads up to {known}; update jax, or export for an older version"
        )
    context: Any = ir.Context()
    for dialect in (stablehlo, chlo, sdy):
        dialect.register_dialect(context)
    diagnostics: list[str] = []

    def note(diagnostic: Any) -> bool:
        with contextlib.suppress(Exception):  # The message may repeat bytes that are not UTF-8.
            diagnostics.append(diagnostic.message.partition("\n")[0])
        return True

    handler = context.attach_diagnostic_handler(note)
    try:
        with context:
            try:
                module = stablehlo.deserialize_portable_artifact(context, blob)
                if not module.operation.verify():
                    raise ValueError("the verifier refuses it")
            except Exception as e:  # noqa: BLE001 - MLIR's error is a direct subclass, and has little text
                why = "; ".join(diagnostics) or str(e)
                raise ValueError(f"is not a valid StableHLO portable artifact: {why}") from None
            yield module
    finally:
        handler.detach()


def artifact_version(blob: bytes) -> str:
    """Return the StableHLO version that an artifact was written for. Raises ValueError if `blob` is not an artifact."""
    match = _ARTIFACT.match(blob)
    if match is None:
        raise ValueError(
            "is not a StableHLO portable artifact; text and other MLIR bytecode are not accepted"
        )
    return match[1].decode()


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def serialised(module: Any, version: str) -> bytes:
    """Return a module as an artifact for `version` of StableHLO."""
    from jaxlib.mlir.dialects import stablehlo

    # Allow sharding attributes, which are of another dialect. jax writes them for library calls.
    return bytes(stablehlo.serialize_portable_artifact(module, version, allow_other_dialects=True))


def _signature(module: Any, file: str, problems: Problems) -> Signature:
    attributes = module.operation.attributes
    for attribute in ("mhlo.num_partitions", "mhlo.num_replicas"):
        if attribute in attributes and attributes[attribute].value != 1:
            problems.add(file, attribute, f"is {attributes[attribute].value}; only 1 is supported")
    check_operations(module, file, problems)
    functions = {op.sym_name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    main = functions.get("main")
    if main is None:
        problems.add(file, "", f"has no function 'main'; it has: {', '.join(functions) or 'none'}")
        return Signature((), ())
    visibility = main.sym_visibility
    if visibility is not None and visibility.value != "public":
        problems.add(file, "", f"its function 'main' is {visibility.value}, not public")
    kind = main.function_type.value
    inputs = [_value(t, f"argument {i}", file, problems) for i, t in enumerate(kind.inputs)]
    outputs = [_value(t, f"result {i}", file, problems) for i, t in enumerate(kind.results)]
    return Signature(
        tuple(v for v in inputs if v), tuple(v for v in outputs if v), precision=precision_of(module)
    )


def _value(kind: Any, key: str, file: str, problems: Problems) -> Value | None:
    from jaxlib.mlir import ir

    if not isinstance(kind, ir.RankedTensorType):
        problems.add(file, key, f"is a {kind}; only tensors with a rank are supported")
        return None
    if not kind.has_static_shape:
        problems.add(file, key, f"has the dynamic shape {kind}; export it for concrete shapes")
        return None
    check_extent(kind.shape, key, file, problems)
    try:
        return dtypes.token_of_mlir(str(kind.element_type)), tuple(kind.shape)
    except KeyError:
        problems.add(file, key, f"has the element type {kind.element_type}, which the format has no name for")
        return None


def check_signatures(
    bundle: Bundle, read_signature: SignatureReader = signature_of
) -> dict[tuple[int, int], Signature]:
    """Compare every module with the manifest and the weights.

    The arguments of a module must be the inputs in the manifest's order and then the weights in argument order, with equal types
    and shapes. The first results must be the declared outputs by position. Further results are allowed. With state, the slots follow
    the inputs, the pools follow the weights, and the results are the outputs and then the pools.

    Each module is compared with its checksum in the manifest, if there is one, and then read by `read_signature`. Return the
    signatures by (variant, batch size). If the name of a module has no size, the size is the module's batch extent, or 1 if the
    inputs have no batch axis. Raises BundleError with all problems.
    """
    problems = Problems()
    signatures: dict[tuple[int, int], Signature] = {}
    for (variant, size), file in sorted(bundle.modules.items()):
        try:
            blob = _read(file)
            # Compare checksums first, because the parser would only report that a partly written module is not a module.
            digest = hashlib.sha256(blob).hexdigest()
            if bundle.manifest.sha256.get(file.name, digest) != digest:
                raise BundleError(mismatch(file.name))
            signature = read_signature(blob, file.name)
        except BundleError as e:
            problems.lines += e.problems
            continue
        if size == 0:
            size = _own_size(bundle, signature)
        state = bundle.manifest.state
        if state is not None and size > state.slots:
            problems.add(file.name, "", f"takes {size} rows, but only {state.slots} sequences have a slot")
        _check_arguments(bundle, variant, size, signature, file.name, problems)
        _check_results(bundle, variant, size, signature, file.name, problems)
        signatures[variant, size] = dataclasses.replace(signature, donated=len(_pools(bundle)))
    problems.raise_if_any()
    return signatures


def _own_size(bundle: Bundle, signature: Signature) -> int:
    for spec, (_, shape) in zip(bundle.manifest.inputs, signature.inputs, strict=False):
        if spec.batch_axis is not None and spec.batch_axis < len(shape):
            return shape[spec.batch_axis]
    return 1


def _check_arguments(
    bundle: Bundle, variant: int, size: int, signature: Signature, file: str, problems: Problems
) -> None:
    specs = bundle.manifest.inputs
    expected: list[tuple[str, Value]] = [
        (f"input '{spec.name}'", (spec.dtype, bundle.input_shape(i, variant, size)))
        for i, spec in enumerate(specs)
    ]
    state = bundle.manifest.state
    if state is not None:
        expected.append(("slots", ("i32", (size,))))
    expected += [(f"weight '{weight.name}'", (weight.dtype, weight.shape)) for weight in bundle.weights]
    expected += _pools(bundle)
    if len(signature.inputs) != len(expected):
        problems.add(
            file,
            "",
            f"main takes {len(signature.inputs)} arguments, but the manifest and the weights list {len(expected)}:"
            f" {len(specs)} inputs{'' if state is None else f', the slots, {len(state.tensors)} pools'} and"
            f" {len(bundle.weights)} weights; export it so that no unused argument is dropped",
        )
        return
    for i, ((key, required), actual) in enumerate(zip(expected, signature.inputs, strict=True)):
        if actual != required:
            problems.add(file, key, f"argument {i} of main is {_text(actual)}, expected {_text(required)}")


def _check_results(
    bundle: Bundle, variant: int, size: int, signature: Signature, file: str, problems: Problems
) -> None:
    specs = bundle.manifest.outputs
    pools = _pools(bundle)
    if pools and len(signature.outputs) != len(specs) + len(pools):
        rule = f"main returns {len(signature.outputs)} results, expected {len(specs)} outputs and {len(pools)} pools"
        problems.add(file, "", rule)
        return
    for i, (key, pool) in enumerate(pools, len(specs)):
        if signature.outputs[i] != pool:
            problems.add(
                file, key, f"result {i} of main is {_text(signature.outputs[i])}, expected {_text(pool)}"
            )
    if len(signature.outputs) < len(specs):
        problems.add(
            file, "", f"main returns {len(signature.outputs)} results, but the manifest lists {len(specs)}"
        )
    for i, (spec, actual) in enumerate(zip(specs, signature.outputs, strict=False)):
        padded = bundle.manifest.padded_axis(spec)
        if padded is not None:
            [length] = bundle.manifest.input_shapes[variant][:1]
            spec = dataclasses.replace(spec, dims=(*spec.dims[:padded], length, *spec.dims[padded + 1 :]))
        if not _fits(spec, size, actual):
            dims = [size if axis == spec.batch_axis else d for axis, d in enumerate(spec.dims)]
            required = f"{spec.dtype} [{', '.join('any' if d == -1 else str(d) for d in dims)}]"
            problems.add(
                file, f"output '{spec.name}'", f"result {i} of main is {_text(actual)}, expected {required}"
            )


def _pools(bundle: Bundle) -> list[tuple[str, Value]]:
    """Return the name, type and shape of each pool, which holds a state tensor of all slots."""
    state = bundle.manifest.state
    if state is None:
        return []
    return [(f"state '{t.name}'", (t.dtype, (state.slots, *t.dims))) for t in state.tensors]


def _fits(spec: TensorSpec, size: int, actual: Value) -> bool:
    dtype, shape = actual
    if dtype != spec.dtype or len(shape) != len(spec.dims):
        return False
    return all(
        extent == (size if axis == spec.batch_axis else dim)
        for axis, (extent, dim) in enumerate(zip(shape, spec.dims, strict=True))
        if dim != -1 or axis == spec.batch_axis
    )


def _text(value: Value) -> str:
    return f"{value[0]} {list(value[1])}"


def as_exported(blob: bytes, signature: Signature) -> jax.export.Exported:
    """Wrap a module so that jax runs it: `jax.jit(as_exported(blob, signature).call)(*inputs, *weights)`.

    The call returns a tuple of all results. It runs on jax's default platform, even if the module was lowered for another one. With
    64-bit element types, the call also needs `jax_enable_x64`.
    """
    import jax
    import jax.export
    import jax.numpy as jnp

    def structs(values: tuple[Value, ...]) -> list[jax.ShapeDtypeStruct]:
        struct: Any = jax.ShapeDtypeStruct  # jax does not annotate the arguments.
        return [struct(shape, dtypes.numpy_dtype(token)) for token, shape in values]

    with jax.enable_x64(True):
        results = structs(signature.outputs)
        # jax has no public function that makes an Exported from StableHLO. So export a function with the same signature, and
        # replace its module.
        template = jax.export.export(
            jax.jit(lambda *_: tuple(jnp.zeros(r.shape, r.dtype) for r in results), keep_unused=True)
        )(*structs(signature.inputs))
    return dataclasses.replace(template, mlir_module_serialized=blob)


@dataclass(frozen=True, slots=True)
class Stripped:
    """An artifact without debug locations, and its constants."""

    blob: bytes
    #: Pairs (bytes, MLIR type) of the constants, the largest first. Constants that repeat one value are left out.
    constants: tuple[tuple[int, str], ...]


def strip_locations(blob: bytes) -> Stripped:
    """Remove the debug locations of an artifact. The version of StableHLO stays the same.

    Debug locations contain paths and line numbers of the exporting program. These are private, and they give equal modules
    different digests. Raises ValueError if `blob` is not an artifact.
    """
    from jaxlib.mlir import ir

    version = artifact_version(blob)
    constants: list[tuple[int, str]] = []
    with parsed(blob) as module:
        unknown = ir.Location.unknown()

        def strip(operation: Any) -> None:
            if operation.name == "stablehlo.constant":
                kind = operation.results[0].type
                if not _is_splat(operation):
                    constants.append((_constant_bytes(kind), str(kind)))
            operation.location = unknown
            for region in operation.regions:
                for block in region.blocks:
                    for argument in block.arguments:
                        argument.set_location(unknown)
                    for inner in block.operations:
                        strip(inner.operation)

        strip(module.operation)
        stripped = serialised(module, version)
    return Stripped(stripped, tuple(sorted(constants, reverse=True)))


def _is_splat(constant: Any) -> bool:
    """Return whether a stablehlo.constant is one value repeated."""
    try:
        value = constant.attributes["value"]
    except TypeError:
        # The bindings cannot read complex numbers. So look at MLIR's text, in which long lists of values are elided. The text of
        # one repeated value has only this value.
        return "elided" not in constant.get_asm(large_elements_limit=1)
    return getattr(value, "is_splat", False)


def _constant_bytes(kind: Any) -> int:  # `kind` is a ranked tensor type.
    try:
        itemsize = dtypes.itemsize(dtypes.token_of_mlir(str(kind.element_type)))
    except KeyError:
        itemsize = 8
    count: int = math.prod(kind.shape)
    return itemsize * count


def known_version(text: str | None) -> str:
    """Return a version of StableHLO that this jaxlib writes: `text`, or jax.export's default if it is None.

    Raises ValueError if this jaxlib does not write the version `text`.
    """
    from jaxlib.mlir.dialects import stablehlo

    if text is None:
        # Use the version of four weeks ago, so that readers of that age know it.
        four_weeks = stablehlo.StablehloCompatibilityRequirement.WEEK_4
        return str(stablehlo.get_version_from_compatibility_requirement(four_weeks))
    oldest, newest = stablehlo.get_minimum_version(), stablehlo.get_current_version()
    if re.fullmatch(r"\d+\.\d+\.\d+", text, re.ASCII) is None:
        raise ValueError(f"'{text}' is not a version; write one as {newest}")
    if not _numbers(oldest) <= _numbers(text) <= _numbers(newest):
        raise ValueError(f"this jaxlib writes {oldest} to {newest}, not {text}")
    return text


def rewritten(blob: bytes, version: str) -> bytes:
    """Rewrite an artifact for `version` of StableHLO. Return the same bytes if it already has that version.

    Raises ValueError if `blob` is not an artifact, or if `version` lacks one of its operations.
    """
    current = artifact_version(blob)
    if current == version:
        return blob
    with parsed(blob) as module:
        try:
            return serialised(module, version)
        except Exception as e:  # noqa: BLE001 - MLIR's error is a direct subclass
            why = str(e).partition("\n")[0]
            raise ValueError(f"is StableHLO {current} and cannot be written as {version}: {why}") from None

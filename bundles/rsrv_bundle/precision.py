"""In what precision a module multiplies f32: changed where it should be another, and counted in what is compiled.

On a GPU with TF32 the compiler may round the operands of such products to 10 bits of mantissa, unless the module says
otherwise. It can say so for each operation: by an algorithm, or by a precision for each operand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rsrv_bundle.errors import BundleError
from rsrv_bundle.modules import Signature, parsed, signature_of

#: keep: as exported; strip: TF32 algorithms removed, so that hardware without TF32 runs the module; pin: all in f32
Treatment = Literal["keep", "strip", "pin"]

#: what multiplies its first two operands, and says how precisely in an attribute, or, the einsum, not at all
_PRODUCTS = frozenset(
    {
        "stablehlo.dot_general",
        "stablehlo.dot",
        "stablehlo.convolution",
        "stablehlo.dynamic_conv",
        "stablehlo.einsum",
        "chlo.ragged_dot",
    }
)
#: how jax exports a chlo.ragged_dot, which the compiler makes of it again
_COMPOSITE = "stablehlo.composite"
_RAGGED = "chlo.ragged_dot"
#: what multiplies in a library, whose precision nothing in a module decides
_UNGOVERNABLE = frozenset({"stablehlo.custom_call", "stablehlo.cholesky", "stablehlo.triangular_solve"})
_SEEN = _PRODUCTS | _UNGOVERNABLE | {_COMPOSITE}
#: an artifact has its operations' names in plain: without any of these in it there is nothing to look for
_NAMES = re.compile(rb"dot|convolution|dynamic_conv|einsum|custom_call|cholesky|triangular_solve")
#: complex ones are computed as products of their parts
_F32 = frozenset({"f32", "complex<f32>"})

Kind = Literal["f32", "tf32", "hardware", "algorithm"]


@dataclass(frozen=True, slots=True)
class Precision:
    """How many operations of a module, as it is compiled, multiply f32 in which precision; and what was changed."""

    #: in f32, whatever the hardware has
    f32: int = 0
    #: in TF32, by an algorithm
    tf32: int = 0
    #: as the hardware does by default
    hardware: int = 0
    #: by another algorithm, which the exporter chose
    algorithm: int = 0
    #: given the highest precision here
    pinned: int = 0
    #: given an f32 algorithm for a TF32 one
    rewritten: int = 0
    #: rid of a TF32 algorithm
    stripped: int = 0
    #: operations on f32 that compute in a library, by name and target: nothing here decides how
    ungovernable: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """For people: the counts that are not 0, by their names here."""
        counts = {key: count for key, count in asdict(self).items() if key != "ungovernable"}
        shown = ", ".join(f"{key} {n}" for key, n in (*counts.items(), *self.ungovernable.items()) if n)
        return f"products of f32: {shown or 'none'}"


def treat(blob: bytes, file: str, treatment: Treatment) -> tuple[bytes, Precision]:
    """The module to be compiled, and what there is in it; the same bytes if nothing had to change.

    `blob` is a module that `signature_of` has found good, and `file` the name of its file. Raises BundleError if
    `pin` leaves a product of f32 that is not in f32.
    """
    if _NAMES.search(blob) is None:
        return blob, Precision()
    try:
        changed: Counter[str] = Counter()
        with parsed(blob) as module:
            _walk(module, lambda operation: changed.update(_change(operation, treatment)))
            if changed:
                blob = _written(module)
            else:
                seen = _count(module)
        if changed:
            with parsed(blob) as module:
                seen = _count(module)
    except ValueError as e:
        raise BundleError(f"{file}: {e}") from None
    kinds, ungovernable, names = seen
    if treatment == "pin" and (left := names["hardware"] + names["tf32"]):
        text = ", ".join(f"{count} {name}" for name, count in sorted(left.items()))
        raise BundleError(
            f"{file}: {text}: multiplies f32, and nothing in a module can have it do so in f32; export the model anew, "
            "so that it has stablehlo.dot_general there, or do without runtime.numerics: f32"
        )
    return blob, Precision(**kinds, **changed, ungovernable=dict(sorted(ungovernable.items())))


def product(n: int) -> tuple[bytes, Signature]:
    """A module that multiplies two square matrices of f32 as the hardware does by default."""
    import jax
    import jax.numpy as jnp

    square: Any = jax.ShapeDtypeStruct  # has no types
    exported = jax.export.export(jax.jit(jnp.matmul))(*[square((n, n), jnp.float32)] * 2)
    blob = bytes(exported.mlir_module_serialized)
    return blob, signature_of(blob, "product")


def _walk(module: Any, visit: Any) -> None:
    """Visit what may be of interest, in all functions and regions."""
    from jaxlib.mlir import ir

    def look(operation: Any) -> Any:
        if operation.name in _SEEN:
            visit(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look, ir.WalkOrder.PRE_ORDER)


def _written(module: Any) -> bytes:
    from jaxlib.mlir.dialects import stablehlo

    # Whoever compiles it reads with the same library, whichever version it was exported for. Sharding attributes
    # are of another dialect.
    version = stablehlo.get_current_version()
    return bytes(stablehlo.serialize_portable_artifact(module, version, allow_other_dialects=True))


def _count(module: Any) -> tuple[Counter[str], Counter[str], dict[Kind, Counter[str]]]:
    """Products of f32 by kind; ungovernable operations by name; and the names of products by kind."""
    kinds: Counter[str] = Counter()
    ungovernable: Counter[str] = Counter()
    names: dict[Kind, Counter[str]] = {kind: Counter() for kind in ("f32", "tf32", "hardware", "algorithm")}

    def visit(operation: Any) -> None:
        name = operation.name
        if name in _UNGOVERNABLE:
            if any(map(_is_f32, operation.operands)):
                target = operation.attributes["call_target_name"].value if "custom" in name else ""
                ungovernable[f"{name.partition('.')[2]} {target}".strip()] += 1
        elif (kind := _kind(operation)) is not None:
            kinds[kind] += 1
            names[kind][name] += 1

    _walk(module, visit)
    return kinds, ungovernable, names


def _kind(operation: Any) -> Kind | None:
    """In what precision it multiplies f32, as the module says; None: it does not multiply f32, nor in TF32."""
    if operation.name == _COMPOSITE and operation.attributes["name"].value != _RAGGED:
        return None
    types = _algorithm(operation)
    if "tf32" in types:
        return "tf32"
    if not any(map(_is_f32, list(operation.operands)[:2])):
        return None
    if types:
        return "f32" if set(types) <= {"f32", "f64"} else "algorithm"
    precisions = _precisions(operation)
    return "f32" if len(precisions) == 2 and set(precisions) == {"HIGHEST"} else "hardware"


def _is_f32(value: Any) -> bool:
    return str(getattr(value.type, "element_type", "")) in _F32


def _algorithm(operation: Any) -> list[str]:
    """The types of its operands and of their sum, if it says by which algorithm they are multiplied."""
    from jaxlib.mlir.dialects import stablehlo

    if operation.name != "stablehlo.dot_general" or "algorithm" not in operation.attributes:
        return []
    algorithm = stablehlo.DotAlgorithm(operation.attributes["algorithm"])
    return [
        str(kind)
        for kind in (
            algorithm.lhs_precision_type,
            algorithm.rhs_precision_type,
            algorithm.accumulation_type,
        )
    ]


def _precisions(operation: Any) -> list[str]:
    from jaxlib.mlir.dialects import chlo, stablehlo

    attributes = _holder(operation)
    if "precision_config" not in attributes:
        return []
    dialect: Any = {_RAGGED: chlo.PrecisionAttr, _COMPOSITE: lambda text: text}.get(
        operation.name, stablehlo.PrecisionAttr
    )
    return [str(dialect(one).value) for one in attributes["precision_config"]]


def _holder(operation: Any) -> Any:
    """The attributes among which its precision is."""
    attributes = operation.attributes
    return attributes["composite_attributes"] if operation.name == _COMPOSITE else attributes


def _change(operation: Any, treatment: Treatment) -> list[str]:
    """Do to an operation what is to be done; returns the changes, as `Precision` names them."""
    kind = None if treatment == "keep" or operation.name in _UNGOVERNABLE else _kind(operation)
    if kind == "tf32":
        if treatment == "strip":
            del operation.attributes["algorithm"]
            return ["stripped"]
        operation.attributes["algorithm"] = _f32_algorithm()
        return ["rewritten"]
    if kind == "hardware" and treatment == "pin" and operation.name != "stablehlo.einsum":
        _pin(operation)
        return ["pinned"]
    return []


def _f32_algorithm() -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    f32 = ir.F32Type.get()
    return stablehlo.DotAlgorithm.get(f32, f32, f32, 1, 1, 1, False)


def _pin(operation: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import chlo, stablehlo

    if operation.name == _COMPOSITE:
        highest: Any = ir.StringAttr.get("HIGHEST")
        kept = {one.name: one.attr for one in _holder(operation)}
        kept["precision_config"] = ir.ArrayAttr.get([highest, highest])
        operation.attributes["composite_attributes"] = ir.DictAttr.get(kept)
        return
    dialect = chlo if operation.name == _RAGGED else stablehlo
    highest = dialect.PrecisionAttr.get("HIGHEST")
    operation.attributes["precision_config"] = ir.ArrayAttr.get([highest, highest])

"""In what precision a module multiplies f32, operation by operation.

On a GPU with TF32 the compiler may round the operands of such products to 10 bits of mantissa, unless the module says
otherwise. It can say so for each operation: by an algorithm, or by a precision for each operand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
COMPOSITE = "stablehlo.composite"
RAGGED = "chlo.ragged_dot"
#: what multiplies in a library, whose precision nothing in a module decides
_UNGOVERNABLE = frozenset({"stablehlo.custom_call", "stablehlo.cholesky", "stablehlo.triangular_solve"})
#: custom calls that say where tensors lie, or are computed element by element, and multiply nothing
_HARMLESS = re.compile(
    r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|AllocateBuffer|ApproxTopK"
    r"|mhlo\.(erf|topk)"
)
_SEEN = _PRODUCTS | _UNGOVERNABLE | {COMPOSITE}
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


def precision_of(module: Any) -> Precision:
    """What is in a parsed module."""
    kinds: Counter[str] = Counter()
    ungovernable: Counter[str] = Counter()

    for operation, repeats in products(module):
        name = operation.name
        if name in _UNGOVERNABLE:
            target = operation.attributes["call_target_name"].value if "custom" in name else ""
            if any(map(_is_f32, operation.operands)) and not _HARMLESS.fullmatch(target):
                ungovernable[f"{name.partition('.')[2]} {target}".strip()] += 1
        # Of a TF32 algorithm only the repetition tells, which has to be treated.
        elif (kind := kind_of(operation)) is not None and not (repeats and kind in ("f32", "hardware")):
            kinds[kind] += 1
    return Precision(**kinds, ungovernable=dict(sorted(ungovernable.items())))


def products(module: Any) -> Iterator[tuple[Any, bool]]:
    """Every operation, in all functions and regions, that may multiply f32.

    And whether it repeats another one: what a ragged product may be decomposed into is in the module beside it.
    """
    from jaxlib.mlir import ir

    found: list[tuple[Any, Any]] = []
    repetitions: set[str] = set()
    for function in module.body.operations:

        def look(operation: Any, function: Any = function) -> Any:
            if operation.name in _SEEN:
                found.append((operation, function.attributes.get("sym_name")))
                if operation.name == COMPOSITE and operation.attributes["name"].value == RAGGED:
                    repetitions.add(operation.attributes["decomposition"].value)
            return ir.WalkResult.ADVANCE

        function.operation.walk(look, ir.WalkOrder.PRE_ORDER)
    return ((operation, name is not None and name.value in repetitions) for operation, name in found)


def kind_of(operation: Any) -> Kind | None:
    """In what precision it multiplies f32, as the module says; None: it does not multiply f32, nor in TF32."""
    if operation.name in _UNGOVERNABLE:
        return None
    if operation.name == COMPOSITE and operation.attributes["name"].value != RAGGED:
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

    attributes = holder(operation)
    if "precision_config" not in attributes:
        return []
    dialect: Any = {RAGGED: chlo.PrecisionAttr, COMPOSITE: lambda text: text}.get(
        operation.name, stablehlo.PrecisionAttr
    )
    return [str(dialect(one).value) for one in attributes["precision_config"]]


def holder(operation: Any) -> Any:
    """The attributes among which its precision is."""
    attributes = operation.attributes
    if operation.name != COMPOSITE:
        return attributes
    return attributes.get("composite_attributes", {})

"""Precision of a module's f32 products, operation by operation.

On a GPU with TF32, the compiler may round the operands of such products to 10 bits of mantissa, unless the module forbids it. For
each operation, a module can name an algorithm, or a precision of each operand.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

#: Operations that multiply their first two operands. All except the einsum have an attribute for the precision.
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
#: Operation that jax exports in place of a chlo.ragged_dot. The compiler converts it back to the ragged dot.
COMPOSITE = "stablehlo.composite"
RAGGED = "chlo.ragged_dot"
#: Operations whose products a library computes. A module cannot set their precision.
_UNGOVERNABLE = frozenset({"stablehlo.custom_call", "stablehlo.cholesky", "stablehlo.triangular_solve"})
#: Custom calls that place tensors or work element by element, and multiply nothing.
_HARMLESS = re.compile(
    r"Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|AllocateBuffer|ApproxTopK"
    r"|mhlo\.(erf|topk)"
)
_SEEN = _PRODUCTS | _UNGOVERNABLE | {COMPOSITE}
#: Element types that are multiplied in f32. Complex numbers are multiplied as products of their parts.
_F32 = frozenset({"f32", "complex<f32>"})

Kind = Literal["f32", "tf32", "hardware", "algorithm"]


@dataclass(frozen=True, slots=True)
class Precision:
    """Numbers of operations that multiply f32 in a module, by precision, and numbers of changed operations."""

    #: Products in f32 on all hardware.
    f32: int = 0
    #: Products in TF32 because of an algorithm.
    tf32: int = 0
    #: Products in the hardware's default precision.
    hardware: int = 0
    #: Products for which the exporter chose another algorithm than f32 or TF32.
    algorithm: int = 0
    #: Products that rsrv changed to the highest precision.
    pinned: int = 0
    #: Products whose TF32 algorithm was replaced by an f32 algorithm.
    rewritten: int = 0
    #: Products whose TF32 algorithm was removed.
    stripped: int = 0
    #: Numbers of operations on f32 that a library computes, by name and target. A module cannot set their precision.
    ungovernable: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        """Return the counts above 0 with their names, for people."""
        counts = {key: count for key, count in asdict(self).items() if key != "ungovernable"}
        shown = ", ".join(f"{key} {n}" for key, n in (*counts.items(), *self.ungovernable.items()) if n)
        return f"products of f32: {shown or 'none'}"


def precision_of(module: Any) -> Precision:
    """Count the products of a parsed module."""
    kinds: Counter[str] = Counter()
    ungovernable: Counter[str] = Counter()

    for operation, repeats in products(module):
        name = operation.name
        if name in _UNGOVERNABLE:
            target = operation.attributes["call_target_name"].value if "custom" in name else ""
            if any(map(_is_f32, operation.operands)) and not _HARMLESS.fullmatch(target):
                ungovernable[f"{name.partition('.')[2]} {target}".strip()] += 1
        # Skip an operation that repeats another one, unless it has an algorithm, because an algorithm may need a change.
        elif (kind := kind_of(operation)) is not None and not (repeats and kind in ("f32", "hardware")):
            kinds[kind] += 1
    return Precision(**kinds, ungovernable=dict(sorted(ungovernable.items())))


def products(module: Any) -> Iterator[tuple[Any, bool]]:
    """Yield every operation that may multiply f32, in all functions and regions, and whether it repeats another operation.

    A module contains the decomposition of each ragged product as a function. The operations of this function repeat the product.
    """
    from jaxlib.mlir import ir

    operations: list[tuple[Any, Any]] = []
    repetitions: set[str] = set()
    for function in module.body.operations:

        def collect(operation: Any, function: Any = function) -> Any:
            if operation.name in _SEEN:
                operations.append((operation, function.attributes.get("sym_name")))
                if operation.name == COMPOSITE and operation.attributes["name"].value == RAGGED:
                    repetitions.add(operation.attributes["decomposition"].value)
            return ir.WalkResult.ADVANCE

        function.operation.walk(collect, ir.WalkOrder.PRE_ORDER)
    return ((operation, name is not None and name.value in repetitions) for operation, name in operations)


def kind_of(operation: Any) -> Kind | None:
    """Return the precision in which an operation multiplies f32. Return None if it does not multiply f32 or use TF32."""
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
    """Return the types of the operands and of the sum in the operation's algorithm. Empty if it names no algorithm."""
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
    return [str(dialect(value).value) for value in attributes["precision_config"]]


def holder(operation: Any) -> Any:
    """Return the attributes that hold the operation's precision."""
    attributes = operation.attributes
    if operation.name != COMPOSITE:
        return attributes
    return attributes.get("composite_attributes", {})

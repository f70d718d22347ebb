"""Rewrite of a module so that it computes in half precision, as mixed precision does in the frameworks.

Matrix products and convolutions take and return the half type, and sum in f32. Operations that only move such values, or that
combine them with weights and constants, also use the half type. All other operations and values stay in f32: reductions (and so
softmax and norms), exponentials and other functions, elementwise multiplications of two activations, complex numbers, the state
of loops, inputs and outputs.
"""

from __future__ import annotations

from typing import Any

from rsrv_bundle.errors import BundleError
from rsrv_bundle.modules import artifact_version, parsed, serialised
from rsrv_bundle.narrow_modules import element, main_of
from rsrv_bundle.products import kind_of

_PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
#: Operations that are computed in the half type if at least one of their f32 operands is not static, and if all such operands
#: already exist in the half type.
_FOLLOW = frozenset(
    f"stablehlo.{name}"
    for name in [
        "abs",
        "add",
        "broadcast_in_dim",
        "clamp",
        "concatenate",
        "dynamic_slice",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "pad",
        "reshape",
        "reverse",
        "select",
        "slice",
        "subtract",
        "transpose",
    ]
)
#: Types that are as narrow as the half types, or narrower.
_NARROW = frozenset({"i8", "f8E4M3FN", "bf16", "f16"})


def computed_in(blob: bytes, file: str, half: str, first: int) -> bytes:
    """Return the module with its products of f32 in the type `half`.

    first: the index of the first weight among the arguments. Raises BundleError, naming the file, if the result is no
    valid module.
    """
    from jaxlib.mlir import ir

    version = artifact_version(blob)
    with parsed(blob) as module, ir.Location.unknown():
        block = main_of(module).entry_block
        _Rewriter(element(half), set(list(block.arguments)[first:])).rewrite(block)
        if not module.operation.verify():
            raise BundleError(f"{file}: the verifier refuses the module in {half}")
        return serialised(module, version)


class _Rewriter:
    """Rewriter of the blocks of one function, each from its first operation to its last."""

    def __init__(self, half: Any, static: set[Any]) -> None:
        self.half = half
        #: Values that depend on no input: weights, constants, and results computed only from weights and constants.
        self.static = static
        #: Maps f32 values to the same values in the half type.
        self.halves: dict[Any, Any] = {}

    def rewrite(self, block: Any) -> None:
        for operation in [item.operation for item in block.operations]:
            name = operation.name
            # Rewrite the regions of loops and branches, which contain computations. The region of a reduction only names its
            # operation.
            if name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
                for region in operation.regions:
                    for inner in region.blocks:
                        self.rewrite(inner)
            elif all(value in self.static for value in operation.operands) and not len(operation.regions):
                self.static.update(operation.results)
            elif _is_product(operation) or self._follows(operation):
                self._halve(operation)

    def _follows(self, operation: Any) -> bool:
        if operation.name not in _FOLLOW and not _is_pooling(operation):
            return False
        floats = [value for value in operation.operands if _is_f32(value)]
        moving = [value for value in floats if value not in self.static]
        # A product of two activations, such as a power, is often a part of a function that needs f32.
        if operation.name == "stablehlo.multiply" and len(moving) > 1:
            return False
        return bool(moving) and all(value in self.halves for value in moving)

    def _halve(self, operation: Any) -> None:
        """Make an operation take and return the half type, and convert its result back to f32 for the operations that use it."""
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        with ir.InsertionPoint(operation):
            for place, value in enumerate(operation.operands):
                if _is_f32(value):
                    operation.operands[place] = self._in_half(value)
        for value in _inner_values(operation):
            value.set_type(ir.RankedTensorType.get([], self.half))
        result = operation.results[0]
        kind = result.type
        uses = [(use.owner.operation, use.operand_number) for use in result.uses]
        result.set_type(ir.RankedTensorType.get(kind.shape, self.half))
        with ir.InsertionPoint.after(operation):
            wide = stablehlo.convert(kind, result)
        for user, place in uses:
            user.operands[place] = wide
        self.halves[wide] = result

    def _in_half(self, value: Any) -> Any:
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        if value in self.halves:
            return self.halves[value]
        source = value
        if isinstance(value, ir.OpResult) and value.owner.name == "stablehlo.convert":
            stored = value.owner.operands[0]
            if str(stored.type.element_type) in _NARROW:
                source = stored
        return stablehlo.convert(ir.RankedTensorType.get(value.type.shape, self.half), source)


def _is_product(operation: Any) -> bool:
    """Return whether an operation is a matrix product or a convolution of f32 whose precision the module leaves to the hardware."""
    if operation.name not in _PRODUCTS or kind_of(operation) != "hardware":
        return False
    # Products of complex numbers, and products with results in f64, have no half type.
    return all(map(_is_f32, [*operation.operands, *operation.results]))


def _is_pooling(operation: Any) -> bool:
    """Return whether an operation is a max pooling. It rounds nothing, so it may use the half type."""
    if operation.name != "stablehlo.reduce_window" or len(operation.results) != 1:
        return False
    first = next(iter(operation.regions[0].blocks[0].operations))
    return bool(first.operation.name == "stablehlo.maximum")


def _inner_values(pooling: Any) -> list[Any]:
    """Return the values of a pooling's region, which are scalars. Other operations have no such values."""
    values = []
    for region in pooling.regions:
        for block in region.blocks:
            values += [
                *block.arguments,
                *(value for inner in block.operations for value in inner.operation.results),
            ]
    return values


def _is_f32(value: Any) -> bool:
    return str(getattr(value.type, "element_type", "")) == "f32"

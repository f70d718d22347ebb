"""Rewrite a module so that it takes narrow weights, and widens them where it uses them.

The compiler fuses a widening into the operation that reads its result. So this rewrite moves the widening after transpositions,
table lookups and loops, which then handle the narrow tensor. A product also takes the weight without its scale. Instead, the
product's result is multiplied by the scale. This is mathematically the same, and the result is smaller than the weight. Before a
result is scaled, it could overflow in f16. So a matrix product in f16 returns f32, which is scaled and then converted to f16. A
convolution in f16 takes the scaled weight instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError
from rsrv_bundle.modules import artifact_version, parsed, serialised


@dataclass(frozen=True, slots=True)
class Change:
    """A weight that is stored in a narrower type."""

    #: Element type token of the stored tensor.
    dtype: str
    #: Shape of the scale, or None without a scale. It has the weight's rank, and the size 1 for each axis that shares a scale.
    scale: tuple[int, ...] | None


def main_of(module: Any) -> Any:
    """Inline the functions that `main` calls, and return `main`."""
    from jaxlib.mlir import ir, passmanager

    functions = {op.sym_name.value: op for op in module.body.operations if op.operation.name == "func.func"}
    main = functions["main"]
    calls: list[Any] = []

    def note(operation: Any) -> Any:
        if operation.name == "func.call":
            calls.append(operation)
        return ir.WalkResult.ADVANCE

    main.operation.walk(note)
    while calls:
        call = calls.pop()
        copy = functions[call.attributes["callee"].value].operation.clone()
        (block,) = copy.regions[0].blocks
        for argument, operand in zip(block.arguments, call.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *inner, last = [operation.operation for operation in block.operations]
        for operation in inner:
            operation.move_before(call)
            operation.walk(note)
        for result, value in zip(call.results, last.operands, strict=True):
            result.replace_all_uses_with(value)
        call.erase()
        copy.erase()
    passmanager.PassManager.parse("builtin.module(symbol-dce)", module.context).run(module.operation)
    return main


def shared_axes(blob: bytes, first: int, count: int) -> dict[int, frozenset[int]]:
    """Return, by the index of each weight, the axes along which its elements can share a scale.

    The first product or lookup that reads the weight decides. A product sums over such axes, and a lookup returns them
    completely. Weights that are read by neither of them are left out.

    first: the index of the first weight among the arguments. count: the number of weights.
    """
    axes_of = {}
    with parsed(blob) as module:
        arguments = main_of(module).entry_block.arguments
        for index in range(count):
            axes = next(_shared(arguments[first + index]), None)
            if axes is not None:
                axes_of[index] = axes
    return axes_of


def narrowed(blob: bytes, file: str, first: int, changes: Sequence[Change | None]) -> bytes:
    """Return the module with narrow weights in place of wide weights. The scales are additional arguments after all weights.

    first: the index of the first weight among the arguments. changes: one entry for each weight, or None to keep the weight.
    Raises BundleError, which names the file, if the result is not a valid module.
    """
    from jaxlib.mlir import ir

    version = artifact_version(blob)
    with parsed(blob) as module:
        with ir.Location.unknown():
            _rewrite(main_of(module), first, changes)
        if not module.operation.verify():
            raise BundleError(f"{file}: the verifier refuses the module with narrow weights")
        return serialised(module, version)


def _rewrite(main: Any, first: int, changes: Sequence[Change | None]) -> None:
    from jaxlib.mlir import ir

    block = main.entry_block
    old = list(block.arguments)
    attributes = list(main.arg_attrs) if "arg_attrs" in main.attributes else [ir.DictAttr.get({})] * len(old)
    last = first + len(changes)
    types = [argument.type for argument in old[:last]]
    remaining = attributes[:last]
    scaled = []
    for index, change in enumerate(changes):
        if change is not None:
            shape = types[first + index].shape
            types[first + index] = ir.RankedTensorType.get(shape, element(change.dtype))
            if change.scale is not None:
                scaled.append(index)
                types.append(ir.RankedTensorType.get(change.scale, ir.F32Type.get()))
                remaining.append(ir.DictAttr.get({}))
    types += [argument.type for argument in old[last:]]
    remaining += attributes[last:]
    new = [block.add_argument(kind, ir.Location.unknown()) for kind in types]
    scales = dict(zip(scaled, new[last:], strict=False))
    for index, argument in enumerate(old):
        change = changes[index - first] if first <= index < last else None
        if change is None:
            argument.replace_all_uses_with(new[index if index < last else index + len(scaled)])
        else:
            _place(argument, argument.type, new[index], scales.get(index - first))
    for _ in old:
        block.erase_argument(0)
    kind = main.function_type.value
    main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, kind.results))
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(remaining)


def element(token: str) -> Any:
    """Return the MLIR type of an element type token, in the current context."""
    from jaxlib.mlir import ir

    return ir.Type.parse(dtypes.mlir_name(token))


def _place(value: Any, kind: Any, narrow: Any, scale: Any, *, but: Any = None) -> None:
    """Replace a wide value by `narrow` and `scale` in all operations that use it except `but`. `kind` is its wide type."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    for operation, place in [(use.owner.operation, use.operand_number) for use in value.uses]:
        if but is not None and operation == but:
            continue
        with ir.InsertionPoint(operation):
            if operation.name == "stablehlo.transpose":
                order = operation.attributes["permutation"]
                turned = None if scale is None else stablehlo.transpose(scale, order)
                result = operation.results[0]
                _place(result, result.type, stablehlo.transpose(narrow, order), turned)
                operation.erase()
            elif _is_rounding(operation):
                result = operation.results[0]
                _place(result, result.type, narrow, scale)
                operation.erase()
            elif operation.name == "stablehlo.while" and _invariant(operation, place):
                _through_loop(operation, place, narrow, scale)
            elif (axes := _result_axes(operation, place)) is not None and _fits(operation, scale, axes):
                operation.operands[place] = stablehlo.convert(kind, narrow)
                if scale is not None:
                    _scale_result(operation, scale, axes)
            elif _is_lookup(operation, place):
                _narrow_lookup(operation, narrow, scale)
            else:
                wide = stablehlo.convert(kind, narrow)
                operation.operands[place] = _multiplied(wide, scale, range(kind.rank))


def _shared(value: Any) -> Iterator[frozenset[int]]:
    """Yield, for each product or lookup that reads a value, the axes along which its elements can share a scale."""
    for use in value.uses:
        operation, place = use.owner.operation, use.operand_number
        if operation.name == "stablehlo.transpose":
            order = list(operation.attributes["permutation"])
            yield from (frozenset(order[axis] for axis in axes) for axes in _shared(operation.results[0]))
        elif _is_rounding(operation):
            yield from _shared(operation.results[0])
        elif operation.name == "stablehlo.while" and _invariant(operation, place):
            for region in operation.regions:
                yield from _shared(region.blocks[0].arguments[place])
        elif (axes := _result_axes(operation, place)) is not None:
            yield frozenset(range(value.type.rank)) - set(axes)
        elif _is_lookup(operation, place):
            yield frozenset(range(1, value.type.rank))


def _is_rounding(operation: Any) -> bool:
    """Return whether an operation converts a weight to a type that represents all values of i8 and f8, or back to f32."""
    if operation.name != "stablehlo.convert":
        return False
    return str(operation.results[0].type.element_type) in ("f16", "bf16", "f32")


def _result_axes(operation: Any, place: int) -> dict[int, int] | None:
    """Map the axes of a product's operand to the axes of its result. Return None if the operation is not a product.

    The axes over which the product sums are left out.
    """
    from jaxlib.mlir.dialects import stablehlo

    if operation.name == "stablehlo.dot_general":
        numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
        sides = (
            (list(numbers.lhs_batching_dimensions), list(numbers.lhs_contracting_dimensions)),
            (list(numbers.rhs_batching_dimensions), list(numbers.rhs_contracting_dimensions)),
        )
        free = [
            [axis for axis in range(operation.operands[side].type.rank) if axis not in (*batch, *summed)]
            for side, (batch, summed) in enumerate(sides)
        ]
        batch = sides[place][0]
        start = len(batch) + (len(free[0]) if place else 0)
        return {axis: i for i, axis in enumerate(batch)} | {
            axis: start + i for i, axis in enumerate(free[place])
        }
    if operation.name == "stablehlo.convolution" and place == 1:
        layout = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        return {layout.kernel_output_feature_dimension: layout.output_feature_dimension}
    return None


def _fits(product: Any, scale: Any, axes: Mapping[int, int]) -> bool:
    """Return whether a product's result can be multiplied by the scale of an operand, in place of the operand itself.

    The scale must vary only along `axes`, and the result must not overflow before it is multiplied.
    """
    from jaxlib.mlir import ir

    if scale is None:
        return True
    shared = all(size == 1 or axis in axes for axis, size in enumerate(scale.type.shape))
    # A result in f16 may overflow. A matrix product can return f32 instead, but libraries have no such convolution of f16.
    overflows = product.results[0].type.element_type == ir.F16Type.get()
    return shared and (not overflows or product.name == "stablehlo.dot_general")


def _scale_result(operation: Any, scale: Any, axes: Mapping[int, int]) -> None:
    """Multiply a product's result by the scale of its operand."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    result = operation.results[0]
    kind = result.type
    uses = [(use.owner.operation, use.operand_number) for use in result.uses]
    if kind.element_type == ir.F16Type.get():
        result.set_type(ir.RankedTensorType.get(kind.shape, ir.F32Type.get()))
    ordered = sorted(axes, key=lambda axis: axes[axis])
    order = [*(axis for axis in range(scale.type.rank) if axis not in axes), *ordered]
    with ir.InsertionPoint.after(operation):
        turned = stablehlo.transpose(scale, ir.DenseI64ArrayAttr.get(order))
        shape = [scale.type.shape[axis] for axis in ordered]
        flat = stablehlo.reshape(ir.RankedTensorType.get(shape, scale.type.element_type), turned)
        product = _multiplied(result, flat, [axes[axis] for axis in ordered])
        if product.type != kind:
            product = stablehlo.convert(kind, product)
    for user, place in uses:
        user.operands[place] = product


def _multiplied(value: Any, scale: Any, axes: Sequence[int]) -> Any:
    """Return `value` times `scale`. `axes` are the axes of `value` to which the axes of `scale` belong.

    If `scale` is None, return `value`.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if scale is None:
        return value
    kind = value.type
    f32 = ir.RankedTensorType.get(kind.shape, scale.type.element_type)
    spread = stablehlo.broadcast_in_dim(f32, scale, ir.DenseI64ArrayAttr.get(list(axes)))
    if kind == f32:
        return stablehlo.multiply(value, spread)
    return stablehlo.convert(kind, stablehlo.multiply(stablehlo.convert(f32, value), spread))


def _is_lookup(operation: Any, place: int) -> bool:
    """Return whether an operation gathers whole rows of this operand, as an embedding does."""
    from jaxlib.mlir.dialects import stablehlo

    if operation.name != "stablehlo.gather" or place:
        return False
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    shape = operation.operands[0].type.shape
    return (
        list(numbers.collapsed_slice_dims) == [0]
        and list(numbers.start_index_map) == [0]
        and not list(numbers.operand_batching_dims)
        and list(operation.attributes["slice_sizes"]) == [1, *shape[1:]]
    )


def _narrow_lookup(operation: Any, narrow: Any, scale: Any) -> None:
    """Look up rows of the narrow table and of the scales, and widen only these rows."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    result = operation.results[0]
    numbers = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    offsets = list(numbers.offset_dims)

    def rows(table: Any) -> Any:
        inner = table.type.shape[1:]
        shape = [
            inner[offsets.index(axis)] if axis in offsets else size
            for axis, size in enumerate(result.type.shape)
        ]
        gather = ir.Operation.create(
            "stablehlo.gather",
            results=[ir.RankedTensorType.get(shape, table.type.element_type)],
            operands=[table, operation.operands[1]],
            attributes={
                **{name: operation.attributes[name] for name in operation.attributes},
                "slice_sizes": ir.DenseI64ArrayAttr.get([1, *inner]),
            },
        )
        return gather.results[0]

    wide = stablehlo.convert(result.type, rows(narrow))
    spread = None if scale is None else rows(scale)
    result.replace_all_uses_with(_multiplied(wide, spread, range(result.type.rank)))
    operation.erase()


def _invariant(loop: Any, place: int) -> bool:
    """Return whether each round of a loop passes the operand at `place` on unchanged."""
    body = loop.regions[1].blocks[0]
    *_, last = body.operations
    return bool(last.operation.operands[place] == body.arguments[place])


def _through_loop(loop: Any, place: int, narrow: Any, scale: Any) -> None:
    """Change a loop so that it carries the narrow tensor. Its regions read the scale from outside the loop."""
    loop.operands[place] = narrow
    *_, last = loop.regions[1].blocks[0].operations
    passed = [region.blocks[0].arguments[place] for region in loop.regions]
    for value in (*passed, loop.results[place]):
        kind = value.type
        value.set_type(narrow.type)
        _place(value, kind, value, scale, but=last.operation)

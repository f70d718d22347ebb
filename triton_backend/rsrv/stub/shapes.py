"""Which compiled variant and how many rows a request's tensors mean: pure, and the source of shape errors."""

from collections.abc import Sequence
from dataclasses import dataclass

from rsrv.wire.layout import Interface, Tensor, Variant


@dataclass(frozen=True, slots=True)
class Plan:
    """How requests of certain shapes are executed, and how much memory one takes; worked out once."""

    index: int  # of the variant
    rows: int
    inputs: tuple[tuple[Tensor, int], ...]  # with each one's offset in the inputs' block, in bytes
    outputs: tuple[tuple[Tensor, int], ...]
    input_bytes: int
    output_bytes: int


class BadShape(Exception):
    """No execution takes these shapes; the message names the input, what was expected and what came."""


class WrongAxis(BadShape):
    """An axis that the model fixes differs: never the number of rows or a choice among variants."""


def resolve(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> Plan:
    """The plan for the executable inputs' shapes, in the order of registration. Raises BadShape.

    Rows are the extent of the batch axis, the same in every input; 1 where there is none.
    """
    for index, variant in enumerate(interface.variants):
        if all(_fits(t, s) for t, s in zip(variant.inputs.tensors, shapes, strict=True)):
            rows = {
                s[t.batch_axis]
                for t, s in zip(variant.inputs.tensors, shapes, strict=True)
                if t.batch_axis is not None
            }
            if len(rows) > 1:
                raise BadShape(f"the inputs disagree on the number of rows: {sorted(rows)}")
            count = rows.pop() if rows else 1
            _check_rows(count, variant.sizes, interface.exact)
            return _plan(index, variant, count)
    raise _mismatch(interface, shapes)


def _plan(index: int, variant: Variant, rows: int) -> Plan:
    input_offsets, input_bytes = variant.inputs.places(rows)
    output_offsets, output_bytes = variant.outputs.places(rows)
    return Plan(
        index,
        rows,
        tuple(zip(variant.inputs.tensors, input_offsets, strict=True)),
        tuple(zip(variant.outputs.tensors, output_offsets, strict=True)),
        input_bytes,
        output_bytes,
    )


def _fits(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(tensor.dims) and all(
        want in (-1, got) for want, got in zip(tensor.dims, shape, strict=True)
    )


def _check_rows(rows: int, sizes: tuple[int, ...], exact: bool) -> None:
    compiled = ", ".join(map(str, sizes))
    if rows > sizes[-1]:
        raise BadShape(
            f"{rows} rows exceed the largest compiled batch size; compiled are {compiled}. Send fewer rows a request"
        )
    if exact and rows not in sizes:
        raise BadShape(f"{rows} rows: this model runs at its compiled batch sizes only: {compiled}")


def _mismatch(interface: Interface, shapes: Sequence[tuple[int, ...]]) -> BadShape:
    if len(interface.variants) > 1:
        compiled = "; ".join(
            ", ".join(f"{t.name} {list(t.dims)}" for t in v.inputs.tensors) for v in interface.variants
        )
        came = ", ".join(
            f"{t.name} {list(s)}" for t, s in zip(interface.variants[0].inputs.tensors, shapes, strict=True)
        )
        return BadShape(f"no module is compiled for {came}; compiled are {compiled} (-1 is the batch)")
    for tensor, shape in zip(interface.variants[0].inputs.tensors, shapes, strict=True):
        if not _fits(tensor, shape):
            batch = "" if tensor.batch_axis is None else f" (axis {tensor.batch_axis} is the batch)"
            return WrongAxis(
                f"input {tensor.name!r}: expected shape {list(tensor.dims)}{batch}, got {list(shape)}"
            )
    raise AssertionError("called for shapes that fit")

"""Derive the interface of a function that is being exported: its batch axes, fixed axes and variable axes, and their letters.

This module only computes with shapes. It runs and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError
from rsrv_bundle.spec import TensorSpec

#: Letters for axes that the caller did not name: all except n and b, which mean the batch.
LETTERS = "acdefghijklmopqrstuvwxyzACDEFGHIJKLMOPQRSTUVWXYZ"

#: Element type token and shape.
Value = tuple[str, tuple[int, ...]]
#: A function that returns the outputs by name for a variant and a batch size.
OutputsAt = Callable[[int, int], Mapping[str, Value]]


@dataclass(frozen=True, slots=True)
class InputPlan:
    """Executable inputs, and the sizes that they are compiled for."""

    specs: tuple[TensorSpec, ...]
    #: Sizes by letter for each variant, as in the manifest. Empty without variants.
    input_shapes: tuple[Mapping[str, int], ...]
    #: Sizes to compile, ascending, or empty without a batch axis.
    batch_sizes: tuple[int, ...]

    @property
    def batched(self) -> bool:
        return any(spec.batch_axis is not None for spec in self.specs)

    def keys(self) -> Iterator[tuple[int, int]]:
        """Yield every (variant, batch size) to compile. Without a batch axis, the size is 1."""
        for variant in range(max(1, len(self.input_shapes))):
            for size in self.batch_sizes or (1,):
                yield variant, size

    def describe(self, variant: int, size: int) -> str:
        """Return a module's sizes in words, such as `h=224, w=320, batch size 8`.

        The text is empty without variants and without a batch axis.
        """
        sizes = self.input_shapes[variant] if self.input_shapes else {}
        named = [f"{letter}={value}" for letter, value in sizes.items()]
        return ", ".join([*named, *([f"batch size {size}"] if self.batched else [])])

    def shapes(self, variant: int, size: int) -> list[tuple[int, ...]]:
        """Return the concrete shapes of all inputs."""
        sizes = self.input_shapes[variant] if self.input_shapes else {}
        return [
            tuple(
                size if axis == spec.batch_axis else sizes[letter] if dim == -1 else dim
                for axis, (letter, dim) in enumerate(zip(spec.letters, spec.dims, strict=True))
            )
            for spec in self.specs
        ]


def plan_inputs(
    examples: Mapping[str, Value],
    *,
    batch_sizes: Sequence[int],
    batch_axis: int | Mapping[str, int] | None,
    axes: Mapping[str, str],
    input_shapes: Sequence[Mapping[str, int]],
) -> InputPlan:
    """Derive the inputs' specs from example shapes. Raises BundleError, which names the input."""
    for size in batch_sizes:
        if not isinstance(size, int | np.integer) or size < 1:
            raise BundleError(f"batch_sizes: {size!r} is not a number of rows; give whole numbers from 1 on")
    variable = {letter for entry in input_shapes for letter in entry}
    specs = []
    for name, (dtype, shape) in examples.items():
        letters = axes.get(name)
        if letters is None:
            axis = batch_axis.get(name, 0) if isinstance(batch_axis, Mapping) else batch_axis
            # Letters that are chosen here never stand for variable axes, even if `input_shapes` has the same letter.
            specs.append(_spec(name, dtype, shape, _auto_letters(name, len(shape), axis), set()))
        elif len(letters) != len(shape):
            raise BundleError(
                f"axes: {name}: '{letters}' names {len(letters)} axes, but the example has {shape}"
            )
        elif len(set(letters.replace("b", "n"))) < len(letters):
            raise BundleError(
                f"axes: {name}: '{letters}' uses a letter twice; each axis needs its own letter, and one letter is for the batch"
            )
        else:
            specs.append(_spec(name, dtype, shape, letters, variable))
    inputs = InputPlan(
        tuple(specs), tuple(dict(entry) for entry in input_shapes), tuple(sorted(set(map(int, batch_sizes))))
    )
    if inputs.batched and not inputs.batch_sizes:
        raise BundleError("batch_sizes: is empty; give the sizes to compile, or batch_axis=None")
    if not inputs.batched and inputs.batch_sizes:
        raise BundleError("batch_sizes: no input has a batch axis, so it must be empty")
    used = {letter for spec in specs for letter in axes.get(spec.name, "")}
    if variable - used:
        raise BundleError(
            f"input_shapes: {', '.join(sorted(variable - used))}: no input has such an axis; name axes with axes=,"
            " or in --input"
        )
    return inputs


def plan_outputs(
    inputs: InputPlan, axes: Mapping[str, str], outputs_at: OutputsAt, padded: str | None = None
) -> tuple[TensorSpec, ...]:
    """Derive the outputs' specs by comparing their shapes across batch sizes and variants.

    padded: the letter of the axis that a server pads.

    Raises BundleError if an axis is neither fixed, nor the batch, nor determined by the variant alone. Also raises BundleError if an
    axis of an output grows with the padded axis, but has another length.
    """
    keys = list(inputs.keys())
    seen = {key: outputs_at(*key) for key in keys}
    probes = dict(seen)
    if len(inputs.batch_sizes) == 1:
        # With a single batch size, a batch axis looks like a fixed axis of this length. So also trace a larger size.
        larger = inputs.batch_sizes[0] + 1
        try:
            probes.update({(variant, larger): outputs_at(variant, larger) for variant, _ in keys})
        except Exception as e:
            raise BundleError(
                f"batch_sizes: with one size the outputs' batch axes are found by tracing size {larger}, which fails"
                f" ({type(e).__name__}); give a second size"
            ) from e
    first = seen[keys[0]]
    if any(at.keys() != first.keys() for at in probes.values()):
        raise BundleError("outputs: their names depend on the input shapes; return the same for all")
    return tuple(
        _output_spec(name, {key: at[name] for key, at in probes.items()}, inputs, axes.get(name), padded)
        for name in first
    )


def _output_spec(
    name: str,
    values: Mapping[tuple[int, int], Value],
    inputs: InputPlan,
    letters: str | None,
    padded: str | None,
) -> TensorSpec:
    (dtype, shape), *_ = values.values()
    if len({len(at[1]) for at in values.values()}) > 1:
        raise BundleError(f"outputs: {name}: its rank depends on the input shapes")
    dims: list[int] = []
    batch: list[int] = []
    for axis in range(len(shape)):
        by_size = [(size, at[1][axis]) for (_, size), at in values.items()]
        extents = {extent for _, extent in by_size}
        if inputs.batched and all(size == extent for size, extent in by_size):
            batch.append(axis)
            dims.append(-1)
        elif len(extents) == 1:
            dims.append(extents.pop())
        elif len({(variant, at[1][axis]) for (variant, _), at in values.items()}) == len(
            {variant for variant, _ in values}
        ):
            dims.append(-1)
        else:
            raise BundleError(
                f"outputs: {name}: axis {axis} changes with the batch size but is not equal to it; "
                "rsrv can split the output only into whole rows"
            )
    if inputs.batched and len(batch) != 1:
        raise BundleError(
            f"outputs: {name}: has {len(batch)} axes that grow with the batch, but must have one; "
            "the rows of a batch are different requests; keep other outputs with outputs= or --outputs"
        )
    batch_axis = batch[0] if batch else None
    cut = [axis for axis, extent in enumerate(dims) if padded and extent == -1 and axis not in batch]
    for axis in cut:
        longer = [
            at[1][axis]
            for (variant, _), at in values.items()
            if at[1][axis] != inputs.input_shapes[variant][padded or ""]
        ]
        if longer or len(cut) > 1:
            raise BundleError(
                f"outputs: {name}: padding cannot be cut from its shape, such as {shape}: at most one axis may grow with"
                f" '{padded}', and must have the same length; keep other outputs with outputs= or --outputs, or leave pad out"
            )
    if letters is None:
        letters = _auto_letters(name, len(dims), batch_axis)
        for axis in cut:
            letters = letters.replace(padded or "", LETTERS[-1])
            letters = f"{letters[:axis]}{padded}{letters[axis + 1 :]}"
    elif len(letters) != len(dims) or [i for i, letter in enumerate(letters) if letter in "nb"] != batch:
        raise BundleError(
            f"axes: {name}: '{letters}' does not fit the output's shape {shape}, "
            + ("which has no batch axis" if batch_axis is None else f"whose batch axis is {batch_axis}")
        )
    elif any(letters[axis] != padded for axis in cut):
        raise BundleError(
            f"axes: {name}: '{letters}' must have the letter {padded} for the axis that grows with it"
        )
    return TensorSpec(name, dtype, tuple(dims), batch_axis, letters)


def _spec(name: str, dtype: str, shape: tuple[int, ...], letters: str, variable: set[str]) -> TensorSpec:
    batch = [i for i, letter in enumerate(letters) if letter in "nb"]
    axis = batch[0] if batch else None
    dims = tuple(
        -1 if i == axis or letter in variable else extent
        for i, (letter, extent) in enumerate(zip(letters, shape, strict=True))
    )
    return TensorSpec(name, dtype, dims, axis, letters)


def _auto_letters(name: str, rank: int, batch_axis: int | None) -> str:
    if rank > len(LETTERS):
        raise BundleError(f"{name}: has {rank} axes; at most {len(LETTERS)} can be named")
    letters = list(LETTERS[: rank if batch_axis is None else rank - 1])
    if batch_axis is not None:
        if not 0 <= batch_axis < rank:
            raise BundleError(f"{name}: has {rank} axes, so axis {batch_axis} cannot be its batch axis")
        letters.insert(batch_axis, "n")
    return "".join(letters)


def value_of(name: str, dtype: Any, shape: Sequence[int]) -> Value:
    """Return the token and shape of an array-like. Raises BundleError for an element type that the format lacks."""
    try:
        token = dtypes.token_of(dtype)
    except (KeyError, TypeError):
        raise nameless(name, dtype) from None
    return token, tuple(int(extent) for extent in shape)


def nameless(name: str, dtype: Any) -> BundleError:
    """Return the error for an element type that the format lacks."""
    cure = (
        "; keep real and imaginary parts, e.g. by torch.view_as_real, jax.numpy.real and imag"
        if str(dtype).startswith("complex")
        else ""
    )
    return BundleError(f"{name}: has the element type {dtype}, which the format has no name for{cure}")

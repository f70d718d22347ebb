"""ONNX operators that create, move and select elements by position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

from rsrv_bundle.onnx_import.model import Array
from rsrv_bundle.onnx_import.operators import (
    Context,
    Unsupported,
    axis_of,
    is_float,
    limits,
    op,
    scalar,
    whole_numbers,
)


def dtype_of(number: int) -> np.dtype[Any]:
    """Return the numpy element type for the number of an ONNX element type. Raises Unsupported for strings."""
    if number == onnx.TensorProto.STRING:
        raise Unsupported(
            "it makes strings, which a compiled model cannot; cut the model before it with --outputs"
        )
    return np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number))


# --- constants --------------------------------------------------------------------------------------------


@op("Constant", control=True)
def _constant(
    ctx: Context, *, value: Any = None, value_float: Any = None, value_int: Any = None, value_floats: Any = None,
    value_ints: Any = None, value_string: Any = None, value_strings: Any = None,
) -> Any:  # fmt: skip
    if value is not None:
        return value
    if value_string is not None or value_strings is not None:
        return np.array(value_strings if value_string is None else value_string, object)
    if value_float is not None or value_floats is not None:
        return np.array(value_floats if value_float is None else value_float, np.float32)
    return np.array(value_ints if value_int is None else value_int, np.int64)


@op("ConstantOfShape")
def _constant_of_shape(ctx: Context, shape: Any, *, value: Any = None) -> Any:
    filling = np.zeros(1, np.float32) if value is None else value
    return jnp.full(whole_numbers(ctx, shape, "shape"), np.ravel(filling)[0], filling.dtype)


@op("Shape", control=True)
def _shape(ctx: Context, x: Any, *, start: int = 0, end: int | None = None) -> Any:
    return np.array(np.shape(x)[start:end], np.int64)


@op("Size", control=True)
def _size(ctx: Context, x: Any) -> Any:
    return np.array(np.size(x) if isinstance(x, np.ndarray) else x.size, np.int64)


@op("Range")
def _range(ctx: Context, start: Any, limit: Any, delta: Any) -> Any:
    first, last, step = (ctx.known(value, "length").reshape(()) for value in (start, limit, delta))
    count = max(int(np.ceil((last.astype(np.float64) - first) / step)), 0)
    return (first + jnp.arange(count).astype(first.dtype) * step).astype(first.dtype)


@op("EyeLike")
def _eye_like(ctx: Context, x: Any, *, dtype: int | None = None, k: int = 0) -> Any:
    return jnp.eye(x.shape[0], x.shape[1], k, dtype_of(dtype) if dtype else x.dtype)


# --- element types ----------------------------------------------------------------------------------------


_NARROW = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def cast(x: Any, dtype: np.dtype[Any], saturate: int) -> Any:
    if x.dtype == object:
        raise Unsupported("it reads numbers from strings, which a compiled model cannot")
    if dtype.name == "float8_e8m0fnu":
        raise Unsupported("its element type, a power of two, is not supported")
    if (bits := _NARROW.get(dtype.name)) is not None:
        # A number that does not fit the narrow type wraps around.
        whole = jnp.asarray(x).astype(np.int32) & (2**bits - 1)
        signed = dtype.name.startswith("int")
        return (
            jnp.where(whole >= 2 ** (bits - 1), whole - 2**bits, whole).astype(dtype)
            if signed
            else whole.astype(dtype)
        )
    if saturate and dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating) and is_float(x):
        limit = limits(dtype)[1]
        return jnp.where(jnp.isnan(x), x, jnp.clip(x, -limit, limit)).astype(dtype)
    if is_float(x) and dtype.kind in "iu" and (dtype.itemsize < 4 or dtype.kind == "u"):
        # A number that does not fit wraps around, as in C.
        whole = jnp.asarray(x).astype(np.int32 if dtype.itemsize < 4 else np.int64).astype(dtype)
        return jnp.where(x < 0, whole, jnp.asarray(x).astype(dtype)) if dtype.itemsize == 8 else whole
    return jnp.asarray(x).astype(dtype)


@op("Cast")
def _cast(ctx: Context, x: Any, *, to: int, saturate: int = 1, round_mode: str = "up") -> Any:
    return cast(x, dtype_of(to), saturate)


@op("BitCast")
def _bit_cast(ctx: Context, x: Any, *, to: int) -> Any:
    return lax.bitcast_convert_type(x, dtype_of(to))


# --- shapes -----------------------------------------------------------------------------------------------


@op("Identity", "OptionalGetElement", control=True)
def _identity(ctx: Context, x: Any) -> Any:
    return x


@op("Reshape")
def _reshape(ctx: Context, x: Any, size: Any = None, *, allowzero: int = 0, shape: Any = None) -> Any:
    sizes = list(shape or ()) if size is None else whole_numbers(ctx, size, "shape")
    if not allowzero:
        sizes = [x.shape[axis] if value == 0 else value for axis, value in enumerate(sizes)]
    return jnp.reshape(x, sizes)


@op("Flatten")
def _flatten(ctx: Context, x: Any, *, axis: int = 1) -> Any:
    at = axis if axis >= 0 else axis + x.ndim
    return jnp.reshape(x, (int(np.prod(x.shape[:at])), int(np.prod(x.shape[at:]))))


@op("Transpose")
def _transpose(ctx: Context, x: Any, *, perm: Any = None) -> Any:
    return jnp.transpose(x, perm or None)


@op("Squeeze")
def _squeeze(ctx: Context, x: Any, axes_input: Any = None, *, axes: Any = None) -> Any:
    chosen_axes = axes if axes_input is None else whole_numbers(ctx, axes_input, "axes")
    return jnp.squeeze(
        x, None if chosen_axes is None else tuple(axis_of(axis, x.ndim) for axis in chosen_axes)
    )


@op("Unsqueeze")
def _unsqueeze(ctx: Context, x: Any, axes_input: Any = None, *, axes: Any = ()) -> Any:
    return jnp.expand_dims(x, tuple(axes if axes_input is None else whole_numbers(ctx, axes_input, "axes")))


@op("Expand")
def _expand(ctx: Context, x: Any, shape: Any) -> Any:
    return jnp.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(whole_numbers(ctx, shape, "shape"))))


@op("Tile")
def _tile(ctx: Context, x: Any, repeats: Any) -> Any:
    return jnp.tile(x, whole_numbers(ctx, repeats, "repeats"))


@op("Concat")
def _concat(ctx: Context, *x: Any, axis: int) -> Any:
    return jnp.concatenate(x, axis)


@op("Split")
def _split(
    ctx: Context,
    x: Any,
    sizes: Any = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    split: Any = None,
) -> Any:
    axis = axis_of(axis, x.ndim)
    parts = split if sizes is None else whole_numbers(ctx, sizes, "split")
    if not parts:
        count = num_outputs or ctx.outputs
        # If the axis cannot be split evenly, the last part is smaller.
        size = -(-x.shape[axis] // count)
        parts = [size] * (count - 1) + [x.shape[axis] - size * (count - 1)]
    return tuple(jnp.split(x, np.cumsum(parts)[:-1], axis))


@op("Slice")
def _slice(
    ctx: Context, x: Any, first: Any = None, last: Any = None, which: Any = None, strides: Any = None, *, starts: Any = (),
    ends: Any = (), axes: Any = None,
) -> Any:  # fmt: skip
    if first is not None:
        starts, ends = whole_numbers(ctx, first, "starts"), whole_numbers(ctx, last, "ends")
        axes = None if which is None else whole_numbers(ctx, which, "axes")
    steps = [1] * len(starts) if strides is None else whole_numbers(ctx, strides, "steps")
    places = [slice(None)] * x.ndim
    for start, end, axis, step in zip(
        starts, ends, range(len(starts)) if axes is None else axes, steps, strict=True
    ):
        at = axis_of(axis, x.ndim)
        size = x.shape[at]
        if step < 0:
            start = min(start + size if start < 0 else start, size - 1)
            end = end + size if end < 0 else end
            places[at] = slice(start, end if end >= 0 else None, step) if start >= 0 else slice(0, 0)
        else:
            places[at] = slice(start, end, step)
    return x[tuple(places)]


@op("Pad")
def _pad(
    ctx: Context, x: Any, amounts: Any = None, filling: Any = None, which: Any = None, *, mode: str = "constant", pads: Any = None,
    paddings: Any = None, value: float = 0.0,
) -> Any:  # fmt: skip
    sizes = (pads or paddings or []) if amounts is None else whole_numbers(ctx, amounts, "pads")
    axes = range(x.ndim) if which is None else [axis_of(a, x.ndim) for a in whole_numbers(ctx, which, "axes")]
    widths = [(0, 0)] * x.ndim
    for index, axis in enumerate(axes):
        widths[axis] = (sizes[index], sizes[len(sizes) // 2 + index])
    if mode == "constant":
        fill = np.array(value, x.dtype) if filling is None else scalar(filling).astype(x.dtype)
        return lax.pad(jnp.asarray(x), fill, [(*width, 0) for width in widths])
    # A negative amount removes elements.
    x = x[
        tuple(
            slice(max(-low, 0), size - max(-high, 0))
            for size, (low, high) in zip(x.shape, widths, strict=True)
        )
    ]
    return jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in widths], mode=mode)


@op("Trilu")
def _trilu(ctx: Context, x: Any, k: Any = None, *, upper: int = 1) -> Any:
    diagonal = 0 if k is None else whole_numbers(ctx, k, "k")[0]
    diagonal = max(min(diagonal, x.shape[-1] + x.shape[-2]), -x.shape[-1] - x.shape[-2])
    return (jnp.triu if upper else jnp.tril)(x, diagonal)


@op("DepthToSpace")
def _depth_to_space(ctx: Context, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    n, c, h, w = x.shape
    b = blocksize
    if mode == "DCR":
        parts = jnp.transpose(jnp.reshape(x, (n, b, b, c // b**2, h, w)), (0, 3, 4, 1, 5, 2))
    else:
        parts = jnp.transpose(jnp.reshape(x, (n, c // b**2, b, b, h, w)), (0, 1, 4, 2, 5, 3))
    return jnp.reshape(parts, (n, c // b**2, h * b, w * b))


@op("SpaceToDepth")
def _space_to_depth(ctx: Context, x: Any, *, blocksize: int, mode: str = "DCR") -> Any:
    n, c, h, w = x.shape
    b = blocksize
    order = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    parts = jnp.transpose(jnp.reshape(x, (n, c, h // b, b, w // b, b)), order)
    return jnp.reshape(parts, (n, c * b * b, h // b, w // b))


@op("ReverseSequence")
def _reverse_sequence(ctx: Context, x: Any, lengths: Any, *, batch_axis: int = 1, time_axis: int = 0) -> Any:
    y = jnp.moveaxis(x, (batch_axis, time_axis), (0, 1))
    time = jnp.arange(y.shape[1])[None]
    length = jnp.reshape(lengths, (-1, 1))
    at = jnp.where(time < length, length - 1 - time, time)
    y = jnp.take_along_axis(y, jnp.reshape(at, (*at.shape, *[1] * (y.ndim - 2))), 1)
    return jnp.moveaxis(y, (0, 1), (batch_axis, time_axis))


# --- elements by index ------------------------------------------------------------------------------------


def _wrapped(index: Any, size: int) -> Any:
    return jnp.where(index < 0, index + size, index)


@op("Gather")
def _gather(ctx: Context, x: Any, index: Any, *, axis: int = 0) -> Any:
    axis = axis_of(axis, x.ndim)
    return jnp.take(x, _wrapped(index, x.shape[axis]), axis, mode="clip")


@op("GatherElements")
def _gather_elements(ctx: Context, x: Any, index: Any, *, axis: int = 0) -> Any:
    axis = axis_of(axis, x.ndim)
    # Cut the other axes of the data, because they may be longer than the same axes of the index.
    whole = tuple(slice(None) if at == axis else slice(size) for at, size in enumerate(index.shape))
    return jnp.take_along_axis(x[whole], _wrapped(index, x.shape[axis]), axis, mode="clip")


@op("GatherND")
def _gather_nd(ctx: Context, x: Any, index: Any, *, batch_dims: int = 0) -> Any:
    def gather(x: Any, index: Any) -> Any:
        return x[tuple(jnp.moveaxis(index, -1, 0))]

    for _ in range(batch_dims):
        gather = jax.vmap(gather)
    return gather(jnp.asarray(x), jnp.asarray(index))


def _scattered(at: Any, updates: Any, reduction: str) -> Any:
    put = {"none": at.set, "add": at.add, "mul": at.multiply, "max": at.max, "min": at.min}
    return put[reduction](updates)


@op("ScatterND")
def _scatter_nd(ctx: Context, x: Any, index: Any, updates: Any, *, reduction: str = "none") -> Any:
    return _scattered(jnp.asarray(x).at[tuple(jnp.moveaxis(jnp.asarray(index), -1, 0))], updates, reduction)


@op("ScatterElements", "Scatter")
def _scatter_elements(
    ctx: Context, x: Any, index: Any, updates: Any, *, axis: int = 0, reduction: str = "none"
) -> Any:
    axis = axis_of(axis, x.ndim)
    places = list(jnp.meshgrid(*(jnp.arange(size) for size in index.shape), indexing="ij"))
    places[axis] = _wrapped(jnp.asarray(index), x.shape[axis])
    return _scattered(jnp.asarray(x).at[tuple(places)], updates, reduction)


@op("TensorScatter")
def _tensor_scatter(
    ctx: Context, cache: Any, update: Any, indices: Any = None, *, axis: int = -2, mode: str = "linear"
) -> Any:
    axis = axis_of(axis, cache.ndim)
    first = jnp.zeros(cache.shape[0], np.int64) if indices is None else jnp.asarray(indices)
    at = first[:, None] + jnp.arange(update.shape[axis])
    if mode == "circular":
        at = at % cache.shape[axis]
    y = jnp.moveaxis(jnp.asarray(cache), axis, 1)
    y = y.at[jnp.arange(cache.shape[0])[:, None], at].set(jnp.moveaxis(update, axis, 1))
    return jnp.moveaxis(y, 1, axis)


# --- sequences and optional values ------------------------------------------------------------------------


def _place(ctx: Context, position: Any, size: int) -> int:
    [at] = whole_numbers(ctx, position, "position")
    return at + size if at < 0 else at


@op("SequenceConstruct", control=True)
def _sequence_construct(ctx: Context, *x: Any) -> Any:
    return (list(x),)


@op("SequenceEmpty", control=True)
def _sequence_empty(ctx: Context, *, dtype: int = 1) -> Any:
    return ([],)


@op("SequenceAt", control=True)
def _sequence_at(ctx: Context, sequence: Any, position: Any) -> Any:
    return sequence[_place(ctx, position, len(sequence))]


@op("SequenceInsert", control=True)
def _sequence_insert(ctx: Context, sequence: Any, x: Any, position: Any = None) -> Any:
    at = len(sequence) if position is None else _place(ctx, position, len(sequence))
    return ([*sequence[:at], x, *sequence[at:]],)


@op("SequenceErase", control=True)
def _sequence_erase(ctx: Context, sequence: Any, position: Any = None) -> Any:
    at = len(sequence) - 1 if position is None else _place(ctx, position, len(sequence))
    return ([*sequence[:at], *sequence[at + 1 :]],)


@op("SequenceLength", control=True)
def _sequence_length(ctx: Context, sequence: Any) -> Any:
    return np.array(len(sequence), np.int64)


@op("ConcatFromSequence", control=True)
def _concat_from_sequence(ctx: Context, sequence: Any, *, axis: int, new_axis: int = 0) -> Any:
    return jnp.stack(sequence, axis) if new_axis else jnp.concatenate(sequence, axis)


@op("SplitToSequence", control=True)
def _split_to_sequence(ctx: Context, x: Any, split: Any = None, *, axis: int = 0, keepdims: int = 1) -> Any:
    axis = axis_of(axis, x.ndim)
    size = x.shape[axis]
    sizes: Array | None = None if split is None else ctx.known(split, "split")
    step = 1 if sizes is None else int(sizes) if sizes.ndim == 0 else 0
    places = np.arange(step, size, step) if step else np.cumsum(np.asarray(sizes))[:-1]
    parts = jnp.split(x, places, axis)
    return ([jnp.squeeze(part, axis) for part in parts] if sizes is None and not keepdims else list(parts),)


@op("Optional", control=True)
def _optional(ctx: Context, x: Any = None, *, type: Any = None) -> Any:
    return (x,)


@op("OptionalHasElement", control=True)
def _optional_has_element(ctx: Context, x: Any = None) -> Any:
    return np.array(x is not None)

"""The ONNX operators Resize and Upsample. They multiply each axis with a matrix of weights that is computed at export."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from rsrv_bundle.onnx_import.model import Array
from rsrv_bundle.onnx_import.operators import Context, Unsupported, axis_of, op, refuse_large
from rsrv_bundle.onnx_import.ops_nn import cubic_far, cubic_near, cubic_weights

#: Maximum number of elements of a resized axis. The export computes weights for each element, so longer axes are refused.
_LONGEST = 2**20
_ROUND: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@op("Upsample")
def _upsample(ctx: Context, x: Any, given: Any = None, *, mode: str = "nearest", scales: Any = None) -> Any:
    factors = scales if given is None else ctx.known(given, "scales")
    for axis, factor in enumerate(factors):
        size = int(np.floor(x.shape[axis] * float(factor)))
        refuse_large(*x.shape[:axis], size, *x.shape[axis + 1 :])
        at = np.arange(size) / float(factor)
        x = _sampled(x, axis, at, mode, "floor", -0.75, False, None)
    return x


@op("Resize")
def _resize(
    ctx: Context, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None, *, antialias: int = 0, axes: Any = None,
    coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75, exclude_outside: int = 0,
    extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch", mode: str = "nearest",
    nearest_mode: str = "round_prefer_floor",
) -> Any:  # fmt: skip
    if ctx.opset < 11:
        return _upsample(ctx, x, roi, mode=mode)
    which = [axis_of(axis, x.ndim) for axis in (range(x.ndim) if axes is None else axes)]
    goals, factors = _goals(ctx, x, which, scales, sizes, keep_aspect_ratio_policy)
    refuse_large(*(goals[which.index(axis)] if axis in which else size for axis, size in enumerate(x.shape)))
    if max(goals, default=0) > _LONGEST:
        raise Unsupported(f"it asks for an axis of {max(goals)} elements, more than {_LONGEST}")
    region = None
    if coordinate_transformation_mode == "tf_crop_and_resize":
        region = np.reshape(ctx.known(roi, "region"), (2, -1))
    result = jnp.asarray(x)
    for index, axis in enumerate(which):
        size, goal, factor = x.shape[axis], goals[index], factors[index]
        if goal == size and factor == 1 and region is None:
            continue
        at = _places(
            coordinate_transformation_mode, size, goal, factor, None if region is None else region[:, index]
        )
        if antialias and factor < 1 and mode != "nearest":
            result = _narrowed(result, axis, at, factor, mode, cubic_coeff_a, bool(exclude_outside))
            continue
        outside = (at < 0) | (at > size - 1) if region is not None else None
        result = _sampled(result, axis, at, mode, nearest_mode, cubic_coeff_a, bool(exclude_outside), outside, extrapolation_value)  # fmt: skip
    return result.astype(x.dtype)


def _goals(
    ctx: Context, x: Any, which: Sequence[int], scales: Any, sizes: Any, policy: str
) -> tuple[list[int], list[float]]:
    """Return the new sizes of the axes, and the factor by which each axis grows."""
    if scales is not None and np.size(scales):
        factors = [float(value) for value in ctx.known(scales, "scales")]
        return [int(np.floor(x.shape[axis] * f)) for axis, f in zip(which, factors, strict=True)], factors
    if sizes is None:
        raise Unsupported("it has neither scales nor sizes; the file is damaged")
    goals = [int(value) for value in ctx.known(sizes, "sizes")]
    factors = [goal / x.shape[axis] for axis, goal in zip(which, goals, strict=True)]
    if policy != "stretch":
        factor = (min if policy == "not_larger" else max)(factors)
        factors = [factor] * len(goals)
        goals = [int(np.floor(x.shape[axis] * factor + 0.5)) for axis in which]
    return goals, factors


def _places(mode: str, size: int, goal: int, factor: float, region: Array | None) -> Array:
    """Return the position of each new element, in the coordinates of the old elements."""
    index = np.arange(goal, dtype=np.float64)
    if mode == "asymmetric":
        return index / factor
    if mode == "align_corners":
        length = factor * size
        return index * ((size - 1) / (length - 1)) if length > 1 else index * 0
    if mode == "tf_crop_and_resize":
        assert region is not None
        first, last = map(float, region)
        if goal > 1:
            return first * (size - 1) + index * (last - first) * (size - 1) / (goal - 1)
        return np.full(goal, 0.5 * (first + last) * (size - 1))
    if mode == "half_pixel_symmetric":
        adjustment = goal / (factor * size)
        centre = size / 2
        return centre * (1 - adjustment) + (index + 0.5) / factor - 0.5
    if mode == "pytorch_half_pixel" and goal <= 1:
        return index * 0
    if mode in ("half_pixel", "pytorch_half_pixel"):
        return (index + 0.5) / factor - 0.5
    raise Unsupported(f"its coordinate_transformation_mode '{mode}' is not supported")


def _sampled(
    x: Any, axis: int, at: Array, mode: str, nearest: str, a: float, exclude: bool, outside: Array | None, filling: float = 0.0
) -> Any:  # fmt: skip
    size = x.shape[axis]
    if mode == "nearest":
        x = jnp.take(x, np.clip(_ROUND[nearest](at), 0, size - 1).astype(np.int64), axis)
    else:
        low = np.floor(at)
        t = at - low
        taps, weights = (
            ((0, 1), (1 - t, t)) if mode in ("linear", "bilinear") else ((-1, 0, 1, 2), cubic_weights(t, a))
        )
        x = _product(x, axis, [low + tap for tap in taps], list(weights), exclude)
    if outside is None or not outside.any():
        return x
    shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
    return jnp.where(outside.reshape(shape), np.array(filling, x.dtype), x)


def _narrowed(x: Any, axis: int, at: Array, factor: float, mode: str, a: float, exclude: bool) -> Any:
    """Shrink an axis with a filter as wide as a new element."""
    reach = (2 if mode == "cubic" else 1) / factor
    low = np.floor(at)
    offsets = np.arange(-int(np.ceil(reach)), int(np.ceil(reach)) + 2)
    taps = [low + offset for offset in offsets]
    weights = []
    for tap in taps:
        distance = np.abs(tap - at) * factor
        if mode == "cubic":
            far = np.where(distance < 2, cubic_far(distance, a), 0)
            weights.append(np.where(distance <= 1, cubic_near(distance, a), far))
        else:
            weights.append(np.maximum(1 - distance, 0))
    total = sum(weights)
    return _product(x, axis, taps, [weight / total for weight in weights], exclude)


def _product(x: Any, axis: int, taps: Sequence[Array], weights: Sequence[Array], exclude: bool) -> Any:
    size, goal = x.shape[axis], len(taps[0])
    if exclude:
        weights = [weight * ((tap >= 0) & (tap < size)) for tap, weight in zip(taps, weights, strict=True)]
        total = sum(weights)
        weights = [weight / total for weight in weights]
    if size * goal > 2**18:
        # Do not build a matrix of weights, because it would be large and consist mostly of zeros.
        parts = []
        for tap, weight in zip(taps, weights, strict=True):
            shape = [-1 if dim == axis else 1 for dim in range(x.ndim)]
            taken = jnp.take(x, np.clip(tap, 0, size - 1).astype(np.int64), axis)
            parts.append(taken * weight.reshape(shape).astype(x.dtype))
        return sum(parts)
    matrix = np.zeros((goal, size))
    for tap, weight in zip(taps, weights, strict=True):
        np.add.at(matrix, (np.arange(goal), np.clip(tap, 0, size - 1).astype(int)), weight)
    y = jnp.tensordot(jnp.moveaxis(x, axis, -1), matrix.T.astype(x.dtype), 1)
    return jnp.moveaxis(y, -1, axis)

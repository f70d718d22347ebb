"""Convolutions, pooling, normalisations and operators on images."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rsrv_bundle.between_pixels import aligned_regions, deformable_convolution
from rsrv_bundle.onnx_import.operators import (
    Context,
    Unsupported,
    axis_of,
    channels,
    in_f32,
    lowest,
    op,
    widened,
)

#: Padding before and after the data, for each spatial axis.
Widths = list[tuple[int, int]]

# --- convolutions -----------------------------------------------------------------------------------------


def same_widths(sizes: Sequence[int], spans: Sequence[int], strides: Sequence[int], auto: str) -> Widths:
    """Return the padding with which an output has ceil(size / stride) elements."""
    widths = []
    for size, span, stride in zip(sizes, spans, strides, strict=True):
        total = max((-(-size // stride) - 1) * stride + span - size, 0)
        low = total // 2 if auto == "SAME_UPPER" else total - total // 2
        widths.append((low, total - low))
    return widths


def widths_of(
    sizes: Sequence[int], spans: Sequence[int], strides: Sequence[int], auto: str, pads: Sequence[int]
) -> Widths:
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        return same_widths(sizes, spans, strides, auto)
    count = len(sizes)
    pads = [0] * 2 * count if auto == "VALID" or not pads else pads
    return list(zip(pads[:count], pads[count:], strict=True))


def convolved(
    x: Any, w: Any, *, auto_pad: str = "NOTSET", dilations: Any = None, group: int = 1, kernel_shape: Any = None,
    pads: Any = None, strides: Any = None,
) -> Any:  # fmt: skip
    count = x.ndim - 2
    strides, dilations = strides or [1] * count, dilations or [1] * count
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(w.shape[2:], dilations, strict=True)]
    return lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.asarray(w),
        strides,
        widths_of(x.shape[2:], spans, strides, auto_pad, pads),
        rhs_dilation=dilations,
        feature_group_count=group,
    )


def biased(y: Any, b: Any) -> Any:
    """Add a bias, which has one value per channel or is absent."""
    return y if b is None else y + channels(b, y)


@op("Conv")
def _conv(ctx: Context, x: Any, w: Any, b: Any = None, **attributes: Any) -> Any:
    return biased(convolved(x, w, **attributes), b)


@op("ConvTranspose")
def _conv_transpose(
    ctx: Context, x: Any, w: Any, b: Any = None, *, auto_pad: str = "NOTSET", dilations: Any = None, group: int = 1,
    kernel_shape: Any = None, output_padding: Any = None, output_shape: Any = None, pads: Any = None, strides: Any = None,
) -> Any:  # fmt: skip
    count = x.ndim - 2
    kernel = w.shape[2:]
    strides, dilations = strides or [1] * count, dilations or [1] * count
    extra = output_padding or [0] * count
    spans = [(size - 1) * dilation + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    whole = [
        (size - 1) * stride + span + more
        for size, stride, span, more in zip(x.shape[2:], strides, spans, extra, strict=True)
    ]
    if output_shape or auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        goals = (
            output_shape[-count:]
            if output_shape
            else [s * k for s, k in zip(x.shape[2:], strides, strict=True)]
        )
        totals = [max(size - goal, 0) for size, goal in zip(whole, goals, strict=True)]
        lows = [total // 2 if auto_pad == "SAME_UPPER" else total - total // 2 for total in totals]
        widths = [(low, total - low) for low, total in zip(lows, totals, strict=True)]
        # If the output is larger than the full result, zeros are appended.
        extra = [more + max(goal - size, 0) for more, goal, size in zip(extra, goals, whole, strict=True)]
    else:
        widths = widths_of(x.shape[2:], spans, strides, auto_pad, pads)
    inputs, outputs = w.shape[:2]
    flipped = jnp.flip(jnp.asarray(w), range(2, 2 + count))
    grouped = jnp.reshape(flipped, (group, inputs // group, outputs, *kernel)).swapaxes(1, 2)
    y = lax.conv_general_dilated(
        jnp.asarray(x),
        jnp.reshape(grouped, (group * outputs, inputs // group, *kernel)),
        [1] * count,
        [
            (span - 1 - low, span - 1 - high + more)
            for span, (low, high), more in zip(spans, widths, extra, strict=True)
        ],
        lhs_dilation=strides,
        rhs_dilation=dilations,
        feature_group_count=group,
    )
    return biased(y, b)


@op("DeformConv")
def _deform_conv(
    ctx: Context, x: Any, w: Any, offset: Any, b: Any = None, mask: Any = None, *, dilations: Any = None, group: int = 1,
    kernel_shape: Any = None, offset_group: int = 1, pads: Any = None, strides: Any = None,
) -> Any:  # fmt: skip
    if x.ndim != 4:
        raise Unsupported("only images of two axes are supported")
    y = deformable_convolution(
        jnp.asarray(x),
        w,
        offset,
        mask,
        strides=strides or (1, 1),
        pads=(pads or (0, 0))[:2],
        dilations=dilations or (1, 1),
        groups=group,
    )
    return biased(y, b)


@op("Col2Im")
def _col2im(
    ctx: Context,
    x: Any,
    image: Any,
    block: Any,
    *,
    dilations: Any = None,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    sizes, kernel = ([int(v) for v in ctx.known(value, "shape")] for value in (image, block))
    count = len(sizes)
    strides, dilations = strides or [1] * count, dilations or [1] * count
    widths = widths_of(sizes, kernel, strides, "NOTSET", pads)
    padded = [size + low + high for size, (low, high) in zip(sizes, widths, strict=True)]
    blocks = [
        (size - (k - 1) * d - 1) // s + 1
        for size, k, d, s in zip(padded, kernel, dilations, strides, strict=True)
    ]
    n, features = x.shape[0], x.shape[1] // int(np.prod(kernel))
    columns = jnp.reshape(x, (n, features, *kernel, *blocks))
    places = [
        (np.arange(k)[:, None] * d + np.arange(b)[None] * s).reshape(
            [k if axis == i else b if axis == count + i else 1 for axis in range(2 * count)]
        )
        for i, (k, d, b, s) in enumerate(zip(kernel, dilations, blocks, strides, strict=True))
    ]
    y = jnp.zeros((n, features, *padded), x.dtype).at[(slice(None), slice(None), *places)].add(columns)
    return y[(..., *(slice(low, low + size) for size, (low, _) in zip(sizes, widths, strict=True)))]


# --- pooling ----------------------------------------------------------------------------------------------


class _Windows:
    """The windows of a pooling operator."""

    def __init__(
        self, x: Any, kernel: Sequence[int], strides: Any, dilations: Any, auto: str, pads: Any, ceil: int
    ) -> None:
        count = len(kernel)
        self.kernel = list(kernel)
        self.strides, self.dilations = strides or [1] * count, dilations or [1] * count
        spans = [(size - 1) * d + 1 for size, d in zip(kernel, self.dilations, strict=True)]
        #: Padding in the file.
        self.given = widths_of(x.shape[2:], spans, self.strides, auto, pads)
        #: Padding in the file, increased so that the last window is complete.
        self.widths: Widths = []
        for size, span, stride, (low, high) in zip(x.shape[2:], spans, self.strides, self.given, strict=True):
            span_left = size + low + high - span
            steps = -(-span_left // stride) if ceil else span_left // stride
            if ceil and steps * stride >= size + low:
                # No window begins in the padding after the data.
                steps -= 1
            self.widths.append((low, high + max(steps * stride - span_left, 0)))

    def counts(self, x: Any, padded: bool) -> Any:
        """Return the number of elements of each window. If `padded`, the padding in the file counts as elements."""
        total: Any = np.ones((), x.dtype)
        for axis, size in enumerate(x.shape[2:]):
            (low, high), (own_low, own_high) = self.widths[axis], self.given[axis]
            span = (self.kernel[axis] - 1) * self.dilations[axis] + 1
            steps = (size + low + high - span) // self.strides[axis] + 1
            first = np.arange(steps) * self.strides[axis] - low
            places = first[:, None] + np.arange(self.kernel[axis]) * self.dilations[axis]
            inside = (
                (places >= -own_low) & (places < size + own_high)
                if padded
                else (places >= 0) & (places < size)
            )
            shape = [-1 if dim == axis else 1 for dim in range(x.ndim - 2)]
            total = total * jnp.asarray(inside.sum(1).reshape(shape), x.dtype)
        return total

    def reduce(self, x: Any, first: Any, function: Any) -> Any:
        """Reduce the windows of an array, or of a tuple of arrays."""
        return lax.reduce_window(
            x,
            first,
            function,
            (1, 1, *self.kernel),
            (1, 1, *self.strides),
            [(0, 0), (0, 0), *self.widths],
            window_dilation=(1, 1, *self.dilations),
        )


@op("MaxPool")
def _max_pool(
    ctx: Context, x: Any, *, kernel_shape: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
    pads: Any = None, storage_order: int = 0, strides: Any = None,
) -> Any:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, auto_pad, pads, ceil_mode)
    y = windows.reduce(jnp.asarray(x), lowest(x.dtype), lax.max)
    if not ctx.wants(1):
        return y
    order = tuple(range(2)) + (
        tuple(range(2, x.ndim)) if not storage_order else tuple(range(x.ndim - 1, 1, -1))
    )
    places = jnp.transpose(
        jnp.reshape(jnp.arange(x.size), [x.shape[axis] for axis in order]), tuple(np.argsort(order).tolist())
    )

    def larger(a: Any, b: Any) -> Any:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    start = (jnp.asarray(lowest(x.dtype)), jnp.asarray(np.int64(2**62)))
    return y, windows.reduce((jnp.asarray(x), places.astype(np.int64)), start, larger)[1]


@op("AveragePool")
def _average_pool(
    ctx: Context, x: Any, *, kernel_shape: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, count_include_pad: int = 0,
    dilations: Any = None, pads: Any = None, strides: Any = None,
) -> Any:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, auto_pad, pads, ceil_mode)

    def mean(x: Any) -> Any:
        return windows.reduce(jnp.asarray(x), np.zeros((), x.dtype), lax.add) / windows.counts(
            x, bool(count_include_pad)
        )

    return in_f32(mean)(x)


@op("LpPool")
def _lp_pool(
    ctx: Context, x: Any, *, kernel_shape: Any, auto_pad: str = "NOTSET", ceil_mode: int = 0, dilations: Any = None,
    p: int = 2, pads: Any = None, strides: Any = None,
) -> Any:  # fmt: skip
    windows = _Windows(x, kernel_shape, strides, dilations, auto_pad, pads, ceil_mode)
    return windows.reduce(jnp.abs(x) ** p, np.zeros((), x.dtype), lax.add) ** np.array(1 / p, x.dtype)


def _space(x: Any) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@op("GlobalAveragePool")
def _global_average_pool(ctx: Context, x: Any) -> Any:
    return in_f32(lambda v: jnp.mean(v, _space(v), keepdims=True))(x)


@op("GlobalMaxPool")
def _global_max_pool(ctx: Context, x: Any) -> Any:
    return jnp.max(x, _space(x), keepdims=True)


@op("GlobalLpPool")
def _global_lp_pool(ctx: Context, x: Any, *, p: int = 2) -> Any:
    return jnp.sum(jnp.abs(x) ** p, _space(x), keepdims=True) ** np.array(1 / p, x.dtype)


@op("MaxUnpool")
def _max_unpool(
    ctx: Context,
    x: Any,
    indices: Any,
    shape: Any = None,
    *,
    kernel_shape: Any,
    pads: Any = None,
    strides: Any = None,
) -> Any:
    count = x.ndim - 2
    strides, pads = strides or [1] * count, pads or [0] * 2 * count
    inferred = [
        (x.shape[2 + i] - 1) * strides[i] + kernel_shape[i] - pads[i] - pads[count + i] for i in range(count)
    ]
    own = (*x.shape[:2], *inferred)
    sizes = own if shape is None else tuple(int(v) for v in ctx.known(shape, "shape"))
    flat = jnp.zeros(int(np.prod(own)), x.dtype).at[jnp.ravel(indices)].set(jnp.ravel(x))
    y = jnp.reshape(flat, own)
    return jnp.pad(y, [(0, size - mine) for size, mine in zip(sizes, own, strict=True)])


@op("MaxRoiPool")
def _max_roi_pool(ctx: Context, x: Any, rois: Any, *, pooled_shape: Any, spatial_scale: float = 1.0) -> Any:
    height, width = x.shape[2:]

    def edges(low: Any, high: Any, count: int, size: int) -> tuple[Any, Any]:
        length = jnp.maximum(high - low + 1, 1) / count
        index = np.arange(count, dtype=np.float32)
        first = jnp.clip(jnp.floor(index * length) + low, 0, size)
        last = jnp.clip(jnp.ceil((index + 1) * length) + low, 0, size)
        return first, last

    def pooled(roi: Any) -> Any:
        x1, y1, x2, y2 = (jnp.round(roi[1 + i] * spatial_scale) for i in range(4))
        top, bottom = edges(y1, y2, pooled_shape[0], height)
        left, right = edges(x1, x2, pooled_shape[1], width)
        rows = (np.arange(height) >= top[:, None]) & (np.arange(height) < bottom[:, None])
        columns = (np.arange(width) >= left[:, None]) & (np.arange(width) < right[:, None])
        inside = rows[:, None, :, None] & columns[None, :, None, :]
        image = x[roi[0].astype(np.int32)]
        largest = jnp.max(jnp.where(inside, image[:, None, None], -np.inf), (-2, -1))
        return jnp.where(inside.any((-2, -1)), largest, 0).astype(x.dtype)

    return jax.vmap(pooled)(jnp.asarray(rois))


# --- normalisations ---------------------------------------------------------------------------------------


def _inverse_rms(x: Any, axes: Any, epsilon: float) -> Any:
    """Return 1 / sqrt(mean(x^2) + epsilon) along the axes."""
    return lax.rsqrt(jnp.mean(jnp.square(x), axes, keepdims=True) + np.array(epsilon, x.dtype))


def scaled_by_rms(x: Any, axes: Any, epsilon: float) -> Any:
    return x * _inverse_rms(x, axes, epsilon)


def standardised(x: Any, axes: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """Return the values scaled to mean 0 and variance 1, the original mean, and the inverse of the standard deviation."""
    mean = jnp.mean(x, axes, keepdims=True)
    inverse = _inverse_rms(x - mean, axes, epsilon)
    return (x - mean) * inverse, mean, inverse


@op("BatchNormalization")
def _batch_normalization(
    ctx: Context, x: Any, scale: Any, bias: Any, mean: Any, variance: Any, *, epsilon: float = 1e-5, momentum: float = 0.9,
    spatial: int = 1, training_mode: int = 0,
) -> Any:  # fmt: skip
    if training_mode:
        raise Unsupported("it normalises by the batch, as in training; export the model for inference")
    if not spatial:
        raise Unsupported("its statistics are per element (spatial=0); convert the file to opset 9 or newer")
    inverse = lax.rsqrt(jnp.asarray(variance) + np.array(epsilon, variance.dtype))
    y = (x - channels(mean, x)) * channels(inverse, x) * channels(scale, x) + channels(bias, x)
    return y.astype(x.dtype)


@op("InstanceNormalization")
def _instance_normalization(ctx: Context, x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5) -> Any:
    return in_f32(lambda v: standardised(v, _space(v), epsilon)[0] * channels(scale, v) + channels(bias, v))(
        x
    )


@op("LayerNormalization")
def _layer_normalization(
    ctx: Context,
    x: Any,
    scale: Any,
    bias: Any = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    wide = widened(x)
    y, mean, inverse = standardised(wide, tuple(range(axis_of(axis, x.ndim), x.ndim)), epsilon)
    y = y * scale if bias is None else y * scale + bias
    return (y.astype(x.dtype), mean, inverse)[: ctx.outputs]


@op("GroupNormalization")
def _group_normalization(
    ctx: Context,
    x: Any,
    scale: Any,
    bias: Any,
    *,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    if ctx.opset < 21:
        scale, bias = (jnp.repeat(value, x.shape[1] // num_groups) for value in (scale, bias))

    def normalised(v: Any) -> Any:
        groups = jnp.reshape(v, (v.shape[0], num_groups, -1))
        return jnp.reshape(standardised(groups, -1, epsilon)[0], v.shape) * channels(scale, v) + channels(
            bias, v
        )

    return in_f32(normalised)(x)


@op("LpNormalization")
def _lp_normalization(ctx: Context, x: Any, *, axis: int = -1, p: int = 2) -> Any:
    norm = (
        jnp.sum(jnp.abs(x), axis, keepdims=True) if p == 1 else jnp.sqrt(jnp.sum(x * x, axis, keepdims=True))
    )
    return jnp.where(norm == 0, jnp.zeros_like(x), x / jnp.where(norm == 0, jnp.ones_like(norm), norm))


@op("LRN")
def _lrn(
    ctx: Context, x: Any, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Any:
    low = (size - 1) // 2
    window = (1, size, *[1] * (x.ndim - 2))
    widths = [(0, 0), (low, size - 1 - low), *[(0, 0)] * (x.ndim - 2)]
    squares = lax.reduce_window(jnp.square(x), np.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, widths)
    return x / (np.array(bias, x.dtype) + np.array(alpha / size, x.dtype) * squares) ** np.array(
        beta, x.dtype
    )


# --- images -----------------------------------------------------------------------------------------------


def _linear_weights(t: Any) -> tuple[Any, ...]:
    return 1 - t, t


def _between(image: Any, places: Sequence[Any], taps: Sequence[int], weigh: Any, pixel: Any) -> Any:
    """Interpolate at places between pixels: sum the weighted pixels around each place.

    `taps` are the offsets of these pixels from the pixel in front of the place, along each axis.
    """
    lows = [jnp.floor(at) for at in places]
    weights = [weigh(at - low) for at, low in zip(places, lows, strict=True)]
    total: Any = 0
    for corner in itertools.product(range(len(taps)), repeat=len(places)):
        weight = functools.reduce(jnp.multiply, (weights[axis][tap] for axis, tap in enumerate(corner)))
        at = [low + taps[tap] for low, tap in zip(lows, corner, strict=True)]
        total = total + pixel(image, at) * weight[:, None]
    return total


def pixels(image: Any, places: Sequence[Any]) -> Any:
    """Return the pixels of [n, c, *space] at integer places, as [n, c, k]. Outside the image, pixels are 0.

    `places` has one array [n, k] for each axis of the image.
    """
    space = image.shape[2:]
    inside: Any = True
    at: Any = 0
    for place, size in zip(places, space, strict=True):
        inside = inside & (place >= 0) & (place < size)
        at = at * size + jnp.clip(place, 0, size - 1).astype(np.int32)
    flat = jnp.reshape(image, (*image.shape[:2], -1))
    return jnp.take_along_axis(flat, at[:, None], 2) * inside[:, None].astype(image.dtype)


def _reflected(at: Any, low: float, high: float) -> Any:
    span = high - low
    if span <= 0:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    turns, remainder = jnp.floor(away / span), jnp.mod(away, span)
    return jnp.where(turns % 2 == 0, low + remainder, high - remainder)


@op("GridSample")
def _grid_sample(
    ctx: Context,
    x: Any,
    grid: Any,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Any:
    n, c, *space = x.shape
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)

    def place(at: Any, size: int) -> Any:
        return (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2

    # The last coordinate of a point in the grid belongs to the first axis of the image. So read the coordinates in reverse order.
    at = [place(jnp.reshape(grid[..., -1 - axis], (n, -1)), size) for axis, size in enumerate(space)]

    def pixel(image: Any, places: Sequence[Any]) -> Any:
        if padding_mode == "reflection":
            edge = 0.0 if align_corners else 0.5
            places = [
                _reflected(place, -edge, size - 1 + edge) for place, size in zip(places, space, strict=True)
            ]
        if padding_mode != "zeros":
            places = [jnp.clip(place, 0, size - 1) for place, size in zip(places, space, strict=True)]
        return pixels(image, places)

    if mode == "nearest":
        y = pixel(x, [jnp.round(place) for place in at])
    elif mode == "linear":
        y = _between(x, at, (0, 1), _linear_weights, pixel)
    else:
        y = _between(x, at, (-1, 0, 1, 2), cubic_weights, pixel)
    return jnp.reshape(y, (n, c, *grid.shape[1:-1])).astype(x.dtype)


def cubic_weights(t: Any, a: float = -0.75) -> tuple[Any, Any, Any, Any]:
    """Return the weights of the four pixels around a place that is `t` after the second pixel."""
    u = 1 - t
    return cubic_far(t + 1, a), cubic_near(t, a), cubic_near(u, a), cubic_far(u + 1, a)


def cubic_near(distance: Any, a: float) -> Any:
    """Return the weight of a pixel at a distance of at most 1 in the cubic convolution of Keys (1981)."""
    return ((a + 2) * distance - (a + 3)) * distance * distance + 1


def cubic_far(distance: Any, a: float) -> Any:
    """Return the weight of a pixel at a distance of 1 to 2."""
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a


@op("RoiAlign")
def _roi_align(
    ctx: Context, x: Any, rois: Any, images: Any, *, coordinate_transformation_mode: str | None = None, mode: str = "avg",
    output_height: int = 1, output_width: int = 1, sampling_ratio: int = 0, spatial_scale: float = 1.0,
) -> Any:  # fmt: skip
    if sampling_ratio <= 0:
        raise Unsupported(
            "the number of its samples depends on the boxes of a request; set sampling_ratio to a number above 0"
        )
    half = (
        coordinate_transformation_mode or ("half_pixel" if ctx.opset >= 16 else "output_half_pixel")
    ) == "half_pixel"
    if mode != "avg":
        raise Unsupported(f"its mode '{mode}' is not supported; only avg is supported")
    size = output_height, output_width
    averages = aligned_regions(jnp.asarray(x), rois, images, spatial_scale, size, sampling_ratio, half)
    return averages.astype(x.dtype)


@op("AffineGrid")
def _affine_grid(ctx: Context, theta: Any, size: Any, *, align_corners: int = 0) -> Any:
    sizes = [int(value) for value in ctx.known(size, "size")][2:]

    def steps(count: int) -> Any:
        if align_corners:
            return jnp.linspace(-1, 1, count) if count > 1 else jnp.zeros(1)
        return (2 * jnp.arange(count) + 1) / count - 1

    axes = jnp.meshgrid(*map(steps, sizes), indexing="ij")[::-1]
    places = jnp.stack([*axes, jnp.ones(sizes)], -1).astype(theta.dtype)
    return jnp.einsum("...j,nij->n...i", places, theta)

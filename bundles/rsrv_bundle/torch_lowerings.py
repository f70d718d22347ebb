"""JAX functions for PyTorch operations that torchax lacks or gets wrong.

Each function takes the arguments of its operation. Operations of other libraries are listed by name, so that this module
imports no other library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle import torch_recurrent as recurrent
from rsrv_bundle.between_pixels import aligned_regions, deformable_convolution
from rsrv_bundle.torch_nms import lowered_nms


def _grouped_mm(rows: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply each group of rows by its matrix. `offs` has the end of each group, where the next group begins."""
    if offs is None and rows.ndim == weights.ndim == 3:
        return rows @ weights
    if rows.ndim != 2 or weights.ndim != 3 or bias is not None or out_dtype is not None:
        raise NotImplementedError("only rows [n, k] and weights [groups, k, m] without bias and out_dtype")
    sizes = jnp.diff(offs, prepend=0).astype(jnp.int32)
    answers = jax.lax.ragged_dot(rows, weights, sizes)
    # Return zeros for the rows after the last group.
    return jnp.where(jnp.arange(len(rows))[:, None] < offs[-1], answers, 0)


def _int_mm(a: Any, b: Any) -> Any:
    return jax.lax.dot(a, b, preferred_element_type=jnp.int32)


def _embedding_bag(
    table: Any, indices: Any, offsets: Any, scale_grad_by_freq: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, include_last_offset: bool = False, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows of each bag, and values that only training needs."""
    count = len(offsets) - int(include_last_offset)
    bags = jnp.searchsorted(offsets[:count], jnp.arange(len(indices)), side="right") - 1
    counted = (indices != padding_idx)[:, None]
    rows = table[indices] if weights is None else table[indices] * weights[:, None]
    sizes = jax.ops.segment_sum(counted[:, 0].astype(indices.dtype), bags, count)
    if mode == 2:
        reduced = jax.ops.segment_max(jnp.where(counted, rows, -jnp.inf), bags, count)
        reduced = jnp.where(sizes[:, None] > 0, reduced, 0)
    else:
        reduced = jax.ops.segment_sum(jnp.where(counted, rows, 0), bags, count)
        reduced = reduced / jnp.maximum(sizes, 1)[:, None] if mode == 1 else reduced
    return reduced, bags, sizes, sizes


def _nonzero_static(x: Any, *, size: int, fill_value: int = -1) -> Any:
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=1)


def _solve(a: Any, b: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vector else b
    answer = jnp.linalg.solve(a, right) if left else jnp.linalg.solve(a.mT, right.mT).mT
    info = jnp.zeros(a.shape[:-2], jnp.int32)
    return answer[..., 0] if vector else answer, a, info, info


def _det(a: Any) -> Any:
    factors, pivots, _ = jax.lax.linalg.lu(a)
    return jnp.linalg.det(a), factors, pivots + 1


def _adaptive_max_pool(x: Any, sizes: Sequence[int]) -> tuple[Any, Any]:
    """Return the largest value of each window, and the index of this value in the flat input."""
    first = x.ndim - len(sizes)
    places = jnp.arange(prod(x.shape[first:])).reshape(x.shape[first:])
    for at, size in enumerate(sizes):
        extent = x.shape[first + 2 * at]
        starts = np.arange(size) * extent // size
        ends = -(-(np.arange(size) + 1) * extent // size)
        # Repeat the last element of shorter windows, so that all windows have the same length.
        window = np.minimum(starts[:, None] + np.arange((ends - starts).max()), ends[:, None] - 1)
        x = jnp.take(x, window, axis=first + 2 * at)
        places = jnp.take(places, window, axis=2 * at)
    count = len(sizes)
    order = [*range(0, 2 * count, 2), *range(1, 2 * count, 2)]
    x = x.transpose([*range(first), *(first + axis for axis in order)]).reshape(*x.shape[:first], *sizes, -1)
    places = jnp.broadcast_to(places.transpose(order).reshape(*sizes, -1), x.shape)
    best = jnp.argmax(x, axis=-1, keepdims=True)
    values, indices = (jnp.take_along_axis(array, best, axis=-1)[..., 0] for array in (x, places))
    return values, indices


def _resize(
    x: Any, sizes: Sequence[int], align_corners: bool, scales: Sequence[float | None], support: int
) -> Any:
    """Resize the last two axes as Pillow does: the kernel is wider if the image shrinks."""
    for axis, size, scale in zip((-2, -1), sizes, scales, strict=True):
        weights = jnp.asarray(_kernel(x.shape[axis], size, align_corners, scale, support), x.dtype)
        x = jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ weights.T, -1, axis)
    return x


def _kernel(extent: int, size: int, align_corners: bool, factor: float | None, support: int) -> Any:
    if align_corners:
        scale = (extent - 1) / (size - 1) if size > 1 else 0.0
    else:
        scale = 1 / factor if factor else extent / size
    width = max(scale, 1.0)
    centers = scale * (np.arange(size)[:, None] + 0.5)
    cells = np.arange(extent)
    first = np.maximum(np.trunc(centers - support * width + 0.5), 0)
    last = np.minimum(np.trunc(centers + support * width + 0.5), extent)
    distance = np.abs((cells - centers + 0.5) / width)
    if support == 1:
        weights = np.maximum(1 - distance, 0)
    else:
        near, far = (
            ((1.5 * distance - 2.5) * distance * distance + 1),
            (((-0.5 * distance + 2.5) * distance - 4) * distance + 2),
        )
        weights = np.where(distance < 1, near, np.where(distance < 2, far, 0))
    weights = np.where((cells >= first) & (cells < last), weights, 0)
    return weights / weights.sum(1, keepdims=True)


def _bilinear_aa(
    x: Any, output_size: Sequence[int], align_corners: bool, scales_h: Any = None, scales_w: Any = None
) -> Any:
    return _resize(x, output_size, align_corners, (scales_h, scales_w), 1)


def _bicubic_aa(
    x: Any, output_size: Sequence[int], align_corners: bool, scales_h: Any = None, scales_w: Any = None
) -> Any:
    return _resize(x, output_size, align_corners, (scales_h, scales_w), 2)


def _deform_conv2d(
    x: Any, weight: Any, offset: Any, mask: Any, bias: Any, stride_h: int, stride_w: int, pad_h: int, pad_w: int,
    dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Any:  # fmt: skip
    convolved = deformable_convolution(
        x,
        weight,
        offset,
        mask if use_mask else None,
        strides=(stride_h, stride_w),
        pads=(pad_h, pad_w),
        dilations=(dilation_h, dilation_w),
        groups=groups,
    )
    return convolved + bias[:, None, None]


def _roi_align(
    x: Any, rois: Any, scale: float, rows: int, columns: int, sampling_ratio: int, aligned: bool
) -> Any:
    if sampling_ratio <= 0:
        raise NotImplementedError("sampling_ratio: must be a fixed number of samples, such as 2")
    owners = rois[:, 0].astype(jnp.int32)
    return aligned_regions(x, rois[:, 1:], owners, scale, (rows, columns), sampling_ratio, aligned)


#: Lowerings by the names of their operations. They are used in place of torchax's lowerings.
LOWERINGS: Mapping[str, Callable[..., Any]] = {
    "aten._embedding_bag": _embedding_bag,
    "aten._embedding_bag_forward_only": _embedding_bag,
    "aten._grouped_mm": _grouped_mm,
    "aten._int_mm": _int_mm,
    "aten._linalg_det": _det,
    "aten._linalg_solve_ex": _solve,
    "aten._upsample_bicubic2d_aa": _bicubic_aa,
    "aten._upsample_bilinear2d_aa": _bilinear_aa,
    "aten.adaptive_max_pool2d": _adaptive_max_pool,
    "aten.adaptive_max_pool3d": _adaptive_max_pool,
    "aten.gru.input": recurrent.scanned(recurrent.gru),
    "aten.lstm.input": recurrent.scanned(recurrent.lstm),
    "aten.nonzero_static": _nonzero_static,
    "aten.rnn_relu.input": recurrent.scanned(recurrent.rnn_relu),
    "aten.rnn_tanh.input": recurrent.scanned(recurrent.rnn_tanh),
    "rsrv.nms": lowered_nms,
    "torchvision.deform_conv2d": _deform_conv2d,
    "torchvision.roi_align": _roi_align,
    "transformers.grouped_mm_fallback": _grouped_mm,
}

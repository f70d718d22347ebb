"""Operations that read images at points between pixels. PyTorch and ONNX define them in the same way. Needs jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def interpolated(image: Any, y: Any, x: Any) -> Any:
    """Interpolate between the pixels of an image [channels, height, width]. Outside the image, values are 0."""
    height, width = image.shape[1:]
    top, left = jnp.floor(y), jnp.floor(x)
    total: Any = 0
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        weight = (1 - jnp.abs(y - row)) * (1 - jnp.abs(x - column))
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        at = [
            jnp.clip(place, 0, extent - 1).astype(jnp.int32)
            for place, extent in ((row, height), (column, width))
        ]
        total += image[:, at[0], at[1]] * jnp.where(inside, weight, 0)
    return total


def deformable_convolution(
    images: Any,
    weight: Any,
    offset: Any,
    mask: Any,
    *,
    strides: Sequence[int],
    pads: Sequence[int],
    dilations: Sequence[int],
    groups: int,
) -> Any:
    """Convolve images with a kernel whose points are moved by `offset`.

    offset: [n, groups of channels * rows * columns * 2, height, width], where rows and columns are those of `weight`.
    mask: a factor for the value at each point, or None.
    pads: number of rows of padding above the images, and of columns to the left.
    """
    count, channels = images.shape[:2]
    height, width = offset.shape[2:]
    rows, columns = weight.shape[2:]
    moved = offset.reshape(count, -1, rows, columns, 2, height, width)
    parts = moved.shape[1]
    y, x = (
        (jnp.arange(taps) * dilation)[:, None] + jnp.arange(places) * stride - pad
        for taps, dilation, places, stride, pad in zip(
            (rows, columns), dilations, (height, width), strides, pads, strict=True
        )
    )
    values = jax.vmap(jax.vmap(interpolated))(
        images.reshape(count, parts, channels // parts, *images.shape[2:]),
        y[:, None, :, None] + moved[:, :, :, :, 0],
        x[None, :, None, :] + moved[:, :, :, :, 1],
    )
    if mask is not None:
        values = values * mask.reshape(count, parts, 1, rows, columns, height, width)
    values = values.reshape(count, groups, channels // groups, rows, columns, height, width)
    kernels = weight.reshape(groups, -1, *weight.shape[1:])
    return jnp.einsum("ngcklhw,gockl->ngohw", values, kernels).reshape(count, -1, height, width)


def aligned_regions(
    images: Any,
    regions: Any,
    owners: Any,
    scale: float,
    size: tuple[int, int],
    samples: int,
    half_pixel: bool,
) -> Any:
    """Return the average of `samples` times `samples` values in each cell of each region.

    regions: [m, 4], as x1, y1, x2, y2. owners: the index of each region's image. size: rows and columns of cells.
    """
    height, width = images.shape[2:]
    rows, columns = size

    def one(region: Any, owner: Any) -> Any:
        corners = region * scale - (0.5 if half_pixel else 0.0)
        extents = corners[2:] - corners[:2]
        if not half_pixel:
            extents = jnp.maximum(extents, 1.0)

        def places(start: Any, extent: Any, cells: int) -> Any:
            steps = jnp.arange(cells * samples) + 0.5
            return start + steps * extent / (cells * samples)

        y, x = places(corners[1], extents[1], rows), places(corners[0], extents[0], columns)
        inside = ((y >= -1) & (y <= height))[:, None] & ((x >= -1) & (x <= width))
        values = interpolated(
            images[owner],
            jnp.clip(y, 0, height - 1)[:, None] + 0 * x,
            jnp.clip(x, 0, width - 1) + 0 * y[:, None],
        )
        return jnp.where(inside, values, 0).reshape(-1, rows, samples, columns, samples).mean((2, 4))

    return jax.vmap(one)(regions, owners)

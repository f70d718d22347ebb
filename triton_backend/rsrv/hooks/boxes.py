"""Boxes of detectors. The last axis is (left, top, right, bottom) in pixels; right and bottom are just outside the box."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from rsrv.hooks import floats

Array = npt.NDArray[Any]
Format = Literal["xyxy", "xywh", "cxcywh"]

#: Number of boxes of one image that suppress each other at a time. It is large enough to make numpy's calls cheap, and small
#: enough for the cache.
_BLOCK = 256

#: If a bin of a region covers at least this many cells of a map, the map no longer affects the bin's mean.
_ENDLESS = 2.0**40

_TO_XYXY: Mapping[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "xyxy": lambda a, b: (a, b),
    "xywh": lambda corner, size: (corner, corner + size),
    "cxcywh": lambda centre, size: (centre - size / 2, centre + size / 2),
}
_FROM_XYXY: Mapping[str, Callable[[Array, Array], tuple[Array, Array]]] = {
    "xyxy": lambda a, b: (a, b),
    "xywh": lambda a, b: (a, b - a),
    "cxcywh": lambda a, b: (a + (b - a) / 2, b - a),
}


def convert(boxes: Array, source: Format, target: Format) -> Array:
    """Convert boxes [..., 4] to another format: corners, corner and size, or centre and size."""
    corners = _TO_XYXY[source](boxes[..., :2], boxes[..., 2:])
    return np.concatenate(_FROM_XYXY[target](*corners), -1)


def clip(boxes: Array, height: npt.ArrayLike, width: npt.ArrayLike) -> Array:
    """Cut boxes [..., 4] at an image's sides.

    height, width: pixels, as numbers or as arrays with one number for each box, for example [n, 1] for [n, k, 4].
    """
    right, bottom = np.asarray(width), np.asarray(height)
    limits = np.stack(np.broadcast_arrays(right, bottom, right, bottom), -1)
    # Use the wider of both dtypes: an image may have more pixels than the dtype of the boxes can count.
    cut: Array = np.clip(boxes, 0, limits).astype(boxes.dtype)
    return cut


def detections(
    scores: Array, boxes: Array, sizes: Array, labels: Sequence[str], *, threshold: float = 0.5
) -> list[list[dict[str, Any]]]:
    """Return each image's objects as transformers' pipelines do: score, label, and a box in whole pixels.

    scores: [n, k, classes + 1], probabilities. The last class is "no object". boxes: [n, k, 4], centre and size in shares
    of the image. sizes: [n, 2], heights and widths. Objects whose best score is at most `threshold` are left out.
    """
    corners = convert(boxes, "cxcywh", "xyxy") * np.tile(sizes[:, None, ::-1], 2)
    best, most = scores[..., :-1].argmax(-1), scores[..., :-1].max(-1)
    return [
        [
            {
                "score": float(most[row, place]),
                "label": labels[best[row, place]],
                "box": dict(
                    zip(("xmin", "ymin", "xmax", "ymax"), map(int, corners[row, place]), strict=True)
                ),
            }
            for place in np.flatnonzero(most[row] > threshold)
        ]
        for row in range(len(scores))
    ]


def anchors(rows: int, columns: int, *, stride: float, sizes: npt.ArrayLike, centre: float = 0.5) -> Array:
    """Return the boxes that a network's deltas start from: f32 [rows * columns * a, 4], in the order of a map [rows, columns, a].

    stride: pixels from one cell of the map to the next. sizes: [a, 2], the widths and heights around each cell. centre: place
    of the centre in a cell, as a share of the cell. torchvision's AnchorGenerator uses 0, and first rounds half the sizes to
    whole pixels.
    """
    half = np.asarray(sizes, np.float32) / 2
    y, x = (np.arange(cells, dtype=np.float32) * stride + centre * stride for cells in (rows, columns))
    points = np.stack(np.meshgrid(x, y), -1)[:, :, None]
    return np.concatenate([points - half, points + half], -1, dtype=np.float32).reshape(-1, 4)


def decode(
    boxes: Array,
    deltas: Array,
    *,
    weights: tuple[float, float, float, float] = (1, 1, 1, 1),
    largest: float = math.log(1000 / 16),
) -> Array:
    """Move and stretch anchors or regions [..., 4] by a network's deltas, [..., 4] (dx, dy, dw, dh).

    The results are centre + (dx, dy) * size, and size * exp(dw, dh): Ren et al. 2015, "Faster R-CNN", equation 2 solved for the
    box. The deltas are first divided by `weights`; dw and dh are then limited to `largest`, as in torchvision's BoxCoder.
    """
    deltas = deltas / np.array(weights, deltas.dtype)
    size = boxes[..., 2:] - boxes[..., :2]
    centre = boxes[..., :2] + size / 2 + deltas[..., :2] * size
    half = size * np.exp(np.minimum(deltas[..., 2:], deltas.dtype.type(largest))) / 2
    return np.concatenate([centre - half, centre + half], -1)


def iou(a: Array, b: Array) -> Array:
    """Return the intersection over union of boxes [..., p, 4] and [..., q, 4]: [..., p, q]. It is 0 for two empty boxes.

    The result is f64 for boxes of f64 or integers, otherwise f32, because f16 and short integers cannot hold areas.
    """
    a, b = _wide(a), _wide(b)
    (left, top, right, bottom), (left_b, top_b, right_b, bottom_b) = (
        [array[..., axis, None] for axis in range(4)] for array in (a, b)
    )
    left_b, top_b, right_b, bottom_b = (
        np.swapaxes(each, -1, -2) for each in (left_b, top_b, right_b, bottom_b)
    )
    both = (np.minimum(right, right_b) - np.maximum(left, left_b)).clip(0)
    both *= (np.minimum(bottom, bottom_b) - np.maximum(top, top_b)).clip(0)
    either = (right - left) * (bottom - top) + (right_b - left_b) * (bottom_b - top_b) - both
    shares: Array = np.zeros_like(either)
    np.divide(both, either, out=shares, where=either > 0)
    return shares


def nms(
    boxes: Array,
    scores: Array,
    overlap: float,
    *,
    classes: Array | None = None,
    least: float = -math.inf,
) -> Array:
    """Suppress boxes [n, k, 4] of n images greedily (non-maximum suppression). Returns a mask of the kept boxes, bool [n, k].

    Boxes are visited from the best score to the worst, and boxes with equal scores in their order. A box suppresses all later boxes
    whose intersection over union with it is larger than `overlap`. Images are independent.

    scores: floats [n, k], else ValueError. Boxes whose score is NaN or less than `least` are not kept and suppress no other box.
    classes: [n, k]. If it is given, a box suppresses only boxes of its own class.

    The time grows with the square of k. If there are very many boxes, first select the thousand best (`labels.top_k`).
    """
    floats(scores, "scores")
    boxes = _wide(boxes)
    mask = np.zeros(scores.shape, bool)
    for image, row in enumerate(scores):
        order = np.argsort(-row, kind="stable")
        order = order[row[order] >= least]
        kinds = None if classes is None else classes[image][order]
        mask[image, order] = _suppress(boxes[image][order], kinds, overlap)
    return mask


def best(scores: Array, kept: Array, most: int) -> tuple[Array, Array]:
    """Return the indices of the best kept boxes, i64 [n, most], best first, and a mask of the valid indices, bool [n, most].

    scores: floats [n, k], else ValueError. kept: [n, k], the result of `nms`. `np.take_along_axis(scores, indices, 1)` returns
    the scores of these boxes. If k < most, the results are [n, k].
    """
    floats(scores, "scores")
    order = np.lexsort((-scores, ~kept), axis=1)[:, :most].astype(np.int64)
    return order, np.take_along_axis(kept, order, 1)


def levels(boxes: Array, lowest: int, highest: int, *, size: float = 224, level: int = 4) -> Array:
    """Return the level of a pyramid from which each region [..., 4] is read: i64 [...], 0 for the level `lowest`.

    The level is floor(level + log2(sqrt(width * height) / size)), limited to `lowest` and `highest`: Lin et al. 2017, "Feature
    Pyramid Networks for Object Detection", equation 1, with 1e-6 added before the floor, as in torchvision's MultiScaleRoIAlign.
    """
    boxes = _wide(boxes)
    area = (boxes[..., 2:] - boxes[..., :2]).clip(0).prod(-1)
    chosen = np.floor(level + np.log2(np.maximum(np.sqrt(area) / size, 2.0**-level)) + 1e-6)
    at: Array = chosen.clip(lowest, highest).astype(np.int64) - lowest
    return at


def roi_align(
    features: Array,
    boxes: Array,
    owners: Array,
    *,
    size: tuple[int, int],
    scale: float,
    sampling: int | None = 2,
    aligned: bool = True,
    layout: Literal["nchw", "nhwc"] = "nchw",
) -> Array:
    """Return the features of regions: He et al. 2017, "Mask R-CNN", section 3, as torchvision.ops.roi_align computes it.

    features: floats [n, c, h, w] or [n, h, w, c] by `layout`, else ValueError; f16 is converted to f32 for the computation.
    boxes: [m, 4] in pixels. owners: integers [m], the index of each region's image. size: (rows, columns) of the result, [m, c,
    rows, columns] or [m, rows, columns, c]. scale: cells per pixel, for example 1/16. sampling: number of points in each
    direction whose mean is one element. None, which is -1 in torchvision, means one point in each cell under a region. aligned:
    True if the value of a cell is at its middle, which is correct. Older networks were trained with False.
    """
    floats(features, "features")
    if layout == "nchw":
        # With the channels last, each point is read as one piece of memory.
        features = np.ascontiguousarray(features.transpose(0, 2, 3, 1))
    _, height, width, channels = features.shape
    dtype = np.result_type(features, np.float32)
    scaled = boxes.astype(dtype) * dtype.type(scale) - dtype.type(0.5 if aligned else 0)
    extent = scaled[:, 2:] - scaled[:, :2]
    if not aligned:
        extent = np.maximum(extent, dtype.type(1))
    down = _shares(scaled[:, 1], extent[:, 1], size[0], sampling, height)
    across = _shares(scaled[:, 0], extent[:, 0], size[1], sampling, width)
    pooled = np.empty((len(boxes), *size, channels), features.dtype)
    tops, bottoms = _used(down)
    lefts, rights = _used(across)
    for index, owner in enumerate(owners):
        # Both interpolations are products of matrices with the part of the map under the region.
        rows, columns = slice(tops[index], bottoms[index]), slice(lefts[index], rights[index])
        part = features[owner, rows, columns]
        lines = down[index, :, rows] @ part.reshape(len(part), -1)
        np.matmul(across[index, :, columns], lines.reshape(size[0], -1, channels), out=pooled[index])
    return pooled if layout == "nhwc" else np.ascontiguousarray(pooled.transpose(0, 3, 1, 2))


def _wide(boxes: Array) -> Array:
    """Convert boxes to a dtype that holds the area of any box: f32 or f64."""
    exact = np.result_type(boxes, np.float32) if boxes.dtype.kind == "f" else np.float64
    return boxes.astype(exact, copy=False)


def _shares(start: Array, extent: Array, bins: int, sampling: int | None, cells: int) -> Array:
    """Return the weight of each cell of an axis in each bin of each region, by linear interpolation: [m, bins, cells]."""
    if sampling is not None:
        numbers = np.arange(bins * sampling)
        shares = _linear(start[:, None] + _places(numbers, bins * sampling, extent), cells)
        weights: Array = shares.reshape(len(start), bins, sampling, cells).mean(2)
        return weights
    # An empty region has no point, and an endless region has hardly any point on the map. Their weights are all 0.
    counts = np.ceil(np.where(extent / bins < _ENDLESS, extent / bins, 0)).astype(np.int64)
    weights = np.zeros((len(start), bins, cells), start.dtype)
    for count in np.unique(counts[counts > 0]):
        (same,) = np.nonzero(counts == count)
        points = bins * int(count)
        # If a region is far larger than the map, use only the points near the map. Points are at least half a cell apart.
        used = min(points, 2 * cells + 8)
        first = np.floor((-1 - start[same]) / extent[same] * points).astype(np.int64) - 1
        numbers = first.clip(0, points - used)[:, None] + np.arange(used)
        shares = _linear(start[same, None] + _places(numbers, points, extent[same]), cells)
        bin_of = (numbers // count)[:, None] == np.arange(bins)[:, None]
        weights[same] = bin_of.astype(start.dtype) @ shares / count
    return weights


def _places(numbers: Array, points: int, extent: Array) -> Array:
    """Return the distances of points from the start of their region: [m, numbers].

    A region has `points` points. `numbers` are the indices of the returned points.
    """
    kind = extent.dtype.type
    places: Array = (numbers.astype(extent.dtype) + kind(0.5)) / kind(points) * extent[:, None]
    return places


def _linear(points: Array, cells: int) -> Array:
    """Return the weight of each cell of an axis at each point: [m, points, cells]."""
    # Beyond its edge, the map continues for one cell with the value of the outermost cell. Points beyond that have the weight 0.
    inside = (points >= -1) & (points <= cells)
    distances = abs(points.clip(0, cells - 1)[..., None] - np.arange(cells, dtype=points.dtype))
    shares: Array = (1 - distances).clip(0) * inside[..., None]
    return shares


def _used(shares: Array) -> tuple[Array, Array]:
    """Return the first cell of an axis with a weight, and the cell after the last one with a weight: [m] each.

    The range has at least one cell.
    """
    used: Array = np.any(shares, axis=1)
    return used.argmax(1), used.shape[1] - used[:, ::-1].argmax(1)


def _suppress(boxes: Array, classes: Array | None, overlap: float) -> Array:
    """Return the mask of kept boxes, bool [k], for boxes [k, 4], best first."""

    def rivals(a: Array, b: Array) -> Array:
        overlapping: Array = iou(boxes[a], boxes[b]) > overlap
        return overlapping if classes is None else overlapping & (classes[a, None] == classes[b])

    mask = np.ones(len(boxes), bool)
    for start in range(0, len(boxes), _BLOCK):
        block = start + np.flatnonzero(mask[start : start + _BLOCK])
        among = rivals(block, block)
        left = np.ones(len(block), bool)
        for index in range(len(block)):
            if left[index]:
                left[index + 1 :] &= ~among[index, index + 1 :]
        mask[block] = left
        behind = start + _BLOCK + np.flatnonzero(mask[start + _BLOCK :])
        mask[behind] = ~rivals(block[left], behind).any(0)
    return mask

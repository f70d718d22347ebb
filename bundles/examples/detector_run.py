"""The detector between and behind its two networks, copied into its bundle as `model.py`. Needs numpy only.

Boxes are (left, top, right, bottom) in pixels. Everything is done for all images at once; how many regions go
through the second network is known only when the first one has answered.
"""

import functools
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The first network looks for a shape around each point of a grid with this spacing, once for each side (pixels).
SPACING = 8
ANCHOR_SIDES = (18, 30)
#: A cell of the feature map is this many pixels wide.
CELL = 4
#: A region's features are read at POOLED x POOLED points.
POOLED = 7

#: The largest batches that the networks are compiled for.
MOST_IMAGES = 8
MOST_REGIONS = 32
#: How many boxes of an image are looked at at all, and how many are reported.
CANDIDATES = 32
MOST_FOUND = 16
#: Boxes with less are dropped: probability that there is a shape, probability of the class.
LEAST_OBJECTNESS = 0.5
LEAST_SCORE = 0.5
#: Of two boxes with a larger intersection over union only the better one stays: regions, shapes of one class.
REGION_OVERLAP = 0.5
SHAPE_OVERLAP = 0.4


def run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
    """image: u8 [n, side, side, 3] -> boxes: f32 [n, 16, 4], scores: f32 [n, 16], classes: i64 [n, 16] and
    count: i64 [n, 1]. The best come first; behind `count` boxes there are zeros, and classes of -1."""
    image = inputs["image"]
    limit = np.float32(image.shape[1])
    found = in_parts(call, "detector_backbone", "image", image, MOST_IMAGES)
    regions, kept = propose(found["objectness"], found["deltas"], limit)

    # Regions of all images in one list: which image and which of its boxes.
    owner, slot = np.nonzero(kept)
    scores = np.zeros(kept.shape, np.float32)
    classes = np.full(kept.shape, -1, np.int64)
    boxes = np.zeros_like(regions)
    if len(owner):
        crops = call.scratch((len(owner), POOLED, POOLED, found["features"].shape[3]), np.float32)
        crops[:] = pool(found["features"][owner], regions[owner, slot])
        judged = in_parts(call, "detector_head", "crops", crops, MOST_REGIONS)
        probabilities = softmax(judged["logits"])[:, 1:]  # the first is that of no shape
        scores[owner, slot] = probabilities.max(1)
        classes[owner, slot] = probabilities.argmax(1)
        boxes[owner, slot] = decode(regions[owner, slot], judged["deltas"]).clip(0, limit)
    return report(boxes, scores, classes)


def in_parts(call: Any, model: str, name: str, array: Array, most: int) -> dict[str, Array]:
    """All rows of `array` through a model that takes at most `most` at a time. The calls run side by side."""
    parts = [(model, {name: array[start : start + most]}) for start in range(0, len(array), most)]
    answers = call.many(parts)
    return {output: np.concatenate([answer[output] for answer in answers]) for output in answers[0]}


def propose(objectness: Array, deltas: Array, limit: np.float32) -> tuple[Array, Array]:
    """objectness: logits [n, anchors], deltas: [n, anchors, 4] -> boxes [n, CANDIDATES, 4], and which to look at."""
    order = np.argsort(-objectness, axis=1, kind="stable")[:, :CANDIDATES]
    objectness = np.take_along_axis(objectness, order, 1)
    deltas = np.take_along_axis(deltas, order[:, :, None], 1)
    boxes = decode(anchors(int(limit))[order], deltas).clip(0, limit)
    likely = objectness > np.log(LEAST_OBJECTNESS / (1 - LEAST_OBJECTNESS))
    return boxes, suppress(likely, iou(boxes, boxes) > REGION_OVERLAP)


def report(boxes: Array, scores: Array, classes: Array) -> dict[str, Array]:
    """The outputs, from [n, CANDIDATES] boxes, their scores and classes; those without a score are no shapes."""
    order = np.argsort(-scores, axis=1, kind="stable")
    boxes = np.take_along_axis(boxes, order[:, :, None], 1)
    scores, classes = np.take_along_axis(scores, order, 1), np.take_along_axis(classes, order, 1)
    rivals = (iou(boxes, boxes) > SHAPE_OVERLAP) & (classes[:, :, None] == classes[:, None, :])
    kept = suppress(scores >= LEAST_SCORE, rivals)

    # Those that are kept move to the front, and stay in order.
    order = np.argsort(~kept, axis=1, kind="stable")[:, :MOST_FOUND]
    kept = np.take_along_axis(kept, order, 1)
    return {
        "boxes": np.where(kept[:, :, None], np.take_along_axis(boxes, order[:, :, None], 1), np.float32(0)),
        "scores": np.where(kept, np.take_along_axis(scores, order, 1), np.float32(0)),
        "classes": np.where(kept, np.take_along_axis(classes, order, 1), -1),
        "count": kept.sum(1, dtype=np.int64)[:, None],
    }


@functools.cache
def anchors(extent: int) -> Array:
    """f32 [anchors, 4]: the boxes that the first network starts from, in the order of its outputs."""
    centres = np.arange(SPACING / 2, extent, SPACING, dtype=np.float32)
    sides = np.array(ANCHOR_SIDES, np.float32)
    y, x, side = np.meshgrid(centres, centres, sides, indexing="ij")
    return np.stack([x - side / 2, y - side / 2, x + side / 2, y + side / 2], -1).reshape(-1, 4)


def decode(boxes: Array, deltas: Array) -> Array:
    """[..., 4] boxes, moved: (x, y) by shares of width and height, which grow by exponentials of the other two."""
    size = boxes[..., 2:] - boxes[..., :2]
    centre = boxes[..., :2] + size / 2 + deltas[..., :2] * size
    half = size * np.exp(deltas[..., 2:].clip(-2, 2)) / 2
    return np.concatenate([centre - half, centre + half], -1)


def iou(a: Array, b: Array) -> Array:
    """Intersection over union of each of [..., p, 4] boxes with each of [..., q, 4]: [..., p, q]."""
    a, b = a[..., :, None, :], b[..., None, :, :]
    extent = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    both = extent.clip(0).prod(-1)
    either = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - both
    shares: Array = both / np.maximum(either, np.float32(1e-6))
    return shares


def suppress(wanted: Array, rivals: Array) -> Array:
    """Greedy non-maximum suppression: bool [n, k], best first, and bool [n, k, k] -> which are left.

    One box after the other removes its rivals behind it, in all images at once.
    """
    kept = wanted.copy()
    for i in np.flatnonzero(wanted.any(0)):
        kept[:, i + 1 :] &= ~(kept[:, i, None] & rivals[:, i, i + 1 :])
    return kept


def pool(features: Array, boxes: Array) -> Array:
    """features [m, cells, cells, c] read at POOLED x POOLED points of boxes [m, 4]: [m, POOLED, POOLED, c].

    A point has its share of each of the cells around it: bilinear interpolation, as two products of matrices.
    Arrays of jax will do as well, and then it has a gradient.
    """
    count, cells, _, channels = features.shape
    shares = (np.arange(POOLED, dtype=np.float32)[:, None] + np.float32(0.5)) / POOLED
    points = boxes[:, None, :2] + shares * (boxes[:, None, 2:] - boxes[:, None, :2])
    points = (points / CELL - np.float32(0.5)).clip(0, cells - 1)
    weights = (1 - abs(points[..., None] - np.arange(cells, dtype=np.float32))).clip(0)
    across, down = weights[:, None, :, 0], weights[:, :, 1]
    rows = (down @ features.reshape(count, cells, -1)).reshape(count, POOLED, cells, channels)
    pooled: Array = across @ rows
    return pooled


def softmax(logits: Array) -> Array:
    """Over the last axis."""
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities: Array = exponentials / exponentials.sum(-1, keepdims=True)
    return probabilities

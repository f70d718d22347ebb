"""The steps of the detector between and after its two networks, copied into its bundle as `model.py`.

Boxes are (left, top, right, bottom) in pixels. All images are processed together. The number of regions for the second network
is known only after the first one has answered.
"""

import functools
from typing import Any

import numpy as np

from rsrv.hooks.boxes import anchors as grid
from rsrv.hooks.boxes import best, clip, decode, nms, roi_align
from rsrv.hooks.labels import softmax, top_k

Array = np.ndarray[Any, Any]

#: The first network looks for shapes of each size around the points of a grid. This is the grid's spacing in pixels.
SPACING = 8
ANCHOR_SIDES = (18, 30)
#: A cell of the feature map is this many pixels wide.
CELL = 4
#: A region's features are read at POOLED x POOLED points.
POOLED = 7

#: The largest batch of each network.
MOST_IMAGES = 8
MOST_REGIONS = 32
#: Maximum number of boxes per image that the second network classifies.
CANDIDATES = 32
#: Maximum number of shapes per image that are reported.
MOST_FOUND = 16
#: Boxes are dropped if the first network gives a smaller probability that they contain a shape.
LEAST_OBJECTNESS = 0.5
#: Boxes are dropped if the second network gives a smaller probability to their likeliest class.
LEAST_SCORE = 0.5
#: Largest intersection over union of two regions. Of two regions that overlap more, only the better one stays.
REGION_OVERLAP = 0.5
#: The same limit for two shapes of one class.
SHAPE_OVERLAP = 0.4
#: A network may enlarge a side of a box at most by the factor exp(LARGEST).
LARGEST = 2


def run(inputs: dict[str, Array], call: Any) -> dict[str, Array]:
    """Detect shapes: image: u8 [n, side, side, 3] -> boxes: f32 [n, 16, 4], scores: f32 [n, 16], classes, count.

    classes: i64 [n, 16]; count: i64 [n, 1]. The best boxes come first; the rows after the first `count` are zeros, with
    classes of -1.
    """
    image = inputs["image"]
    side = image.shape[1]
    maps = in_parts(call, "detector_backbone", "image", image, MOST_IMAGES)
    regions, mask = propose(maps["objectness"], maps["deltas"], side)

    # List the regions of all images: `owner` is the image of each region, and `slot` is its index among the image's boxes.
    owner, slot = np.nonzero(mask)
    scores = np.zeros(mask.shape, np.float32)
    classes = np.full(mask.shape, -1, np.int64)
    boxes = np.zeros_like(regions)
    if len(owner):
        chosen, features = regions[owner, slot], maps["features"]
        crops = call.scratch((len(owner), POOLED, POOLED, features.shape[3]), np.float32)
        crops[:] = pool(features, chosen, owner)
        judged = in_parts(call, "detector_head", "crops", crops, MOST_REGIONS)
        probabilities = softmax(judged["logits"])[:, 1:]  # The first class means "no shape".
        scores[owner, slot] = probabilities.max(1)
        classes[owner, slot] = probabilities.argmax(1)
        boxes[owner, slot] = clip(decode(chosen, judged["deltas"], largest=LARGEST), side, side)
    return report(boxes, scores, classes)


def in_parts(call: Any, model: str, name: str, array: Array, most: int) -> dict[str, Array]:
    """Send all rows of `array` to a model, at most `most` rows at a time. The calls run concurrently."""
    parts = [(model, {name: array[start : start + most]}) for start in range(0, len(array), most)]
    answers = call.many(parts)
    return {output: np.concatenate([answer[output] for answer in answers]) for output in answers[0]}


def propose(objectness: Array, deltas: Array, side: int) -> tuple[Array, Array]:
    """Choose boxes: objectness: logits [n, anchors], deltas: [n, anchors, 4] -> boxes [n, CANDIDATES, 4], mask.

    The mask, [n, CANDIDATES], is True for the boxes that the second network classifies.
    """
    objectness, order = top_k(objectness, CANDIDATES)
    deltas = np.take_along_axis(deltas, order[:, :, None], 1)
    boxes = clip(decode(anchors(side)[order], deltas, largest=LARGEST), side, side)
    least = np.log(LEAST_OBJECTNESS / (1 - LEAST_OBJECTNESS))
    return boxes, nms(boxes, objectness, REGION_OVERLAP, least=least)


def pool(features: Array, boxes: Array, owner: Array) -> Array:
    """Return the features inside each box, [m, POOLED, POOLED, c].

    features: [n, cells, cells, c], of the images. boxes: [m, 4]. owner: [m], the index of each box's image.
    """
    return roi_align(features, boxes, owner, size=(POOLED, POOLED), scale=1 / CELL, sampling=1, layout="nhwc")


def report(boxes: Array, scores: Array, classes: Array) -> dict[str, Array]:
    """Return the outputs for [n, CANDIDATES] boxes with their scores and classes. Boxes below LEAST_SCORE are dropped."""
    mask = nms(boxes, scores, SHAPE_OVERLAP, classes=classes, least=LEAST_SCORE)
    order, mask = best(scores, mask, MOST_FOUND)
    return {
        "boxes": np.where(mask[:, :, None], np.take_along_axis(boxes, order[:, :, None], 1), np.float32(0)),
        "scores": np.where(mask, np.take_along_axis(scores, order, 1), np.float32(0)),
        "classes": np.where(mask, np.take_along_axis(classes, order, 1), -1),
        "count": mask.sum(1, dtype=np.int64)[:, None],
    }


@functools.cache
def anchors(extent: int) -> Array:
    """Return the boxes that the first network starts from, f32 [anchors, 4], in the order of its outputs."""
    cells = extent // SPACING
    return grid(cells, cells, stride=SPACING, sizes=[(side, side) for side in ANCHOR_SIDES])

"""Training the detector's two networks together, on the features that they share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import adam
from examples.detector_networks import FEATURES, backbone, head
from examples.detector_run import ANCHOR_SIDES, CELL, POOLED, anchors
from examples.detector_scenes import CLASSES, MOST_SHAPES, SIDE, scenes
from rsrv.hooks.boxes import iou

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

_IMAGES = 2000
_BATCH = 8
_STEPS = 1600
#: A training step of the head uses this many regions per image: close to a shape (one for each shape), less close to a shape,
#: and at random places.
_NEAR, _BESIDE, _ANYWHERE = MOST_SHAPES, 3, 3
_RATE = 3e-3


@functools.cache
def trained() -> dict[str, Params]:
    """Return the parameters `backbone` and `head` after training with Adam. Trains once per process."""
    known = scenes(_IMAGES, seed=1, fewest=0)
    objects, offsets = _anchor_targets(known.boxes)
    rng = np.random.default_rng(2)
    orders = [rng.permutation(_IMAGES) for _ in range(1 + _STEPS * _BATCH // _IMAGES)]
    order = np.concatenate(orders)[: _STEPS * _BATCH].reshape(_STEPS, _BATCH)

    @jax.jit
    def step(state: Any, count: Any, batch: Any) -> Any:
        return adam.step(lambda params, batch: _loss(params, *batch), state, batch, count, _STEPS, _RATE)

    state = adam.start(_initial())
    for count, rows in enumerate(order):
        regions, kinds, moves = _regions(rng, known.boxes[rows], known.classes[rows])
        batch = (known.images[rows], objects[rows], offsets[rows], regions, kinds, moves)
        state = step(state, np.float32(count), batch)
    arrays: dict[str, Params] = jax.tree.map(np.asarray, state[0])
    return arrays


def _initial() -> dict[str, Params]:
    """Return the initial parameters: random kernels, the same in every process."""
    rng = np.random.default_rng(0)

    def layer(*shape: int, scale: float = 1.0) -> dict[str, Array]:
        kernel = scale * rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1]))
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(shape[-1], np.float32)}

    return {
        "backbone": {
            "conv1": layer(5, 5, 3, 12),
            "conv2": layer(3, 3, 12, 24),
            "conv3": layer(3, 3, 24, FEATURES),
            "conv4": layer(3, 3, FEATURES, 48),
            "conv5": layer(3, 3, 48, 48),
            "anchors": layer(1, 1, 48, 5 * len(ANCHOR_SIDES), scale=0.1),
        },
        "head": {
            "dense1": layer(POOLED * POOLED * FEATURES, 64),
            "dense2": layer(64, 1 + len(CLASSES) + 4, scale=0.1),
        },
    }


def _loss(
    params: Any, images: Any, objects: Any, offsets: Any, regions: Any, kinds: Any, moves: Any
) -> jax.Array:
    """Return the loss: objectness and offsets of the anchors, and classes and offsets of the regions, with equal weights."""
    maps: Any = backbone(params["backbone"], images)
    # Anchors on a shape have a larger weight, because most anchors have no shape. Anchors in between have the weight 0.
    weights = jnp.where(objects == 1, 4.0, objects == 0)
    cross = jax.nn.softplus(maps["objectness"]) - objects * maps["objectness"]
    total = (weights * cross).sum() / weights.sum()
    total += _distance(maps["deltas"], offsets, objects == 1)

    features: Any = jnp.repeat(maps["features"], regions.shape[1], 0)
    crops: Any = pool(features, regions.reshape(-1, 4))
    judged = head(params["head"], crops)
    logits, kinds = jax.nn.log_softmax(judged["logits"]), kinds.reshape(-1)
    total -= jnp.take_along_axis(logits, kinds[:, None], 1).mean()
    return jnp.add(total, _distance(judged["deltas"], moves.reshape(-1, 4), kinds > 0))


def pool(features: Any, boxes: Any) -> Any:
    """Pool features [m, cells, cells, c] inside the boxes [m, 4], as `detector_run.pool` does, but with a gradient.

    Two products of matrices interpolate each point bilinearly between the cells around it.
    """
    count, cells, _, channels = features.shape
    shares = (np.arange(POOLED, dtype=np.float32)[:, None] + np.float32(0.5)) / POOLED
    points = boxes[:, None, :2] + shares * (boxes[:, None, 2:] - boxes[:, None, :2])
    points = (points / CELL - np.float32(0.5)).clip(0, cells - 1)
    weights = (1 - abs(points[..., None] - np.arange(cells, dtype=np.float32))).clip(0)
    across, down = weights[:, None, :, 0], weights[:, :, 1]
    rows = (down @ features.reshape(count, cells, -1)).reshape(count, POOLED, cells, channels)
    return across @ rows


def _distance(predicted: Any, target: Any, counted: Any) -> Any:
    """Return Huber's mean loss over the boxes for which `counted` is True."""
    error = jnp.abs(predicted - target) * 4
    error = jnp.where(error < 1, error**2 / 2, error - 0.5).sum(-1)
    return (error * counted).sum() / jnp.maximum(counted.sum(), 1)


def _anchor_targets(boxes: Array) -> tuple[Array, Array]:
    """Return the targets of the anchors for boxes: [n, k, 4].

    The first result, f32 [n, anchors], is 1 for an anchor on a shape, 0 for an anchor without a shape, and -1 for an anchor in
    between. The second result, [n, anchors, 4], has the deltas from each anchor to its nearest shape.
    """
    own = anchors(SIDE)
    overlap = iou(own, boxes)
    best = overlap.max(-1)
    objects = np.where(best >= 0.5, 1, np.where(best < 0.35, 0, -1)).astype(np.float32)
    # Each shape has at least one anchor.
    image, shape = np.nonzero(boxes[..., 2])
    objects[image, overlap.argmax(1)[image, shape]] = 1
    nearest = np.take_along_axis(boxes, overlap.argmax(-1)[..., None], 1)
    return objects, np.where(objects[..., None] == 1, _encode(own, nearest), 0)


def _regions(rng: np.random.Generator, boxes: Array, classes: Array) -> tuple[Array, Array, Array]:
    """Return training data for the head: regions [n, r, 4] on, near and far from the shapes, and their classes and deltas.

    A region's class is 0 without a shape, and otherwise 1 + the class of its shape.
    """
    near = np.array([True] * _NEAR + [False] * (_BESIDE + _ANYWHERE))
    shape = np.array([*range(_NEAR), *range(_BESIDE), *[-1] * _ANYWHERE])
    size = rng.uniform(10, 40, (len(boxes), len(shape), 1)).astype(np.float32)
    anywhere = rng.uniform(0, SIDE, (len(boxes), len(shape), 2)).astype(np.float32)
    random = np.concatenate([anywhere - size / 2, anywhere + size / 2], -1)
    start = np.where((shape >= 0)[:, None] & (classes[:, shape, None] >= 0), boxes[:, shape], random)
    spread = np.where(near, 0.12, 0.3)[:, None]
    extent = start[..., 2:] - start[..., :2]
    centre = start[..., :2] + extent / 2 + extent * spread * rng.standard_normal(extent.shape)
    half = extent * np.exp(1.25 * spread * rng.standard_normal(extent.shape)) / 2
    regions = np.concatenate([centre - half, centre + half], -1).clip(0, SIDE).astype(np.float32)

    overlap = iou(regions, boxes)
    nearest = overlap.argmax(-1)
    there = overlap.max(-1) >= 0.5
    kinds = np.where(there, np.take_along_axis(classes, nearest, 1) + 1, 0)
    target = np.take_along_axis(boxes, nearest[..., None], 1)
    moves = np.where(there[..., None], _encode(regions, np.where(there[..., None], target, regions)), 0)
    return regions, kinds, moves


def _encode(boxes: Array, targets: Array) -> Array:
    """Return the deltas with which `rsrv.hooks.boxes.decode` turns `boxes` into `targets`."""
    size = np.maximum(boxes[..., 2:] - boxes[..., :2], 1)
    wanted_size = np.maximum(targets[..., 2:] - targets[..., :2], 1)
    centre = (targets[..., 2:] + targets[..., :2] - boxes[..., 2:] - boxes[..., :2]) / 2
    return np.concatenate([centre / size, np.log(wanted_size / size)], -1).astype(np.float32)

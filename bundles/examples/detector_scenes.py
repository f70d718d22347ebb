"""Scenes for the detector: coloured squares, discs and triangles on noise, drawn by seed. Needs numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv.hooks.boxes import iou

Array = np.ndarray[Any, Any]

#: Height and width of an image, pixels.
SIDE = 96
CLASSES = ("square", "disc", "triangle")
#: Maximum number of shapes in an image.
MOST_SHAPES = 6

_SIZES = (14, 36)
_NOISE = 12.0
#: Smallest distance between two colours of an image, in RGB from 0 to 255.
_CONTRAST = 80.0
#: Maximum share of a shape's box that another shape may cover.
_COVERED = 0.25


@dataclass(frozen=True)
class Scenes:
    """Images with their shapes.

    images: u8 [n, SIDE, SIDE, 3]. boxes: f32 [n, MOST_SHAPES, 4], (left, top, right, bottom) in pixels, zeros without a shape.
    classes: i64 [n, MOST_SHAPES], indices of CLASSES, -1 without a shape. pixels: i64 [n, SIDE, SIDE], the shape at each pixel:
    0 for none, otherwise 1 + its index in CLASSES.
    """

    images: Array
    boxes: Array
    classes: Array
    pixels: Array


def scenes(count: int, seed: int, *, fewest: int = 1) -> Scenes:
    """Return `count` images with `fewest` to MOST_SHAPES shapes each.

    The same arguments return the same images. An image has fewer shapes if there was no room for more.
    """
    rng = np.random.default_rng(seed)
    # Fill each image with a background colour, draw the shapes over it, and finally add noise to all pixels.
    images = np.empty((count, SIDE, SIDE, 3), np.float32)
    boxes = np.zeros((count, MOST_SHAPES, 4), np.float32)
    classes = np.full((count, MOST_SHAPES), -1, np.int64)
    pixels = np.zeros((count, SIDE, SIDE), np.int64)
    for image, its_boxes, its_classes, shown in zip(images, boxes, classes, pixels, strict=True):
        colours = [rng.uniform(0, 255, 3)]
        image[:] = colours[0]
        placed: list[tuple[int, int, int]] = []
        for _ in range(rng.integers(fewest, MOST_SHAPES, endpoint=True)):
            place = _place(rng, placed)
            if place is None:
                break
            left, top, size = place
            kind = int(rng.integers(len(CLASSES)))
            colours.append(_colour(rng, colours))
            mask = _mask(kind, size, rng)
            image[top : top + size, left : left + size][mask] = colours[-1]
            shown[top : top + size, left : left + size][mask] = 1 + kind
            its_boxes[len(placed)] = left, top, left + size, top + size
            its_classes[len(placed)] = kind
            placed.append(place)
    images += _NOISE * rng.standard_normal(images.shape, np.float32)
    return Scenes(images.clip(0, 255).astype(np.uint8), boxes, classes, pixels)


def _place(rng: np.random.Generator, placed: list[tuple[int, int, int]]) -> tuple[int, int, int] | None:
    """Return (left, top, size) of a shape that covers only a little of other shapes, or None after many tries."""
    for _ in range(50):
        size = int(rng.integers(*_SIZES, endpoint=True))
        left, top = (int(value) for value in rng.integers(0, SIDE - size, 2, endpoint=True))
        for other_left, other_top, other_size in placed:
            width = min(left + size, other_left + other_size) - max(left, other_left)
            height = min(top + size, other_top + other_size) - max(top, other_top)
            if max(width, 0) * max(height, 0) > _COVERED * min(size, other_size) ** 2:
                break
        else:
            return left, top, size
    return None


def _colour(rng: np.random.Generator, colours: list[Array]) -> Array:
    while True:
        colour = rng.uniform(0, 255, 3)
        if min(float(np.linalg.norm(colour - earlier)) for earlier in colours) >= _CONTRAST:
            return colour


def _mask(kind: int, size: int, rng: np.random.Generator) -> Array:
    """Return the pixels, bool [size, size], of a shape that touches all four sides of its box."""
    # Pixel centres, from -1 to 1.
    y, x = np.mgrid[1 - size : size : 2, 1 - size : size : 2] / size
    match CLASSES[kind]:
        case "square":
            return np.full((size, size), True)
        case "disc":
            return np.asarray(x**2 + y**2 <= 1)
        case _:
            upright: Array = np.abs(x) <= (y + 1) / 2
            return upright if rng.integers(2) else upright[::-1]


def recall_and_precision(known: Scenes, outputs: Mapping[str, Array]) -> tuple[float, float]:
    """Return the share of the shapes that were found, and the share of the found shapes that are right.

    outputs: the detector's outputs for `known.images`. A box is right if its class is right, and if its intersection over union with
    the shape is at least 0.5. A second box for the same shape is wrong.
    """
    right = 0
    for boxes, classes, known_boxes, known_classes in zip(
        outputs["boxes"], outputs["classes"], known.boxes, known.classes, strict=True
    ):
        matches = (iou(boxes, known_boxes) >= 0.5) & (classes[:, None] == known_classes)
        matches &= known_classes >= 0
        for box in matches:
            if box.any():
                right += 1
                matches[:, box.argmax()] = False
    return right / int((known.classes >= 0).sum()), right / max(int(outputs["count"].sum()), 1)

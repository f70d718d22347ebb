"""Boxes, compared with slow and simple computations and with torch's grid_sample, and by properties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rsrv.hooks import boxes

Array = np.ndarray[Any, Any]

seeds = st.integers(0, 2**32 - 1)
FORMATS: tuple[boxes.Format, ...] = ("xyxy", "xywh", "cxcywh")


def grid_boxes(rng: np.random.Generator, *shape: int, side: int = 12) -> Array:
    """Return boxes of whole numbers as f32 [*shape, 4]. Some boxes are equal, and some are empty."""
    corners = rng.integers(0, side, (*shape, 2, 2), endpoint=True)
    return np.concatenate([corners.min(-2), corners.max(-2)], -1).astype(np.float32)


def pixels(box: Array) -> set[tuple[int, int]]:
    left, top, right, bottom = map(int, box)
    return {(x, y) for x in range(left, right) for y in range(top, bottom)}


def overlap(a: Array, b: Array) -> float:
    """Return the overlap of two boxes of whole numbers by counting pixels."""
    return len(pixels(a) & pixels(b)) / max(len(pixels(a) | pixels(b)), 1)


@pytest.mark.parametrize(
    ("kind", "values"), [("xyxy", (10, 20, 16, 28)), ("xywh", (10, 20, 6, 8)), ("cxcywh", (13, 24, 6, 8))]
)
@pytest.mark.parametrize("target", FORMATS)
def test_a_box_is_the_same_in_every_format(
    kind: boxes.Format, values: tuple[int, ...], target: boxes.Format
) -> None:
    """A box that is written in three formats converts to each format and back."""
    box = np.array([[values]], np.float32)
    converted = boxes.convert(box, kind, target)
    assert converted.dtype == np.float32
    assert boxes.convert(converted, target, "xyxy").tolist() == [[[10, 20, 16, 28]]]
    assert (boxes.convert(converted, target, kind) == box).all()


def test_boxes_are_cut_at_the_sides_of_their_image() -> None:
    """Boxes are clipped to one size for all images, or to a size for each image."""
    corners = np.array([[[-5, -5, 100, 100], [1, 2, 3, 4]]] * 2, np.float32)
    assert boxes.clip(corners, 40, 60).tolist() == [[[0, 0, 60, 40], [1, 2, 3, 4]]] * 2
    clipped = boxes.clip(corners, np.array([[40], [3]]), np.array([[60], [2]]))
    assert clipped.tolist() == [[[0, 0, 60, 40], [1, 2, 3, 4]], [[0, 0, 2, 3], [1, 2, 2, 3]]]
    assert clipped.dtype == np.float32


def test_anchors_stand_around_the_cells_of_a_map() -> None:
    """Anchors are ordered by row, cell and size. Here, two rows of three cells are 8 pixels apart."""
    anchors = boxes.anchors(2, 3, stride=8, sizes=[(6, 2), (4, 4)])
    assert anchors.dtype == np.float32
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres[::2].tolist() == [[4, 4], [12, 4], [20, 4], [4, 12], [12, 12], [20, 12]]
    assert (centres[::2] == centres[1::2]).all()
    assert (anchors[:, 2:] - anchors[:, :2]).tolist() == [[6, 2], [4, 4]] * 6
    assert boxes.anchors(1, 2, stride=8, sizes=[(2, 2)], centre=0).tolist() == [[-1, -1, 1, 1], [7, -1, 9, 1]]


def test_large_regions_are_read_from_small_maps() -> None:
    """A region of 224 pixels belongs to level 4, as in the paper. Levels are clipped to the pyramid."""
    sides = np.array([0, 1, 111, 112, 223, 224, 447, 448, 2000])
    regions = np.stack([0 * sides, 0 * sides, sides, sides], -1).astype(np.float32)
    assert boxes.levels(regions, 2, 5).tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert boxes.levels(regions[None] * np.array([1, 1, 2, 0.5], np.float32), 2, 5)[0].tolist() == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
        3,
    ]


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ((0, 0, 0, 0), (10, 20, 30, 60)),
        ((0.5, 0, 0, 0), (20, 20, 40, 60)),
        ((0, -0.25, 0, 0), (10, 10, 30, 50)),
        ((0, 0, np.log(2), np.log(0.5)), (0, 30, 40, 50)),
        ((0, 0, 50, 0), (20 - 10 * 62.5, 20, 20 + 10 * 62.5, 60)),
    ],
)
def test_deltas_move_and_stretch_a_box(deltas: tuple[float, ...], expected: tuple[float, ...]) -> None:
    """Deltas are relative to the box. A side grows to at most 1000 / 16 times its length."""
    box = np.array([10, 20, 30, 60], np.float32)
    moved = boxes.decode(box, np.array(deltas, np.float32))
    assert moved.dtype == np.float32
    np.testing.assert_allclose(moved, expected, rtol=1e-5)
    weights = (10.0, 10.0, 5.0, 5.0)
    scaled = np.array(deltas, np.float32) * np.array(weights, np.float32)
    np.testing.assert_allclose(boxes.decode(box, scaled, weights=weights), expected, rtol=1e-4)


@given(seeds)
def test_the_deltas_between_two_boxes_lead_from_one_to_the_other(seed: int) -> None:
    """The deltas between two boxes, computed in 64 bits by the paper's formula, lead from one box to the other."""
    rng = np.random.default_rng(seed)
    start, target = (boxes.convert(rng.uniform(1, 9, (5, 4)), "xywh", "cxcywh") for _ in "ab")
    deltas = np.concatenate(
        [(target[:, :2] - start[:, :2]) / start[:, 2:], np.log(target[:, 2:] / start[:, 2:])], -1
    )
    moved = boxes.decode(boxes.convert(start, "cxcywh", "xyxy"), deltas)
    np.testing.assert_allclose(moved, boxes.convert(target, "cxcywh", "xyxy"), rtol=1e-9)


@given(seeds)
def test_overlaps_are_counted_in_pixels(seed: int) -> None:
    """The IoU of random boxes, including empty ones and integers, equals the IoU of their sets of pixels."""
    rng = np.random.default_rng(seed)
    a, b = grid_boxes(rng, 2, 3), grid_boxes(rng, 2, 4)
    expected = [[[overlap(p, q) for q in b[n]] for p in a[n]] for n in range(2)]
    assert boxes.iou(a, b).dtype == np.float32
    np.testing.assert_allclose(boxes.iou(a, b), expected, rtol=1e-6)
    np.testing.assert_allclose(boxes.iou(a.astype(np.int64), b.astype(np.int64)), expected)
    np.testing.assert_allclose(
        boxes.iou(a[0], b), [[[overlap(p, q) for q in c] for p in a[0]] for c in b], rtol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.float16, np.int16, np.uint16, np.int32, np.uint8])
def test_areas_may_be_larger_than_the_boxes_dtype_holds(dtype: Any) -> None:
    """Areas beyond the range of f16 or integers give the results of f64."""
    side = 250 if dtype == np.uint8 else 60_000 if dtype in (np.uint16, np.int32) else 1000
    corners = np.array([[[0, 0, side, side]] * 2 + [[side // 2, 0, side, side], [0, 0, 5, 5]]], dtype)
    wide = corners.astype(np.float64)
    overlaps = boxes.iou(corners[0], corners[0])
    assert overlaps.dtype == (np.float32 if dtype == np.float16 else np.float64)
    np.testing.assert_allclose(overlaps, boxes.iou(wide[0], wide[0]), rtol=1e-6)
    assert overlaps[0].tolist()[:3] == [1, 1, 0.5]
    scores = np.array([[0.9, 0.8, 0.7, 0.6]], np.float16)
    assert boxes.nms(corners, scores, 0.45).tolist() == [[True, False, False, True]]
    assert boxes.levels(corners, 2, 5).tolist() == boxes.levels(wide, 2, 5).tolist()


def test_boxes_of_short_integers_are_moved_within_their_range() -> None:
    """16-bit boxes convert without overflow, and are clipped to images wider than their range."""
    corners = np.array([[20_000, 30_000, 30_000, 32_000]], np.int16)
    assert boxes.convert(corners, "xyxy", "cxcywh").tolist() == [[25_000, 31_000, 10_000, 2000]]
    assert boxes.clip(corners, 40_000, 70_000).tolist() == corners.tolist()
    assert boxes.clip(corners, 40_000, 70_000).dtype == np.int16


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_scores_that_are_no_floats_are_refused(dtype: Any) -> None:
    """Scores that are not floats are refused: bf16 arrives as u16, which orders differently."""
    scores = np.zeros((1, 2), dtype)
    with pytest.raises(ValueError, match=f"scores must be floats, not {np.dtype(dtype)}; hooks get bf16"):
        boxes.nms(np.zeros((1, 2, 4), np.float32), scores, 0.5)
    with pytest.raises(ValueError, match=f"scores must be floats, not {np.dtype(dtype)}; hooks get bf16"):
        boxes.best(scores, np.ones((1, 2), bool), 1)


def greedy(candidates: Array, scores: Array, limit: float, classes: Array | None, least: float) -> list[int]:
    """Return the boxes of an image that greedy suppression keeps."""
    remaining = sorted((i for i in range(len(scores)) if scores[i] >= least), key=lambda i: (-scores[i], i))
    taken = []
    while remaining:
        first, *remaining = remaining
        taken.append(first)
        fine = boxes.iou(candidates[[first]], candidates[remaining])[0] <= limit
        remaining = [
            other
            for other, ok in zip(remaining, fine, strict=True)
            if ok or (classes is not None and classes[first] != classes[other])
        ]
    return sorted(taken)


@given(seeds, st.integers(0, 30), st.sampled_from([0, 0.3, 0.5, 1]), st.booleans())
def test_suppression_leaves_what_one_box_after_the_other_leaves(
    seed: int, count: int, limit: float, kinds: bool
) -> None:
    """nms keeps the same boxes as greedy suppression, with equal scores and boxes, with and without classes."""
    rng = np.random.default_rng(seed)
    candidates = grid_boxes(rng, 3, count)
    scores = rng.integers(0, 6, (3, count)).astype(np.float32)
    classes = rng.integers(0, 2, (3, count)) if kinds else None
    selected = boxes.nms(candidates, scores, limit, classes=classes, least=1)
    for n in range(3):
        of_image = None if classes is None else classes[n]
        assert np.flatnonzero(selected[n]).tolist() == greedy(candidates[n], scores[n], limit, of_image, 1)


@pytest.mark.parametrize("spread", [60, 400])
def test_suppression_of_many_boxes_is_the_same_in_blocks(spread: int) -> None:
    """For a thousand boxes, which are computed in blocks, nms keeps the same boxes as greedy suppression."""
    rng = np.random.default_rng(spread)
    candidates = rng.uniform(0, spread, (1, 1000, 4)).astype(np.float32)
    candidates = boxes.convert(candidates * np.array([1, 1, 0.2, 0.2], np.float32), "xywh", "xyxy")
    scores, classes = rng.random((1, 1000)), rng.integers(0, 3, (1, 1000))
    selected = boxes.nms(candidates, scores, 0.5)
    assert np.flatnonzero(selected[0]).tolist() == greedy(candidates[0], scores[0], 0.5, None, 0)
    selected = boxes.nms(candidates, scores, 0.5, classes=classes)
    assert np.flatnonzero(selected[0]).tolist() == greedy(candidates[0], scores[0], 0.5, classes[0], 0)


def test_boxes_without_a_number_for_a_score_are_not_kept() -> None:
    """A box whose score is NaN is not kept, and suppresses no other box."""
    corners = np.array([[[0, 0, 4, 4]] * 2], np.float32)
    assert boxes.nms(corners, np.array([[np.nan, 0.1]]), 0.5).tolist() == [[False, True]]


def test_the_best_of_what_is_kept_come_first() -> None:
    """`best` returns the kept boxes by score. Equal scores are ordered by position, and the padding is marked."""
    scores = np.array([[0.1, 0.9, 0.5, 0.5], [0.4, 0.3, 0.2, 0.1]], np.float32)
    selected = np.array([[True, False, True, True], [False, False, False, True]])
    order, there = boxes.best(scores, selected, 3)
    assert (order.tolist()[0], order[1, 0]) == ([2, 3, 0], 3)
    assert there.tolist() == [[True] * 3, [True, False, False]]
    assert boxes.best(scores, selected, 9)[0].shape == (2, 4)


def test_the_worst_score_comes_before_what_was_not_kept() -> None:
    """A kept box with the score minus infinity is before boxes that were not kept."""
    scores = np.array([[0.5, -np.inf, 0.7]], np.float32)
    order, there = boxes.best(scores, np.array([[False, True, True]]), 2)
    assert order.tolist() == [[2, 1]]
    assert there.tolist() == [[True, True]]


def slow_roi_align(
    features: Array, box: Array, size: int, scale: float, sampling: int | None, *, aligned: bool
) -> Array:
    """Compute roi_align of one map [c, h, w] and one box with torchvision's loops."""
    _, height, width = features.shape
    left, top, right, bottom = box * scale - (0.5 if aligned else 0)
    wide, high = right - left, bottom - top
    if not aligned:
        wide, high = max(wide, 1), max(high, 1)
    down, across = (sampling or math.ceil(extent / size) for extent in (high, wide))

    def at(y: float, x: float) -> Any:
        if y < -1 or y > height or x < -1 or x > width:
            return 0
        y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
        low_y, low_x = int(y), int(x)
        high_y, high_x = min(low_y + 1, height - 1), min(low_x + 1, width - 1)
        dy, dx = y - low_y, x - low_x
        above = (1 - dx) * features[:, low_y, low_x] + dx * features[:, low_y, high_x]
        below = (1 - dx) * features[:, high_y, low_x] + dx * features[:, high_y, high_x]
        return (1 - dy) * above + dy * below

    result = np.zeros((len(features), size, size))
    for row in range(size):
        for column in range(size):
            points = [
                at(
                    top + (row + (i + 0.5) / down) * high / size,
                    left + (column + (j + 0.5) / across) * wide / size,
                )
                for i in range(down)
                for j in range(across)
            ]
            result[:, row, column] = sum(points) / max(len(points), 1)
    return result


@given(seeds, st.integers(1, 3) | st.none(), st.booleans())
def test_regions_are_read_point_by_point(seed: int, sampling: int | None, aligned: bool) -> None:
    """roi_align equals the loops for regions inside, across and far outside of the maps, in both layouts."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((2, 3, 6, 9))
    corners = np.sort(rng.uniform(-30, 80, (4, 2, 2)), 1).reshape(4, 4)
    corners[0, 2] = corners[0, 0]
    owners = rng.integers(0, 2, 4)
    options: Any = {"size": (3, 3), "scale": 0.125, "sampling": sampling, "aligned": aligned}
    pooled = boxes.roi_align(features, corners, owners, **options)
    expected = [
        slow_roi_align(features[owner], box, 3, 0.125, sampling, aligned=aligned)
        for owner, box in zip(owners, corners, strict=True)
    ]
    np.testing.assert_allclose(pooled, expected, atol=1e-12)
    last = boxes.roi_align(features.transpose(0, 2, 3, 1), corners, owners, layout="nhwc", **options)
    np.testing.assert_allclose(last, pooled.transpose(0, 2, 3, 1), atol=1e-12)


def test_regions_are_read_as_torch_samples_a_grid() -> None:
    """roi_align equals torch's grid_sample at the centres of the bins, in f32."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((1, 8, 20, 30)).astype(np.float32)
    corners = np.array([[16, 32, 200, 100], [0, 0, 480, 320], [101.5, 7.25, 140, 300]], np.float32)
    pooled = boxes.roi_align(features, corners, np.zeros(3, int), size=(5, 4), scale=1 / 16, sampling=1)
    assert pooled.dtype == np.float32
    assert pooled.shape == (3, 8, 5, 4)
    for box, region in zip(corners, pooled, strict=True):
        x, y = ((np.arange(n) + 0.5) / n for n in (4, 5))
        grid = (
            np.stack(np.meshgrid(box[0] + x * (box[2] - box[0]), box[1] + y * (box[3] - box[1])), -1)
            / [480, 320]
            * 2
            - 1
        )
        expected = torch.nn.functional.grid_sample(
            torch.tensor(features), torch.tensor(grid[None], dtype=torch.float32),
            padding_mode="border", align_corners=False,
        )  # fmt: skip
        np.testing.assert_allclose(region, expected[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("aligned", [True, False])
def test_regions_far_larger_than_the_map_are_read_point_by_point(aligned: bool) -> None:
    """roi_align equals the loops for regions that are up to 500 times as large as the map."""
    features = np.random.default_rng(0).standard_normal((1, 2, 3, 4))
    corners = np.array(
        [[-40, -300, 2000, 30], [-7, -2, 31, 9], [-600, 1.5, 900, 2], [50, 0, 90, 2], [-90, 0, -9, 2]]
    )
    pooled = boxes.roi_align(
        features, corners, np.zeros(5, int), size=(3, 3), scale=1, sampling=None, aligned=aligned
    )
    expected = [slow_roi_align(features[0], box, 3, 1, None, aligned=aligned) for box in corners]
    np.testing.assert_allclose(pooled, expected, atol=1e-12)


def test_features_of_16_bits_are_read_where_those_of_32_are() -> None:
    """roi_align reads f16 features at the same places as f32 features, although f16 could not represent these places.

    Bits of bf16 are refused.
    """
    features = np.tile(np.arange(100, dtype=np.float16), (1, 1, 2, 1))
    corners = np.array([[2001, 0, 2021, 31], [-70_000, 0, 70_000, 31]], np.float32)
    for sampling in (1, None):
        options: Any = {"size": (1, 5), "scale": 1 / 32, "sampling": sampling}
        pooled = boxes.roi_align(features, corners, np.zeros(2, int), **options)
        assert pooled.dtype == np.float16
        wide = boxes.roi_align(features.astype(np.float32), corners, np.zeros(2, int), **options)
        assert (pooled == wide.astype(np.float16)).all()
    with pytest.raises(ValueError, match="features must be floats, not uint16; hooks get bf16"):
        boxes.roi_align(features.view(np.uint16), corners, np.zeros(2, int), size=(1, 5), scale=1)


def test_a_region_of_any_size_takes_no_more_memory() -> None:
    """A box of 10 ** 12 pixels takes no more memory than others, because only points over the map are computed."""
    corners = np.array([[-1e12, -1e12, 1e12, 1e12]])
    pooled = boxes.roi_align(
        np.ones((1, 1, 3, 4)), corners, np.zeros(1, int), size=(3, 3), scale=1, sampling=None
    )
    assert pooled[0, 0].tolist() == [[0, 0, 0], [0, pytest.approx(0, abs=1e-20), 0], [0, 0, 0]]
    for end in (1e30, np.inf, np.nan):
        corners[0, 2:] = end
        pooled = boxes.roi_align(
            np.ones((1, 1, 3, 4)), corners, np.zeros(1, int), size=(3, 3), scale=1, sampling=None
        )
        assert not pooled.any()


def test_without_regions_there_is_nothing() -> None:
    """Without regions, the results are empty, with the right shapes and dtypes."""
    nothing = np.zeros((0, 4), np.float32)
    pooled = boxes.roi_align(
        np.zeros((1, 3, 4, 4), np.float32), nothing, np.zeros(0, int), size=(2, 2), scale=1
    )
    assert pooled.dtype == np.float32
    assert pooled.shape == (0, 3, 2, 2)
    assert boxes.nms(nothing[None], np.zeros((1, 0)), 0.5).shape == (1, 0)
    assert boxes.iou(nothing, nothing).shape == (0, 0)
    assert math.isclose(boxes.iou(np.ones((1, 4)), np.ones((1, 4)))[0, 0], 0)


def test_detections_are_whole_pixels_of_their_pictures() -> None:
    """Objects above the threshold are returned in order. Their boxes are in the pixels of their own picture."""
    scores = np.array([[[0.8, 0.1, 0.1], [0.2, 0.2, 0.6], [0.1, 0.6, 0.3]]] * 2, np.float32)
    relative = np.array([[[0.5, 0.5, 0.5, 0.5], [0, 0, 1, 1], [0.25, 0.5, 0.1, 1.0]]] * 2, np.float32)
    sizes = np.array([[100, 200], [10, 10]], np.int32)
    first, second = boxes.detections(scores, relative, sizes, ["cat", "dog"])
    assert [each["label"] for each in first] == ["cat", "dog"]
    assert first[0]["box"] == {"xmin": 50, "ymin": 25, "xmax": 150, "ymax": 75}
    assert second[0]["box"] == {"xmin": 2, "ymin": 2, "xmax": 7, "ymax": 7}
    assert boxes.detections(scores, relative, sizes, ["cat", "dog"], threshold=0.7)[0] == first[:1]

"""The detector without a server.

The steps of its `run` are compared with slow and simple implementations. The complete `run` is tested with the built bundles.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import detector_run as steps
from examples import detector_training
from examples.detector import Direct
from examples.detector_scenes import CLASSES, SIDE, recall_and_precision, scenes
from rsrv.hooks.boxes import iou
from rsrv_bundle import read_bundle
from tests.examples.built import Array, Arrays, Model


def some_boxes(rng: np.random.Generator, *shape: int) -> Array:
    """Return random boxes inside an image, f32 [*shape, 4]. Some are equal, and some are empty."""
    corners = rng.integers(0, SIDE // 8, (*shape, 2, 2), endpoint=True) * 8
    return np.concatenate([corners.min(-2), corners.max(-2)], -1).astype(np.float32)


seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_regions_are_read_as_in_training(seed: int) -> None:
    """For regions anywhere in two images, including empty regions, the head reads the same features as in its training."""
    rng = np.random.default_rng(seed)
    cells = SIDE // steps.CELL
    features = rng.standard_normal((2, cells, cells, 3)).astype(np.float32)
    regions, owner = some_boxes(rng, 5), rng.integers(0, 2, 5)
    pooled = steps.pool(features, regions, owner)
    assert pooled.dtype == np.float32
    np.testing.assert_allclose(pooled, detector_training.pool(features[owner], regions), atol=1e-5)


def test_anchors_stand_around_the_points_of_a_grid() -> None:
    """Anchors are ordered by the rows of a grid. Each point of the grid has anchors of both sizes."""
    anchors = steps.anchors(16)
    assert anchors.dtype == np.float32
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    assert centres[::2].tolist() == [[4, 4], [12, 4], [4, 12], [12, 12]]
    assert (centres[::2] == centres[1::2]).all()
    assert (anchors[:, 2:] - anchors[:, :2]).tolist() == [[18, 18], [30, 30]] * 4


@given(seeds, st.integers(1, 3))
def test_reports_hold_the_best_shapes_in_order(seed: int, images: int) -> None:
    """A report has the best proposals in the order of falling scores, and no overlapping shapes of a class.

    The entries after the last shape are padding.
    """
    rng = np.random.default_rng(seed)
    boxes = some_boxes(rng, images, steps.CANDIDATES)
    scores = rng.permuted(np.linspace(0, 1, boxes[..., 0].size, dtype=np.float32)).reshape(boxes.shape[:2])
    classes = rng.integers(0, len(CLASSES), (images, steps.CANDIDATES))
    report = steps.report(boxes, scores, classes)
    for index in range(images):
        (count,) = report["count"][index]
        proposed = list(zip(scores[index], classes[index], boxes[index].tolist(), strict=True))
        expected: list[tuple[Any, ...]] = []
        for score, kind, box in sorted(proposed, key=lambda item: -item[0]):
            alike = [other for _, other_kind, other in expected if other_kind == kind]
            if score >= steps.LEAST_SCORE and all(
                iou(np.array([other]), np.array([box])).item() <= steps.SHAPE_OVERLAP for other in alike
            ):
                expected.append((score, kind, box))
        assert count == min(len(expected), steps.MOST_FOUND)
        got = zip(
            *(report[name][index][:count].tolist() for name in ("scores", "classes", "boxes")), strict=True
        )
        assert list(got) == expected[: steps.MOST_FOUND]
        assert not report["scores"][index, count:].any()
        assert not report["boxes"][index, count:].any()
        assert (report["classes"][index, count:] == -1).all()


def test_scenes_are_the_same_every_time_and_hold_what_they_say() -> None:
    """Scenes with the same seed are equal. A scene has shapes exactly where it has classes, and an empty scene is noise on one colour."""
    first, second = scenes(4, seed=3), scenes(4, seed=3)
    assert (first.images == second.images).all()
    assert first.images.shape == (4, SIDE, SIDE, 3)
    assert first.images.dtype == np.uint8
    assert ((first.classes >= 0) == (first.boxes[..., 2] > first.boxes[..., 0])).all()
    assert ((first.classes >= 0).sum(1) >= 1).all()
    many = scenes(30, seed=5, fewest=0)
    empty = many.images[(many.classes < 0).all(1)]
    assert len(empty)
    assert empty.std((1, 2)).max() < 16


def test_finds_are_judged_by_class_place_and_number() -> None:
    """The true shapes count as right finds. A duplicate, a wrong class or a wrong place counts as a wrong find."""
    known = scenes(2, seed=9)
    count = (known.classes >= 0).sum(1)
    truth = {"boxes": known.boxes, "classes": known.classes, "count": count[:, None]}
    assert recall_and_precision(known, truth) == (1, 1)
    assert recall_and_precision(known, {**truth, "boxes": known.boxes + 30})[0] == 0
    others = np.where(known.classes < 0, -1, (known.classes + 1) % len(CLASSES))
    assert recall_and_precision(known, {**truth, "classes": others}) == (0, 0)
    twice = {name: np.concatenate([array] * 2, 1) for name, array in truth.items() if name != "count"}
    assert recall_and_precision(known, {**twice, "count": 2 * count[:, None]}) == (1, 0.5)
    nothing = {"boxes": known.boxes[:, :0], "classes": known.classes[:, :0], "count": 0 * count[:, None]}
    assert recall_and_precision(known, nothing) == (0, 0)


class Detector:
    """The built detector. A module is compiled at its first call."""

    def __init__(self, root: Path) -> None:
        bundle = read_bundle(root / "detector", digest=False)
        assert bundle.hooks is not None
        self.run = runpy.run_path(str(bundle.hooks))["run"]
        self.outputs = bundle.manifest.wire_outputs
        self.models = {name: Model(root / name) for name in bundle.manifest.meta_calls}
        #: Name and number of rows of each call for the last request.
        self.calls: list[tuple[str, int]] = []

    def __call__(self, images: Array) -> Arrays:
        call = Direct(self.models)
        answer: Arrays = self.run({"image": images}, call)
        self.calls = call.calls
        assert {spec.name: (answer[spec.name].dtype, answer[spec.name].shape) for spec in self.outputs} == {
            "boxes": (np.float32, (len(images), steps.MOST_FOUND, 4)),
            "scores": (np.float32, (len(images), steps.MOST_FOUND)),
            "classes": (np.int64, (len(images), steps.MOST_FOUND)),
            "count": (np.int64, (len(images), 1)),
        }
        return answer


def test_any_number_of_regions_is_classified_and_none_is_mixed_up() -> None:
    """Nine images have so many regions that the head is called several times. Each region gets the class of its own image."""
    anchors = steps.anchors(SIDE)
    cells = SIDE // steps.CELL

    def backbone(inputs: Arrays) -> Arrays:
        # An image with the same brightness everywhere has this brightness as its features.
        brightness = inputs["image"][:, :cells, :cells, :1].astype(np.float32)
        rows = len(brightness)
        objectness = np.full((rows, len(anchors)), 9, np.float32)
        return {
            "objectness": objectness,
            "deltas": np.zeros((rows, *anchors.shape), np.float32),
            "features": brightness,
        }

    def head(inputs: Arrays) -> Arrays:
        kinds = inputs["crops"].mean((1, 2, 3)).round().astype(int) % len(CLASSES)
        logits = 9 * np.eye(1 + len(CLASSES), dtype=np.float32)[1 + kinds]
        return {"logits": logits, "deltas": np.zeros((len(kinds), 4), np.float32)}

    call = Direct({"detector_backbone": backbone, "detector_head": head})
    images = np.full((9, SIDE, SIDE, 3), np.arange(9)[:, None, None, None], np.uint8)
    answer = steps.run({"image": images}, call)
    assert [rows for name, rows in call.calls if name == "detector_backbone"] == [steps.MOST_IMAGES, 1]
    *full, rest = [rows for name, rows in call.calls if name == "detector_head"]
    assert set(full) == {steps.MOST_REGIONS}
    assert 0 < rest <= steps.MOST_REGIONS
    assert (answer["count"] > 1).all()
    own = np.arange(9)[:, None] % len(CLASSES)
    assert ((answer["classes"] == own) == (answer["scores"] > 0)).all()

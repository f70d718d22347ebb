"""The two-stage detector on a real server finds the shapes in requests with one or many images."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from examples import detector
from examples.detector_scenes import SIDE, recall_and_precision, scenes
from tests.e2e.calls import PROTOCOLS, Arrays, Caller, at_once, caller
from tests.e2e.harness import RunningTriton
from tests.examples.test_detector import Detector

pytestmark = pytest.mark.long


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_it_finds_the_shapes_in_unseen_images(pipelines: RunningTriton, protocol: str) -> None:
    """For requests of 1 to 20 images from several clients, recall and precision equal the figures of the detector's maker."""
    known = detector.held_out()
    rng = np.random.default_rng(5)
    starts = [0, *np.cumsum(rng.integers(1, 21, 100))]
    parts = [slice(start, end) for start, end in pairwise(starts) if start < len(known.images)]

    def work(call: Caller, number: int) -> list[Arrays]:
        return [call("detector", {"image": known.images[part]}) for part in parts[number::4]]

    answers = dict(enumerate(at_once(pipelines, 4, work, protocol)))
    in_order = [answers[number % 4][number // 4] for number in range(len(parts))]
    detected = {name: np.concatenate([answer[name] for answer in in_order]) for name in in_order[0]}
    recall, precision = recall_and_precision(known, detected)
    assert recall >= detector.REQUIRED_RECALL
    assert precision >= detector.REQUIRED_PRECISION


def test_an_image_has_one_answer_whatever_comes_with_it(pipelines: RunningTriton) -> None:
    """An image has the same answer alone and together with other images, with and without shapes."""
    known = detector.held_out()
    images = np.concatenate([np.full((1, SIDE, SIDE, 3), 128, np.uint8), known.images[:6]])
    with caller(pipelines) as call:
        together = call("detector", {"image": images})
        for number, image in enumerate(images):
            alone = call("detector", {"image": image[np.newaxis]})
            assert alone["count"][0] == together["count"][number]
            np.testing.assert_array_equal(alone["classes"][0], together["classes"][number])
            np.testing.assert_allclose(alone["boxes"][0], together["boxes"][number], atol=1e-3)
            np.testing.assert_allclose(alone["scores"][0], together["scores"][number], atol=1e-4)
    assert together["count"][0] == 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shapes_are_those_that_the_bundles_find(
    pipelines: RunningTriton, pipeline_bundles: Path, protocol: str
) -> None:
    """The server finds the same shapes as the bundles in this process, in single images, in many images, and in an empty image."""
    images = scenes(10, seed=33, fewest=4).images
    images[3] = 90
    expected = Detector(pipeline_bundles)(images)
    assert expected["count"][3] == 0
    assert expected["count"].sum() > 20

    with caller(pipelines, protocol) as call:
        together = call("detector", {"image": images})
        alone = [call("detector", {"image": image[None]}) for image in images]

    for got in (together, {name: np.concatenate([each[name] for each in alone]) for name in expected}):
        for name in ("classes", "count"):
            assert (got[name] == expected[name]).all()
        np.testing.assert_allclose(got["boxes"], expected["boxes"], atol=1e-3 * SIDE)
        np.testing.assert_allclose(got["scores"], expected["scores"], atol=1e-4)

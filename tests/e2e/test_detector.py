"""The detector through the real server: what it finds is what its bundles find when they are executed directly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.detector_scenes import SIDE, scenes
from tests.e2e.calls import PROTOCOLS, caller
from tests.e2e.harness import RunningTriton
from tests.examples.test_detector import Detector


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_shapes_are_those_that_the_bundles_find(
    triton: RunningTriton, example_bundles: Path, protocol: str
) -> None:
    """Images alone, many in one request, and one without anything."""
    images = scenes(10, seed=33, fewest=4).images
    images[3] = 90
    expected = Detector(example_bundles)(images)
    assert expected["count"][3] == 0
    assert expected["count"].sum() > 20

    with caller(triton, protocol) as call:
        together = call("detector", {"image": images})
        alone = [call("detector", {"image": image[None]}) for image in images]

    for got in (together, {name: np.concatenate([each[name] for each in alone]) for name in expected}):
        for name in ("classes", "count"):
            assert (got[name] == expected[name]).all()
        np.testing.assert_allclose(got["boxes"], expected["boxes"], atol=1e-3 * SIDE)
        np.testing.assert_allclose(got["scores"], expected["scores"], atol=1e-4)

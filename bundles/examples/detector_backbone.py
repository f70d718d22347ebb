"""detector_backbone: computes objectness, box deltas and features from images. It is the first stage of the detector."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.detector_networks import backbone
from examples.detector_run import MOST_IMAGES
from examples.detector_scenes import SIDE
from examples.detector_training import trained
from rsrv_bundle.export import export_bundle

BATCH_SIZES = (1, 2, 4, MOST_IMAGES)


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one. Trains both networks, once per process."""
    export_bundle(
        backbone,
        trained()["backbone"],
        {"image": np.zeros((1, SIDE, SIDE, 3), np.uint8)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc", "objectness": "na", "deltas": "nad", "features": "nyxf"},
        out_dir=out_dir,
        description="Where shapes may be in an image: the detector's first network.",
        internal=True,
        overwrite=True,
    )

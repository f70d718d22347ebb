"""detector_head: computes the class and box of a region from its features. It is the second stage of the detector."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.detector_networks import FEATURES, head
from examples.detector_run import MOST_REGIONS, POOLED
from examples.detector_training import trained
from rsrv_bundle.export import export_bundle

BATCH_SIZES = (1, 4, 16, MOST_REGIONS)


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one. Trains both networks, once per process."""
    export_bundle(
        head,
        trained()["head"],
        {"crops": np.zeros((1, POOLED, POOLED, FEATURES), np.float32)},
        batch_sizes=BATCH_SIZES,
        axes={"crops": "nyxf", "logits": "nk", "deltas": "nd"},
        out_dir=out_dir,
        description="What is in a region of an image: the detector's second network.",
        internal=True,
        overwrite=True,
    )

"""vit_tiny: a vision transformer of 5.6 million weights, written in Flax NNX."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.vit.network import SIDE, network
from rsrv_bundle.from_nnx import eager_nnx, export_nnx

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)

source = functools.cache(network)


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """image: f32 [n, SIDE, SIDE, 3] -> logits: f32 [n, 1000]."""
    (logits,) = eager_nnx(source())(**inputs).values
    return {"logits": logits}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    export_nnx(
        source(),
        {"image": np.zeros((1, SIDE, SIDE, 3), np.float32)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc"},
        output_names=["logits"],
        out_dir=out_dir,
        description="ViT-Ti on images of 64 x 64 pixels, with random weights.",
        overwrite=True,
    )

"""resnet18: an image classifier, written in PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rsrv_bundle.from_torch import eager_torch, export_torch

from examples.resnet18.network import ResNet18, network

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)
#: Height and width of an image, pixels. Of less than 65, the last layers see maps smaller than their kernels, which XLA on a
#: CPU convolves a hundred times slower.
SIDE = 96

source = functools.cache(network)


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """image: f32 [n, 3, SIDE, SIDE] -> logits: f32 [n, 1000]."""
    (logits,) = eager_torch(source())(**inputs).values
    return {"logits": logits}


def make(out_dir: Path, module: ResNet18 | None = None) -> None:
    """Write the bundle `out_dir`, replacing one that is there; without a module, of random weights."""
    export_torch(
        module or source(),
        {"image": np.zeros((1, 3, SIDE, SIDE), np.float32)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nchw"},
        output_names=["logits"],
        out_dir=out_dir,
        description="ResNet-18 on images of 96 x 96 pixels, with random weights.",
        overwrite=True,
    )

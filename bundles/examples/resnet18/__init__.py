"""resnet18: an image classifier, written in PyTorch. Clients send image files and get classes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from examples.resnet18 import hooks
from examples.resnet18.network import ResNet18, network
from rsrv_bundle.from_torch import eager_torch, export_torch

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)

source = functools.cache(network)


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """image: f32 [n, 3, SIDE, SIDE] -> logits: f32 [n, 1000], as PyTorch computes them without compiling."""
    (logits,) = eager_torch(source())(**inputs).values
    return {"logits": logits}


def make(out_dir: Path, module: ResNet18 | None = None) -> None:
    """Write the bundle `out_dir`, replacing an existing one. Without a module, the network gets random weights."""
    export_torch(
        module or source(),
        {"image": np.zeros((1, 3, hooks.SIDE, hooks.SIDE), np.float32)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nchw"},
        output_names=["logits"],
        out_dir=out_dir,
        hooks=Path(hooks.__file__),
        client_inputs=[{"name": "file", "dtype": "u8", "shape": "nl", "dims": {"l": -1}}],
        client_outputs=[
            {"name": "classes", "dtype": "i64", "shape": "nk", "dims": {"k": 5}},
            {"name": "scores", "dtype": "f32", "shape": "nk", "dims": {"k": 5}},
        ],
        description="ResNet-18: image files to the five likeliest of 1000 classes.",
        overwrite=True,
    )

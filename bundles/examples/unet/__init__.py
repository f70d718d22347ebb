"""unet: a small U-Net in Equinox that finds the pixels of an image that show a shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.detector_scenes import SIDE, Scenes, scenes
from examples.unet.network import UNet, trained
from rsrv_bundle.from_equinox import eager_equinox, export_equinox

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)
#: Minimum intersection over union of the pixels that show a shape and the pixels that a trained network reports.
REQUIRED_OVERLAP = 0.7


def held_out() -> Scenes:
    """Return 32 images that the network has not seen."""
    return scenes(32, seed=0)


def overlap(logits: Array, known: Scenes) -> float:
    """logits: f32 [n, h, w] for the images of `known` -> intersection over union, computed once over the pixels of all images."""
    shown, there = logits > 0, known.pixels != 0
    return float((shown & there).sum() / (shown | there).sum())


def reference(inputs: Mapping[str, Array], network: UNet | None = None) -> dict[str, Array]:
    """image: u8 [n, h, w, 3] -> logits: f32 [n, h, w], uncompiled. Trains first, unless it is given a network."""
    (logits,) = eager_equinox(network or trained())(**inputs).values
    return {"logits": logits}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one. RuntimeError if training went badly."""
    known = held_out()
    share = overlap(np.asarray(jax.jit(jax.vmap(trained()))(known.images)), known)
    print(f"unet: intersection over union {share:.2f} on {len(known.images)} held-out images", flush=True)
    if share < REQUIRED_OVERLAP:
        raise RuntimeError(f"must be {REQUIRED_OVERLAP} at least")
    export_equinox(
        trained(),
        {"image": np.zeros((1, SIDE, SIDE, 3), np.uint8)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc", "logits": "nhw"},
        output_names=["logits"],
        out_dir=out_dir,
        description="Which pixels show a square, a disc or a triangle: logits, above 0 for yes.",
        overwrite=True,
    )

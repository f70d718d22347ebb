"""two_sizes: a bundle with variants, which has one set of weights compiled for two image sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 4)
#: (height, width) of each variant, pixels.
SIZES = ((16, 16), (24, 32))


def params() -> dict[str, Array]:
    """Return the weights, which are the same in every process."""
    rng = np.random.default_rng(1)
    return {
        "conv": rng.standard_normal((3, 3, 3, 8)).astype(np.float32) / 5,
        "dense": rng.standard_normal((8, 5)).astype(np.float32) / 3,
    }


def apply(params: Any, image: jax.Array) -> dict[str, jax.Array]:
    """image: [n, h, w, 3] -> scores: [n, 5], features: [n, h, w, 8]."""
    features = jax.nn.relu(
        jax.lax.conv_general_dilated(
            image,
            params["conv"],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
    )
    return {"scores": features.mean((1, 2)) @ params["dense"], "features": features}


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """image: f32 [n, h, w, 3], of one of `SIZES` -> scores: f32 [n, 5], features: f32 [n, h, w, 8]."""
    return {name: np.asarray(value) for name, value in apply(params(), jnp.asarray(inputs["image"])).items()}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    export_bundle(
        apply,
        params(),
        {"image": np.zeros((1, *SIZES[0], 3), np.float32)},
        batch_sizes=BATCH_SIZES,
        axes={"image": "nhwc", "features": "nhwf"},
        input_shapes=[{"h": height, "w": width} for height, width in SIZES],
        out_dir=out_dir,
        description="A convolution and its mean, for two image sizes.",
        overwrite=True,
    )

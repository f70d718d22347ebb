"""mlp: two dense layers, 256 -> 256 -> 10, with random weights. It is small, so that the costs of serving are visible."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@functools.cache
def params() -> dict[str, dict[str, Array]]:
    """Return the weights, which are the same in every process."""
    rng = np.random.default_rng(0)

    def dense(rows: int, columns: int) -> dict[str, Array]:
        kernel = rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return {"kernel": kernel.astype(np.float32), "bias": np.zeros(columns, np.float32)}

    return {"hidden": dense(256, 256), "output": dense(256, 10)}


def apply(params: Any, x: jax.Array) -> dict[str, jax.Array]:
    """x: [n, 256] -> logits: [n, 10]."""
    hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return {"logits": hidden @ params["output"]["kernel"] + params["output"]["bias"]}


def reference(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """x: f32 [n, 256] -> logits: f32 [n, 10]. Uses numpy, because jax would compile again for each number of rows."""
    hidden, output = params()["hidden"], params()["output"]
    activations = np.maximum(inputs["x"] @ hidden["kernel"] + hidden["bias"], 0)
    return {"logits": activations @ output["kernel"] + output["bias"]}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    export_bundle(
        apply,
        params(),
        {"x": np.zeros((1, 256), np.float32)},
        batch_sizes=BATCH_SIZES,
        out_dir=out_dir,
        description="Two dense layers with random weights.",
        overwrite=True,
    )

"""minilm_pool: the mean of a sentence's token vectors, scaled to length 1. The bundle has no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.minilm_encoder import BATCH_SIZES, LENGTHS, WIDTH
from rsrv_bundle.export import export_bundle


def apply(params: Any, hidden: jax.Array, attention_mask: jax.Array) -> dict[str, jax.Array]:
    """hidden: [n, l, 384], attention_mask: [n, l] (0: ignore the token) -> embedding: [n, 384]."""
    counted = (attention_mask != 0)[:, :, None]
    # The two lower limits avoid a division by zero for rows with only padding.
    mean = jnp.where(counted, hidden, 0).sum(1) / jnp.maximum(counted.sum(1), 1)
    return {"embedding": mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    export_bundle(
        apply,
        {},
        {
            "hidden": np.zeros((1, LENGTHS[0], WIDTH), np.float32),
            "attention_mask": np.zeros((1, LENGTHS[0]), np.int32),
        },
        batch_sizes=BATCH_SIZES,
        axes={"hidden": "nlh", "attention_mask": "nl"},
        input_shapes=[{"l": length} for length in LENGTHS],
        out_dir=out_dir,
        description="Mean over a sentence's tokens, of length 1.",
        internal=True,
        overwrite=True,
    )

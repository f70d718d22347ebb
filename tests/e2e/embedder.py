"""The text encoder of the examples with its mean as one bundle of lengths up to 512, with or without a padded axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from examples import minilm_encoder, minilm_pool
from rsrv_bundle.export import export_bundle

LENGTHS = (32, 64, 128, 256, 512)
PAD = "t=0,mask=attention_mask"


def embed(params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> dict[str, jax.Array]:
    """input_ids, attention_mask: [n, t] -> embedding: [n, 384], of length 1."""
    hidden = minilm_encoder.apply(params, input_ids, attention_mask)["hidden"]
    return minilm_pool.apply({}, hidden, attention_mask)


def export_embedder(encoder: Path, out_dir: Path, *, pad: str) -> None:
    """Write the bundle `out_dir` with the weights of the bundle `encoder`; `pad` is the exporter's."""
    tokens = np.arange(1000, 1032, dtype=np.int32)[None]
    export_bundle(
        embed,
        load_file(encoder / "weights.safetensors"),
        {"input_ids": tokens, "attention_mask": np.ones_like(tokens)},
        batch_sizes=(1, 8),
        axes={"input_ids": "nt", "attention_mask": "nt"},
        input_shapes=[{"t": length} for length in LENGTHS],
        pad=pad,
        out_dir=out_dir,
    )

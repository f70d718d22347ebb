"""minilm_encoder: the encoder of all-MiniLM-L6-v2, a BERT of six layers, with its published weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples import minilm_files
from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 4, 16)
#: Numbers of tokens per row. The bundle has a variant for each. The weights were trained on rows of at most 128 tokens.
LENGTHS = (16, 32, 64, 128)
#: Length of a token's vector.
WIDTH = 384

_LAYERS = 6
_HEADS = 12


def apply(params: Any, input_ids: jax.Array, attention_mask: jax.Array) -> dict[str, jax.Array]:
    """input_ids, attention_mask (0: padding): [n, l] -> hidden: [n, l, 384]. Values of `hidden` at padding have no meaning."""
    weights: Mapping[str, jax.Array] = params

    def dense(name: str, x: jax.Array) -> jax.Array:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: jax.Array) -> jax.Array:
        return jax.nn.standardize(x, epsilon=1e-12) * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], _HEADS, WIDTH // _HEADS)

    # Use a large but finite number, because a row with only padding, for example in a partly filled batch, must not become NaN.
    unseen = jnp.where(attention_mask == 0, -1e9, 0.0)[:, None, None, :]
    words = jnp.take(weights["embeddings.word_embeddings.weight"], input_ids, axis=0, mode="clip")
    places = weights["embeddings.position_embeddings.weight"][: input_ids.shape[1]]
    x = norm("embeddings.LayerNorm", words + places + weights["embeddings.token_type_embeddings.weight"][0])
    for layer in (f"encoder.layer.{index}" for index in range(_LAYERS)):
        query, key, value = (
            heads(dense(f"{layer}.attention.self.{part}", x)) for part in ("query", "key", "value")
        )
        scores = jnp.einsum("nqhd,nkhd->nhqk", query, key) / np.sqrt(WIDTH / _HEADS) + unseen
        seen = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores), value).reshape(x.shape)
        x = norm(f"{layer}.attention.output.LayerNorm", x + dense(f"{layer}.attention.output.dense", seen))
        inner = jax.nn.gelu(dense(f"{layer}.intermediate.dense", x), approximate=False)
        x = norm(f"{layer}.output.LayerNorm", x + dense(f"{layer}.output.dense", inner))
    return {"hidden": x}


def params() -> dict[str, Array]:
    """Return the published weights that `apply` uses, by their published names."""
    return {
        name: array
        for name, array in minilm_files.fetched().weights.items()
        if name.startswith(("embeddings.", "encoder.")) and array.dtype == np.float32
    }


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    tokens = np.zeros((1, LENGTHS[0]), np.int32)
    export_bundle(
        apply,
        params(),
        {"input_ids": tokens, "attention_mask": tokens},
        batch_sizes=BATCH_SIZES,
        axes={"input_ids": "nl", "attention_mask": "nl", "hidden": "nlh"},
        input_shapes=[{"l": length} for length in LENGTHS],
        out_dir=out_dir,
        description="The encoder of all-MiniLM-L6-v2.",
        internal=True,
        overwrite=True,
    )

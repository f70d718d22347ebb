"""The network of SmolLM2-135M: a Llama of 30 blocks, which keeps keys and values of its sequences in pools.

Each block's weights are arguments of their own. A loop over an array of all blocks would copy each block out of it:
as many bytes again as a step reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]
Params = Mapping[str, Any]
Pools = Mapping[str, jax.Array]

BLOCKS = 30
WIDTH = 576
HEADS = 9
#: Heads of keys and values; each serves three heads of queries.
KV_HEADS = 3
HEAD = WIDTH // HEADS
#: Most tokens of a sequence. The weights were trained on up to 8,192.
CONTEXT = 512

_ROPE_BASE = 100_000.0
_EPSILON = 1e-5


def state() -> dict[str, jax.ShapeDtypeStruct]:
    """Return what a slot holds: keys and values of each token so far, 24 MB."""
    one = jax.ShapeDtypeStruct((BLOCKS, KV_HEADS, CONTEXT, HEAD), np.float32)
    return {"keys": one, "values": one}


def apply(
    params: Params,
    pools: Pools,
    slots: jax.Array,
    begins: jax.Array,
    position: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Read tokens, i32 [n, t], of which `lengths` [n] count, behind `position` [n] others -> the next one's logits, and pools.

    Each block writes the new tokens' keys and values, and reads what it has written, with what was there: XLA copies a pool
    that is read before it is written. A row whose slot is none writes nothing.
    """
    del begins  # says what a position of 0 says, too
    n, t = tokens.shape
    at = position[:, None] + jnp.arange(t)
    counted = jnp.arange(t) < lengths[:, None]
    # A place outside the pool is not written.
    where = jnp.where(counted, at, CONTEXT)
    causal = (jnp.arange(CONTEXT) <= at[:, :, None])[:, None, None]
    known = (jnp.arange(CONTEXT) < (position + lengths)[:, None])[:, None, :, None]
    rotations = _rotations(at)
    pools = dict(pools)
    x = jnp.take(params["token_embd.weight"], tokens, axis=0, mode="clip")
    for block in range(BLOCKS):

        def linear(name: str, x: jax.Array, block: int = block) -> jax.Array:
            weight: jax.Array = params[f"blk.{block}.{name}.weight"]
            return x @ weight.T

        def heads(name: str, x: jax.Array, count: int) -> jax.Array:
            return linear(name, x).reshape(n, t, count, HEAD).swapaxes(1, 2)

        def cached(name: str, new: jax.Array, block: int = block) -> jax.Array:
            by_token = new.swapaxes(1, 2)
            pools[name] = pools[name].at[slots[:, None], block, :, where].set(by_token, mode="drop")
            return pools[name].at[slots, block].get(mode="fill", fill_value=0)

        given = _norm(params[f"blk.{block}.attn_norm.weight"], x)
        query = _rotated(heads("attn_q", given, HEADS), rotations).reshape(n, KV_HEADS, -1, HEAD)
        keys = cached("keys", _rotated(heads("attn_k", given, KV_HEADS), rotations))
        # Behind the position is what an earlier sequence left, which zero times need not make zero.
        values = jnp.where(known, cached("values", heads("attn_v", given, KV_HEADS)), 0)
        scores = _scores(query, keys).reshape(n, KV_HEADS, -1, t, CONTEXT)
        shares = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)).reshape(n, KV_HEADS, -1, CONTEXT)
        seen = shares @ values
        x += linear("attn_output", seen.reshape(n, HEADS, t, HEAD).swapaxes(1, 2).reshape(n, t, WIDTH))
        given = _norm(params[f"blk.{block}.ffn_norm.weight"], x)
        x += linear("ffn_down", jax.nn.silu(linear("ffn_gate", given)) * linear("ffn_up", given))
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = _norm(params["output_norm.weight"], last) @ params["token_embd.weight"].T
    return logits, pools


def _norm(weight: jax.Array, x: jax.Array) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _EPSILON)
    return x * scale * weight


def _rotations(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines, [n, 1, t, HEAD / 2], for tokens at these positions, [n, t]."""
    frequencies = _ROPE_BASE ** (-np.arange(0, HEAD, 2, dtype=np.float32) / HEAD)
    angles = positions[:, None, :, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotated(x: jax.Array, rotations: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x: [n, heads, t, HEAD] -> the same, with each pair of a half's values rotated."""
    (first, second), (cosines, sines) = jnp.split(x, 2, axis=-1), rotations
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)


def _scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """query: [n, heads, a, HEAD], key: [n, heads, b, HEAD] -> [n, heads, a, b]."""
    scores: jax.Array = jnp.einsum("nhad,nhbd->nhab", query, key) / HEAD**0.5
    return scores

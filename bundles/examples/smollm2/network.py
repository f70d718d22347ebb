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

    The pools are read in each block, and written once: the new tokens' keys and values, and nothing for a row whose slot
    is none.
    """
    del begins  # says what a position of 0 says, too
    n, t = tokens.shape
    at = position[:, None] + jnp.arange(t)
    past = (jnp.arange(CONTEXT) < position[:, None])[:, None, None, :]
    counted = jnp.arange(t) < lengths[:, None]
    causal = jnp.arange(t)[:, None] >= jnp.arange(t)
    rotations = _rotations(at)
    new: dict[str, list[jax.Array]] = {"keys": [], "values": []}
    x = jnp.take(params["token_embd.weight"], tokens, axis=0, mode="clip")
    for block in range(BLOCKS):

        def linear(name: str, x: jax.Array, block: int = block) -> jax.Array:
            weight: jax.Array = params[f"blk.{block}.{name}.weight"]
            return x @ weight.T

        def heads(name: str, x: jax.Array, count: int) -> jax.Array:
            return linear(name, x).reshape(n, t, count, HEAD).swapaxes(1, 2)

        def cached(name: str, block: int = block) -> jax.Array:
            return pools[name].at[slots, block].get(mode="fill", fill_value=0)

        given = _norm(params[f"blk.{block}.attn_norm.weight"], x)
        query = _rotated(heads("attn_q", given, HEADS), rotations).reshape(n, KV_HEADS, -1, HEAD)
        key = _rotated(heads("attn_k", given, KV_HEADS), rotations)
        value = heads("attn_v", given, KV_HEADS)
        new["keys"].append(key)
        new["values"].append(value)
        before = jnp.where(past, _scores(query, cached("keys")), -jnp.inf)
        among = _scores(query, key).reshape(n, KV_HEADS, -1, t, t)
        among = jnp.where(causal, among, -jnp.inf).reshape(n, KV_HEADS, -1, t)
        shares = jax.nn.softmax(jnp.concatenate([before, among], axis=-1))
        # Behind the position is what an earlier sequence left, which zero times need not make zero.
        old = jnp.where(past.swapaxes(2, 3), cached("values"), 0)
        seen = shares[..., :CONTEXT] @ old + shares[..., CONTEXT:] @ value
        x += linear("attn_output", seen.reshape(n, HEADS, t, HEAD).swapaxes(1, 2).reshape(n, t, WIDTH))
        given = _norm(params[f"blk.{block}.ffn_norm.weight"], x)
        x += linear("ffn_down", jax.nn.silu(linear("ffn_gate", given)) * linear("ffn_up", given))
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    logits = _norm(params["output_norm.weight"], last) @ params["token_embd.weight"].T
    # A place outside the pool is not written.
    where = jnp.where(counted, at, CONTEXT)
    written = {
        name: pools[name].at[slots[:, None], :, :, where].set(_by_token(parts), mode="drop")
        for name, parts in new.items()
    }
    return logits, written


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


def _by_token(parts: list[jax.Array]) -> jax.Array:
    """Return [n, t, BLOCKS, KV_HEADS, HEAD] of each block's [n, KV_HEADS, t, HEAD]."""
    return jnp.stack(parts).transpose(1, 3, 0, 2, 4)

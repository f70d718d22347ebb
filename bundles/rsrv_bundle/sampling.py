"""Choice of the next token on the device: greedy, or by temperature, top-k, top-p and a seed. Needs jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def sample(logits: jax.Array, sampling: jax.Array, position: jax.Array) -> jax.Array:
    """Return the next token of each row, i32 [n]; -1 where the largest logit is not finite.

    logits: [n, vocabulary]; -infinity forbids a token.
    sampling: f32 [n, 4], of each row: temperature (0: greedy), top_k (0: off), top_p (1: off), seed.
    position: i32 [n], of the token to choose. Row, batch size and neighbours change nothing: the same seed gives the same
        token at the same position.

    Draws are computed only if a row wants one.
    """
    logits = logits.astype(jnp.float32)
    best = jnp.max(logits, axis=-1)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    hot = sampling[:, 0] > 0
    drawn = jax.lax.cond(
        hot.any(), lambda: jnp.where(hot, _drawn(logits, sampling, position), greedy), lambda: greedy
    )
    return jnp.where(jnp.isfinite(best), drawn, -1)


def _drawn(logits: jax.Array, sampling: jax.Array, position: jax.Array) -> jax.Array:
    """Draw a token of each row, by adding Gumbel noise to the logits that top-k and top-p leave."""
    temperature, top_k, top_p, seed = sampling.T
    vocabulary = logits.shape[-1]
    # From 0 down, so that no temperature makes the largest ones infinite.
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.maximum(temperature, 1e-6)[:, None]
    kept = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    scaled = _most(scaled, jnp.ones_like(scaled), kept)
    scaled = _most(scaled, jax.nn.softmax(scaled), top_p)

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(seed.astype(jnp.uint32), impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), (vocabulary,))

    return jnp.argmax(scaled + jax.vmap(noise)(seed, position), axis=-1).astype(jnp.int32)


def _most(scores: jax.Array, masses: jax.Array, wanted: jax.Array) -> jax.Array:
    """Keep each row's largest scores, as few as have the wanted mass together; the others become -infinity.

    The threshold is found bit by bit, in 32 passes: sorting a vocabulary takes ten times as long on a CPU.
    """
    bits: Any = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    # Unsigned integers in the order of the floats.
    keys = jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)

    def narrow(step: Any, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> step)
        enough = jnp.where(keys >= higher[:, None], masses, 0).sum(-1) >= wanted
        return jnp.where(enough, higher, threshold)

    threshold = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), narrow, jnp.zeros(len(keys), jnp.uint32))
    return jnp.where(keys >= threshold[:, None], scores, -jnp.inf)

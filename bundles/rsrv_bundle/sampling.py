"""Choice of the next token on the device: greedy, or by temperature, top-k, top-p and a seed. Needs jax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

#: Most draws need only this many of the likeliest tokens.
_CANDIDATES = 256
#: Number of tokens in each block of the vocabulary, for a draw from the whole vocabulary.
_BLOCK = 128


def sample(logits: jax.Array, sampling: jax.Array, position: jax.Array) -> jax.Array:
    """Return the next token of each row, i32 [n], or -1 if the row's largest logit is not finite.

    logits: [n, vocabulary]. A token with -infinity is never chosen. sampling: f32 [n, 4], with the temperature (0: greedy), top_k (0:
    off), top_p (1: off) and seed of each row. position: i32 [n], the position of the chosen token.

    The same seed gives the same token at the same position, whatever the row, the batch size and the other rows are. Random draws are
    computed only if at least one row needs them.
    """
    logits = logits.astype(jnp.float32)
    vocabulary = logits.shape[-1]
    best = logits.max(-1)
    # Find the first best token. On a CPU, this takes a fifth of the time of argmax.
    greedy = jnp.where(logits == best[:, None], jnp.arange(vocabulary), vocabulary).min(-1)
    hot = sampling[:, 0] > 0
    drawn = jax.lax.cond(
        hot.any(), lambda: jnp.where(hot, _drawn(logits, best, sampling, position), greedy), lambda: greedy
    )
    return jnp.where(jnp.isfinite(best), drawn, -1).astype(jnp.int32)


def _drawn(logits: jax.Array, best: jax.Array, sampling: jax.Array, position: jax.Array) -> jax.Array:
    """Draw a token for each row. Consider only the likeliest tokens if top-k and top-p exclude all others."""
    temperature, top_k, top_p, seed = sampling.T
    vocabulary = logits.shape[-1]
    # Shift the largest score of each row to 0, so that it stays finite at any temperature.
    scaled = (logits - best[:, None]) / jnp.maximum(temperature, 1e-6)[:, None]
    limit = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    keys = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), at))(
        seed.astype(jnp.uint32), position
    )

    count = min(_CANDIDATES, vocabulary)
    scores, tokens = jax.lax.top_k(scaled, count)
    masses = jnp.where(jnp.arange(count) < limit[:, None], jnp.exp(scores), 0)
    goal = top_p * jnp.where(limit <= count, masses.sum(-1), _sum(jnp.exp(scaled)))
    up_to = jnp.cumsum(masses, axis=-1)
    scores = jnp.where((masses > 0) & (up_to - masses < goal[:, None]), scores, -jnp.inf)
    likely = jnp.take_along_axis(tokens, _choice(keys, scores)[:, None], axis=1)[:, 0]
    # Decide for each row separately whether the likeliest tokens are enough, because other rows must not change its token.
    enough = (temperature <= 0) | (limit <= count) | (top_p < 1) & (up_to[:, -1] >= goal)

    def whole() -> jax.Array:
        few, part = ~enough & (limit < vocabulary), ~enough & (top_p < 1)
        left = jax.lax.cond(
            few.any(),
            lambda: _most(scaled, jnp.ones_like(scaled), jnp.where(few, limit, jnp.inf)),
            lambda: scaled,
        )
        masses = jnp.exp(left)
        left = jax.lax.cond(
            part.any(),
            lambda: _most(left, masses, jnp.where(part, top_p * _sum(masses), jnp.inf)),
            lambda: left,
        )
        return jnp.where(enough, likely, _choice_of_block(keys, left))

    drawn: jax.Array = jax.lax.cond(enough.all(), lambda: likely, whole)
    return drawn


def _choice(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw an index for each row. The scores are the logarithms of the probabilities, up to a constant."""
    # Convert the indices to 32 bits, like the indices of top_k. With jax_enable_x64, they have 64 bits.
    return jax.vmap(jax.random.categorical)(keys, scores).astype(jnp.int32)


def _choice_of_block(keys: jax.Array, scores: jax.Array) -> jax.Array:
    """Draw a block, and then one of its tokens. This is faster than drawing a random number for each token."""
    blocks = _blocks(scores, -jnp.inf)
    first, second = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    block = _choice(first, jnp.log(jnp.exp(blocks).sum(1)))
    members = jnp.take_along_axis(blocks, block[:, None, None], axis=2)[:, :, 0]
    token: jax.Array = _choice(second, members) * blocks.shape[2] + block
    return token


def _blocks(values: jax.Array, fill: float) -> jax.Array:
    """Reshape [n, vocabulary] to [n, tokens of a block, blocks], so that a CPU adds up blocks in parallel."""
    padding = -values.shape[-1] % _BLOCK
    return jnp.pad(values, ((0, 0), (0, padding)), constant_values=fill).reshape(len(values), _BLOCK, -1)


def _sum(values: jax.Array) -> jax.Array:
    return _blocks(values, 0).sum(1).sum(-1)


def _most(scores: jax.Array, masses: jax.Array, least: jax.Array) -> jax.Array:
    """Keep the largest scores of each row, as few as possible, so that the sum of their masses is at least `least`.

    The other scores become -infinity.

    The threshold is found bit by bit, in 32 passes, because sorting a vocabulary takes ten times as long on a CPU.
    """
    bits: Any = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    # Map the floats to unsigned integers, so that the order stays the same.
    keys = jnp.where(bits >> 31 == 0, bits | jnp.uint32(1 << 31), ~bits)

    def narrow(step: Any, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(1 << 31) >> step)
        enough = _sum(jnp.where(keys >= higher[:, None], masses, 0)) >= least
        return jnp.where(enough, higher, threshold)

    threshold = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(32), narrow, jnp.zeros(len(keys), jnp.uint32))
    return jnp.where(keys >= threshold[:, None], scores, -jnp.inf)

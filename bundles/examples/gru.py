"""A GRU over tokens, which can read a sequence in chunks. It is the network of `glossary` and `tagger`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]
Params = dict[str, Any]


def initial(tokens: int, embedding: int, width: int, outputs: int) -> Params:
    """Return random parameters, the same in every process.

    tokens: number of different tokens. embedding: length of a token's vector. width: length of the state.
    outputs: number of logits.
    """
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows), np.float32)

    return {
        "embedding": rng.standard_normal((tokens, embedding)).astype(np.float32),
        "input": matrix(embedding, 3 * width),
        "recurrent": matrix(width, 3 * width),
        "bias": np.zeros(3 * width, np.float32),
        "output": matrix(width, outputs),
        "output_bias": np.zeros(outputs, np.float32),
    }


def states(params: Params, before: jax.Array, tokens: jax.Array, counted: jax.Array) -> jax.Array:
    """before: [n, width], tokens: i32 [n, t], counted: bool [n, t] -> the state after each token, [n, t, width].

    A token that is not `counted` does not change the state.
    """
    embedded = jnp.take(params["embedding"], tokens, axis=0, mode="clip")
    inputs = embedded @ params["input"] + params["bias"]

    def step(state: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_in, counts = item
        own = state @ params["recurrent"]
        (reset, update, new), (own_reset, own_update, own_new) = (
            jnp.split(x, 3, axis=-1) for x in (x_in, own)
        )
        keep = jax.nn.sigmoid(update + own_update)
        proposed = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
        state = jnp.where(counts[:, None], keep * state + (1 - keep) * proposed, state)
        return state, state

    _, after = jax.lax.scan(step, before, (inputs.swapaxes(0, 1), counted.T))
    return after.swapaxes(0, 1)


def logits(params: Params, state: jax.Array) -> jax.Array:
    """state: [..., width] -> [..., outputs]."""
    scores: jax.Array = state @ params["output"] + params["output_bias"]
    return scores

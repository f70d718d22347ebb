"""Adam, the optimiser for training the small examples. The learning rate falls linearly to zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Loss = Callable[[Any, Any], jax.Array]


def start(params: Any) -> Any:
    """Return the state before the first step: the parameters, and means of gradients and of their squares."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.tree.map(jnp.asarray, params), zeros, zeros


def step(loss: Loss, state: Any, batch: Any, count: Any, of: int, rate: float) -> Any:
    """Return the state after one step. `count` is the index of the step, from 0, and `of` is the number of steps."""
    params, mean, square = state
    gradient = jax.grad(loss)(params, batch)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, square, gradient)
    now = rate * (1 - count / of) * jnp.sqrt(1 - 0.999 ** (count + 1)) / (1 - 0.9 ** (count + 1))
    params = jax.tree.map(lambda p, m, s: p - now * m / (jnp.sqrt(s) + 1e-8), params, mean, square)
    return params, mean, square


def trained(loss: Loss, params: Any, batches: Any, rate: float) -> Any:
    """Return the trained parameters as numpy arrays. Each step uses the next entry of each array in `batches`."""
    steps = len(jax.tree.leaves(batches)[0])

    def following(state: Any, item: Any) -> Any:
        count, batch = item
        return step(loss, state, batch, count, steps, rate), None

    counts = jnp.arange(steps, dtype=jnp.float32)
    state, _ = jax.lax.scan(following, start(params), (counts, jax.tree.map(jnp.asarray, batches)))
    return jax.tree.map(np.asarray, state[0])

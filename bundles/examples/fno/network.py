"""A Fourier neural operator in one dimension (Z. Li et al., arXiv:2010.08895), and its training."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.fno.burgers import POINTS, solve, starts

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

#: Number of Fourier modes that a layer keeps, number of channels, and number of layers.
WAVES, WIDTH, LAYERS = 12, 24, 4

_STARTS = 768
_BATCH = 32
_STEPS = 1200


def apply(params: Any, start: jax.Array) -> dict[str, jax.Array]:
    """start: [n, x] -> end: [n, x]: u at the time 0 and u at `burgers.TIME`, at x equally spaced points of the circle.

    x may be any number above 2 * WAVES.
    """
    angle = 2 * np.pi * np.arange(start.shape[1]) / start.shape[1]
    place = jnp.broadcast_to(jnp.stack([jnp.sin(angle), jnp.cos(angle)], -1), (*start.shape, 2))
    x = _dense(params["lift"], jnp.concatenate([start[..., None], place.astype(start.dtype)], -1))
    for layer in params["layers"]:
        x = jax.nn.gelu(_waves(layer["waves"], x) + _dense(layer["points"], x))
    x = jax.nn.gelu(_dense(params["project"], x))
    return {"end": _dense(params["end"], x)[..., 0]}


def _dense(params: Any, x: jax.Array) -> jax.Array:
    return jnp.add(x @ params["kernel"], params["bias"])


def _waves(params: Any, x: jax.Array) -> jax.Array:
    """Multiply each of the longest waves by its own matrix, and drop all other waves."""
    spectrum = jnp.fft.rfft(x, axis=1)[:, :WAVES]
    kernel = jax.lax.complex(params["real"], params["imaginary"])
    # The sums of rfft grow with the number of points, and irfft divides by it. So the kernel fits grids of any size.
    return jnp.fft.irfft(jnp.einsum("nkc,kcd->nkd", spectrum, kernel), x.shape[1], axis=1)


@functools.cache
def trained() -> Params:
    """Return the parameters, f32, after training with Adam on solved starts. Training takes some seconds, once per process."""
    known = starts(_STARTS, seed=1)
    solved = solve(known)
    # Train on every other point. The trained operator also works on the grid with all points.
    pairs = jnp.asarray(np.stack([known, solved], 1)[..., ::2], jnp.float32)
    rng = np.random.default_rng(2)
    order = rng.integers(0, _STARTS, (_STEPS, _BATCH))
    shift = rng.integers(0, POINTS // 2, _STEPS)
    optimiser = optax.adam(optax.cosine_decay_schedule(4e-3, _STEPS))

    def loss(params: Params, start: jax.Array, end: jax.Array) -> jax.Array:
        error = apply(params, start)["end"] - end
        return jnp.mean(jnp.sqrt((error**2).mean(1) / (end**2).mean(1)))

    @jax.jit
    def step(params: Params, state: Any, rows: Any, by: Any) -> Any:
        # The equation is the same at each point of the circle, so a rotated example is also right. Rotate each batch.
        batch = jnp.roll(pairs[rows], by, axis=2)
        updates, state = optimiser.update(jax.grad(loss)(params, batch[:, 0], batch[:, 1]), state)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, initial())
    state = optimiser.init(params)
    for rows, by in zip(order, shift, strict=True):
        params, state = step(params, state, rows, by)
    arrays: Params = jax.tree.map(np.asarray, params)
    return arrays


def initial() -> Params:
    """Return the initial weights: random, f32, the same in every process."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> Array:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def dense(rows: int, columns: int) -> dict[str, Array]:
        return {
            "kernel": normal(rows, columns, scale=rows**-0.5),
            "bias": np.zeros(columns, np.float32),
        }

    def layer() -> dict[str, Any]:
        shape = (WAVES, WIDTH, WIDTH)
        waves = {part: normal(*shape, scale=0.5 / WIDTH) for part in ("real", "imaginary")}
        return {"waves": waves, "points": dense(WIDTH, WIDTH)}

    return {
        "lift": dense(3, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
        "project": dense(WIDTH, 64),
        "end": dense(64, 1),
    }

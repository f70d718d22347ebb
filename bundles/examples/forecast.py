"""forecast: learns each time series as its values arrive, and forecasts the next value, by recursive least squares.

Each time series is a sequence. The states of 64 sequences are on the device, and the states of all others are in host memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.stateful import export_stateful

Array = np.ndarray[Any, Any]
Params = dict[str, Any]

#: Numbers of values in a chunk. The bundle has a variant for each.
CHUNKS = (1, 16)
BATCH_SIZES = (1, 32)
#: Maximum number of sequences on the device at once.
SLOTS = 64
#: A forecast is a weighted sum of this many previous values.
LAGS = 8
#: Variance of the weights before the first value. It is large, because nothing is known about them.
PRIOR = 100.0


def params() -> Params:
    """Return the model's weights: the state of a series without values. The rest is learned from the series itself."""
    return {"prior": np.eye(LAGS, dtype=np.float32) * np.float32(PRIOR)}


def begin(params: Params) -> dict[str, jax.Array]:
    """Return the state of a series without values."""
    zeros = jnp.zeros(LAGS, jnp.float32)
    return {"window": zeros, "weights": zeros, "covariance": params["prior"]}


def step(
    params: Params, state: dict[str, jax.Array], value: jax.Array
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Read the next values of n series, f32 [n, t]. Return the outputs and the new state.

    forecast: f32 [n, t], the forecast of the value after each value that was read.
    """
    del params

    def learn(state: dict[str, jax.Array], value: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        window, weights, covariance = state["window"], state["weights"], state["covariance"]
        direction = jnp.einsum("nij,nj->ni", covariance, window)
        gain = direction / (1 + (window * direction).sum(1, keepdims=True))
        weights += gain * (value - (weights * window).sum(1))[:, None]
        covariance -= gain[:, :, None] * direction[:, None, :]
        window = jnp.concatenate([value[:, None], window[:, :-1]], axis=1)
        after = {"window": window, "weights": weights, "covariance": covariance}
        return after, (weights * window).sum(1)

    state, forecasts = jax.lax.scan(learn, state, value.T)
    return {"forecast": forecasts.T}, state


def series(count: int, length: int) -> Array:
    """Return f32 [count, length]: sums of two waves each, with a little noise."""
    rng = np.random.default_rng(0)
    time = np.arange(length)
    waves = [
        rng.uniform(0.5, 2, (count, 1))
        * np.sin(rng.uniform(0.1, 1, (count, 1)) * time + rng.uniform(0, 6, (count, 1)))
        for _ in range(2)
    ]
    return np.asarray(sum(waves) + rng.normal(0, 0.01, (count, length)), np.float32)


def direct(values: Array) -> float:
    """Return the forecast after one series, f32 [t], for comparison: it solves for the weights directly, in 64 bits."""
    padded = np.concatenate([np.zeros(LAGS), values.astype(np.float64)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, LAGS)[:, ::-1]
    known, last = windows[:-1], windows[-1]
    weights = np.linalg.solve(known.T @ known + np.eye(LAGS) / PRIOR, known.T @ values)
    return float(weights @ last)


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, replacing an existing one."""
    export_stateful(
        step,
        begin,
        params(),
        {"value": np.zeros((1, CHUNKS[0]), np.float32)},
        slots=SLOTS,
        when_full="host",
        batch_sizes=BATCH_SIZES,
        axes={"value": "nt", "forecast": "nt"},
        input_shapes=[{"t": chunk} for chunk in CHUNKS],
        out_dir=out_dir,
        description="The next value of a time series, learned from the values so far.",
        overwrite=True,
    )

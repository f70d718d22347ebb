"""Burgers' equation, u_t + u u_x = v u_xx, on a circle: random starts, and a solver."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: The factor v, for a circle of length 2 pi.
VISCOSITY = 0.1
#: Time from a start to the answer.
TIME = 1.0
#: Number of points at which the solver computes. All waves of a start are long enough for this grid.
POINTS = 128

_STEPS = 100
#: Number of waves in a start.
_WAVES = 6


def starts(count: int, seed: int) -> Array:
    """Return smooth starts, f64 [count, POINTS]: sums of random waves.

    The amplitude of a wave falls with its wave number. The mean variance of a start is 1.
    """
    rng = np.random.default_rng(seed)
    x = 2 * np.pi * np.arange(POINTS) / POINTS
    number = np.arange(1, _WAVES + 1)
    scale = 1 / number / np.sqrt((1 / number**2).sum())
    a, b = rng.standard_normal((2, count, _WAVES)) * scale
    return np.asarray(a @ np.sin(number[:, None] * x) + b @ np.cos(number[:, None] * x))


def solve(start: Array) -> Array:
    """Return u at the time TIME, f64 [n, POINTS]. `start` is u at the time 0, f64 [n, POINTS].

    The solver is pseudo-spectral. It integrates the viscosity exactly, and the advection by the classical Runge-Kutta method.
    """
    wave = np.arange(POINTS // 2 + 1)
    low = wave <= POINTS // 3
    step = TIME / _STEPS
    half = np.exp(-VISCOSITY * wave**2 * step / 2)

    def advection(spectrum: Array) -> Array:
        u = np.fft.irfft(spectrum, POINTS, axis=1)
        return np.asarray(-0.5j * wave * low * np.fft.rfft(u * u, axis=1))

    spectrum = np.fft.rfft(start, axis=1)
    for _ in range(_STEPS):
        a = step * advection(spectrum)
        b = step * advection(half * (spectrum + a / 2))
        c = step * advection(half * spectrum + b / 2)
        d = step * advection(half**2 * spectrum + half * c)
        spectrum = half**2 * spectrum + (half**2 * a + 2 * half * (b + c) + d) / 6
    return np.fft.irfft(spectrum, POINTS, axis=1)

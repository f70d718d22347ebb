"""The functions that the test bundles compute, in numpy alone, so that clients in other processes need no jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: One round of the models that take time: x <- FACTOR x + SUMMAND, in 32 bits.
FACTOR, SUMMAND = 1664525, 1013904223
#: Rounds in one step: some tenths of a millisecond.
ROUNDS = 20_000
#: Steps of `elastic` without work: some milliseconds, more than the runtime's loop executes itself.
LEAST_STEPS = 80


def stepped(x: Array, steps: npt.ArrayLike) -> Array:
    """Return the answer of `sudden`, without doing the rounds one by one: u32 [n, 4], i32 [n] -> u32 [n, 4]."""
    rows = []
    for row, count in zip(x, np.broadcast_to(steps, len(x)), strict=True):
        a, c = 1, 0  # Until here: value -> a * value + c.
        square_a, square_c = FACTOR, SUMMAND
        left = int(count) * ROUNDS
        while left > 0:
            if left & 1:
                a, c = square_a * a % 2**32, (square_a * c + square_c) % 2**32
            square_a, square_c = square_a * square_a % 2**32, (square_a * square_c + square_c) % 2**32
            left >>= 1
        rows.append([(a * int(value) + c) % 2**32 for value in row])
    return np.array(rows, np.uint32).reshape(x.shape)


def exact_kernel() -> Array:
    """Return the weights of `exact`, f32 [64, 6]."""
    return np.random.default_rng(7).integers(-8, 9, (64, 6)).astype(np.float32)

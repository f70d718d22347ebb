"""NumPy versions of the functions that the test bundles compute. Clients in other processes use them without jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Some models take time because they execute many rounds. A round is x <- FACTOR x + SUMMAND, in 32 bits.
FACTOR, SUMMAND = 1664525, 1013904223
#: Number of rounds in one step. A step takes some tenths of a millisecond.
ROUNDS = 20_000
#: Number of steps that `elastic` adds to the steps of a request. They take some milliseconds, which is too long for an execution in the
#: runtime's own loop.
LEAST_STEPS = 80


def stepped(x: Array, steps: npt.ArrayLike) -> Array:
    """Return the answer of `sudden`, without doing the rounds one by one: u32 [n, 4], i32 [n] -> u32 [n, 4]."""
    rows = []
    for row, count in zip(x, np.broadcast_to(steps, len(x)), strict=True):
        a, c = 1, 0  # The rounds so far map a value to a * value + c.
        square_a, square_c = FACTOR, SUMMAND
        remaining = int(count) * ROUNDS
        while remaining > 0:
            if remaining & 1:
                a, c = square_a * a % 2**32, (square_a * c + square_c) % 2**32
            square_a, square_c = square_a * square_a % 2**32, (square_a * square_c + square_c) % 2**32
            remaining >>= 1
        rows.append([(a * int(value) + c) % 2**32 for value in row])
    return np.array(rows, np.uint32).reshape(x.shape)


def exact_kernel() -> Array:
    """Return the weights of `exact`, f32 [64, 6]."""
    return np.random.default_rng(7).integers(-8, 9, (64, 6)).astype(np.float32)

"""What the test bundles compute, in numpy alone: clients in processes of their own need no jax for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: one round of the models that take time: x <- FACTOR x + SUMMAND, in 32 bits
FACTOR, SUMMAND = 1664525, 1013904223
#: rounds in one step: some tenths of a millisecond
ROUNDS = 20_000
#: steps of `elastic` for no work at all: some milliseconds, more than what the runtime's loop executes by itself
LEAST_STEPS = 80


def stepped(x: Array, steps: npt.ArrayLike) -> Array:
    """What `sudden` answers, without doing the rounds one by one: u32 [n, 4], i32 [n] -> u32 [n, 4]."""
    rows = []
    for row, count in zip(x, np.broadcast_to(steps, len(x)), strict=True):
        a, c = 1, 0  # so far: value -> a * value + c
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
    """The weights of `exact`, f32 [64, 6]."""
    return np.random.default_rng(7).integers(-8, 9, (64, 6)).astype(np.float32)

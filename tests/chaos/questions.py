"""Requests to the models of the chaos tests, and the right answers. They need only NumPy, and are exact to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tests.e2e.answers import LEAST_STEPS, Array, exact_kernel, stepped

Arrays = Mapping[str, Array]


class Question(NamedTuple):
    """Inputs of a request, and the expected answer."""

    inputs: Arrays
    #: Expected outputs. If there are none, any answer except an error is wrong.
    wanted: Arrays
    #: The model of this request, if the client asks several models.
    model: str = ""


# --- the models' functions ----------------------------------------------------------------------------------------

#: Least element of an input for which the device of `fragile` fails. For other elements, `fragile` returns three times its input.
BREAKS = 1e6
#: Number of elements in the weights of heavy models (128 MiB of u32), and of light ones (1 MiB).
HEAVY, LIGHT = 2**25, 2**18
#: Factors of the heavy models. Element i of the weights is i times the factor, in 32 bits.
HEAVY_FACTORS = {"heavy_a": 2654435761, "heavy_b": 2246822519}
#: Factors of the light models.
LIGHT_FACTORS = {f"light{number:02}": 2654435761 + 2 * number for number in range(13)}
#: Number of elements in the weights of a catalogue's model (256 KiB).
ITEM = 2**16
#: Number of models that clients of `catalogue` ask by Zipf's law. With the Python front, each model is a process.
ITEMS = 1000 if os.environ.get("RSRV_STUB__FRONT") == "native" else 50
#: Number of further models in the catalogue. Only faults ask them.
SPARE_ITEMS = 4
#: Number of elements in a row of `bulky` (4 MiB of f32), and the step between the elements that its answer has.
BULKY, BULKY_STEP = 2**20, 2**12
#: Number of rounds of `compiling`. Each of them is separate code for the compiler.
MIXES = 600
#: Actions of the hooks of `moody`. The first element of a request selects one, and other values select none.
MOODS = ("hang", "hoard", "exit")
_FIRST_MOOD = 1000.0


def mood(name: str) -> Question:
    """Return a request that makes the preprocess hook of `moody` do the action `name` of MOODS."""
    x = np.zeros((1, 4), np.float32)
    x[0, 0] = _FIRST_MOOD + MOODS.index(name)
    return Question({"x": x}, {})


def breaking() -> Question:
    """Return a request to `fragile` that its device cannot execute."""
    return Question({"x": np.full((1, 4), 2 * BREAKS, np.float32)}, {})


def endless() -> Question:
    """Return a request to `sudden` that takes weeks."""
    inputs = {"x": np.ones((1, 4), np.uint32), "steps": np.full((1, 1), 2**31 - 1, np.int32)}
    return Question(inputs, {})


def mixing() -> list[tuple[int, int]]:
    """Return the shift and the factor of each round of `compiling`: h <- (h ^ h >> shift) * factor."""
    rng = np.random.default_rng(11)
    pairs = zip(rng.integers(1, 31, MIXES), rng.integers(0, 2**31, MIXES), strict=True)
    return [(int(shift), 2 * int(half) + 1) for shift, half in pairs]


# --- questions ----------------------------------------------------------------------------------------------------

_KERNEL = exact_kernel()


def _rows(rng: np.random.Generator, most: int = 8) -> int:
    return int(rng.integers(1, most + 1))


def _u32(rng: np.random.Generator, rows: int) -> Array:
    return rng.integers(0, 2**32, (rows, 4), np.uint32)


def _whole(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.integers(-50, 51, (rows, columns)).astype(np.float32)


def _exact(rng: np.random.Generator) -> Question:
    x = _whole(rng, _rows(rng), 64)
    return Question({"x": x}, {"y": x @ _KERNEL})


def _only_rows(rng: np.random.Generator) -> Question:
    x = rng.integers(-(2**20), 2**20, _rows(rng)).astype(np.int32).reshape(-1, 1)
    return Question({"x": x}, {"y": 3 * x})


def _elastic(rng: np.random.Generator) -> Question:
    x, steps = _u32(rng, 1), int(rng.integers(0, 40))
    inputs = {"x": x, "steps": np.full((1, 1), steps, np.int32)}
    return Question(inputs, {"y": stepped(x, steps + LEAST_STEPS)})


def _sudden(rng: np.random.Generator) -> Question:
    x, steps = _u32(rng, 1), int(rng.integers(0, 3))
    return Question({"x": x, "steps": np.full((1, 1), steps, np.int32)}, {"y": stepped(x, steps)})


def _fragile(rng: np.random.Generator) -> Question:
    x = _whole(rng, _rows(rng, 4), 4)
    return Question({"x": x}, {"y": 3 * x})


def _moody(rng: np.random.Generator) -> Question:
    x = _whole(rng, _rows(rng, 4), 4)
    return Question({"x": x}, {"y": 2 * x + 1})


def _lookup(elements: int, factor: int) -> Callable[[np.random.Generator], Question]:
    def ask(rng: np.random.Generator) -> Question:
        at = rng.integers(0, elements, (1, 4)).astype(np.int32)
        return Question({"at": at}, {"y": at.astype(np.uint32) * np.uint32(factor)})

    return ask


def bulky(rng: np.random.Generator, rows: int) -> Question:
    """Return a request to `bulky` with at most 4 rows."""
    x = np.full((rows, BULKY), -1, np.float32)
    x[:, ::BULKY_STEP] = rng.integers(-(2**20), 2**20, (rows, BULKY // BULKY_STEP))
    return Question({"x": x}, {"y": x[:, ::BULKY_STEP]})


def _compiling(rng: np.random.Generator) -> Question:
    x = h = _u32(rng, 1)
    for shift, factor in mixing():
        h = (h ^ h >> np.uint32(shift)) * np.uint32(factor)
    return Question({"x": x}, {"y": h})


def item_name(number: int) -> str:
    return f"item{number:04}"


def item_factor(number: int) -> int:
    return 2654435761 + 2 * number


def item(rng: np.random.Generator, number: int) -> Question:
    """Return a request to a model of the catalogue."""
    return _lookup(ITEM, item_factor(number))(rng)._replace(model=item_name(number))


_SHARES = np.cumsum(1 / np.arange(1, ITEMS + 1))


def _catalogue(rng: np.random.Generator) -> Question:
    return item(rng, int(np.searchsorted(_SHARES, rng.uniform(0, _SHARES[-1]))))


def _chain(rng: np.random.Generator) -> Question:
    x = _whole(rng, _rows(rng), 8)
    return Question({"x": x}, {"y": 6 * x})


QUESTIONS: Mapping[str, Callable[[np.random.Generator], Question]] = {
    "exact": _exact,
    "only_rows": _only_rows,
    "elastic": _elastic,
    "sudden": _sudden,
    "fragile": _fragile,
    "moody": _moody,
    "bulky": lambda rng: bulky(rng, 1),
    "compiling": _compiling,
    "chain": _chain,
    "catalogue": _catalogue,
    **{name: _lookup(HEAVY, factor) for name, factor in HEAVY_FACTORS.items()},
    **{name: _lookup(LIGHT, factor) for name, factor in LIGHT_FACTORS.items()},
}

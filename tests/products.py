"""Bundles for tests of many models: products with matrices of whole numbers, exact in any order of summation."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rsrv_bundle.export import export_bundle
from rsrv_bundle.writer import write_weights
from tests.unit.bundle.forge import seal

Array = npt.NDArray[Any]

#: Number of columns. A product maps f32 [n, COLUMNS] to f32 [n, COLUMNS].
COLUMNS = 512
WEIGHT_BYTES = COLUMNS * COLUMNS * 4
#: Number of different modules. Every MODULES-th model has the same module with other weights.
MODULES = 4


def kernel(number: int) -> Array:
    """Return the weights of model `number`. They differ between models."""
    return np.random.default_rng(number).integers(-8, 9, (COLUMNS, COLUMNS)).astype(np.float32)


def question(number: int, rows: int = 1) -> Array:
    """Return an input of whole numbers."""
    return np.random.default_rng(number).integers(-50, 51, (rows, COLUMNS)).astype(np.float32)


def answer(number: int, x: Array) -> Array:
    """Return the answer of model `number`."""
    return np.asarray(np.maximum(x @ kernel(number), np.float32(number % MODULES)))


def make_products(folder: Path, count: int) -> list[Path]:
    """Write the bundles `product_0` and so on below `folder`, and return their paths."""
    paths = [folder / f"product_{number}" for number in range(count)]
    for number, path in enumerate(paths):
        if number < MODULES:
            _export(path, number)
        else:
            shutil.copytree(paths[number % MODULES], path)
            write_weights(path / "weights.safetensors", [("kernel", kernel(number))])
            seal(path)
    return paths


def _export(path: Path, number: int) -> None:
    export_bundle(
        lambda params, x: {"y": jnp.maximum(x @ params["kernel"], np.float32(number))},
        {"kernel": kernel(number)},
        {"x": np.zeros((1, COLUMNS), np.float32)},
        batch_sizes=(1, 4),
        out_dir=path,
    )

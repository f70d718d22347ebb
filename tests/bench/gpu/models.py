"""Bundles with any number of bytes of weights, cheap to make and with known answers.

The weights are zeros except for the first and the last element of each tensor, in sparse files: two models share no
tensor, a partial or misplaced tensor changes the answer, and the files take little disk. All arithmetic is on small
integers and therefore exact.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsrv_bundle.export import export_bundle
from tests.unit.bundle.forge import seal

#: Elements of a model's input.
WIDTH = 4
_WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class Shape:
    """The common shape of models, so that they share one compilation. `steps` matrix products take time."""

    nbytes: int
    tensors: int = 8
    steps: int = 0
    #: Rows and columns of those matrices.
    matrix: int = 128

    @property
    def elements(self) -> list[int]:
        """Elements of each tensor, f32."""
        each, rest = divmod(self.nbytes // 4, self.tensors)
        return [each + (i < rest) for i in range(self.tensors)]


@dataclass(frozen=True)
class Model:
    name: str
    path: Path
    nbytes: int
    # Return the sum that is added to its input.
    constant: float

    def answer(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x + np.float32(self.constant)


def make_models(directory: Path, shape: Shape, names: Sequence[str]) -> list[Model]:
    """Make bundles at `directory`/name. Different names give different weights, also for different shapes."""
    template = directory / "template"
    params = {f"{i:04}": np.zeros(n, np.float32) for i, n in enumerate(shape.elements)}
    # Lowered for a CPU, it also runs on a GPU, where the exporter's own check of the numerics is skipped.
    export_bundle(
        lambda params, x: {"y": _function(shape, params, x)},
        params,
        {"x": np.zeros((1, WIDTH), np.float32)},
        batch_sizes=[1],
        out_dir=template,
    )
    models = [_vary(template, directory / name, shape) for name in names]
    shutil.rmtree(template)
    return models


def _function(shape: Shape, params: Mapping[str, Any], x: Any) -> Any:
    total = sum(_factor(i) * params[name].sum() for i, name in enumerate(sorted(params)))
    if shape.steps:
        start = jnp.full((shape.matrix, shape.matrix), 1e-3, jnp.float32) + x[0, 0] * 1e-9
        # Never true, which no compiler knows.
        total += jnp.where(spend(shape.steps, start).sum() > 1e30, 1.0, 0.0)
    return x + total


def spend(steps: int, start: Any) -> Any:
    """Compute matrix products in sequence."""
    return jax.lax.fori_loop(0, steps, lambda _, m: jnp.tanh(m @ m), start)


def _factor(tensor: int) -> int:
    """Return a factor by which exchanged tensors are noticed."""
    return tensor % 7 + 1


def _vary(template: Path, path: Path, shape: Shape) -> Model:
    shutil.copytree(template, path, ignore=shutil.ignore_patterns(_WEIGHTS))
    with (template / _WEIGHTS).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        text = file.read(length)
    header = json.loads(text)
    del header["__metadata__"]
    rng = np.random.default_rng(list(path.name.encode()))
    constant = 0
    with (path / _WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", length) + text)
        for index, name in enumerate(sorted(header)):
            begin, end = header[name]["data_offsets"]
            first, last = (int(value) for value in rng.integers(1, 1000, 2))
            for at, value in ((begin, first), (end - 4, last)):
                file.seek(8 + length + at)
                file.write(struct.pack("<f", value))
            constant += _factor(index) * (first + last)
    seal(path)
    return Model(path.name, path, shape.nbytes, constant)

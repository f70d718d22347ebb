"""fno_f32 and fno_f64: a neural operator that stands for a solver of Burgers' equation, in both precisions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from examples.fno.burgers import POINTS, solve, starts
from examples.fno.network import apply, trained
from rsrv_bundle.export import export_bundle

Array = np.ndarray[Any, Any]

BATCH_SIZES = (1, 8, 32)
#: Numbers of points around the circle. The bundle has a variant for each.
GRIDS = (POINTS // 2, POINTS)
#: Largest allowed `mean_error` of a trained operator on starts that were not used for training.
REQUIRED_ERROR = 0.02


def held_out() -> tuple[Array, Array]:
    """Return 200 starts that were not used for training, and their ends from the solver, f64 [200, POINTS]."""
    unseen = starts(200, seed=0)
    return unseen, solve(unseen)


def mean_error(computed: Array, expected: Array) -> float:
    """Return the mean relative error of the rows: the norm of the difference over the norm of the expected row."""
    return float(np.mean(np.linalg.norm(computed - expected, axis=1) / np.linalg.norm(expected, axis=1)))


def params(dtype: Any) -> Any:
    """Return the trained weights in this precision. They were trained in f32, so f64 represents them exactly."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), trained())


def reference(inputs: Mapping[str, Array], weights: Any = None) -> dict[str, Array]:
    """start: [n, x] -> end: [n, x], in the start's precision, f32 or f64. Trains first, unless it is given weights."""
    start = inputs["start"]
    with jax.enable_x64(start.dtype == np.float64):
        outputs = apply(params(start.dtype) if weights is None else weights, jax.numpy.asarray(start))
        return {"end": np.asarray(outputs["end"])}


def make(out_dir: Path) -> None:
    """Write the bundle `out_dir`, fno_f32 or fno_f64, replacing an existing one. RuntimeError if training went badly."""
    unseen, ends = held_out()
    error = mean_error(reference({"start": unseen.astype(np.float32)})["end"], ends)
    print(f"{out_dir.name}: {error:.2%} from the solver on average, on held-out starts", flush=True)
    if error > REQUIRED_ERROR:
        raise RuntimeError(f"must be at most {REQUIRED_ERROR:.0%}")
    dtype = {"fno_f32": np.float32, "fno_f64": np.float64}[out_dir.name]
    # Enable 64 bits only for this export. Elsewhere in the process, the element types stay as they are.
    with jax.enable_x64(dtype is np.float64):
        export_bundle(
            apply,
            params(dtype),
            {"start": np.zeros((1, GRIDS[0]), dtype)},
            batch_sizes=BATCH_SIZES,
            axes={"start": "nx", "end": "nx"},
            input_shapes=[{"x": points} for points in GRIDS],
            out_dir=out_dir,
            description="Burgers' equation by a Fourier neural operator: u now to u one time unit later.",
            overwrite=True,
        )

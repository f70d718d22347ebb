"""Running the modules of a written bundle and comparing them with the function that it was made from."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.errors import Problems
from rsrv_bundle.modules import as_exported, check_signatures, module_file
from rsrv_bundle.spec import Bundle
from rsrv_bundle.weights import load_weights

Array = np.ndarray[Any, Any]

#: Largest error allowed, relative to the largest magnitude of an output; element types not listed must be equal.
TOLERANCE: Mapping[str, float] = {
    "f64": 1e-9,
    "f32": 1e-4,
    "f16": 1e-2,
    "bf16": 3e-2,
    "f8_e4m3": 0.15,
    "f8_e5m2": 0.3,
}


def compare(
    bundle: Bundle, function: Callable[..., Any], leaves: Sequence[Any], tolerance: Mapping[str, float]
) -> dict[str, float]:
    """Run every module, with the weights as read from the file, against `function(*inputs, *leaves)`.

    Returns max_abs_error and max_rel_error over all outputs; relative means divided by the output's largest
    magnitude. Raises BundleError naming every module and output that is further away than its tolerance, and
    every output whose first row changes with the other rows.
    """
    problems = Problems()
    weights = load_weights(bundle)
    direct = jax.jit(function)
    worst_abs = worst_rel = 0.0
    for key, signature in check_signatures(bundle).items():
        file = module_file(bundle, key)
        inputs = random_inputs(bundle, *key)
        found = jax.jit(as_exported(file.read_bytes(), signature).call)(*inputs, *weights)
        expected = direct(*inputs, *leaves)
        if key[1] > 1 and bundle.manifest.batched:
            alone = direct(*(_first_row_only(bundle, i, array) for i, array in enumerate(inputs)), *leaves)
            _check_rows(bundle, file.name, expected, alone, tolerance, problems)
        for spec, got, want in zip(bundle.manifest.outputs, found, expected, strict=True):
            absolute, relative = difference(np.asarray(got), np.asarray(want))
            worst_abs, worst_rel = max(worst_abs, absolute), max(worst_rel, relative)
            allowed = tolerance.get(spec.dtype, 0.0)
            if not relative <= allowed:
                problems.add(
                    file.name,
                    f"output '{spec.name}'",
                    f"differs from fn by {relative:.3g} of its largest magnitude; the tolerance for {spec.dtype} is"
                    f" {allowed:g}",
                )
    problems.raise_if_any()
    return {"max_abs_error": worst_abs, "max_rel_error": worst_rel}


def _first_row_only(bundle: Bundle, index: int, array: Array) -> Array:
    """The input with every row but the first replaced by zeros, as a padded batch has them."""
    axis = bundle.manifest.inputs[index].batch_axis
    assert axis is not None
    padded = np.zeros_like(array)
    np.moveaxis(padded, axis, 0)[0] = np.moveaxis(array, axis, 0)[0]
    return padded


def _check_rows(
    bundle: Bundle,
    file: str,
    together: Sequence[Any],
    alone: Sequence[Any],
    tolerance: Mapping[str, float],
    problems: Problems,
) -> None:
    """The rows of a batch are different requests, or padding, so no row may look at another."""
    for spec, a, b in zip(bundle.manifest.outputs, together, alone, strict=True):
        if spec.batch_axis is None:
            continue
        rows = [np.take(np.asarray(value), 0, axis=spec.batch_axis) for value in (a, b)]
        _, relative = difference(rows[0], rows[1])
        if not relative <= tolerance.get(spec.dtype, 0.0):
            problems.add(
                file,
                f"output '{spec.name}'",
                f"its first row changes by {relative:.3g} of its magnitude when the other rows do; the rows of a"
                " batch are different requests, so fn must treat them apart",
            )


def random_inputs(bundle: Bundle, variant: int, size: int) -> list[Array]:
    """One array per executable input; the same for the same names and sizes in every process."""
    arrays = []
    for index, spec in enumerate(bundle.manifest.inputs):
        seed = zlib.crc32(f"{spec.name}/{variant}/{size}".encode())
        arrays.append(
            _random(np.random.default_rng(seed), spec.dtype, bundle.input_shape(index, variant, size))
        )
    return arrays


def _random(rng: np.random.Generator, token: str, shape: tuple[int, ...]) -> Array:
    dtype = dtypes.numpy_dtype(token)
    if token == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    if token[0] in "iu":
        # Small and not negative: integers are often indices.
        return rng.integers(0, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def difference(got: Array, want: Array) -> tuple[float, float]:
    """(largest absolute difference, that divided by the largest magnitude of `want`); infinite where only one of
    the two is finite, or their infinities or NaNs differ."""
    if got.size == 0:
        return 0.0, 0.0
    if got.dtype.kind in "iub":
        if np.array_equal(got, want):
            return 0.0, 0.0
        # Neighbours among large 64-bit integers are equal as floats; the difference is at least one.
        return max(1.0, float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())), float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf"), float("inf")
    if not finite.any():
        return 0.0, 0.0
    absolute = float(np.abs(a[finite] - b[finite]).max())
    scale = float(np.abs(b[finite]).max())
    return absolute, absolute / scale if scale else absolute

"""Read samples from a file, and convert them to rows for a bundle's modules, if necessary with the bundle's own hook."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError, Problems
from rsrv_bundle.inputs import check_sample_names, sample_count
from rsrv_bundle.padding import fitted
from rsrv_bundle.spec import Bundle, TensorSpec

Array = np.ndarray[Any, Any]


def read_samples(file: Path) -> dict[str, Array]:
    """Read the arrays of an .npz file, by name.

    Raises OSError. Raises ValueError for another kind of file, for arrays of Python objects, and if there are no samples.
    """
    with file.open("rb") as opened:
        if not zipfile.is_zipfile(opened):
            raise ValueError("is not a .npz file; write it with numpy.savez(file, NAME=array)")
    with np.load(file, allow_pickle=False) as archive:
        samples = {name: archive[name] for name in archive.files}
    # Refuse an empty file, because a comparison of nothing would look like an agreement.
    if not samples:
        raise ValueError("holds no array")
    for name, array in samples.items():
        if array.ndim and not len(array):
            raise ValueError(f"{name}: the first axis counts the samples, but its length is 0")
    return samples


def rows_of(bundle: Bundle, samples: Mapping[str, Array]) -> dict[int, list[Array]]:
    """Return samples as executable inputs: for each variant, one array for each input. The first axis counts rows.

    samples: arrays by input name. The first axis of an array counts samples. Its other axes are the axes of the tensor without the
    batch axis.

    The samples are client inputs or executable inputs. Client inputs are converted by the bundle's `preprocess`, which gets one
    sample in each request. This runs the bundle's code. Raises BundleError if the names, types or shapes fit neither kind of
    inputs, or if the hook fails.
    """
    preprocess = None
    specs = bundle.manifest.inputs
    if bundle.hooks is not None and set(samples) == {spec.name for spec in bundle.manifest.wire_inputs}:
        preprocess = _hook(bundle.hooks)
        specs = bundle.manifest.wire_inputs
    arrays = _typed(specs, samples)
    pools: dict[int, list[list[Array]]] = {}
    for index in range(sample_count(arrays)):
        request = {
            spec.name: array[index, ...]
            if spec.batch_axis is None
            else np.expand_dims(array[index, ...], spec.batch_axis)
            for spec, array in zip(specs, arrays, strict=True)
        }
        variant, rows = _executable(bundle, request if preprocess is None else preprocess(request))
        pool = pools.setdefault(variant, [[] for _ in rows])
        for parts, array in zip(pool, rows, strict=True):
            parts.append(array)
    return {variant: [np.concatenate(parts) for parts in pool] for variant, pool in pools.items()}


def _typed(specs: tuple[TensorSpec, ...], samples: Mapping[str, Array]) -> list[Array]:
    """Return the samples in the order of the specs. Raises BundleError if their names or types differ."""
    names = [spec.name for spec in specs]
    check_sample_names(samples, names)
    problems = Problems()
    typed = []
    for spec in specs:
        array = samples[spec.name]
        if spec.dtype == dtypes.BYTES and array.dtype.kind in "SU":
            # The server passes strings to hooks in this form.
            array = (np.char.encode(array) if array.dtype.kind == "U" else array).astype(object)
        expected = np.dtype(object) if spec.dtype == dtypes.BYTES else dtypes.numpy_dtype(spec.dtype)
        # In files, numpy stores the types of ml_dtypes, such as bf16, as raw bytes.
        if array.dtype.kind == "V" and expected != object and array.dtype.itemsize == expected.itemsize:
            array = array.view(expected)
        if array.dtype != expected:
            problems.add("samples", spec.name, f"is {array.dtype}, but the model takes {spec.dtype}")
        if array.ndim == 0:
            problems.add("samples", spec.name, "has no axes; the first one counts the samples")
        typed.append(array)
    problems.raise_if_any()
    return typed


def _hook(file: Path) -> Any:
    # Use the server's loader, so that a file that the server can load also loads here.
    from rsrv.hooks.loader import load_hooks

    try:
        preprocess = load_hooks(file).preprocess
    except Exception as e:
        raise BundleError(f"{file.name}: {type(e).__name__}: {e}") from e
    if preprocess is None:
        return None

    def call(request: dict[str, Array]) -> Mapping[str, Array]:
        try:
            return preprocess(request)
        except Exception as e:
            raise BundleError(f"{file.name}: preprocess raised {type(e).__name__}: {e}") from e

    return call


def _executable(bundle: Bundle, request: Mapping[str, Array]) -> tuple[int, list[Array]]:
    """Return the variant whose shapes a request has, and the executable inputs with the rows on the first axis."""
    specs = bundle.manifest.inputs
    missing = [spec.name for spec in specs if spec.name not in request]
    if missing:
        raise BundleError(f"{bundle.name}: preprocess returns no {', '.join(missing)}")
    arrays = [np.asarray(request[spec.name]) for spec in specs]
    variant, arrays = fitted(bundle, arrays)
    rows = {
        array.shape[spec.batch_axis]
        for spec, array in zip(specs, arrays, strict=True)
        if spec.batch_axis is not None and spec.batch_axis < array.ndim
    }
    for index, (spec, array) in enumerate(zip(specs, arrays, strict=True)):
        expected = dtypes.numpy_dtype(spec.dtype)
        fits = variant is not None and array.shape == bundle.input_shape(index, variant, next(iter(rows), 1))
        if not fits or array.dtype != expected or len(rows) > 1:
            actual = f"{array.dtype} {list(array.shape)}"
            raise BundleError(
                f"{bundle.name}: input '{spec.name}': a sample is {actual}; the model takes {spec.dtype} {spec.letters}"
                f" {list(spec.dims)}, or its variants"
            )
    assert variant is not None or not specs
    return variant or 0, [
        array[np.newaxis] if spec.batch_axis is None else np.moveaxis(array, spec.batch_axis, 0)
        for spec, array in zip(specs, arrays, strict=True)
    ]

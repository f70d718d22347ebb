"""Inputs for running the modules of a bundle: random arrays, and the author's examples."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.spec import Bundle

Array = np.ndarray[Any, Any]


def random_inputs(
    bundle: Bundle, variant: int, size: int, examples: Mapping[str, Array] = MappingProxyType({})
) -> list[Array]:
    """Return one array per executable input; equal arguments give equal arrays in every process.

    examples: input name -> array. An integer input takes its values from its example, since integers are often
    indices, unless the example has only zeros, as one that only gives a shape.
    """
    arrays = []
    for index, spec in enumerate(bundle.manifest.inputs):
        rng = np.random.default_rng(zlib.crc32(f"{spec.name}/{variant}/{size}".encode()))
        shape = bundle.input_shape(index, variant, size)
        example = examples.get(spec.name)
        if example is not None and example.dtype.kind in "iu" and example.any():
            arrays.append(rng.choice(np.unique(example), shape).astype(dtypes.numpy_dtype(spec.dtype)))
        else:
            arrays.append(_random(rng, spec.dtype, shape))
    return arrays if bundle.manifest.generate is None else _chunk(bundle, arrays)


def _chunk(bundle: Bundle, arrays: list[Array]) -> list[Array]:
    """Return random inputs of a generation as a chunk of prompts: 0 behind their lengths, and greedy."""
    generate = bundle.manifest.generate
    assert generate is not None
    index = {spec.name: i for i, spec in enumerate(bundle.manifest.inputs)}
    tokens = arrays[index[generate.tokens]]
    lengths = arrays[index[generate.lengths]] % tokens.shape[1] + 1
    arrays[index[generate.tokens]] = np.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, 0)
    arrays[index[generate.lengths]] = lengths
    arrays[index[generate.sampling]] *= 0
    return arrays


def example_inputs(
    bundle: Bundle, variant: int, size: int, examples: Mapping[str, Array]
) -> list[Array] | None:
    """Return the examples as executable inputs, repeated or cut to the module's sizes; other inputs are random.

    examples: input name -> array. Returns None if no float example has two different values: a constant example
    gives only a shape, and makes many models return nothing but rounding errors.
    """
    fitting = _fitting(bundle, examples)
    if not any(
        _is_float(bundle.manifest.inputs[index].dtype) and _speaks(fitting[index]) for index in fitting
    ):
        return None
    arrays = random_inputs(bundle, variant, size, examples)
    return [
        _repeated(fitting[index], array.shape).astype(array.dtype) if index in fitting else array
        for index, array in enumerate(arrays)
    ]


def row_count(bundle: Bundle, examples: Mapping[str, Array]) -> int:
    """Return the rows of the longest example; 1 without a batch axis, 0 without examples."""
    axes = [spec.batch_axis for spec in bundle.manifest.inputs]
    counts = [
        1 if (axis := axes[index]) is None else example.shape[axis]
        for index, example in _fitting(bundle, examples).items()
    ]
    return max(counts, default=0)


def _fitting(bundle: Bundle, examples: Mapping[str, Array]) -> dict[int, Array]:
    """Return the examples with the right number of axes, by the input's index."""
    return {
        index: example
        for index, spec in enumerate(bundle.manifest.inputs)
        if (example := examples.get(spec.name)) is not None
        and example.size
        and example.ndim == len(spec.dims)
        and example.dtype != np.object_
    }


def _is_float(token: str) -> bool:
    return token != "bool" and token[0] not in "iu"


def _speaks(example: Array) -> bool:
    first = example.reshape(-1)[0]
    return bool((example != first).any() if example.size > 1 else first != 0)


def _repeated(array: Array, shape: tuple[int, ...]) -> Array:
    for axis, size in enumerate(shape):
        array = array.take(np.arange(size) % array.shape[axis], axis)
    return array


def _random(rng: np.random.Generator, token: str, shape: tuple[int, ...]) -> Array:
    dtype = dtypes.numpy_dtype(token)
    if token == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    if token[0] in "iu":
        # Small and not negative: integers are often indices.
        return rng.integers(0, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)

"""Inputs for running the modules of a bundle: random arrays, and the author's examples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError
from rsrv_bundle.spec import Bundle

Array = np.ndarray[Any, Any]


def random_inputs(
    bundle: Bundle,
    variant: int,
    size: int,
    examples: Mapping[str, Array] = MappingProxyType({}),
    first: int = 0,
) -> list[Array]:
    """Return one array for each executable input. Equal arguments return equal arrays in every process.

    examples: input name -> array. The rows of an integer input are copied from its example, because integers are often
        indices and depend on each other: the edges of a box, sorted positions, a special token at the end. If more rows are
        needed, the example's rows are repeated. In each repetition, their elements are rotated by one more place along the
        row's first axis.
    first: number of rows to skip, because other calls have returned these rows.
    """
    arrays = []
    for index, spec in enumerate(bundle.manifest.inputs):
        seed = f"{spec.name}/{variant}/{size}" + (f"/{first}" if first else "")
        rng = np.random.default_rng(zlib.crc32(seed.encode()))
        shape = bundle.input_shape(index, variant, size)
        example = examples.get(spec.name)
        if example is None or not example.size or example.dtype.kind not in "iu":
            arrays.append(_random(rng, spec.dtype, shape))
        elif example.ndim != len(shape):
            arrays.append(rng.choice(np.unique(example), shape).astype(dtypes.numpy_dtype(spec.dtype)))
        else:
            integers = _rotated(example, shape, spec.batch_axis, first)
            arrays.append(integers.astype(dtypes.numpy_dtype(spec.dtype)))
    return arrays if bundle.manifest.generate is None else _chunk(bundle, arrays)


def _rotated(example: Array, shape: tuple[int, ...], batch_axis: int | None, first: int) -> Array:
    """Return an example's rows in another shape, as `random_inputs` describes."""
    if batch_axis is None:
        return repeated(example, shape)
    rows = np.moveaxis(example, batch_axis, 0)
    inner = shape[:batch_axis] + shape[batch_axis + 1 :]
    rotated = []
    for index in range(first, first + shape[batch_axis]):
        turns, place = divmod(index, len(rows))
        row = repeated(rows[place], inner)
        rotated.append(np.roll(row, -turns, 0) if row.ndim else row)
    return np.stack(rotated, batch_axis)


def acceptable(
    bundle: Bundle, examples: Mapping[str, Array], run: Callable[[list[Array]], Any] | None = None
) -> dict[str, Array]:
    """Return the examples without integer arrays of zeros, because such an array often stands only for a shape.

    run: runs the model at the first variant and the smallest batch size. If it is given, this function finds, for each
        array of zeros, the widest range of integers with which the model runs: 0 to 99, 0 to 9, 0 and 1, or only 0. The result
        has an array with this range, or no array for 0 to 99, because random inputs have this range anyway.
    """
    accepted = dict(examples)
    blank = [name for name, array in accepted.items() if array.dtype.kind in "iu" and not array.any()]
    if run is None:
        return {name: array for name, array in accepted.items() if name not in blank}
    key = min(bundle.modules)

    def runs() -> bool:
        try:
            run(random_inputs(bundle, *key, accepted))
        except Exception:  # noqa: BLE001 - the model may raise anything
            return False
        return True

    for name in blank:
        zeros = accepted.pop(name)
        for limit in (10, 2, 1):
            if runs():
                break
            accepted[name] = np.arange(zeros.size).reshape(zeros.shape) % limit
    return accepted


def integers_of(bundle: Bundle, samples: Mapping[int, Sequence[Array]]) -> dict[str, Array]:
    """Return the integer inputs of the first variant in `samples`, as examples.

    Integers are often indices, so random integers could be out of range.

    samples: variant -> one array per input. The first axis of each array counts rows.
    """
    return {
        spec.name: rows[0] if spec.batch_axis is None else np.moveaxis(rows, 0, spec.batch_axis)
        for spec, rows in zip(bundle.manifest.inputs, next(iter(samples.values()), ()), strict=False)
        if spec.dtype[0] in "iu"
    }


def _chunk(bundle: Bundle, arrays: list[Array]) -> list[Array]:
    """Turn random inputs of a generation into a chunk of prompts, with zeros after the prompts and greedy sampling."""
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
    """Return the examples as executable inputs, repeated or cut to the module's sizes. Inputs without an example are random.

    examples: input name -> array. Return None if no float example has two different values. A constant example only stands for a
    shape, and many models return nothing but rounding errors for it.
    """
    fitting = _fitting(bundle, examples)
    if not any(
        not dtypes.is_whole(bundle.manifest.inputs[index].dtype) and _speaks(fitting[index])
        for index in fitting
    ):
        return None
    arrays = random_inputs(bundle, variant, size, examples)
    return [
        repeated(fitting[index], array.shape).astype(array.dtype) if index in fitting else array
        for index, array in enumerate(arrays)
    ]


def row_count(bundle: Bundle, examples: Mapping[str, Array]) -> int:
    """Return the number of rows of the longest example. It is 1 without a batch axis, and 0 without examples."""
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


def _speaks(example: Array) -> bool:
    first = example.reshape(-1)[0]
    return bool((example != first).any() if example.size > 1 else first != 0)


def check_sample_names(samples: Collection[str], names: Collection[str]) -> None:
    """Raise BundleError unless there are samples for exactly these inputs."""
    if set(samples) != set(names):
        raise BundleError(f"samples: are {', '.join(sorted(samples))}; the model takes {', '.join(names)}")


def sample_count(arrays: Iterable[Array]) -> int:
    """Return the length of the first axis of all arrays, or 0 without arrays. Raises BundleError if the lengths differ."""
    counts = {len(array) for array in arrays}
    if len(counts) > 1:
        raise BundleError(
            f"samples: their first axes differ: {sorted(counts)}; it counts the samples in each"
        )
    return counts.pop() if counts else 0


def repeated(array: Array, shape: tuple[int, ...]) -> Array:
    """Return an array, repeated or cut to a shape with the same number of axes."""
    for axis, size in enumerate(shape):
        array = array.take(np.arange(size) % array.shape[axis], axis)
    return array


def _random(rng: np.random.Generator, token: str, shape: tuple[int, ...]) -> Array:
    dtype = dtypes.numpy_dtype(token)
    if token == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    if token[0] in "iu":
        # Use small numbers that are not negative, because integers are often indices.
        return rng.integers(0, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)

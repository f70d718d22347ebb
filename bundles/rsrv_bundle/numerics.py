"""Run a bundle's modules, and compare their results with each other and with the original model.

Only the functions that run modules need jax. All modules run on jax's default device, even if they were lowered for another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.dtypes import numpy_dtype
from rsrv_bundle.errors import BundleError, Problems
from rsrv_bundle.inputs import example_inputs, random_inputs, row_count
from rsrv_bundle.modules import (
    Signature,
    SignatureReader,
    as_exported,
    check_signatures,
    module_file,
    read_module,
    signature_of,
)
from rsrv_bundle.spec import Bundle, TensorSpec
from rsrv_bundle.weights import load_weights

Array = np.ndarray[Any, Any]
#: Variant and batch size.
Key = tuple[int, int]
#: One array for each input or output, with any number of rows. The first axis of an array counts the rows, even if the tensor's
#: batch axis is another one. Without a batch axis, each row is a separate request.
Rows = Sequence[Array]
#: Largest relative error of each module, by its file's name without ".mlir".
Errors = dict[str, float]

#: Largest allowed error, relative to the largest magnitude of an output, by element type. Values of other types must be equal,
#: unless the user gives a tolerance for them.
TOLERANCE: Mapping[str, float] = {
    "f64": 1e-9,
    "f32": 1e-4,
    "f16": 1e-2,
    "bf16": 3e-2,
    "f8_e4m3": 0.15,
    "f8_e5m2": 0.3,
}

#: If the largest magnitude of an output is below this, an error text suggests other inputs for the comparison. For example, the
#: probabilities of a detector are so small for images without an object.
_TINY = 1e-3
#: The largest magnitude of an output is measured over this many rows, because a few rows may be near zero by chance.
_ROWS = 8


class ModuleRunner:
    """Runs the modules of a bundle with the weights from its file. A module is compiled when it first runs."""

    def __init__(self, bundle: Bundle, read_signature: SignatureReader = signature_of) -> None:
        """Read each module with `read_signature`. Raises BundleError if a module disagrees with the manifest."""
        import jax

        self.bundle = bundle
        self.signatures = check_signatures(bundle, read_signature)
        with jax.enable_x64(True):
            self._weights = jax.device_put(load_weights(bundle))
        self._compiled: dict[Key, Any] = {}
        self._pools: list[Any] | None = None

    def __call__(self, key: Key, inputs: Sequence[Array]) -> list[Array]:
        """Run a module, and return its declared outputs. With state, each row is the first step of a sequence.

        Raises BundleError if the module cannot be compiled here.
        """
        if self.bundle.manifest.state is None:
            return self._run(key, inputs, ())[0]
        pools = self.pools(0) if self._pools is None else self._pools
        # The execution consumes the pools, so they are lost if it fails.
        self._pools = None
        outputs, self._pools = self.step(key, inputs, ~np.arange(key[1]), pools)
        return outputs

    def pools(self, value: int, nan: Sequence[int] = ()) -> list[Any]:
        """Return pools filled with `value`. In the slots `nan`, floats are NaN instead."""
        import jax
        import jax.numpy as jnp

        state = self.bundle.manifest.state
        assert state is not None
        with jax.enable_x64(True):
            pools = [
                jnp.full((state.slots, *tensor.dims), value, numpy_dtype(tensor.dtype))
                for tensor in state.tensors
            ]
            spoiled = jnp.array(nan, jnp.int32)
            return [
                pool.at[spoiled].set(jnp.nan) if jnp.issubdtype(pool.dtype, jnp.inexact) else pool
                for pool in pools
            ]

    def step(
        self, key: Key, inputs: Sequence[Array], slots: Array, pools: Sequence[Any]
    ) -> tuple[list[Array], list[Any]]:
        """Run a module of a bundle with state. Return its outputs and the new pools. The old pools cannot be used afterwards."""
        return self._run(key, [*inputs, slots.astype(np.int32)], pools)

    def _run(self, key: Key, inputs: Sequence[Array], pools: Sequence[Any]) -> tuple[list[Array], list[Any]]:
        import jax

        if key not in self._compiled:
            self._compiled[key] = compiled(self.bundle, key, self.signatures[key])
        count = len(self.bundle.manifest.outputs)
        with jax.enable_x64(True):
            results = self._compiled[key](*inputs, *self._weights, *pools)
            return [np.asarray(value) for value in results[:count]], list(results[count:])

    def keys(self) -> list[Key]:
        """Return the keys of all modules, ordered by variant and size."""
        return sorted(self.signatures)

    def sizes(self, variant: int) -> list[int]:
        """Return the batch sizes of a variant, ascending."""
        return [size for key_variant, size in self.keys() if key_variant == variant]


def lowered(bundle: Bundle, key: Key, signature: Signature) -> Any:
    """Return the jax.stages.Lowered of a module. Raises BundleError if its file has changed, or if jax refuses it."""
    import jax

    blob = read_module(bundle, key, signature)
    with _as_problem(bundle, key), jax.enable_x64(True):
        exported = as_exported(blob, signature)
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        state = bundle.manifest.state
        first = len(structs) - (len(state.tensors) if state else 0)
        # Donate the pools as the runtime does, so that no step copies a pool.
        return jax.jit(exported.call, donate_argnums=range(first, len(structs))).lower(*structs)


def compiled(bundle: Bundle, key: Key, signature: Signature) -> Any:
    """Return the jax.stages.Compiled of a module. Raises BundleError if its file has changed, or if compiling fails."""
    stage = lowered(bundle, key, signature)
    with _as_problem(bundle, key):
        return stage.compile()


@contextmanager
def _as_problem(bundle: Bundle, key: Key) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        # The compiler's text is long. Its first line is the most useful one.
        why = str(e).partition("\n")[0]
        raise BundleError(
            f"{module_file(bundle, key).name}: cannot be compiled for this machine: {why}"
        ) from e


def label(bundle: Bundle, key: Key) -> str:
    """Return a module's name in the manifest's `numerics`: its file's name without the suffix."""
    return Path(module_file(bundle, key).name).stem


def compare(
    run: ModuleRunner,
    direct: Callable[..., Sequence[Any]],
    tolerance: Mapping[str, float],
    examples: Mapping[str, Array],
    done: Callable[[str], None],
    further: Callable[[Judge], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare the results of every module with the results of `direct(*inputs)`, and with the results of the other modules.

    examples: as `random_inputs` and `example_inputs` take them.
    done: a function that is called with a module's name after its comparison with `direct`.
    further: a function that makes further comparisons.

    Return the manifest's `numerics`: max_abs_error and max_rel_error over all outputs, and the largest errors of each module by kind
    of comparison. Relative errors are divided by the output's largest magnitude. Raises BundleError, which names every module and
    output beyond its tolerance, every output whose rows influence each other, and every output without a finite value.
    """
    bundle = run.bundle
    judge = Judge(bundle, tolerance, magnitudes=partial(magnitudes, run, examples, direct))
    for key in run.keys():  # noqa: SIM118 - not a mapping
        for inputs in (random_inputs(bundle, *key, examples), example_inputs(bundle, *key, examples)):
            if inputs is not None:
                judge.source(key, run(key, inputs), direct(*inputs))
        done(label(bundle, key))
    for rows in (random_rows(run, examples), example_rows(run, examples)):
        check_buckets(run, rows, judge)
    further(judge)
    judge.raise_if_any()
    return judge.numerics()


def magnitudes(
    run: ModuleRunner, examples: Mapping[str, Array], direct: Callable[..., Sequence[Any]] | None = None
) -> dict[str, float]:
    """Return, for each output of floats, its largest magnitude over several random rows and over the examples.

    `direct` is the original model. Without it, the module itself computes the outputs.

    Errors are relative to this magnitude. A single row may be near zero by chance, but its rounding errors are as large as the
    errors of other rows.
    """
    bundle = run.bundle
    outputs = {
        index: spec for index, spec in enumerate(bundle.manifest.outputs) if not dtypes.is_whole(spec.dtype)
    }
    largest = dict.fromkeys((spec.name for spec in outputs.values()), 0.0)
    key = (0, run.sizes(0)[-1])
    pools: list[Sequence[Array] | None] = [example_inputs(bundle, *key, examples)]
    pools += [random_inputs(bundle, *key, examples, first) for first in range(0, _ROWS, key[1])]
    for inputs in pools if outputs else ():
        if inputs is None:
            continue
        answers = run(key, inputs) if direct is None else direct(*inputs)
        for index, spec in outputs.items():
            values = np.abs(np.asarray(answers[index]).astype(np.float64))
            largest[spec.name] = max(largest[spec.name], float(values[np.isfinite(values)].max(initial=0.0)))
    return largest


class Judge:
    """Collects the largest errors of a comparison, and a line for each error beyond its tolerance."""

    def __init__(
        self,
        bundle: Bundle,
        tolerance: Mapping[str, float],
        source: str = "the original model",
        magnitudes: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`source` is the name of the original model in the lines. `magnitudes` returns the largest magnitudes of the outputs."""
        self.problems = Problems()
        self.bundle = bundle
        self.tolerance = tolerance
        self.called = source
        # Magnitudes take several runs of the model. So they are computed only once, when the first error exceeds its tolerance.
        self._magnitudes = cache(magnitudes)
        self._absolute = self._relative = 0.0
        #: Errors by kind of comparison.
        self.errors: dict[str, Errors] = {}
        #: For each variant and output: the first module whose output had no finite value, or None once any module had a finite
        #: value.
        self._hollow: dict[tuple[int, str], Key | None] = {}

    def source(self, key: Key, actual: Sequence[Any], expected: Sequence[Any]) -> None:
        """Compare a module's outputs with the original model's."""
        for absolute, relative in self._compare(
            "source", key, actual, expected, f"differs from {self.called} by"
        ):
            self._absolute, self._relative = max(self._absolute, absolute), max(self._relative, relative)

    def bucket(self, key: Key, actual: Rows, expected: Rows, smallest: int) -> None:
        """Compare the same rows at two batch sizes."""
        self._compare("buckets", key, actual, expected, f"differs from that of batch size {smallest} by")

    def neighbours(self, key: Key, actual: Rows, expected: Rows) -> None:
        """Compare the first row of a batch whose other rows are zeros with the same row among other rows."""
        because = (
            "the rows of a batch are different requests, so compute each row from that row alone, or keep only other"
            " outputs with outputs= or --outputs"
        )
        self._compare(
            "rows", key, actual, expected, "its first row changes when the other rows do, by", because
        )

    def places(self, key: Key, actual: Rows, expected: Rows) -> None:
        """Compare the same rows in another order."""
        because = (
            "the rows of a batch are different requests; if they are time steps, export without batch sizes"
        )
        self._compare("rows", key, actual, expected, "a row changes with its place in the batch, by", because)

    def whole(self, key: Key, actual: Rows, expected: Rows) -> None:
        """Compare a sequence in chunks with the whole sequence."""
        self._compare(
            "chunks", key, actual, expected, f"in chunks differs from {self.called} for the whole by"
        )

    def padding(self, key: Key, actual: Rows, expected: Rows, length: str, *, noise: bool) -> None:
        """Compare a padded row with the row without padding. With `noise`, the padding is random, and the mask must hide it."""
        because = (
            "the mask must hide it"
            if noise
            else "if the model has a mask, name it with mask=; otherwise leave pad out"
        )
        filled = "random values" if noise else "padding"
        self._compare(
            "padding",
            key,
            actual,
            expected,
            f"a row of {length} changes with {filled} behind it, by",
            because,
        )

    def raise_if_any(self) -> None:
        """Raise BundleError with the errors, and with the outputs for which no finite value was compared."""
        for (_, name), key in self._hollow.items():
            if key is not None:
                self.problems.add(
                    module_file(self.bundle, key).name,
                    f"output '{name}'",
                    "no finite value to compare, so nothing is known about it; give example inputs (floats that are"
                    " not all the same) or samples on which it is finite",
                )
        self.problems.raise_if_any()

    def numerics(self) -> dict[str, Any]:
        """Return the errors as the manifest stores them."""
        entries: dict[str, Any] = {}
        if "source" in self.errors:
            entries = {"max_abs_error": self._absolute, "max_rel_error": self._relative}
        return {**entries, **{kind: dict(errors) for kind, errors in self.errors.items()}}

    def _compare(
        self,
        kind: str,
        key: Key,
        actual: Sequence[Any],
        expected: Sequence[Any],
        verb: str,
        because: str = "",
    ) -> list[tuple[float, float]]:
        errors = self.errors.setdefault(kind, {})
        name = label(self.bundle, key)
        both = []
        for spec, actual_output, expected_output in zip(
            self.bundle.manifest.outputs, actual, expected, strict=True
        ):
            actual_output, expected_output = np.asarray(actual_output), np.asarray(expected_output)
            allowed = self.tolerance.get(spec.dtype, 0.0)
            absolute, relative = difference(actual_output, expected_output)
            if allowed < relative < float("inf") and not dtypes.is_whole(spec.dtype):
                absolute, relative = difference(
                    actual_output, expected_output, self._magnitudes().get(spec.name, 0.0)
                )
            place = (key[0], spec.name)
            if relative or not expected_output.size or np.isfinite(expected_output.astype(np.float64)).any():
                self._hollow[place] = None
            else:
                self._hollow.setdefault(place, key)
            both.append((absolute, relative))
            errors[name] = max(errors.get(name, 0.0), relative)
            # Refuse an infinite error even if the tolerance allows it, because a manifest has only finite numbers.
            if not (np.isfinite(relative) and relative <= allowed):
                known = spec.dtype in self.tolerance
                limit = (
                    f"the tolerance for {spec.dtype} is {allowed:g}"
                    if known
                    else f"{spec.dtype} must be equal, unless you give a tolerance for {spec.dtype}"
                )
                parts = [f"{verb} {relative:.3g} of its largest magnitude", limit]
                if because:
                    parts.append(because)
                if 0 < absolute < relative * _TINY and np.isfinite(relative):
                    parts.append(
                        f"this magnitude is only {absolute / relative:.1g}, so also compare inputs for which the output is larger:"
                        " give example inputs, or --samples"
                    )
                self.problems.add(
                    module_file(self.bundle, key).name, f"output '{spec.name}'", "; ".join(parts)
                )
        return both


def _silent(_: str) -> None:
    pass


def check_buckets(
    run: ModuleRunner, pools: Mapping[int, Rows], judge: Judge, done: Callable[[str], None] = _silent
) -> None:
    """Run the same rows at every batch size, also in another order and among rows of zeros, and compare the results.

    On a server, other requests determine a row's neighbours, its place in the batch and the batch size. Without a batch axis, this
    function does nothing.

    done: a function that is called with a module's name after its runs.
    pools: variant -> rows.
    """
    if not run.bundle.manifest.batched:
        return
    for variant, rows in pools.items():
        smallest, *larger = run.sizes(variant)
        first = answers(run, (variant, smallest), rows)
        for size in (smallest, *larger):
            key = (variant, size)
            whole = first if size == smallest else answers(run, key, rows)
            if size != smallest:
                judge.bucket(key, whole, first, smallest)
            if size > 1:
                judge.neighbours(key, answers(run, key, _cut(rows, 1)), _cut(whole, 1))
                turned = answers(run, key, [_filled(array[:size], size)[::-1] for array in rows])
                judge.places(key, [array[::-1][: len(rows[0])] for array in turned], _cut(whole, size))
            done(label(run.bundle, key))


def check_source(
    run: ModuleRunner,
    source: Callable[[Rows], Rows],
    pools: Mapping[int, Rows],
    judge: Judge,
    done: Callable[[str], None] = _silent,
) -> None:
    """Compare every module with `source`, which gets the inputs in batches for the largest module of the variant.

    done: a function that is called with a module's name after its runs.
    """
    for variant, rows in pools.items():
        sizes = run.sizes(variant)
        expected = in_batches(run.bundle, sizes[-1], rows, source)
        for size in sizes:
            key = (variant, size)
            judge.source(key, answers(run, key, rows), expected)
            done(label(run.bundle, key))


def answers(run: ModuleRunner, key: Key, rows: Rows) -> list[Array]:
    """Return a module's results for these rows, in as many executions as necessary."""
    return in_batches(run.bundle, key[1], rows, lambda inputs: run(key, inputs))


def in_batches(bundle: Bundle, size: int, rows: Rows, ask: Callable[[list[Array]], Rows]) -> list[Array]:
    """Call `ask` with batches of `size` rows, of which the last one is padded with zeros, as on a server.

    Return one array for each output, whose first axis counts the rows. If an output has no batch axis, each row has the value of its
    batch.
    """
    inputs, outputs = bundle.manifest.inputs, bundle.manifest.outputs
    step = size if bundle.manifest.batched else 1
    # A model without inputs has one answer.
    count = len(rows[0]) if rows else 1
    parts: list[list[Array]] = [[] for _ in outputs]
    for start in range(0, count, step):
        chunk = [array[start : start + step] for array in rows]
        results = ask([_batch(spec, array, step) for spec, array in zip(inputs, chunk, strict=True)])
        for part, spec, value in zip(parts, outputs, results, strict=True):
            part.append(rows_of_output(spec, np.asarray(value), min(step, count - start)))
    return [np.concatenate(part) for part in parts]


def _batch(spec: TensorSpec, rows: Array, size: int) -> Array:
    return rows[0] if spec.batch_axis is None else np.moveaxis(_filled(rows, size), 0, spec.batch_axis)


def _filled(rows: Array, size: int) -> Array:
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


def rows_of_output(spec: TensorSpec, value: Array, count: int) -> Array:
    """Return the first `count` rows of an output of a module. Without a batch axis, the output is repeated for each row."""
    if spec.batch_axis is None:
        return np.broadcast_to(value, (count, *value.shape))
    return np.moveaxis(value, spec.batch_axis, 0)[:count]


def _cut(rows: Rows, count: int) -> list[Array]:
    return [array[:count] for array in rows]


def random_rows(run: ModuleRunner, examples: Mapping[str, Array] = MappingProxyType({})) -> dict[int, Rows]:
    """Return for each variant as many random rows as its largest module takes. They are the same in every process.

    examples: as `random_inputs` takes them.
    """
    return {
        variant: rows_of_inputs(
            run.bundle, random_inputs(run.bundle, variant, run.sizes(variant)[-1], examples)
        )
        for variant in range(run.bundle.variants)
    }


def example_rows(run: ModuleRunner, examples: Mapping[str, Array]) -> dict[int, Rows]:
    """Return for each variant the rows of the examples, at most as many as its largest module takes.

    Return an empty mapping if the examples are constant.

    examples: as `example_inputs` takes them.
    """
    pools: dict[int, Rows] = {}
    for variant in range(run.bundle.variants):
        inputs = example_inputs(run.bundle, variant, run.sizes(variant)[-1], examples)
        if inputs is not None:
            pools[variant] = _cut(rows_of_inputs(run.bundle, inputs), row_count(run.bundle, examples))
    return pools


def rows_of_inputs(bundle: Bundle, inputs: Sequence[Array]) -> Rows:
    """Return executable inputs as rows."""
    return [
        array[np.newaxis] if spec.batch_axis is None else np.moveaxis(array, spec.batch_axis, 0)
        for spec, array in zip(bundle.manifest.inputs, inputs, strict=True)
    ]


def difference(got: Array, expected: Array, magnitude: float = 0.0) -> tuple[float, float]:
    """Return the largest absolute difference, and this difference relative to the largest magnitude of `expected`.

    Both are infinite if only one of two values is finite, or if their infinities or NaNs differ. They are never 0 for
    unequal integers.

    magnitude: largest magnitude of other values of the same output. It is used if it exceeds the magnitude of `expected`.
    """
    if got.size == 0:
        return 0.0, 0.0
    a, b = got.astype(np.float64), expected.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf"), float("inf")
    if not finite.any():
        return 0.0, 0.0
    absolute = float(np.abs(a[finite] - b[finite]).max())
    if got.dtype.kind in "iub" and not np.array_equal(got, expected):
        # As floats, large 64-bit integers may be equal although they differ. So the difference is at least 1.
        absolute = max(1.0, absolute)
    scale = max(float(np.abs(b[finite]).max()), magnitude)
    return absolute, absolute / scale if scale else absolute

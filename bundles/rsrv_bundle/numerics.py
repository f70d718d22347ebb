"""Running the modules of a bundle, and comparing what they answer: with each other, and with what they were made from.

Needs jax, but for the arithmetic. All modules run on jax's default device, whichever they were lowered for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rsrv_bundle.errors import BundleError, Problems
from rsrv_bundle.inputs import example_inputs, random_inputs, row_count
from rsrv_bundle.modules import (
    Look,
    Signature,
    as_exported,
    check_signatures,
    module_file,
    read_module,
    signature_of,
)
from rsrv_bundle.spec import Bundle, TensorSpec
from rsrv_bundle.weights import load_weights

Array = np.ndarray[Any, Any]
#: (variant, batch size)
Key = tuple[int, int]
#: One array per input or output, of any number of rows; the first axis counts them, wherever the tensor has its batch
#: axis. Without a batch axis each row is a request of its own.
Rows = Sequence[Array]
#: module, by its file's name without ".mlir" -> the largest relative error found there
Errors = dict[str, float]

#: Largest error allowed, relative to the largest magnitude of an output; element types not listed must be equal, unless
#: somebody gives a tolerance for them.
TOLERANCE: Mapping[str, float] = {
    "f64": 1e-9,
    "f32": 1e-4,
    "f16": 1e-2,
    "bf16": 3e-2,
    "f8_e4m3": 0.15,
    "f8_e5m2": 0.3,
}


class ModuleRunner:
    """A bundle's modules, each compiled when it is first asked, with the weights as read from the file."""

    def __init__(self, bundle: Bundle, look: Look = signature_of) -> None:
        """Each module is shown to `look` first. Raises BundleError if one disagrees with the manifest."""
        import jax

        self.bundle = bundle
        self.signatures = check_signatures(bundle, look)
        with jax.enable_x64(True):
            self._weights = jax.device_put(load_weights(bundle))
        self._compiled: dict[Key, Any] = {}

    def __call__(self, key: Key, inputs: Sequence[Array]) -> list[Array]:
        """The declared outputs of a module for executable inputs. Raises BundleError if it cannot be compiled here."""
        import jax

        if key not in self._compiled:
            self._compiled[key] = compiled(self.bundle, key, self.signatures[key])
        with jax.enable_x64(True):
            found = self._compiled[key](*inputs, *self._weights)
            return [np.asarray(value) for value, _ in zip(found, self.bundle.manifest.outputs, strict=False)]

    def keys(self) -> list[Key]:
        """By variant, then by size."""
        return sorted(self.signatures)

    def sizes(self, variant: int) -> list[int]:
        """Ascending."""
        return [size for other, size in self.keys() if other == variant]


def lowered(bundle: Bundle, key: Key, signature: Signature) -> Any:
    """The jax.stages.Lowered of a module. Raises BundleError if its file has changed, or if this jax cannot."""
    import jax

    blob = read_module(bundle, key, signature)
    with _as_problem(bundle, key), jax.enable_x64(True):
        exported = as_exported(blob, signature)
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
        return jax.jit(exported.call).lower(*structs)


def compiled(bundle: Bundle, key: Key, signature: Signature) -> Any:
    """The jax.stages.Compiled of a module. Raises BundleError if its file has changed, or if this machine cannot."""
    found = lowered(bundle, key, signature)
    with _as_problem(bundle, key):
        return found.compile()


@contextmanager
def _as_problem(bundle: Bundle, key: Key) -> Iterator[None]:
    try:
        yield
    except Exception as e:
        # The compiler's own; it is long, and its first line says the most.
        why = str(e).partition("\n")[0]
        raise BundleError(
            f"{module_file(bundle, key).name}: cannot be compiled for this machine: {why}"
        ) from e


def label(bundle: Bundle, key: Key) -> str:
    """What a module is called in the manifest's `numerics`: its file's name without the ending."""
    return Path(module_file(bundle, key).name).stem


def compare(
    bundle: Bundle,
    direct: Callable[..., Sequence[Any]],
    tolerance: Mapping[str, float],
    examples: Mapping[str, Array],
    done: Callable[[str], None],
) -> dict[str, Any]:
    """Run every module, with the weights as read from the file, against `direct(*inputs)`, and against each other.

    examples: as `random_inputs` and `example_inputs` take them.
    done: is called with a module's name when it has been compared with `direct`.

    Returns the manifest's `numerics`: max_abs_error and max_rel_error over all outputs, and by module `source`, and what
    `check_buckets` returns; relative means divided by the output's largest magnitude. Raises BundleError naming every
    module and output that is further away than its tolerance, every output whose rows are not treated apart, and every
    one of which nothing finite was compared.
    """
    judge = Judge(bundle, tolerance)
    run = ModuleRunner(bundle)
    for key in run.keys():  # noqa: SIM118 - not a mapping
        for inputs in (random_inputs(bundle, *key, examples), example_inputs(bundle, *key, examples)):
            if inputs is not None:
                judge.source(key, run(key, inputs), direct(*inputs))
        done(label(bundle, key))
    for rows in (random_rows(run, examples), example_rows(run, examples)):
        check_buckets(run, rows, judge)
    judge.raise_if_any()
    return judge.numerics()


class Judge:
    """Keeps the largest errors that were found, and a line for each that is beyond its tolerance."""

    def __init__(self, bundle: Bundle, tolerance: Mapping[str, float], source: str = "fn") -> None:
        """`source` is what the lines call what the bundle was made from."""
        self.problems = Problems()
        self.bundle = bundle
        self.tolerance = tolerance
        self.called = source
        self._absolute = self._relative = 0.0
        #: kind of comparison -> errors
        self.errors: dict[str, Errors] = {}
        #: (variant, output) -> nothing but infinities and NaNs so far, and in which module that was first
        self._hollow: dict[tuple[int, str], Key | None] = {}

    def source(self, key: Key, found: Sequence[Any], expected: Sequence[Any]) -> None:
        """A module's outputs against those of what it was made from."""
        for absolute, relative in self._compare(
            "source", key, found, expected, f"differs from {self.called} by"
        ):
            self._absolute, self._relative = max(self._absolute, absolute), max(self._relative, relative)

    def bucket(self, key: Key, found: Rows, expected: Rows, smallest: int) -> None:
        """The same rows at two batch sizes."""
        self._compare("buckets", key, found, expected, f"differs from that of batch size {smallest} by")

    def neighbours(self, key: Key, found: Rows, expected: Rows) -> None:
        """A row beside zeros, and beside others."""
        because = f"the rows of a batch are different requests, so {self.called} must treat them apart"
        self._compare(
            "rows", key, found, expected, "its first row changes when the other rows do, by", because
        )

    def places(self, key: Key, found: Rows, expected: Rows) -> None:
        """The same rows in another order."""
        self._compare("rows", key, found, expected, "a row changes with its place in the batch, by")

    def raise_if_any(self) -> None:
        """Raises BundleError with what was found, and with the outputs of which no finite value was compared."""
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
        """As the manifest stores it."""
        found: dict[str, Any] = {}
        if "source" in self.errors:
            found = {"max_abs_error": self._absolute, "max_rel_error": self._relative}
        return {**found, **{kind: dict(errors) for kind, errors in self.errors.items()}}

    def _compare(
        self,
        kind: str,
        key: Key,
        found: Sequence[Any],
        expected: Sequence[Any],
        verb: str,
        because: str = "",
    ) -> list[tuple[float, float]]:
        errors = self.errors.setdefault(kind, {})
        name = label(self.bundle, key)
        both = []
        for spec, got, want in zip(self.bundle.manifest.outputs, found, expected, strict=True):
            got, want = np.asarray(got), np.asarray(want)
            absolute, relative = difference(got, want)
            place = (key[0], spec.name)
            if relative or not want.size or np.isfinite(want.astype(np.float64)).any():
                self._hollow[place] = None
            else:
                self._hollow.setdefault(place, key)
            both.append((absolute, relative))
            errors[name] = max(errors.get(name, 0.0), relative)
            allowed = self.tolerance.get(spec.dtype, 0.0)
            # An infinite one is no number for the manifest, whatever is allowed.
            if not (np.isfinite(relative) and relative <= allowed):
                known = spec.dtype in self.tolerance
                limit = (
                    f"the tolerance for {spec.dtype} is {allowed:g}"
                    if known
                    else f"{spec.dtype} must be equal, unless you give a tolerance for {spec.dtype}"
                )
                rule = f"{verb} {relative:.3g} of its largest magnitude; {limit}"
                self.problems.add(
                    module_file(self.bundle, key).name,
                    f"output '{spec.name}'",
                    f"{rule}; {because}" if because else rule,
                )
        return both


def _silent(_: str) -> None:
    pass


def check_buckets(
    run: ModuleRunner, pools: Mapping[int, Rows], judge: Judge, done: Callable[[str], None] = _silent
) -> None:
    """Ask the same rows at every batch size, and in one at other places and beside zeros.

    done: is called with a module's name when it has been asked.
    pools: variant -> rows. What a row's neighbours are, where in the batch it is and how large that is, is decided by
    which other requests there happen to be. Without a batch axis nothing is.
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
    """Every module against `source`, which gets executable inputs as the largest module of the variant does.

    done: is called with a module's name when it has been asked.
    """
    for variant, rows in pools.items():
        sizes = run.sizes(variant)
        expected = in_batches(run.bundle, sizes[-1], rows, source)
        for size in sizes:
            key = (variant, size)
            judge.source(key, answers(run, key, rows), expected)
            done(label(run.bundle, key))


def answers(run: ModuleRunner, key: Key, rows: Rows) -> list[Array]:
    """What a module answers to these rows, in as many executions as it takes."""
    return in_batches(run.bundle, key[1], rows, lambda inputs: run(key, inputs))


def in_batches(bundle: Bundle, size: int, rows: Rows, ask: Callable[[list[Array]], Rows]) -> list[Array]:
    """Ask in batches of `size` rows, the last one filled up with zeros, as the server does.

    Returns one array per output, first axis counts the rows; of an output without a batch axis each row has the one of
    its batch.
    """
    inputs, outputs = bundle.manifest.inputs, bundle.manifest.outputs
    step = size if bundle.manifest.batched else 1
    # A model without inputs has one answer.
    count = len(rows[0]) if rows else 1
    parts: list[list[Array]] = [[] for _ in outputs]
    for start in range(0, count, step):
        chunk = [array[start : start + step] for array in rows]
        found = ask([_batch(spec, array, step) for spec, array in zip(inputs, chunk, strict=True)])
        for part, spec, value in zip(parts, outputs, found, strict=True):
            part.append(_rows_of(spec, np.asarray(value), min(step, count - start)))
    return [np.concatenate(part) for part in parts]


def _batch(spec: TensorSpec, rows: Array, size: int) -> Array:
    return rows[0] if spec.batch_axis is None else np.moveaxis(_filled(rows, size), 0, spec.batch_axis)


def _filled(rows: Array, size: int) -> Array:
    return np.concatenate([rows, np.zeros((size - len(rows), *rows.shape[1:]), rows.dtype)])


def _rows_of(spec: TensorSpec, value: Array, count: int) -> Array:
    if spec.batch_axis is None:
        return np.broadcast_to(value, (count, *value.shape))
    return np.moveaxis(value, spec.batch_axis, 0)[:count]


def _cut(rows: Rows, count: int) -> list[Array]:
    return [array[:count] for array in rows]


def random_rows(run: ModuleRunner, examples: Mapping[str, Array] = MappingProxyType({})) -> dict[int, Rows]:
    """For each variant as many rows as its largest module takes; the same ones in every process.

    examples: as `random_inputs` takes them.
    """
    return {
        variant: _as_rows(run.bundle, random_inputs(run.bundle, variant, run.sizes(variant)[-1], examples))
        for variant in range(run.bundle.variants)
    }


def example_rows(run: ModuleRunner, examples: Mapping[str, Array]) -> dict[int, Rows]:
    """For each variant the examples' own rows, at most as many as its largest module takes; empty if they say nothing.

    examples: as `example_inputs` takes them.
    """
    pools: dict[int, Rows] = {}
    for variant in range(run.bundle.variants):
        inputs = example_inputs(run.bundle, variant, run.sizes(variant)[-1], examples)
        if inputs is not None:
            pools[variant] = _cut(_as_rows(run.bundle, inputs), row_count(run.bundle, examples))
    return pools


def _as_rows(bundle: Bundle, inputs: Sequence[Array]) -> Rows:
    return [
        array[np.newaxis] if spec.batch_axis is None else np.moveaxis(array, spec.batch_axis, 0)
        for spec, array in zip(bundle.manifest.inputs, inputs, strict=True)
    ]


def difference(got: Array, want: Array) -> tuple[float, float]:
    """(largest absolute difference, that divided by the largest magnitude of `want`); infinite where only one of
    the two is finite, or their infinities or NaNs differ. Integers that are not equal never give 0."""
    if got.size == 0:
        return 0.0, 0.0
    a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return float("inf"), float("inf")
    if not finite.any():
        return 0.0, 0.0
    absolute = float(np.abs(a[finite] - b[finite]).max())
    if got.dtype.kind in "iub" and not np.array_equal(got, want):
        # Neighbours among large 64-bit integers are equal as floats.
        absolute = max(1.0, absolute)
    scale = float(np.abs(b[finite]).max())
    return absolute, absolute / scale if scale else absolute

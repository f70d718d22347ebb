"""`rsrv-bundle check --numerics`: run a bundle's modules and compare their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rsrv.progress import steps
from rsrv_bundle import writer
from rsrv_bundle.calling import Results
from rsrv_bundle.commands.samples import rows_of
from rsrv_bundle.errors import BundleError
from rsrv_bundle.inputs import acceptable, integers_of
from rsrv_bundle.modules import SignatureReader
from rsrv_bundle.numerics import (
    TOLERANCE,
    Array,
    Judge,
    ModuleRunner,
    Rows,
    check_buckets,
    check_source,
    example_rows,
    label,
    magnitudes,
    random_rows,
)
from rsrv_bundle.padding_check import check_padding
from rsrv_bundle.spec import Bundle

#: A function that takes executable inputs by name, of any compiled batch size. It returns outputs as `Results.of` takes them.
Source = Callable[..., Any]


class SourceError(Exception):
    """The model that the bundle is compared with failed, or its outputs do not fit the bundle. The bundle may be valid."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Inputs, source and tolerances of a comparison."""

    source: Source | None = None
    #: Samples as `samples.rows_of` takes them, or None.
    samples: Mapping[str, Array] | None = None
    #: Examples by executable input, as `numerics.example_inputs` takes them. Without samples, the integers of random inputs are
    #: values of these examples.
    examples: Mapping[str, Any] = field(default_factory=dict)
    #: Tolerances by element type. They replace entries of TOLERANCE, and tolerances in the manifest of a narrow bundle.
    tolerance: Mapping[str, float] = field(default_factory=dict)
    #: True to write the measured errors into the manifest.
    store: bool = False


def agree(bundle: Bundle, comparison: Comparison, read_signature: SignatureReader) -> list[str]:
    """Run a bundle's modules on random inputs and on the samples. Return a line for each module.

    Raises BundleError with a line for each module and output that exceeds its tolerance. In this case, the manifest does not
    change. Also raises SourceError and OSError.
    """
    if bundle.manifest.kind == "meta":
        return ["has no modules of its own"]
    if comparison.store and bundle.manifest.format_version == "2.0":
        raise BundleError(
            "manifest.yaml: format 2.0 has no place for numerics; run `rsrv-bundle convert` first"
        )
    run = ModuleRunner(bundle, read_signature)
    samples = {} if comparison.samples is None else rows_of(bundle, comparison.samples)
    examples = _arrays(comparison.examples)
    # A bundle may lack inputs and outputs of its ONNX file. The bundle's provenance stores these changes, and `of` applies them.
    adapt = getattr(comparison.source, "of", None)
    original = comparison.source if adapt is None else adapt(bundle.manifest.provenance)
    source = None if original is None else _by_name(bundle, original)
    values = acceptable(bundle, examples, source) | integers_of(bundle, samples)
    narrowed = bundle.manifest.numerics.get("narrowed_tolerance")
    tolerance = {**TOLERANCE, **(narrowed if isinstance(narrowed, Mapping) else {}), **comparison.tolerance}
    direct = None if source is None else lambda *inputs: source(inputs)
    judge = Judge(bundle, tolerance, "its source", partial(magnitudes, run, values, direct))
    pools: list[Mapping[int, Rows]] = [random_rows(run, values), example_rows(run, examples), samples]
    executions = sum(len(run.sizes(variant)) for rows in pools for variant in rows)
    comparisons = int(bundle.manifest.batched) + int(source is not None)
    with steps(f"{bundle.name}: comparing", executions * comparisons) as progress:
        for rows in pools:
            check_buckets(run, rows, judge, progress.step)
            if source is not None:
                check_source(run, source, rows, judge, progress.step)
        check_padding(run, judge, values)
    judge.raise_if_any()
    if comparison.store:
        writer.store_numerics(bundle.path / "manifest.yaml", judge.numerics())
    return _lines(run, judge)


def _arrays(examples: Mapping[str, Any]) -> dict[str, Array]:
    """Return the examples that numpy can read. PyTorch's bf16 and shapes without values are left out."""
    arrays = {}
    for name, value in examples.items():
        with suppress(TypeError, RuntimeError):
            arrays[name] = np.asarray(value)
    return arrays


#: For each kind of comparison, the words that follow its largest error in the report.
_WORDS = {
    "buckets": "from the smallest batch size",
    "rows": "among rows and places",
    "source": "from its source",
    "padding": "from unpadded rows",
}


def _lines(run: ModuleRunner, judge: Judge) -> list[str]:
    """Return a line for each module that was compared."""
    lines = []
    for name in (label(run.bundle, key) for key in run.keys()):  # noqa: SIM118 - not a mapping
        errors = {kind: judge.errors.get(kind, {}).get(name) for kind in _WORDS}
        errors_in_words = [
            f"{error:.3g} {_WORDS[kind]}" for kind, error in errors.items() if error is not None
        ]
        if errors_in_words:
            lines.append(f"{name}: {', '.join(errors_in_words)}")
    return lines


def _by_name(bundle: Bundle, source: Source) -> Callable[[Rows], Rows]:
    """Return the source with the calling convention of a module."""
    inputs = [spec.name for spec in bundle.manifest.inputs]
    outputs = [spec.name for spec in bundle.manifest.outputs]

    def call(arrays: Rows) -> list[Array]:
        try:
            result = source(**dict(zip(inputs, arrays, strict=True)))
        except Exception as e:
            cure = (
                "; if the model accepts only some integers, let the factory also return example inputs with such values, or give --samples"
                if any(spec.dtype[0] in "iu" for spec in bundle.manifest.inputs)
                else ""
            )
            raise SourceError(f"the source raised {type(e).__name__}: {e}{cure}") from e
        try:
            results = Results.of(result)
            # A positional result gets the names that the bundle's author gave, unless the bundle uses the positional names.
            renamed = results.positional and not set(outputs) <= set(results.names)
            named = results.named(outputs if renamed else None, outputs)
        except BundleError as e:
            raise SourceError(f"the source: {e}") from e
        answers = [np.asarray(value) for value in named.values()]
        for spec, array in zip(bundle.manifest.outputs, answers, strict=True):
            fixed = [size in (-1, actual) for size, actual in zip(spec.dims, array.shape, strict=False)]
            if array.ndim != len(spec.dims) or not all(fixed):
                raise SourceError(
                    f"the source returns '{spec.name}' as {list(array.shape)}, but the bundle returns {list(spec.dims)}, where"
                    " -1 is any size"
                )
        return answers

    return call

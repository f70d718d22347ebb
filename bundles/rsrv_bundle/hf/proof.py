"""Comparison of a bundle's whole answers, hooks included, with the answers of the framework that the directory is for."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from rsrv.command import put
from rsrv.hooks import BadInput
from rsrv.hooks.loader import load_hooks
from rsrv.progress import steps
from rsrv_bundle.errors import BundleError, summary
from rsrv_bundle.hf.recipe import Array, HubRecipe, Request
from rsrv_bundle.numerics import ModuleRunner, answers, difference
from rsrv_bundle.padding import cut, fitted, length_of
from rsrv_bundle.spec import Bundle


class ServedBundle:
    """A bundle that answers as a server would: `preprocess`, the smallest module that holds the rows, and `postprocess`."""

    def __init__(self, bundle: Bundle) -> None:
        """Read model.py and the modules. Raises BundleError, HookError and errors of model.py."""
        self.bundle = bundle
        self._hooks = load_hooks(bundle.path / "model.py")
        self._run = ModuleRunner(bundle)

    def __call__(self, request: Request) -> dict[str, Array]:
        """Answer a request of one or more rows. Raises BadInput if the request is at fault."""
        manifest = self.bundle.manifest
        inputs = request if self._hooks.preprocess is None else self._hooks.preprocess(request)
        arrays = [inputs[spec.name] for spec in manifest.inputs]
        variant, padded = fitted(self.bundle, arrays)
        if variant is None:
            raise BundleError(
                f"model.py: makes inputs of the shapes {[array.shape for array in arrays]}, which no variant has"
            )
        sizes = self._run.sizes(variant)
        size = next((size for size in sizes if size >= len(arrays[0])), sizes[-1])
        results = answers(self._run, (variant, size), padded)
        length = length_of(manifest, arrays)
        outputs = {
            spec.name: array if length is None else cut(manifest, spec, array, length)
            for spec, array in zip(manifest.outputs, results, strict=True)
        }
        return outputs if self._hooks.postprocess is None else self._hooks.postprocess(outputs)


def prove(bundle: Bundle, recipe: HubRecipe, tolerance: float) -> dict[str, float]:
    """Compare a bundle's answers with the reference on all samples. Return the largest error of each output.

    Print a note about an output that is empty for all samples. Raises BundleError with the samples whose answers differ by more
    than `tolerance` of the largest magnitude.
    """
    served = ServedBundle(bundle)
    errors: dict[str, float] = {}
    empty: dict[str, bool] = {}
    problems: list[str] = []
    with steps(f"prove {bundle.name}", len(recipe.samples)) as progress:
        for name, request in recipe.samples.items():
            try:
                got = served(request)
            except BadInput as e:
                raise BundleError(f"sample '{name}': the hooks refuse it: {e}") from e
            try:
                expected = recipe.reference(request)
            except Exception as e:
                raise BundleError(f"sample '{name}': {recipe.source} itself fails: {summary(e)}") from e
            for output, reference in expected.items():
                error = _error(got[output][0], reference)
                errors[output] = max(errors.get(output, 0.0), error)
                empty[output] = (
                    empty.get(output, True) and isinstance(reference, list | str) and not reference
                )
                if not error <= tolerance:
                    problems.append(
                        f"sample '{name}': {output} differs from {recipe.source} by {error:.3g} of its largest magnitude; the"
                        f" tolerance is {tolerance:g}"
                    )
            progress.step(name)
    if problems:
        raise BundleError(problems[:20])
    for output in (output for output, always in empty.items() if always):
        put(
            f"{bundle.name}: {output} is empty for all samples, which proves little; give your own samples with --samples",
            sys.stderr,
        )
    return errors


def _error(got: Array, reference: Any) -> float:
    """Return the relative error of one row's output.

    Strings are compared as parsed JSON, or as texts if `reference` is a text. The error of unequal texts is infinite.
    """
    if got.dtype != object:
        expected = np.asarray(reference)
        if got.shape != expected.shape:
            return float("inf")
        if got.ndim == 2 and got.dtype.kind in "iu":
            # For a map of classes, the error is the share of pixels with another class, because rounding decides between equally
            # likely classes.
            return float((got != expected).mean())
        return difference(got, expected)[1]
    text = got.reshape(-1)[0].decode()
    return _tree_error(text if isinstance(reference, str) else json.loads(text), reference)


def _tree_error(got: Any, expected: Any) -> float:
    """Return the largest error of the numbers in two JSON documents. It is infinite if anything else differs."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping) and got.keys() == expected.keys():
        # The sides of a box are whole pixels, so 12.9999 and 13.0 may become different numbers. Ignore such small differences.
        return max(
            (_tree_error(got[key], expected[key]) for key in expected if not _is_side(key, got, expected)),
            default=0.0,
        )
    if isinstance(expected, list | tuple) and isinstance(got, list) and len(got) == len(expected):
        return max((_tree_error(a, b) for a, b in zip(got, expected, strict=True)), default=0.0)
    if isinstance(expected, float) or isinstance(got, float):
        error = abs(float(got) - float(expected)) / max(1.0, abs(float(expected)))
        # max() may return a number although one of its arguments is NaN.
        return error if math.isfinite(error) else math.inf
    return 0.0 if got == expected else float("inf")


def _is_side(key: str, got: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return True if a value is a side of a box, and differs by at most one pixel."""
    return key in ("xmin", "ymin", "xmax", "ymax") and abs(got[key] - expected[key]) <= 1

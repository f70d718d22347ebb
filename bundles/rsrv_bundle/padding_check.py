"""Check that padding changes no answer. It pads rows of many lengths to every variant, and executes them together. Needs jax."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np

from rsrv_bundle.errors import BundleError, PaddingError
from rsrv_bundle.inputs import random_inputs
from rsrv_bundle.numerics import Array, Judge, ModuleRunner, Rows, answers, rows_of_inputs, rows_of_output
from rsrv_bundle.padding import cut
from rsrv_bundle.spec import PadSpec

#: Returns outputs for inputs of any length.
Direct = Callable[..., Sequence[Any]]


def check_padding(
    run: ModuleRunner,
    judge: Judge,
    examples: Mapping[str, Array] = MappingProxyType({}),
    direct: Direct | None = None,
) -> None:
    """Compare padded rows with the same rows alone, at their own lengths. Without a padded axis, do nothing.

    The padding first has the manifest's values. If there is a mask, the padding of the other inputs then gets random values. The mask
    is 1 on a row's own elements, or 0 if the mask's padding value is not 0.

    direct: the original model. Without it, the reference is the smallest variant that holds a row.

    Raises PaddingError if the original model fails at a length, or if outputs differ. The error names the differing outputs of
    the first module that has any.
    """
    pad = run.bundle.manifest.pad
    if pad is None:
        return
    judge.raise_if_any()
    try:
        _Check(run, judge, examples, pad).compare(direct)
    except BundleError as e:
        raise PaddingError(e.problems) from e


class _Check:
    """Comparison that uses one row of each length."""

    def __init__(self, run: ModuleRunner, judge: Judge, examples: Mapping[str, Array], pad: PadSpec) -> None:
        self.run = run
        self.judge = judge
        self.examples = examples
        self.pad = pad
        self.manifest = run.bundle.manifest
        #: Compiled length of each variant.
        self.compiled = [sizes[0] for sizes in self.manifest.input_shapes]
        between = [(shorter + longer + 1) // 2 for shorter, longer in pairwise([0, *self.compiled])]
        self.lengths = sorted({1, *self.compiled, *between})
        rows = self._random(len(self.compiled) - 1, len(self.lengths), first=0)
        #: Inputs of the row, by length.
        self.own = {
            length: [
                cut(self.manifest, spec, array[at : at + 1], length)
                for spec, array in zip(self.manifest.inputs, rows, strict=True)
            ]
            for at, length in enumerate(self.lengths)
        }
        for inputs in self.own.values():
            for spec, array in zip(self.manifest.inputs, inputs, strict=True):
                if spec.name == pad.mask:
                    array[...] = 0 if pad.values[spec.name] else 1

    def compare(self, direct: Direct | None) -> None:
        outputs = self.manifest.outputs
        expected = {length: self._alone(length, direct) for length in self.lengths}
        for variant, longest in enumerate(self.compiled):
            lengths = [length for length in self.lengths if length <= longest]
            for noise in (False, True) if self.pad.mask else (False,):
                rows = self._padded(variant, lengths, noise=noise)
                for key in ((variant, size) for size in self.run.sizes(variant)):
                    arrays = answers(self.run, key, rows)
                    for at, length in enumerate(lengths):
                        row = [
                            cut(self.manifest, spec, array[at : at + 1], length)
                            for spec, array in zip(outputs, arrays, strict=True)
                        ]
                        self.judge.padding(
                            key, row, expected[length], f"{self.pad.axis}={length}", noise=noise
                        )
                    self.judge.raise_if_any()

    def _alone(self, length: int, direct: Direct | None) -> list[Array]:
        """Return the outputs of the row with this length, alone and without padding."""
        outputs = self.manifest.outputs
        if direct is None:
            variant = next(at for at, longest in enumerate(self.compiled) if longest >= length)
            key = (variant, self.run.sizes(variant)[0])
            arrays = answers(self.run, key, self._padded(variant, [length], noise=False))
        else:
            inputs = [
                np.moveaxis(array, 0, spec.batch_axis or 0)
                for spec, array in zip(self.manifest.inputs, self.own[length], strict=True)
            ]
            try:
                results = direct(*inputs)
            except Exception as e:
                raise BundleError(
                    f"pad: the model fails at {self.pad.axis}={length} ({type(e).__name__}: {e}), but a padded axis takes every"
                    f" length from 1 to {self.compiled[-1]}; leave pad out"
                ) from e
            arrays = [
                rows_of_output(spec, np.asarray(value), 1)
                for spec, value in zip(outputs, results, strict=True)
            ]
        return [cut(self.manifest, spec, array, length) for spec, array in zip(outputs, arrays, strict=True)]

    def _padded(self, variant: int, lengths: Sequence[int], *, noise: bool) -> Rows:
        """Return the rows of these lengths, padded to a variant."""
        padded = self._random(variant, len(lengths), first=1)
        for index, (spec, array) in enumerate(zip(self.manifest.inputs, padded, strict=True)):
            if spec.name in self.pad.values and (not noise or spec.name == self.pad.mask):
                array[...] = self.pad.values[spec.name]
            for at, length in enumerate(lengths):
                cut(self.manifest, spec, array[at : at + 1], length)[...] = self.own[length][index]
        return padded

    def _random(self, variant: int, count: int, first: int) -> list[Array]:
        """Return rows of random inputs, as writable arrays."""
        inputs = random_inputs(self.run.bundle, variant, count, self.examples, first)
        return [array.copy() for array in rows_of_inputs(self.run.bundle, inputs)]

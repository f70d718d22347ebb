"""Padding of requests along one axis: the section `pad` of a manifest, the option `--pad`, and padded arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.errors import BundleError
from rsrv_bundle.interface import InputPlan
from rsrv_bundle.spec import Bundle, Manifest, PadSpec, TensorSpec

Array = np.ndarray[Any, Any]
Report = Callable[[str, str], None]

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_USAGE = "write LETTER=VALUE,mask=INPUT, and INPUT=VALUE for an input with a value of its own"


def section_of(pad: PadSpec | None) -> dict[str, Any]:
    """Return the section `pad` of a manifest, or an empty mapping without a padded axis."""
    if pad is None:
        return {}
    return {"pad": {pad.axis: {"values": dict(pad.values)} | ({"mask": pad.mask} if pad.mask else {})}}


def parse_pad(section: Any, manifest: Manifest, bad: Report) -> PadSpec | None:
    """Parse the section `pad` of a manifest that is otherwise complete. Report features that such a model may not have."""
    if (
        not isinstance(section, dict)
        or len(section) != 1
        or not isinstance(next(iter(section.values())), dict)
    ):
        bad("pad", "must map the letter of one axis to its values, such as {t: {values: {tokens: 0}}}")
        return None
    [(axis, entry)] = section.items()
    values, mask = entry.get("values"), entry.get("mask")
    letters = {manifest.inputs[index].letters[at] for index, at in manifest.variable_axes}
    if letters != {axis}:
        bad(
            "pad",
            f"'{axis}' must be the only axis of size -1 of the inputs; these are {', '.join(sorted(letters)) or 'none'}",
        )
        return None
    specs = {spec.name: spec for spec in manifest.inputs if spec.variable_axes}
    if not isinstance(values, dict) or values.keys() != specs.keys():
        bad(f"pad.{axis}.values", f"must give a value for each input with the axis: {', '.join(specs)}")
        return None
    for name, value in values.items():
        if problem := _problem(value, specs[name].dtype):
            bad(f"pad.{axis}.values.{name}", problem)
    if mask is not None and (not isinstance(mask, str) or mask not in specs):
        bad(f"pad.{axis}.mask", f"names no input with the axis '{axis}'")
    lengths = [sizes[0] for sizes in manifest.input_shapes if sizes]
    if lengths != sorted(lengths):
        bad("input_shapes", f"the padded axis '{axis}' needs its lengths in ascending order")
    for spec in (*manifest.inputs, *manifest.outputs):
        if spec.batch_axis is None:
            bad("pad", f"'{spec.name}' has no batch axis, so requests cannot share an execution")
    for spec in manifest.outputs:
        if any(spec.letters[at] != axis for at in spec.variable_axes):
            bad(
                f"executable_outputs.{spec.name}",
                f"only its axis '{axis}' may have size -1: the server cuts it back to a request's length",
            )
    return PadSpec(axis, values, mask)


def _problem(value: Any, dtype: str) -> str | None:
    """Return why a value cannot fill a tensor, or None if it can."""
    if not isinstance(value, bool | int | float):
        return f"must be a number, not {value!r:.40}"
    if dtype == "bool":
        return None if value in (0, 1) else f"must be true or false, not {value}"
    if dtype[0] in "iu":
        limits = np.iinfo(dtypes.numpy_dtype(dtype))
        if not isinstance(value, int) or not limits.min <= value <= limits.max:
            return f"must be a whole number that fits {dtype}, not {value}"
    elif not _fits(value, dtype):
        return f"must be a number that fits {dtype}, not {value!s:.40}"
    return None


def _fits(value: float, dtype: str) -> bool:
    """Return False if the value is finite but too large for this float type. Integers may have any size, as in YAML."""
    try:
        real = float(value)
    except OverflowError:
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        stored = float(np.float64(real).astype(dtypes.numpy_dtype(dtype)))
    return isfinite(stored) or not isfinite(real)


def plan_pad(text: str, inputs: InputPlan) -> PadSpec | None:
    """Parse `--pad`, such as `t=0,mask=attention_mask`. A part such as `input_ids=1` sets the padding value of one input.

    Return None for an empty text.

    Raises BundleError.
    """
    if not text:
        return None
    values: dict[str, float] = {}
    mask = None
    for part in text.split(","):
        name, _, value = part.strip().rpartition("=")
        if name == "mask" and not _NUMBER.fullmatch(value):
            mask = value
        elif not name or not _NUMBER.fullmatch(value):
            raise BundleError(f"pad: '{text}': {_USAGE}")
        else:
            values[name] = float(value) if set(value) & set(".eE") else int(value)
    letters = sorted({letter for sizes in inputs.input_shapes for letter in sizes})
    if len(letters) != 1 or letters[0] not in values or len(inputs.input_shapes) < 2:
        raise BundleError(
            f"pad: '{text}': needs one axis that varies, with two lengths or more, and its letter; the axes that vary are"
            f" {', '.join(letters) or 'none'}"
        )
    [axis] = letters
    padded = [spec.name for spec in inputs.specs if spec.variable_axes]
    for name in (*values, *([mask] if mask else ())):
        if name != axis and name not in padded:
            raise BundleError(
                f"pad: no input with the axis '{axis}' is called '{name}'; these are {', '.join(padded)}"
            )
    return PadSpec(
        axis, {name: values.get(name, 0 if name == mask else values[axis]) for name in padded}, mask
    )


def fitted(bundle: Bundle, arrays: Sequence[Array]) -> tuple[int | None, list[Array]]:
    """Pad executable inputs as a server does. Return their variant, or None if no variant fits, and the padded inputs."""
    manifest, padded = bundle.manifest, list(arrays)
    own = length_of(manifest, arrays)
    if manifest.pad is not None and own is not None:
        longest = next((sizes[0] for sizes in manifest.input_shapes if sizes[0] >= own), own)
        for index, spec in enumerate(manifest.inputs):
            if (axis := manifest.padded_axis(spec)) is not None:
                widths = [(0, longest - own if at == axis else 0) for at in range(len(spec.dims))]
                value = manifest.pad.values[spec.name]
                padded[index] = np.pad(padded[index], widths, constant_values=value)
    return bundle.variant_of([array.shape for array in padded]), padded


def length_of(manifest: Manifest, arrays: Sequence[Array]) -> int | None:
    """Return the length of executable inputs along the padded axis, or None without such an axis or if the inputs disagree."""
    if manifest.pad is None or any(
        array.ndim != len(spec.dims) for spec, array in zip(manifest.inputs, arrays, strict=True)
    ):
        return None
    lengths = {arrays[index].shape[axis] for index, axis in manifest.variable_axes}
    return lengths.pop() if len(lengths) == 1 else None


def cut(manifest: Manifest, spec: TensorSpec, rows: Array, length: int) -> Array:
    """Return a view of the first `length` elements of each row along the padded axis.

    rows: an executable tensor with the batch axis in front.
    """
    axis = manifest.padded_axis(spec)
    if axis is None:
        return rows
    assert spec.batch_axis is not None, "the manifest's rules"
    before = axis if axis > spec.batch_axis else axis + 1
    return rows[(slice(None),) * before + (slice(length),)]

"""Choose the tensors to narrow, and convert their values. Needs only numpy."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.spec import Manifest, WeightSpec

Array = np.ndarray[Any, Any]

#: Element types to which weights can be narrowed. The value is the magnitude to which a channel's scale maps its largest element, or
#: None if the type needs no scale because of its own exponent.
TYPES: Mapping[str, float | None] = {"bf16": None, "f16": None, "f8_e4m3": 448.0, "i8": 127.0}
#: Largest error allowed after narrowing, by the type of the weights: relative to an output's largest magnitude, or the
#: share of unequal integers.
BOUNDS: Mapping[str, float] = {"f16": 0.01, "bf16": 0.05, "i8": 0.1, "f8_e4m3": 0.2}
#: Largest allowed errors of a task. cosine: 1 minus the cosine of an embedding. top1: the share of samples with another best score.
TASK_BOUNDS: Mapping[str, float] = {"cosine": 0.01, "top1": 0.05}
KEEP = "keep"
#: Key in the provenance of a narrow bundle.
PROVENANCE = "narrowed"
#: Types that are narrowed. f64 is not, because an author chooses it for its precision.
_WIDE = frozenset({"f32", "bf16", "f16"})
#: Tensors with fewer elements keep their type.
MIN_ELEMENTS = 4096
#: The smallest normal f32. Compilers flush smaller numbers to zero.
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class WeightTypes:
    """Types of weights that the user requests, such as `i8,*.norm*=keep`."""

    #: Type of the tensors whose names fit no pattern.
    default: str
    #: Pairs (pattern, type). The first pattern that fits a name is used.
    patterns: tuple[tuple[str, str], ...] = ()
    #: The user's text.
    text: str = field(default="", compare=False)

    @classmethod
    def parse(cls, text: str) -> WeightTypes:
        """Parse `TYPE,PATTERN=TYPE,...`. Raises ValueError, which names the wrong part."""
        default, *rules = (part.strip() for part in text.split(","))
        patterns = []
        for part in rules:
            pattern, equals, kind = part.rpartition("=")
            if not equals or not pattern:
                raise ValueError(f"'{part}': write PATTERN=TYPE, such as *.norm*=keep")
            patterns.append((pattern, _type(kind)))
        return cls(_type(default), tuple(patterns), text)

    def of(self, name: str) -> tuple[str, bool]:
        """Return the type for a tensor, and whether a pattern fits the tensor's name."""
        for pattern, kind in self.patterns:
            if fnmatch.fnmatchcase(name, pattern):
                return kind, True
        return self.default, False

    def unmatched(self, names: Sequence[str]) -> list[str]:
        """Return the patterns that fit no name."""
        return [pattern for pattern, _ in self.patterns if not fnmatch.filter(names, pattern)]


def _type(text: str) -> str:
    # StableHLO's name of f8_e4m3 ends in "fn".
    token = text if text == KEEP else dtypes.meant(text.removesuffix("fn")) or dtypes.meant(text)
    if token is None or token not in (*TYPES, KEEP):
        raise ValueError(f"'{text}': weights can be {', '.join(TYPES)} or {KEEP}")
    return token


class Narrow(NamedTuple):
    """A tensor in its new type."""

    #: Array of the new type, of the same shape.
    values: Array
    #: The scales in f32, or None without a scale. They have the rank of `values`, and the size 1 for axes that share a scale.
    scale: Array | None


def bytes_before(manifest: Manifest) -> int | None:
    """Return the bytes of the weights before the bundle was narrowed, or None if it was not narrowed."""
    narrowed = manifest.provenance.get(PROVENANCE)
    before = narrowed.get("bytes_before") if isinstance(narrowed, Mapping) else None
    return before if isinstance(before, int) else None


def kept_because(weight: WeightSpec, kind: str, named: bool, shared: frozenset[int]) -> str | None:
    """Return why a tensor keeps its type, or None if it is narrowed to `kind`.

    named: True if a pattern fits the tensor's name. It is then narrowed even if it is small. shared: the axes that share a scale.
    """
    if kind == KEEP:
        return "kept as asked"
    if weight.dtype not in _WIDE:
        return f"of type {weight.dtype}"
    if dtypes.itemsize(kind) >= dtypes.itemsize(weight.dtype):
        return "already narrow"
    if not named and sum(size > 1 for size in weight.shape) < 2:
        return "vectors or scalars"
    if not named and math.prod(weight.shape) < MIN_ELEMENTS:
        return "small"
    after = math.prod(weight.shape) * dtypes.itemsize(kind)
    if TYPES[kind] is not None:
        after += 4 * math.prod(size for axis, size in enumerate(weight.shape) if axis not in shared)
    if 5 * after > 3 * weight.nbytes:
        return "with too many scales"
    return None


def narrow(array: Array, kind: str, shared: frozenset[int]) -> Narrow | str:
    """Return a tensor in the type `kind`, or the reason why this type cannot represent its values.

    shared: the axes whose elements share a scale.
    """
    wide = array.astype(np.float32)
    if not np.isfinite(wide).all():
        return "with infinite or undefined values"
    dtype, limit = dtypes.numpy_dtype(kind), TYPES[kind]
    if limit is None:
        with np.errstate(over="ignore"):
            values = wide.astype(dtype)
        if not np.isfinite(values.astype(np.float32)).all():
            return f"with values beyond the range of {kind}"
        return Narrow(values, None)
    largest = np.abs(wide).max(axis=tuple(shared), keepdims=True, initial=0.0)
    # Use the scale 1 for a channel of zeros, and for a channel whose scale would be flushed to zero.
    scale = np.where(largest < limit * _TINY, np.float32(1), largest / np.float32(limit)).astype(np.float32)
    wide /= scale
    if kind == "i8":
        np.rint(wide, out=wide)
    np.clip(wide, -limit, limit, out=wide)
    return Narrow(wide.astype(dtype), scale)

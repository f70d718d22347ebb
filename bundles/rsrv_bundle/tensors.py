"""Parser of a manifest's tensor entries: name, element type, axis letters and sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from rsrv_bundle import dtypes
from rsrv_bundle.spec import TensorSpec

#: Largest size of an axis, and largest batch size. The product of two such sizes still fits 64 bits.
MAX_EXTENT = 2**31 - 1
MAX_NAME = 256
_BATCH_LETTERS = "nb"
_CLIENT_SECTIONS = ("client_inputs", "client_outputs")

Report = Callable[[str, str], None]


def is_positive(value: Any) -> TypeGuard[int]:
    """Return whether a parsed value is a size: a whole number from 1 to MAX_EXTENT, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_EXTENT


def parse_tensors(
    entries: Sequence[Any], section: str, bad: Report, *, reverse: bool
) -> tuple[TensorSpec, ...]:
    """Parse the entries of one section, in order. Entries that break a rule are reported and left out.

    `bad(key, rule)` is called for each broken rule. `reverse` is True if the fastest axis is written first, as in format 2.0.
    """
    specs = (
        _parse_tensor(entry, f"{section}[{i}]", section, bad, reverse) for i, entry in enumerate(entries)
    )
    return tuple(spec for spec in specs if spec is not None)


def _parse_tensor(entry: Any, place: str, section: str, bad: Report, reverse: bool) -> TensorSpec | None:
    if not isinstance(entry, dict):
        bad(place, "must be a mapping with name, dtype, shape and dims")
        return None
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        bad(place, "tensor entry missing string name")
        return None
    if len(name) > MAX_NAME or not name.isprintable():
        bad(place, f"a tensor's name is at most {MAX_NAME} printable characters")
        return None
    key = f"{section}.{name}"
    dtype = entry.get("dtype")
    tokens = (*dtypes.TOKENS, *([dtypes.BYTES] if section in _CLIENT_SECTIONS else []))
    if not isinstance(dtype, str) or dtype not in tokens:
        problem = "dtype is missing" if dtype is None else f"unknown dtype {dtype!r:.40}"
        bad(key, f"{problem}; {dtypes.unknown(dtype if isinstance(dtype, str) else '')}")
        # Continue with a placeholder type. Without this tensor, the rules over all tensors would report wrong errors.
        dtype = "f32"
    shape = _parse_shape(entry, key, bad)
    sizes = None if shape is None else _parse_dims(entry, shape, key, bad)
    if shape is None or sizes is None:
        return None
    if math.prod(size for size in sizes.values() if size > 0) * dtypes.itemsize(dtype) > 2**63 - 1:
        bad(key, "its dims multiply to more bytes than 64 bits can count")
        return None
    letters = shape[::-1] if reverse else shape
    batch = [i for i, letter in enumerate(letters) if letter in _BATCH_LETTERS]
    return TensorSpec(
        name=name,
        dtype=dtype,
        dims=tuple(sizes.get(letter, -1) for letter in letters),
        batch_axis=batch[0] if batch else None,
        letters=letters,
    )


def _parse_shape(entry: dict[str, Any], key: str, bad: Report) -> str | None:
    shape = entry.get("shape")
    if not isinstance(shape, str):
        bad(key, 'shape must be text with one letter per axis; write "" for a scalar')
        return None
    good = True
    for letter in shape:
        if not _is_letter(letter):
            bad(key, f"shape '{shape}': '{letter}' is not an ASCII letter")
            good = False
    repeated = [letter for letter, count in Counter(shape).items() if count > 1]
    if repeated:
        bad(key, f"shape '{shape}' repeats the axis '{repeated[0]}'; every axis needs its own letter")
        good = False
    elif all(letter in shape for letter in _BATCH_LETTERS):
        bad(key, f"shape '{shape}' has two batch axes; n and b both mean the batch")
        good = False
    return shape if good else None


def _parse_dims(entry: dict[str, Any], shape: str, key: str, bad: Report) -> dict[str, int] | None:
    dims = entry.get("dims")
    if dims is None:
        dims = {}
    if not isinstance(dims, dict):
        bad(key, "dims must be a mapping from axis letter to size")
        return None
    good = True
    for letter, size in dims.items():
        if not _is_letter(letter):
            bad(key, f"dims: '{letter}' is not one ASCII letter")
        elif letter in _BATCH_LETTERS:
            bad(key, f"dims: '{letter}' is reserved for the batch axis, whose size is compiled in; remove it")
        elif letter not in shape:
            bad(key, f"dims: '{letter}' does not occur in shape '{shape}'")
        elif not is_positive(size) and (size != -1 or isinstance(size, float)):
            bad(key, f"dims: {letter} must be a whole number from 1 to {MAX_EXTENT}, or -1, not {size!r:.40}")
        else:
            continue
        good = False
    for letter in shape:
        if letter not in dims and letter not in _BATCH_LETTERS:
            bad(key, f"dims gives no size for the axis '{letter}'")
            good = False
    return dims if good else None


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isalpha()

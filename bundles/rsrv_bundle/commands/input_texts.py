"""Inputs as the command line has them: `image=f32[3,h,w]`. Text only; nothing here knows a model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsrv_bundle import dtypes
from rsrv_bundle.interface import LETTERS

_INPUT = re.compile(r"(?P<name>[^=]+)=(?P<dtype>\w+)\[(?P<sizes>[^\]]*)\]")
_BATCH = frozenset("nb")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Keywords of `export_bundle`."""

    #: Zeros: they only tell shapes.
    examples: Mapping[str, np.ndarray[Any, Any]]
    axes: Mapping[str, str]
    input_shapes: Sequence[Mapping[str, int]]


def parse_inputs(inputs: Sequence[str], input_shapes: Sequence[str], *, batched: bool) -> Inputs:
    """inputs: `NAME=TYPE[SIZE,...]`, where a size is a number, `n` or `b` for the batch axis, or the letter of an axis
    that varies; without a batch axis there is one in front if `batched`. input_shapes: `LETTER=SIZE,...`.

    Raises ValueError saying what is wrong with which.
    """
    variants = [_variant(text) for text in input_shapes]
    parts = [_input(text, batched) for text in inputs]
    taken = {size for _, _, sizes in parts for size in sizes if not size.isdigit()}
    missing = sorted(taken - _BATCH - set(variants[0] if variants else ()))
    if missing:
        raise ValueError(f"--input: axis '{missing[0]}' has no size; give it one in --input-shape")
    examples, axes = {}, {}
    for name, dtype, sizes in parts:
        shape = [
            int(size) if size.isdigit() else variants[0].get(size, 1) if variants else 1 for size in sizes
        ]
        examples[name] = np.zeros(shape, dtypes.numpy_dtype(dtype))
        # Letters that nobody wrote are nobody's variable axes.
        free = (letter for letter in LETTERS if letter not in taken)
        axes[name] = "".join(next(free) if size.isdigit() else size for size in sizes)
    if len(examples) < len(inputs):
        raise ValueError("--input: two have the same name")
    return Inputs(examples, axes, variants)


def _input(text: str, batched: bool) -> tuple[str, str, list[str]]:
    match = _INPUT.fullmatch(text)
    if match is None:
        raise ValueError(f"--input {text}: write NAME=TYPE[SIZE,SIZE], e.g. image=f32[3,32,32]")
    name, dtype, inner = match.group("name", "dtype", "sizes")
    if dtype not in dtypes.TOKENS:
        raise ValueError(f"--input {text}: no element type '{dtype}'; use one of {' '.join(dtypes.TOKENS)}")
    sizes = [size.strip() for size in inner.split(",")] if inner.strip() else []
    for size in sizes:
        if not re.fullmatch(r"[1-9][0-9]*|[A-Za-z]", size):
            raise ValueError(f"--input {text}: '{size}' is neither a size nor an axis' letter")
    if batched and not _BATCH.intersection(sizes):
        sizes.insert(0, "n")
    return name, dtype, sizes


def _variant(text: str) -> dict[str, int]:
    found = re.findall(r"([A-Za-z])=([1-9][0-9]*)", text)
    if ",".join(f"{letter}={size}" for letter, size in found) != text:
        raise ValueError(f"--input-shape {text}: write LETTER=SIZE,LETTER=SIZE, e.g. h=224,w=224")
    return {letter: int(size) for letter, size in found}

"""Layout of the tensors of one request in shared memory, for both ends.

A request's inputs form one block, its outputs another: the tensors in the order of registration, each
row-major and at a multiple of ALIGNMENT. So a place and a number of rows suffice; nothing else is sent.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

#: bytes; a cache line, and the alignment of buffers that XLA reads in place.
ALIGNMENT = 64

#: token -> numpy's dtype, for every dtype that can be sent; types that numpy lacks are sent as their bits.
NUMPY = {token: np.dtype(name) for token, name in {
    "bool": "bool", "i8": "int8", "u8": "uint8", "f8_e5m2": "uint8", "f8_e4m3": "uint8",
    "i16": "int16", "u16": "uint16", "f16": "float16", "bf16": "uint16",
    "i32": "int32", "u32": "uint32", "f32": "float32",
    "i64": "int64", "u64": "uint64", "f64": "float64",
}.items()}  # fmt: skip

#: token -> bytes per element
ITEMSIZE = {token: dtype.itemsize for token, dtype in NUMPY.items()}


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True)
class Tensor:
    """A tensor of one variant. `dims` is row-major; the batch axis, if there is one, holds -1."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    batch_axis: int | None

    def shape(self, rows: int) -> tuple[int, ...]:
        if self.batch_axis is None:
            return self.dims
        return (*self.dims[: self.batch_axis], rows, *self.dims[self.batch_axis + 1 :])

    @cached_property
    def _row_bytes(self) -> int:
        return prod(d for axis, d in enumerate(self.dims) if axis != self.batch_axis) * ITEMSIZE[self.dtype]

    def nbytes(self, rows: int) -> int:
        return self._row_bytes if self.batch_axis is None else self._row_bytes * rows


@dataclass(frozen=True)
class Block:
    """The tensors of one side (inputs or outputs) of one variant."""

    tensors: tuple[Tensor, ...]
    _cache: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict, repr=False, compare=False)

    def places(self, rows: int) -> tuple[tuple[int, ...], int]:
        """Return the offset of each tensor in the block, and the size of the whole block, in bytes."""
        known = self._cache.get(rows)
        if known is None:
            offsets, at = [], 0
            for tensor in self.tensors:
                offsets.append(at)
                at += aligned(tensor.nbytes(rows))
            known = tuple(offsets), at
            if len(self._cache) < 4096:  # a client may send any number of rows
                self._cache[rows] = known
        return known


@dataclass(frozen=True)
class Variant:
    """One compiled input-shape variant: its tensors, and the compiled sizes, ascending."""

    inputs: Block
    outputs: Block
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Interface:
    """Executable side of a model, as a stub gets it at registration."""

    variants: tuple[Variant, ...]
    #: rows must equal a compiled size: some output has no batch axis, so padding would change it
    exact: bool

    def to_json(self) -> dict[str, Any]:
        variants = [
            {
                "inputs": [_tensor_json(t) for t in variant.inputs.tensors],
                "outputs": [_tensor_json(t) for t in variant.outputs.tensors],
                "sizes": list(variant.sizes),
            }
            for variant in self.variants
        ]
        return {"variants": variants, "exact": self.exact}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Interface":
        variants = (
            Variant(
                Block(tuple(_tensor_from_json(t) for t in variant["inputs"])),
                Block(tuple(_tensor_from_json(t) for t in variant["outputs"])),
                tuple(variant["sizes"]),
            )
            for variant in value["variants"]
        )
        return cls(tuple(variants), value["exact"])


def _tensor_json(tensor: Tensor) -> list[Any]:
    return [tensor.name, tensor.dtype, list(tensor.dims), tensor.batch_axis]


def _tensor_from_json(value: list[Any]) -> Tensor:
    name, dtype, dims, batch_axis = value
    return Tensor(name, dtype, tuple(dims), batch_axis)


# --- the flat form, for a front without a JSON parser; docs/protocol.md is the specification ------------------

#: "FLAT"
_MAGIC = 0x54414C46
#: magic, flags, the numbers of inputs, outputs and variants, slot, cost and retry_ns; then of each tensor behind its name
_HEAD, _TYPE = struct.Struct("<IIIIIIQQ"), struct.Struct("<BBh")
_BATCHED, _EXACT, _TRACED = 1, 2, 4
#: the types that clients send, by number
_FLAT_TYPES = (
    "bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f16", "bf16", "f32", "f64",
)  # fmt: skip


def pack_flat(
    client: dict[str, Any],
    interface: Interface,
    *,
    batched: bool,
    traced: bool = False,
    slot: int = 0,
    cost_ns: int = 0,
    retry_ns: int = 0,
    key: str = "",
) -> bytes:
    """Return REGISTERED's document for a model without hooks; `client` and the other values as there.

    Raises ValueError for a type that no client can send.
    """
    inputs, outputs = client["inputs"], client["outputs"]
    flags = _BATCHED * batched | _EXACT * interface.exact | _TRACED * traced
    counts = len(inputs), len(outputs), len(interface.variants)
    parts = [_HEAD.pack(_MAGIC, flags, *counts, slot, cost_ns, retry_ns)]
    parts.append(_text(key))
    parts += (_flat(name, dtype, dims, None) for name, dtype, dims in (*inputs, *outputs))
    for variant in interface.variants:
        parts.append(struct.pack(f"<{len(variant.sizes) + 1}I", len(variant.sizes), *variant.sizes))
        for tensor in (*variant.inputs.tensors, *variant.outputs.tensors):
            parts.append(_flat(tensor.name, tensor.dtype, tensor.dims, tensor.batch_axis))
    return b"".join(parts)


def _flat(name: str, dtype: str, dims: Sequence[int], batch_axis: int | None) -> bytes:
    head = _TYPE.pack(_FLAT_TYPES.index(dtype), len(dims), -1 if batch_axis is None else batch_axis)
    return _text(name) + head + struct.pack(f"<{len(dims)}q", *dims)


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()

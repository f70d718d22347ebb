"""Layout of the tensors of one request in shared memory, for both sides: the stub and the runtime.

A request's inputs form one block, and its outputs form another block. The tensors of a block have the order of registration.
Each tensor is row-major and begins at a multiple of ALIGNMENT. So frames need only the place of a block and a number of rows.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np

#: Alignment of tensors, in bytes: the size of a cache line. XLA can read buffers with this alignment in place.
ALIGNMENT = 64

#: numpy's dtype for each type that can be sent, by its token. Types that numpy lacks are sent as unsigned integers with the
#: same bits.
NUMPY = {token: np.dtype(name) for token, name in {
    "bool": "bool", "i8": "int8", "u8": "uint8", "f8_e5m2": "uint8", "f8_e4m3": "uint8",
    "i16": "int16", "u16": "uint16", "f16": "float16", "bf16": "uint16",
    "i32": "int32", "u32": "uint32", "f32": "float32",
    "i64": "int64", "u64": "uint64", "f64": "float64",
}.items()}  # fmt: skip

#: Bytes per element for each token.
ITEMSIZE = {token: dtype.itemsize for token, dtype in NUMPY.items()}


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


@dataclass(frozen=True)
class Tensor:
    """A tensor of one variant. It is row-major. `dims` has -1 for the batch axis, if there is one."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    batch_axis: int | None
    #: Axis along which requests may be shorter than the compiled module, or None if there is no such axis.
    padded_axis: int | None = None

    def at_length(self, length: int) -> "Tensor":
        """Return the tensor with another length of its padded axis."""
        at = self.padded_axis
        if at is None:
            return self
        return replace(self, dims=(*self.dims[:at], length, *self.dims[at + 1 :]))

    def shape(self, rows: int) -> tuple[int, ...]:
        if self.batch_axis is None:
            return self.dims
        return (*self.dims[: self.batch_axis], rows, *self.dims[self.batch_axis + 1 :])

    @cached_property
    def _row_bytes(self) -> int:
        return prod(d for axis, d in enumerate(self.dims) if axis != self.batch_axis) * ITEMSIZE[self.dtype]

    def nbytes(self, rows: int) -> int:
        return self._row_bytes if self.batch_axis is None else self._row_bytes * rows


class Places(NamedTuple):
    """Offsets and shapes of a block's tensors, and the size of the whole block, in bytes."""

    offsets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int


class _PlacesByRows(dict[int, Places]):
    """The places of some tensors for each number of rows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __missing__(self, rows: int) -> Places:
        sizes = [aligned(tensor.nbytes(rows)) for tensor in self._tensors]
        *offsets, nbytes = accumulate(sizes, initial=0)
        places = Places(tuple(offsets), tuple(tensor.shape(rows) for tensor in self._tensors), nbytes)
        if len(self) < 4096:  # A client may send any number of rows.
            self[rows] = places
        return places


@dataclass(frozen=True)
class Block:
    """The tensors of one side (inputs or outputs) of one variant."""

    tensors: tuple[Tensor, ...]

    @cached_property
    def places(self) -> Mapping[int, Places]:
        """Places of the tensors, by the number of rows."""
        return _PlacesByRows(self.tensors)


@dataclass(frozen=True)
class Variant:
    """One compiled input-shape variant: its tensors, and the compiled batch sizes in ascending order."""

    inputs: Block
    outputs: Block
    sizes: tuple[int, ...]

    @cached_property
    def length(self) -> int:
        """Extent of the padded axis, or 0 if there is no such axis."""
        axes = ((tensor, tensor.padded_axis) for tensor in self.inputs.tensors)
        return next((tensor.dims[axis] for tensor, axis in axes if axis is not None), 0)

    def at_length(self, length: int) -> "Variant":
        """Return this variant with another length of its padded axes."""
        inputs, outputs = (
            Block(tuple(tensor.at_length(length) for tensor in block.tensors))
            for block in (self.inputs, self.outputs)
        )
        return self if length == self.length else replace(self, inputs=inputs, outputs=outputs)


#: Maximum number of lengths whose tensors are cached.
_MAX_LENGTHS = 4096


@dataclass(frozen=True)
class Interface:
    """A model's tensors, sizes and limits, as a stub gets them at registration."""

    variants: tuple[Variant, ...]
    #: True if the rows of a request must equal a compiled batch size, because padding would change an output without a batch
    #: axis.
    exact: bool
    _lengths: dict[int, tuple[int, Variant]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def longest(self) -> int:
        """Length of the longest requests, or 0 without a padded axis. The variants of a padded axis have ascending lengths."""
        return self.variants[-1].length

    def at_length(self, length: int) -> tuple[int, Variant]:
        """Return the index of the shortest variant for requests of this length, and that variant at this length.

        `length` is from 1 to `longest`.
        """
        known = self._lengths.get(length)
        if known is None:
            index = next(at for at, variant in enumerate(self.variants) if variant.length >= length)
            known = index, self.variants[index].at_length(length)
            if len(self._lengths) < _MAX_LENGTHS:
                self._lengths[length] = known
        return known

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
    return [tensor.name, tensor.dtype, list(tensor.dims), tensor.batch_axis, tensor.padded_axis]


def _tensor_from_json(value: list[Any]) -> Tensor:
    name, dtype, dims, batch_axis, padded_axis = value
    return Tensor(name, dtype, tuple(dims), batch_axis, padded_axis)


# --- the flat form, for a front without a JSON parser ---------------------------------------------------------

#: The bytes "FLAT".
FLAT_MAGIC = 0x54414C46
#: Head of the flat form: magic, flags, the numbers of inputs, outputs and variants, slot, cost_ns and retry_ns.
_HEAD = struct.Struct("<IIIIIIQQ")
#: Fields of a tensor that follow its name: type, number of axes, batch axis and padded axis.
_TYPE = struct.Struct("<BBhh")
_BATCHED, _EXACT, _TRACED = 1, 2, 4
#: Types that clients send, by number.
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
    """Return REGISTERED's document for a model without hooks.

    The parameters have the meaning of REGISTERED's fields. Raises ValueError for a type that no client can send.
    """
    inputs, outputs = client["inputs"], client["outputs"]
    flags = _BATCHED * batched | _EXACT * interface.exact | _TRACED * traced
    counts = len(inputs), len(outputs), len(interface.variants)
    parts = [_HEAD.pack(FLAT_MAGIC, flags, *counts, slot, cost_ns, retry_ns)]
    parts.append(_text(key))
    parts += (_flat(Tensor(name, dtype, tuple(dims), None)) for name, dtype, dims in (*inputs, *outputs))
    for variant in interface.variants:
        parts.append(struct.pack(f"<{len(variant.sizes) + 1}I", len(variant.sizes), *variant.sizes))
        parts += map(_flat, (*variant.inputs.tensors, *variant.outputs.tensors))
    return b"".join(parts)


def _flat(tensor: Tensor) -> bytes:
    dims, axes = tensor.dims, (tensor.batch_axis, tensor.padded_axis)
    head = _TYPE.pack(
        _FLAT_TYPES.index(tensor.dtype), len(dims), *(-1 if axis is None else axis for axis in axes)
    )
    return _text(tensor.name) + head + struct.pack(f"<{len(dims)}q", *dims)


def _text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()

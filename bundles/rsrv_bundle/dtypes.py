"""Element types in five spellings, from one table.

A manifest names an element type by a *token* (`f32`). The other spellings are numpy's dtype, the KServe v2 name in
requests (`FP32`), the name in a safetensors header (`F32`) and the element type of an MLIR tensor. The two 8-bit floats have no
KServe name. They can be weights and executable tensors, but never client tensors. Strings of any length (`bytes`) are only
client tensors, and have no row here. Hooks turn them into executable tensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np


class _Row(NamedTuple):
    numpy: str  # Attribute of numpy, or of ml_dtypes if numpy does not have the type.
    itemsize: int  # bytes
    kserve: str | None
    safetensors: str
    mlir: str


_TABLE: dict[str, _Row] = {
    "f16": _Row("float16", 2, "FP16", "F16", "f16"),
    "f32": _Row("float32", 4, "FP32", "F32", "f32"),
    "f64": _Row("float64", 8, "FP64", "F64", "f64"),
    "bf16": _Row("bfloat16", 2, "BF16", "BF16", "bf16"),
    "f8_e5m2": _Row("float8_e5m2", 1, None, "F8_E5M2", "f8E5M2"),
    # StableHLO and safetensors have the variant without infinities, which numpy's name marks with "fn".
    "f8_e4m3": _Row("float8_e4m3fn", 1, None, "F8_E4M3", "f8E4M3FN"),
    "i8": _Row("int8", 1, "INT8", "I8", "i8"),
    "i16": _Row("int16", 2, "INT16", "I16", "i16"),
    "i32": _Row("int32", 4, "INT32", "I32", "i32"),
    "i64": _Row("int64", 8, "INT64", "I64", "i64"),
    "u8": _Row("uint8", 1, "UINT8", "U8", "ui8"),
    "u16": _Row("uint16", 2, "UINT16", "U16", "ui16"),
    "u32": _Row("uint32", 4, "UINT32", "U32", "ui32"),
    "u64": _Row("uint64", 8, "UINT64", "U64", "ui64"),
    "bool": _Row("bool_", 1, "BOOL", "BOOL", "i1"),
}
_ML_DTYPES = frozenset({"bf16", "f8_e5m2", "f8_e4m3"})

TOKENS: tuple[str, ...] = tuple(_TABLE)
#: Strings of any length, which only clients send and get.
BYTES = "bytes"
_STRING_NAMES = ("bytes", "string", "str", "text", "object")
#: Bytes of the length that precedes each string on the wire.
_LENGTH_BYTES = 4

_BY_NUMPY_NAME = {("bool" if row.numpy == "bool_" else row.numpy): token for token, row in _TABLE.items()}
_BY_KSERVE = {row.kserve: token for token, row in _TABLE.items() if row.kserve}
_BY_SAFETENSORS = {row.safetensors: token for token, row in _TABLE.items()}
_BY_MLIR = {row.mlir: token for token, row in _TABLE.items()}


def meant(name: str) -> str | None:
    """Return the token for an element type in another spelling (`float32`, `FP32`), or None if it is unknown."""
    name = name.removeprefix("torch.").removeprefix("TYPE_").lower()
    if name in _STRING_NAMES:
        return BYTES
    spellings = (
        _BY_NUMPY_NAME,
        _BY_KSERVE,
        _BY_SAFETENSORS,
        _BY_MLIR,
        dict(zip(TOKENS, TOKENS, strict=True)),
    )
    return next((tokens[key] for tokens in spellings for key in tokens if key.lower() == name), None)


def unknown(name: str) -> str:
    """Return a hint about the right token for a name that is not a token."""
    token = meant(name)
    if token == BYTES:
        return f"strings are {BYTES}, in client_inputs and client_outputs only"
    return f"did you mean {token}?" if token else f"use one of {' '.join(TOKENS)}"


def itemsize(token: str) -> int:
    """Return the number of bytes of an element, or of the shortest string on the wire. Raises KeyError for an unknown token."""
    return _LENGTH_BYTES if token == BYTES else _TABLE[token].itemsize


@cache
def numpy_dtype(token: str) -> np.dtype[Any]:
    """Return the numpy dtype of a token. Imports ml_dtypes for bf16 and the 8-bit floats. KeyError if unknown."""
    row = _TABLE[token]
    if token in _ML_DTYPES:
        import ml_dtypes

        module: Any = ml_dtypes
    else:
        module = np
    dtype: np.dtype[Any] = np.dtype(getattr(module, row.numpy))
    return dtype


def token_of(dtype: Any) -> str:
    """Return the token of a dtype, in any form that numpy accepts. Raises KeyError if the format has no token for it."""
    return _BY_NUMPY_NAME[np.dtype(dtype).name]


def kserve_name(token: str) -> str | None:
    """Return the KServe v2 name (`FP32`), None for the 8-bit floats. KeyError if the token is unknown."""
    return "BYTES" if token == BYTES else _TABLE[token].kserve


def triton_type(token: str) -> str | None:
    """Return the name in a Triton model configuration (`TYPE_FP32`), None for the 8-bit floats."""
    if token == BYTES:
        return "TYPE_STRING"
    name = _TABLE[token].kserve
    return None if name is None else f"TYPE_{name}"


def safetensors_tag(token: str) -> str:
    """Return the name in a safetensors header (`F32`)."""
    return _TABLE[token].safetensors


def token_of_safetensors(tag: str) -> str:
    """Return the token of a safetensors tag. Raises KeyError if the format has no token for it."""
    return _BY_SAFETENSORS[tag]


def token_of_mlir(element_type: str) -> str:
    """Return the token of an MLIR element type, which is given as MLIR prints it (`ui8`). Raises KeyError if there is no token."""
    return _BY_MLIR[element_type]


def is_whole(token: str) -> bool:
    """Return whether the values of a type are integers or booleans."""
    return token == "bool" or token[0] in "iu"


def mlir_name(token: str) -> str:
    """Return the name of an MLIR element type (`f8E4M3FN`). Raises KeyError for an unknown token."""
    return _TABLE[token].mlir

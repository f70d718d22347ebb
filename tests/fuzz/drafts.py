"""Drafts of requests, and their bytes. A draft may contain data that clients' encoders refuse, such as invalid UTF-8."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tritonclient.utils import np_to_triton_dtype

from tests.chaos.questions import QUESTIONS

Random = random.Random
_BYTE = re.compile(rb"\\udc([89a-f][0-9a-f])")
#: Keys that only drafts have in the entry of an input, and KServe does not: "raw" is the tensor as bytes, "data" is the tensor as
#: a list, and "raws" are tensors for gRPC's raw_input_contents.
_OURS = ("raw", "data", "raws")
#: Texts that become bytes which are not UTF-8 (see `json_bytes`).
NOT_UTF8 = (
    "\udcff",
    "a\udcc3",
    "\udced\udca0\udc80",
    "\udcc0\udc80",
    "x" * 300 + "\udcfe",
    "\udcf4\udc90\udc80\udc80",
)


@dataclass(slots=True)
class Draft:
    """A request, to which changes are made before it is sent."""

    model: str
    #: KServe's JSON. The entry of an input has the tensor twice, as "raw" and as "data".
    document: dict[str, Any]
    #: Over HTTP: True if the tensors follow the JSON as bytes.
    binary: bool
    method: bytes = b"POST"
    path: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    encode: Callable[[bytes], bytes] = bytes
    #: Name of the call over gRPC.
    call: str = "ModelInfer"
    #: Metadata of the call over gRPC.
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)
    #: Function that changes all bytes of the request at the end.
    damage: Callable[[bytes], bytes] = bytes
    #: True if the server may wait for the rest of the request, or may close the connection without an answer.
    cut: bool = False
    #: True if the request would end Triton 24.10 itself. The gateway refuses it.
    only_gateway: bool = False
    #: True if the bytes are sent to the gRPC port, and are not a gRPC call.
    h2: bool = False

    @property
    def inputs(self) -> list[dict[str, Any]]:
        inputs: list[dict[str, Any]] = self.document["inputs"]
        return inputs


Change = Callable[[Random, Draft], None]


class Piece(NamedTuple):
    """A change to requests of one or both protocols, "http" and "grpc"."""

    change: Change
    protocols: tuple[str, ...]
    #: True if the change may give tensors other elements.
    numbers: bool


#: Changes by name.
PIECES: dict[str, Piece] = {}


def piece(*protocols: str, numbers: bool = False) -> Callable[[Change], Change]:
    """Return a decorator that adds a function to PIECES. Without arguments, the change is for both protocols."""

    def put(change: Change) -> Change:
        PIECES[change.__name__] = Piece(change, protocols or ("http", "grpc"), numbers)
        return change

    return put


def honest(seed: int, model: str, *, binary: bool) -> Draft:
    question = QUESTIONS[model](np.random.default_rng(seed))
    inputs = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": np_to_triton_dtype(array.dtype),
            "raw": array.tobytes(),
            "data": array.ravel().tolist(),
        }
        for name, array in question.inputs.items()
    ]
    return Draft(model, {"id": str(seed), "inputs": inputs}, binary)


def http_bytes(draft: Draft) -> bytes:
    """Return the head and the body of an HTTP request."""
    inputs, tensors = [], b""
    for entry in draft.inputs:
        sent = {key: value for key, value in entry.items() if key not in _OURS}
        if draft.binary:
            parameters = sent.get("parameters", {})
            if isinstance(parameters, dict):
                sent["parameters"] = {"binary_data_size": len(entry["raw"]), **parameters}
            tensors += entry["raw"]
        else:
            sent["data"] = entry["data"]
        inputs.append(sent)
    text = json_bytes({**draft.document, "inputs": inputs})
    body = draft.encode(text + tensors)
    own = [(b"Host", b"localhost"), (b"Content-Length", b"%d" % len(body))]
    if draft.binary:
        own.append((b"Inference-Header-Content-Length", b"%d" % len(text)))
    # If a change has added a header of the same name, the draft's header replaces the standard one.
    names = {name.lower() for name, _ in draft.headers}
    headers = [pair for pair in own if pair[0].lower() not in names] + draft.headers
    path = draft.path or b"/v2/models/" + text_bytes(draft.model) + b"/infer"
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return draft.method + b" " + path + b" HTTP/1.1\r\n" + lines + b"\r\n" + body


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON. Lone surrogates from U+DC80 to U+DCFF become the bytes that they represent (PEP 383)."""
    return _BYTE.sub(lambda match: bytes.fromhex(match[1].decode()), json.dumps(value).encode())


def text_bytes(value: object) -> bytes:
    """Return the bytes of a text, without quotes. A value that is not a text is returned as JSON."""
    if not isinstance(value, str):
        return json_bytes(value)
    try:
        return value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return value.encode(errors="surrogatepass")


def message_bytes(draft: Draft) -> bytes:
    """Return the bytes of an inference.ModelInferRequest (grpc_service.proto)."""
    document = draft.document
    out = _field(1, draft.model) + _field(3, document["id"]) + _parameters(4, document.get("parameters"))
    for entry in draft.inputs:
        sizes = entry["shape"] if isinstance(entry["shape"], list) else []
        shape = b"".join(_varint(int(size)) for size in sizes if isinstance(size, int | float))
        tensor = _field(1, entry["name"]) + _field(2, entry["datatype"]) + _field(3, shape)
        out += _field(5, tensor + _parameters(4, entry.get("parameters")) + entry.get("contents", b""))
    outputs = document.get("outputs")
    for output in outputs if isinstance(outputs, list) else []:
        if isinstance(output, dict):
            out += _field(6, _field(1, output["name"]) + _parameters(2, output["parameters"]))
    return out + b"".join(
        _field(7, raw) for entry in draft.inputs for raw in entry.get("raws", [entry["raw"]])
    )


def _varint(value: int) -> bytes:
    remaining, out = value % 2**64, bytearray()
    while remaining > 127:
        out.append(remaining & 127 | 128)
        remaining >>= 7
    return bytes([*out, remaining])


def _field(number: int, value: object) -> bytes:
    content = value if isinstance(value, bytes) else text_bytes(value)
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _parameters(number: int, value: object) -> bytes:
    pairs: Mapping[str, Any] = value if isinstance(value, dict) else {}
    return b"".join(
        _field(number, _field(1, name) + _field(2, _parameter(parameter)))
        for name, parameter in pairs.items()
    )


def _parameter(value: object) -> bytes:
    """Return the bytes of an InferParameter."""
    match value:
        case bool():
            return b"\x08" + _varint(value)
        case int():
            return (b"\x10" if value < 2**63 else b"\x28") + _varint(value)  # int64_param, uint64_param
        case float():
            return b"\x21" + struct.pack("<d", value)
        case None:
            return b""
    return _field(3, value)

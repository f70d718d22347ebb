"""Requests with errors, which their seeds reproduce. This module sends nothing.

Each bad request is an honest request with one to three changes to its content or its transport. Changes to the content are
possible over both protocols.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.fuzz.carriers import TRACES, spelling
from tests.fuzz.drafts import (
    NOT_UTF8,
    PIECES,
    Draft,
    Random,
    honest,
    http_bytes,
    json_bytes,
    message_bytes,
    piece,
    text_bytes,
)
from tests.fuzz.manifests import VALUES

#: Models without state: one that is answered at once, one that is answered later, one with hooks, and a meta model.
MODELS = ("exact", "elastic", "moody", "chain")
#: Models for which all numbers are harmless. For some numbers, the other models take long, hang or exit.
_STOLID = ("exact", "chain")


@dataclass(frozen=True, slots=True)
class Attack:
    """A bad request."""

    seed: int
    #: Names of its changes, which are keys of PIECES.
    pieces: tuple[str, ...]
    #: "http", "grpc" or "h2". With "h2", the bytes are sent to the gRPC port, and are not a gRPC call.
    protocol: str
    #: True if the request is sent to the gateway, and False if it is sent to the server.
    gateway: bool
    #: All bytes of the connection, or the message of the gRPC call.
    data: bytes
    call: str
    metadata: tuple[tuple[str, str | bytes], ...]
    #: See Draft.
    cut: bool


def make(seed: int) -> Attack:
    """Return the bad request of this seed."""
    rng = Random(seed)
    protocol, gateway = rng.choice(("http", "grpc")), rng.random() < 0.5
    names = [name for name, piece in PIECES.items() if protocol in piece.protocols]
    chosen = tuple(rng.choices(names, k=rng.choice((1, 1, 2, 3))))
    numbers = any(PIECES[name].numbers for name in chosen)
    if rng.random() < 0.3:
        draft = rng.choice((_sequence, _generation, _strings))(rng, protocol)
        chosen = chosen if rng.random() < 0.3 else ()
    else:
        draft = honest(seed, rng.choice(_STOLID if numbers else MODELS), binary=rng.random() < 0.7)
    for name in chosen:
        PIECES[name].change(rng, draft)
    data = draft.damage(http_bytes(draft) if protocol == "http" else message_bytes(draft))
    kind = "h2" if draft.h2 else protocol
    return Attack(
        seed, chosen, kind, gateway or draft.only_gateway, data, draft.call, tuple(draft.metadata), draft.cut
    )


# --- state ------------------------------------------------------------------------------------------------------

#: Models with sequences, with generated text, and with generated tokens.
STATEFUL = ("sums", "brief", "brief_tokens")
#: A model whose input and output are strings.
STRINGS = "lengths"
_IDS = (*range(1, 9), "a", "b", "\0", "x" * 300, 0, -1, 2**63, 2**64 - 1, 10**30, 1.5, True, "", None, [])
_FLAGS = (True, True, False, False, False, 1, "true", None)
_PROMPTS = (
    "",
    " ",
    "x",
    "x" * 62,
    "x" * 63,
    "x" * 64,
    "x" * 5000,
    "é\u2603",
    "a\0b",
    "<|im_end|>",
    *NOT_UTF8,
)
_TOKENS = ((), (1,), (255,), (256,), (-1,), (2**31 - 1, -(2**31)), (0,) * 63, (0,) * 64, (7,) * 5000)
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "tokens_per_s",
    "stop",
    "stream",
    "sequence_id",
    "unknown",
)


def _sequence(rng: Random, protocol: str) -> Draft:
    """Return a step of a sequence. The flags and the id are random, so some sequences start in the middle, or end twice."""
    length = rng.choice((1, 1, 4, 16, 3))
    tensor = {
        "name": "x",
        "shape": [1, length],
        "datatype": "FP32",
        "raw": bytes(4 * length),
        "data": [0] * length,
    }
    flags = {name: rng.choice(_FLAGS) for name in ("sequence_start", "sequence_end") if rng.random() < 0.6}
    parameters = {"sequence_id": rng.choice(_IDS[:10] if rng.random() < 0.8 else _IDS), **flags}
    return Draft("sums", {"id": "s", "inputs": [tensor], "parameters": parameters}, rng.random() < 0.5)


def _generation(rng: Random, protocol: str) -> Draft:
    """Return a request for a generation. Some clients leave before its end."""
    values = (*_NUMBERS, 1, 5, "7", "0.5", "nan", "x", "[", '["a"]', [1], ["a", "b"], {"a": 1}, None)
    parameters = {name: rng.choice(values) for name in rng.sample(_SAMPLING, rng.choice((0, 1, 1, 3)))}
    model, name = rng.choice((("brief", "text_input"), ("brief_tokens", "tokens")))
    data: list[Any] = [rng.choice(_PROMPTS)] if model == "brief" else list(rng.choice(_TOKENS))
    raw = b"".join(map(_raw, data))
    tensor = {
        "name": name,
        "shape": [len(data)],
        "datatype": "BYTES" if model == "brief" else "INT32",
        "raw": raw,
        "data": data,
    }
    draft = Draft(model, {"id": "g", "inputs": [tensor], "parameters": parameters}, False)
    draft.call, draft.cut = "ModelStreamInfer", rng.random() < 0.3
    if rng.random() < 0.1:
        _ask_classes(rng, draft, "text_output")
    if protocol == "http" and rng.random() < 0.9:
        fields = {name: data[0] if len(data) == 1 else data, **parameters}
        draft.path = b"/v2/models/%s/%s" % (
            model.encode(),
            rng.choice((b"generate", b"generate_stream", b"generate_stream")),
        )
        draft.encode = lambda _: json_bytes(fields)
    return draft


#: Wrong lengths of strings.
_LENGTHS = (0, 1, 4, 2**31 - 1, 2**31, 2**32 - 1)


def _strings(rng: Random, protocol: str) -> Draft:
    """Return a request with strings, some with wrong lengths. It may ask for their classes, which ends Triton before 25.07."""
    texts = [rng.choice(("", "a", "two words", "x" * 300, "\0")) for _ in range(rng.choice((1, 1, 2, 8)))]
    raw = b"".join(map(_raw, texts))
    if rng.random() < 0.5:
        at = rng.choice((0, len(raw) - len(_raw(texts[-1]))))
        raw = raw[:at] + rng.choice(_LENGTHS).to_bytes(4, "little") + raw[at + 4 :]
    if rng.random() < 0.2:
        raw = raw[: rng.randrange(len(raw))]
    tensor = {
        "name": "text",
        "shape": [rng.choice((len(texts), len(texts), 1, 0)), 1],
        "datatype": "BYTES",
        "raw": raw,
        "data": texts,
    }
    draft = Draft(STRINGS, {"id": "t", "inputs": [tensor]}, rng.random() < 0.8)
    if rng.random() < 0.3:
        _ask_classes(rng, draft, "label")
    return draft


def _ask_classes(rng: Random, draft: Draft, output: str) -> None:
    """Ask for the classes of strings. Over gRPC, this may be a field before the tensors or after them."""
    name = rng.choice((output, output + "\0x"))
    entry = {"name": name, "parameters": {"classification": rng.choice((1, 2, 10**6))}}
    draft.document["outputs"], draft.only_gateway = [entry], True
    late = message_bytes(Draft(draft.model, {"id": "", "inputs": [], "outputs": [entry]}, True))
    if rng.random() < 0.5:
        draft.damage = lambda data: data if data.startswith(b"POST") else data + late


def _raw(element: str | int) -> bytes:
    """Return the bytes of an element in a tensor."""
    if isinstance(element, int):
        return (element % 2**32).to_bytes(4, "little")
    return len(text_bytes(element)).to_bytes(4, "little") + text_bytes(element)


# --- content ------------------------------------------------------------------------------------------------------

_TEXTS = (
    "", " ", "x" * 300, "x" * 100_000, "\0", "a\0b", "a\nb", "\r\n2026-01-01 E rsrv: forged", "\x1b[31m", "é", "\u202e", "\ud800",
    "../../etc/passwd", "%s%n{0}", "$(id)", "'\"\\", "-1", "[rsrv:INTERNAL] x", "1e999", "\U0001f600" * 50,
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**30, 0.5, 1e308, float("nan"), float("inf"), -float("inf"), True,
)  # fmt: skip
_NAMES = (
    "rsrv_run", "rsrv_priority", "rsrv_deadline_unix_ns", "rsrv_trace", "traceparent", "sequence_id", "sequence_start", "sequence_end",
    "priority", "timeout", "triton_final_response", "triton_enable_empty_final_response", "binary_data_output", "headers", "",
)  # fmt: skip
_DTYPES = (
    "FP64",
    "FP16",
    "BF16",
    "INT32",
    "UINT8",
    "BOOL",
    "BYTES",
    "fp32",
    "",
    "TYPE_FP32",
    "x" * 5000,
    7,
    None,
)
_SHAPES: tuple[Any, ...] = (
    [], [0], [0, 64], [-1], [-1, 64], [1, -64], [-(2**63), 1], [1, 64, 1, 1], [1] * 20_000, [1.5, 64], ["1", "64"], [[1, 64]], None,
    "1,64", 64, {"n": 1}, [True, 64], [17, 64],
)  # fmt: skip
#: If the tensors are JSON numbers, Triton 24.10 allocates memory for the whole shape, and aborts if there is too little. So these shapes
#: are used only with binary tensors, or through the gateway.
_HUGE = ([2**31, 64], [2**63 - 1, 2**63 - 1], [2**64, 1], [10**30, 1], [2**32, 2**32], [2**40])
_SIZES = (0, 1, -1, 255, 257, 2**31, 2**32 + 4, 2**63, 2**64 - 1, 10**30, "256", 1.5, None, True)
_OF_TENSORS = (
    "binary_data_size",
    "shared_memory_region",
    "shared_memory_offset",
    "shared_memory_byte_size",
    "x",
)
_OF_OUTPUTS = ("binary_data", "classification", "shared_memory_region", "shared_memory_byte_size")


def _value(rng: Random) -> Any:
    nested: Any = 0
    for _ in range(rng.choice((10, 90, 200))):
        nested = [nested]
    return copy.deepcopy(rng.choice((*VALUES, *_NUMBERS, *_TEXTS, {"a": {"b": [1, {"c": None}]}}, nested)))


def _put(holder: dict[str, Any], name: str, value: Any) -> None:
    """Put a parameter into the document or into an entry of it."""
    if not isinstance(holder.get("parameters"), dict):
        holder["parameters"] = {}
    holder["parameters"][name] = value


@piece()
def request_id(rng: Random, draft: Draft) -> None:
    draft.document["id"] = rng.choice((*_TEXTS, *_NUMBERS, None, [], {}))


@piece()
def not_utf8_id(rng: Random, draft: Draft) -> None:
    """Replace the id by a text that is not UTF-8. Triton passes it on from HTTP, but not from gRPC."""
    draft.document["id"] = rng.choice(NOT_UTF8)


@piece()
def parameter(rng: Random, draft: Draft) -> None:
    for _ in range(rng.choice((1, 1, 2, 300))):
        name = rng.choice(_NAMES)
        _put(draft.document, name, rng.choice(TRACES) if name == "traceparent" else _value(rng))


@piece()
def parameter_name(rng: Random, draft: Draft) -> None:
    _put(draft.document, rng.choice(_TEXTS), _value(rng))


@piece()
def not_utf8_parameter(rng: Random, draft: Draft) -> None:
    text = rng.choice(NOT_UTF8)
    _put(draft.document, *rng.choice(((text, 1), ("x", text), (rng.choice(_NAMES), text))))


@piece()
def parameters(rng: Random, draft: Draft) -> None:
    rng.choice((draft.document, *draft.inputs))["parameters"] = _value(rng)


@piece()
def inputs(rng: Random, draft: Draft) -> None:
    """Add inputs, replace all inputs by another one, or reorder them."""
    first = draft.inputs[0]
    more = {"name": "more", "shape": [1], "datatype": "INT8", "raw": b"x", "data": [1]}
    both = [*draft.inputs]
    draft.document["inputs"] = rng.choice(([*both, more], both + [first] * 50, [more], both[::-1]))


@piece()
def tensor(rng: Random, draft: Draft) -> None:
    """Change a tensor's name or type."""
    key, values = rng.choice(
        (("name", (*_TEXTS, *NOT_UTF8, "y", None, 7)), ("datatype", (*_DTYPES, *NOT_UTF8)))
    )
    rng.choice(draft.inputs)[key] = rng.choice(values)


@piece()
def tensor_parameter(rng: Random, draft: Draft) -> None:
    value = rng.choice(_SIZES) if rng.random() < 0.7 else _value(rng)
    _put(rng.choice(draft.inputs), rng.choice(_OF_TENSORS), value)


@piece()
def shape(rng: Random, draft: Draft) -> None:
    huge = rng.random() < 0.3
    draft.binary = draft.binary or huge
    rng.choice(draft.inputs)["shape"] = rng.choice(_HUGE if huge else _SHAPES)


@piece()
def claimed_shape(rng: Random, draft: Draft) -> None:
    """Send far fewer JSON numbers than the shape needs."""
    draft.only_gateway, draft.binary = True, False
    rng.choice(draft.inputs)["shape"] = rng.choice(_HUGE)


#: Sizes that Triton 24.10 reads as negative numbers.
_NEGATIVE = ([2**64 - 1], [0, 2**64 - 1], [2**64 - 1, 1], [1, 2**64 - 4])


@piece("http")
def hidden_claim(rng: Random, draft: Draft) -> None:
    """Send a shape like `claimed_shape`, in a JSON spelling in which it is difficult to find."""
    draft.only_gateway, draft.binary = True, False
    rng.choice(draft.inputs)["shape"] = rng.choice((*_HUGE, *_NEGATIVE))
    spelling(rng, draft)


@piece("http")
def deep(rng: Random, draft: Draft) -> None:
    """Send lists that are nested so deeply that Triton 24.10 overflows its stack."""
    text = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b", "
    draft.only_gateway, draft.binary = True, False
    draft.encode = lambda body: text + body[1:]


@piece()
def overflowing_shape(rng: Random, draft: Draft) -> None:
    """Send so many rows that their bytes overflow 64 bits, and seem to be none or one row. Triton 24.10 accepts this."""
    draft.binary = True
    row = rng.choice((16, 32, 256))
    tensor = {"shape": [rng.choice((2**62, 2**64 // row, 2**64 // row + 1)), row // 4], "raw": bytes(row)}
    rng.choice(draft.inputs).update(tensor)


@piece()
def length(rng: Random, draft: Draft) -> None:
    """Make a tensor shorter or longer than its shape."""
    entry, size = rng.choice(draft.inputs), rng.choice((0, 1, 255, 4096, 1 << 16))
    entry.update(raw=bytes(size), data=[0] * min(size, 300))


@piece(numbers=True)
def numbers(rng: Random, draft: Draft) -> None:
    """Send random elements: random bytes, and JSON values that may not be numbers."""
    entry = rng.choice(draft.inputs)
    data = [_value(rng) if rng.random() < 0.1 else 0 for _ in range(64)]
    entry.update(raw=rng.randbytes(len(entry["raw"])), data=rng.choice((data, [data], data[:4], _value(rng))))


@piece("grpc")
def raw_contents(rng: Random, draft: Draft) -> None:
    """Send a wrong number of raw contents, or additional elements in the tensor itself."""
    entry = rng.choice(draft.inputs)
    entry["raws"] = rng.choice(([], [entry["raw"]] * 2, [b""] * 300))
    entry["contents"] = rng.choice((b"", b"\x2a\x06\x32\x04\0\0\x80\x3f"))


@piece()
def outputs(rng: Random, draft: Draft) -> None:
    parameters = {rng.choice(_OF_OUTPUTS): rng.choice(_SIZES)} if rng.random() < 0.6 else {}
    entry = {"name": rng.choice(("y", "y", "z", *_TEXTS)), "parameters": parameters}
    draft.document["outputs"] = rng.choice(([entry], [entry] * 30, [], None, 7, [7], {"y": 1}))


@piece()
def model(rng: Random, draft: Draft) -> None:
    draft.model = rng.choice((*_TEXTS, *NOT_UTF8, "double", "none", draft.model + "/versions/7"))
    draft.cut = True  # The name is part of HTTP's path, and may contain the end of a line.


@piece(numbers=True)
def damage(rng: Random, draft: Draft) -> None:
    """Change, add or remove some bytes."""
    changes = [
        (rng.random(), rng.choice((0, 1, 9)), rng.randbytes(rng.choice((0, 1, 9))))
        for _ in range(rng.choice((1, 4, 30)))
    ]

    def damaged(data: bytes) -> bytes:
        for share, gone, more in changes:
            at = int(share * len(data))
            data = data[:at] + more + data[at + gone :]
        return data

    draft.binary = True  # Damage could make a shape huge, which is harmful with JSON numbers.
    draft.damage, draft.cut = damaged, True


@piece()
def truncated(rng: Random, draft: Draft) -> None:
    share = rng.random()
    draft.damage, draft.cut = lambda data: data[: int(share * len(data))], True

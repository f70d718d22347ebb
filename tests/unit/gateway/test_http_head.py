"""Reading the head of an HTTP request, compared with the request that a test wrote."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rsrv_gateway import json_reader
from rsrv_gateway.http_head import HttpHead, InferenceHead, Inflater
from rsrv_gateway.peek import Malformed
from tests.unit.gateway.calls import calls_of

#: Members of an object, in the order in which they are written. Equal keys are allowed.
Pairs = list[tuple[str, Any]]


class Object(Pairs):
    """An object of JSON, as opposed to a list of JSON."""


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(st.tuples(st.text(max_size=4), inner), max_size=3).map(Object)
    ),
    max_leaves=8,
)
sequence_ids: st.SearchStrategy[Any] = (
    st.integers(0, 2**64 - 1)
    | st.text(max_size=300)
    | st.sampled_from(["a\0b", 0, "", -1, 2**64, 10**400, 7.0, 1e300, True, None, []])
)


def objects(members: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Object]:
    """Return objects with some of these members and some other members, in any order. A member may occur twice."""
    pairs = [st.tuples(st.just(name), value) for name, value in members.items()]
    others = st.tuples(st.text(max_size=8) | st.sampled_from([f"{name}\0" for name in members]), junk)
    return st.lists(st.one_of(*pairs, others), max_size=8).map(Object)


sizes = st.integers(0, 3)
tensors = objects(
    {
        "name": st.sampled_from(["X", "Y", "X\0Z"]) | junk,
        "shape": st.lists(sizes, max_size=3) | st.lists(st.one_of(sizes, scalars), max_size=3) | junk,
        "data": st.lists(scalars, max_size=60) | junk,
        "datatype": st.just("FP32"),
    }
)
classes = objects({"classification": st.integers(0, 3) | scalars, "binary_data": st.booleans()})
outputs = objects({"name": st.sampled_from(["T", "U", "T\0"]) | junk, "parameters": classes | junk})
requests = objects(
    {
        "parameters": objects({"sequence_id": sequence_ids, "timeout": scalars}) | junk,
        "inputs": st.lists(tensors | junk, max_size=3) | junk,
        "outputs": st.lists(outputs | junk, max_size=3) | junk,
        "id": st.text(max_size=5),
    }
)


def written(value: Any, rng: Random) -> str:
    """Write a value as JSON, in any spelling that rapidjson accepts."""

    def blank() -> str:
        return rng.choice(("", "", "", " ", "\n\t", "\r"))

    match value:
        case Object():
            members = [f"{blank()}{text(key, rng)}{blank()}:{written(inner, rng)}" for key, inner in value]
            content = "{" + ",".join(members) + blank() + "}"
        case list():
            content = "[" + ",".join([written(inner, rng) for inner in value]) + blank() + "]"
        case str():
            content = text(value, rng)
        case float():
            names = {"nan": "NaN", "inf": rng.choice(("Inf", "Infinity")), "-inf": "-Inf"}
            content = names.get(repr(value), repr(value))
        case _:
            content = json.dumps(value)
    return blank() + content + blank()


def text(value: str, rng: Random) -> str:
    """Write a string. Any of its characters may be escaped."""
    escapes = {'"': '\\"', "\\": "\\\\", "/": rng.choice(("/", "\\/")), "\n": "\\n", "\t": "\\t"}
    parts = []
    for character in value:
        if character < " " or 0xD800 <= ord(character) < 0xE000 or rng.random() < 0.1:
            units = character.encode("utf-16-be", "surrogatepass")
            parts += [f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)]
        else:
            parts.append(escapes.get(character, character))
    return '"' + "".join(parts) + '"'


def first(value: Any, key: str, kind: type) -> Any:
    """Return the first member of this name. If it has another kind, return an empty value of this kind."""
    for name, inner in value if isinstance(value, Object) else ():
        if name == key:
            same = isinstance(inner, kind) and isinstance(inner, Object) == (kind is Object)
            return inner if same and not isinstance(inner, bool) else kind()
    return kind()


def sequence(value: Any) -> int | str | None:
    number, name = first(value, "sequence_id", int), first(value, "sequence_id", str)
    if isinstance(number, int) and 0 < number < 2**64:
        return number
    return name.split("\0")[0] or None


def expected(request: Object) -> InferenceHead:
    """Return the head of a request as Triton reads it, according to the source code of Triton's HTTP server."""
    inputs = []
    for tensor in first(request, "inputs", list):
        shape, name = first(tensor, "shape", list), first(tensor, "name", str)
        if "name" in dict(tensor if isinstance(tensor, Object) else ()) and all(
            type(extent) is int and 0 <= extent < 2**64 for extent in shape
        ):
            inputs.append((name.split("\0")[0], tuple(shape)))
    classified = [
        first(output, "name", str).split("\0")[0]
        for output in first(request, "outputs", list)
        if first(first(output, "parameters", Object), "classification", int) > 0
    ]
    return InferenceHead(
        sequence(first(request, "parameters", Object)),
        tuple((name, shape) for name, shape in inputs if name),
        tuple(name for name in classified if name),
    )


def read(body: bytes, rng: Random, encoding: str | None = None, length: str | None = None) -> InferenceHead:
    """Read a body in pieces of random sizes."""
    head = HttpHead("infer", encoding, length, 1 << 30)
    at = 0
    while head.head is None:
        size = rng.choice((1, 3, 100, 5000, 1 << 20))
        head.feed(body[at : at + size], at + size >= len(body))
        at += size
    return head.head


@given(requests, st.integers(0))
def test_a_request_is_read_as_triton_does_however_it_is_written(request: Object, seed: int) -> None:
    """The sequence, shapes and classes of a request are read correctly, in any spelling, encoding and pieces."""
    rng = Random(seed)
    body = written(request, rng).encode(errors="surrogatepass")
    if rng.random() < 0.3:
        # The library reads a small document in one piece. This makes the document large, so that the gateway's own reader reads it.
        body = body[: body.index(b"{") + 1] + b" " * 5000 + body[body.index(b"{") + 1 :]
    body = rng.choice((b"", b"\xef\xbb\xbf")) + body
    tail = rng.choice((b"", b"\0rubbish", bytes(40)))
    encoding = rng.choice((None, "identity", "gzip", "deflate"))
    length = str(len(body)) if tail else None
    packed = body + tail
    if encoding in ("gzip", "deflate"):
        packed = gzip.compress(packed) if encoding == "gzip" else zlib.compress(packed)

    head = read(packed, rng, encoding, length)

    reference = expected(request)
    assert head.sequence == reference.sequence
    assert tuple(pair for pair in head.inputs if pair[0]) == reference.inputs
    assert tuple(name for name in head.classified if name) == reference.classified


@given(st.binary(max_size=60) | st.text('{}[]",:\\u0 a1', max_size=60).map(str.encode), st.integers(0))
@example(b'{"inputs":[{"shape":[1,[2]]},3,"x"],"parameters":7}', 0)
def test_any_bytes_are_read_or_refused(data: bytes, seed: int) -> None:
    """Any bytes are read as a request or refused, in any pieces."""
    for encoding in (None, "gzip"):
        with suppress(Malformed):
            read(data, Random(seed), encoding)


def test_only_the_pattern_is_stored() -> None:
    """A text of 100 MB before the sequence id is skipped in constant memory, with a few function calls for each piece."""
    head = HttpHead("infer", None, None, 1 << 30)
    piece = b'\\"x' * (1 << 16)
    head.feed(b'{"a": "', last=False)

    def skip() -> None:
        for _ in range(500):
            head.feed(piece, last=False)

    tracemalloc.start()
    try:
        calls = calls_of(skip)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    head.feed(b'", "parameters": {"sequence_id": 3}}', last=True)

    assert head.head == InferenceHead(3)
    assert most < 1 << 16
    assert calls < 500 * 100


@pytest.mark.parametrize(
    "data",
    [
        [0.5] * 200_000,
        [[0.5, 0.25, 0.125]] * 60_000,
        [[[[[1]]]]] * 60_000,
        ["some text"] * 60_000,
        ['a "quoted" \\ one'] * 60_000,
        ["x" * 1_000_000],
    ],
    ids=["numbers", "rows", "nested", "texts", "escaped", "long"],
)
def test_data_are_skipped_fast(data: Any) -> None:
    """If the body arrives in pieces, a few calls into C skip the tensors before the id, each call many values."""
    document = {"inputs": [{"name": "X", "shape": [1], "data": data}], "parameters": {"sequence_id": "s"}}
    body = json.dumps(document).encode()
    head = HttpHead("infer", None, None, 1 << 30)

    def skip() -> None:
        for at in range(0, len(body), 1 << 16):
            head.feed(body[at : at + (1 << 16)], at + (1 << 16) >= len(body))

    # The limit is five times the usual number.
    assert calls_of(skip) < len(body) / 200
    assert head.head == InferenceHead("s", (("X", (1,)),))


def test_deep_values_are_skipped_fast() -> None:
    """A hundred kilobytes of deep objects are read in a bounded number of calls, in the pieces of a decompressed body.

    The pattern for tensors does not match such objects, so the reader goes from bracket to bracket.
    """
    deep = b"{" * 900 + b"}" * 900
    body = b'{"x":[' + b",".join([deep] * 58) + b'],"parameters":{"sequence_id":3}}'

    def skip() -> HttpHead:
        head = HttpHead("infer", None, None, 1 << 30)
        for at in range(0, len(body), 1 << 15):
            head.feed(body[at : at + (1 << 15)], at + (1 << 15) >= len(body))
        return head

    assert skip().head == InferenceHead(3)
    assert calls_of(skip) < 6 * len(body)
    assert calls_of(skip, json_reader._CONTENT) < len(body) / 50


def test_bytes_behind_the_end_of_a_compressed_body_are_not_kept() -> None:
    """Bytes after the end of a compressed message take no memory and no time, however many there are."""
    inflater = Inflater("deflate")
    assert b"".join(inflater.slices(zlib.compress(b"content") + b"more")) == b"content"
    for _ in range(3):
        assert list(inflater.slices(bytes(1000))) == []
    assert len(inflater._zlib.unused_data) == len(b"more")


def test_many_fields_and_long_names_are_refused() -> None:
    """Too many members, too long texts and too long shapes are refused."""
    for body, words in (
        ('{"parameters": {' + ",".join(f'"p{number}": 1' for number in range(10_001)) + "}}", "10000 fields"),
        ('{"parameters": {"sequence_id": "' + "s" * 20_000 + '"}}', "16384 bytes"),
        ('{"inputs": [{"name": "X", "shape": [' + "1," * 100 + "1]}]}", "100 extents"),
        ('{"inputs": [' + "1," * 10_000 + "1]}", "10000 fields"),
    ):
        with pytest.raises(Malformed, match=words):
            read(body.encode(), Random(0))


def test_a_generation_has_its_sequence_among_its_inputs() -> None:
    """A generation's sequence id is found among its inputs and its parameters. A header with the length of the JSON is ignored."""
    for body in (b'{"text": "x", "sequence_id": 4}', b'{"parameters": {"sequence_id": 4}}'):
        head = HttpHead("generate", None, "3", 100)
        head.feed(body, last=True)
        assert head.head == InferenceHead(4)


def test_a_generation_may_say_whether_it_streams() -> None:
    """A generation's `stream` is found among its inputs and its parameters, even with an escaped key."""
    for body, has_stream in (
        (b'{"text": "stream"}', False),
        (b'{"text": "x", "stream": false}', True),
        (b'{"text": "x", "str\\u0065am": true}', True),
        (b'{"parameters": {"stream": null}}', True),
    ):
        head = HttpHead("generate", None, None, 100)
        head.feed(body, last=True)
        assert head.head == InferenceHead(has_stream=has_stream)


def test_a_body_larger_than_the_setting_is_refused_after_decompression() -> None:
    """max_message_bytes also limits the decompressed size of a body."""
    body = json.dumps({"id": Random(0).randbytes(4000).hex()}).encode()
    with pytest.raises(Malformed, match="max_message_bytes"):
        HttpHead("infer", "gzip", None, 5000).feed(gzip.compress(body)[:-1000], last=False)

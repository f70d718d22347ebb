"""Reading the bytes of a request, compared with protobuf's parser."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from rsrv_gateway.peek import Malformed, MessageReader, Peeked, int_parameter
from tests.unit.gateway.calls import calls_of

Request: Any = service_pb2.ModelInferRequest
names = st.text(max_size=150)
#: Shapes. The product of four extents is below 2**31.
extents = st.lists(st.integers(-(2**63), 200), max_size=4)
#: Fields that the message does not define, one for each wire type: varint, 64-bit, length-delimited and 32-bit.
UNKNOWN = (b"\xf8\x06\x96\x01", b"\xf9\x0612345678", b"\xfa\x06\x03abc", b"\xfd\x061234")


@st.composite
def parameters(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["bool", "int64", "string", "double", "uint64"]))
    value = {
        "bool": st.booleans(),
        "int64": st.integers(-(2**63), 2**63 - 1),
        "string": names,
        "double": st.floats(),
        "uint64": st.integers(0, 2**64 - 1),
    }[kind]
    return service_pb2.InferParameter(**{f"{kind}_param": draw(value)})


@st.composite
def requests(draw: st.DrawFn) -> Any:
    request = Request(model_name=draw(names), model_version=draw(names), id=draw(names))
    for key in draw(st.lists(st.sampled_from(["sequence_id", "timeout", "other"]), max_size=3)):
        request.parameters[key].CopyFrom(draw(parameters()))
    for _ in range(draw(st.integers(0, 3))):
        name, shape = draw(st.sampled_from(["X", "Y"]) | names), draw(extents)
        tensor = request.inputs.add(name=name, datatype="FP32", shape=shape)
        tensor.contents.fp32_contents.extend([1.0] * draw(st.integers(0, 3)))
        request.raw_input_contents.append(b"\x0a\x05other" * draw(st.integers(0, 40)))
    return request


def top_level_fields(request: Any) -> list[bytes]:
    """Return the message in pieces, each of which has one field."""
    pieces = [Request(**{name: getattr(request, name)}) for name in ("model_name", "model_version", "id")]
    for key in request.parameters:
        pieces.append(Request())
        pieces[-1].parameters[key].CopyFrom(request.parameters[key])
    pieces += [Request(inputs=[tensor]) for tensor in request.inputs]
    pieces += [Request(raw_input_contents=[raw]) for raw in request.raw_input_contents]
    return [piece.SerializeToString() for piece in pieces]


def parameter(request: Any, key: str) -> int | str | None:
    """Return a parameter as protobuf reads it."""
    if key not in request.parameters:
        return None
    kind = request.parameters[key].WhichOneof("parameter_choice")
    numbers = ("int64_param", "uint64_param", "string_param")
    return getattr(request.parameters[key], kind) if kind in numbers else None


def items(request: Any, name: str, axis: int) -> int:
    """Return the number of items as protobuf reads it."""
    for tensor in request.inputs:
        if tensor.name == name:
            return tensor.shape[axis] if axis < len(tensor.shape) and 0 < tensor.shape[axis] < 2**31 else 1
    return 1


def is_too_large(tensor: Any) -> bool:
    return bool(prod([n for n in tensor.shape if n > 0]) >= 2**31 or len(tensor.shape) > 100)


def assert_reads_as(data: bytes, request: Any) -> None:
    peeked = Peeked(data)
    assert peeked.model == request.model_name
    assert peeked.id == request.id
    for key in ("sequence_id", "timeout", "missing"):
        assert peeked.parameter(key) == parameter(request, key)
    for name in ("X", "Y", "missing"):
        for axis in range(4):
            assert peeked.items((name, axis)) == items(request, name, axis)


@given(requests(), st.randoms(use_true_random=False), st.booleans())
def test_fields_in_any_order(request: Any, random: Random, large: bool) -> None:
    """A request is read as protobuf reads it, for any order of fields, with unknown fields and large tensors between them."""
    if large:
        request.raw_input_contents.append(bytes(20_000))
        request.inputs.add(name="Z", shape=[20_000]).contents.bool_contents.extend([True] * 20_000)
    pieces = [*top_level_fields(request), *random.sample(UNKNOWN, random.randrange(len(UNKNOWN) + 1))]
    random.shuffle(pieces)
    data = b"".join(pieces)

    assert_reads_as(data, Request.FromString(data))
    assert_reads_as(request.SerializeToString(), request)


def test_the_last_name_counts() -> None:
    """If a field with one value occurs twice, the last value is used, as in the worker."""
    data = Request(model_name="first").SerializeToString() + Request(model_name="last").SerializeToString()

    assert_reads_as(data, Request(model_name="last"))


def test_numbers_that_take_more_bytes_than_they_need() -> None:
    """Tags and lengths that use more bytes than necessary are read, and so are unpacked extents."""
    tensor = b"\x8a\x80\x00\x81\x00X" + b"\x18\x87\x00" + b"\x1a\x02\x02\x03"
    data = b"\x8a\x00\x82\x00ab" + b"\x2a" + bytes([len(tensor)]) + tensor

    assert_reads_as(data, Request.FromString(data))
    assert Peeked(data).model == "ab"
    assert [Peeked(data).items(("X", axis)) for axis in range(4)] == [7, 2, 3, 1]


@given(
    st.binary(max_size=200) | st.builds(Request.SerializeToString, requests()),
    st.randoms(use_true_random=False),
)
def test_hostile_bytes(data: bytes, random: Random) -> None:
    """Tampered bytes are refused, or read as protobuf reads them."""
    tampered = bytearray(data)
    for _ in range(random.randrange(4)):
        if tampered:
            at = random.randrange(len(tampered))
            tampered[at : at + random.randrange(2)] = random.randbytes(random.randrange(3))
    data = bytes(tampered)
    try:
        request = Request.FromString(data)
    except DecodeError:
        request = None
    try:
        peeked = Peeked(data)
        read = (
            peeked.model,
            peeked.id,
            peeked.parameter("sequence_id"),
            *[peeked.items((name, axis)) for name in ("X", "Y") for axis in range(4)],
        )
    except Malformed:
        # If protobuf can read the bytes, an input that is too large is the only allowed reason for a refusal.
        assert request is None or any(map(is_too_large, request.inputs))
        return
    if request is not None:
        assert read == (
            request.model_name,
            request.id,
            parameter(request, "sequence_id"),
            *[items(request, name, axis) for name in ("X", "Y") for axis in range(4)],
        )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a", id="no length"),
        pytest.param(b"\x0a\x05abc", id="cut off"),
        pytest.param(b"\x0a\x01\xff", id="not text"),
        pytest.param(b"\x02\x01a", id="field 0"),
        pytest.param(b"\x0f", id="no wire type"),
        pytest.param(b"\xf9\x06123", id="8 bytes cut off"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="longer than memory"),
        pytest.param(b"\x0a" + b"\xff" * 11, id="an endless number"),
    ],
)
def test_no_request(data: bytes) -> None:
    """Malformed bytes are refused. The time for it does not depend on the lengths that the bytes claim."""
    with pytest.raises(Malformed, match="ModelInferRequest"):
        Peeked(data)


@pytest.mark.parametrize(
    "shape", [[1] * 1_000_000, [2**31], [1, 2**16, 2**16], [2**32, 2**32], [2**63 - 1, -1]]
)
def test_a_shape_that_no_message_can_fill(shape: list[int]) -> None:
    """A shape is refused if its product would overflow in Triton, which would fail all requests of the batch.

    A shape with a million extents is also refused.
    """
    data = Request(inputs=[Request.InferInputTensor(name="X", shape=shape)]).SerializeToString()

    with pytest.raises(Malformed, match=r"input 'X' .* more than"):
        Peeked(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"\x2a\x00" * 500_000, "10000 fields", id="inputs"),
        pytest.param(b"\x22\x00" * 500_000, "10000 fields", id="parameters"),
        pytest.param(b"\x2a\xc0\x84\x3d" + b"\x18\x01" * 500_000, "10000 fields", id="extents"),
        pytest.param(
            b"\x2a\xc4\x84\x3d\x1a\xc0\x84\x3d" + bytes(1_000_000), "100 extents", id="packed extents"
        ),
        pytest.param(b"\x3a\xc0\x84\x3d" + bytes(999_999), "not a ModelInfer", id="cut off"),
    ],
)
def test_many_small_fields(data: bytes, why: str) -> None:
    """A request with a megabyte of tiny fields is refused early.

    Reading all fields would take much memory and block the event loop for seconds.
    """

    def read() -> None:
        with pytest.raises(Malformed, match=why):
            Peeked(data)

    assert calls_of(read) < 500_000


@given(requests(), st.data())
def test_the_beginning_of_a_request(request: Any, drawn: st.DataObject) -> None:
    """If a request is cut off, its complete fields are still read."""
    pieces = top_level_fields(request)
    whole = drawn.draw(st.integers(0, len(pieces)))
    cut = pieces[whole][:-1] if whole < len(pieces) else b""
    reader = MessageReader(1 << 20)
    reader.feed(b"".join(pieces[:whole]) + cut, last=False)
    peeked = Peeked(bytes(reader.without_tensors))
    expected = Request.FromString(b"".join(pieces[:whole]))

    assert peeked.model == expected.model_name
    assert peeked.parameter("sequence_id") == parameter(expected, "sequence_id")


@given(requests(), st.lists(st.integers(0, 60)))
def test_a_request_is_read_in_any_pieces(request: Any, sizes: list[int]) -> None:
    """A request in pieces of any sizes is read as if it were in one piece."""
    if any(is_too_large(tensor) for tensor in request.inputs):
        return
    output = request.outputs.add(name="Z")
    output.parameters["classification"].int64_param = 3
    data = request.SerializeToString()
    reader, at = MessageReader(1 << 20), 0
    for size in sizes:
        reader.feed(data[at : at + size], last=False)
        at += size
    reader.feed(data[at:], last=True)
    peeked = Peeked(bytes(reader.without_tensors))

    assert (peeked.model, peeked.version, peeked.id) == (
        request.model_name,
        request.model_version,
        request.id,
    )
    assert peeked.classified == ("Z",)
    assert peeked.sequence == Peeked(data).sequence
    assert peeked.items(("X", 0)) == items(request, "X", 0)


@given(requests(), st.integers(0, 2**63 - 1))
def test_a_parameter_is_appended(request: Any, value: int) -> None:
    """Appended bytes set a parameter of a request, and replace its earlier value."""
    data = request.SerializeToString() + int_parameter("timeout", value)

    request.parameters["timeout"].CopyFrom(service_pb2.InferParameter(int64_param=value))
    assert Request.FromString(data) == request
    assert Peeked(data).parameter("timeout") == value

"""Parsing HTTP requests and answers, without a connection."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from rsrv_gateway.http_protocol import PARSED_JSON_MAX_BYTES, for_client, http_refusal, overstated, peek
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.upload import decoded

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["inputs", "name", "shape", "parameters", "sequence_id"]), inner)
    ),
    max_leaves=12,
)


@given(_ANY, st.integers(0, 3))
def test_any_json_may_come(said: Any, axis: int) -> None:
    """Any JSON counts as at least one item, and its sequence id is a number, a text or none."""
    items, sequence = peek(json.dumps(said).encode(), ("X", axis))

    assert items >= 1
    assert sequence is None or isinstance(sequence, int | str)


@given(st.binary(max_size=40))
def test_any_bytes_may_come(data: bytes) -> None:
    """Arbitrary bytes, also wrongly compressed, count as one item of no sequence."""
    assert decoded(data, "br", 10) == b""
    decoded(data, "gzip", 10)
    http_refusal(400, CIMultiDict(), data, generated=True)
    items, _ = peek(data + b'"sequence_id"', ("X", 0))
    assert items == 1


def test_large_json_is_not_read_for_items() -> None:
    """JSON above a size counts as one item, and its sequence id is still found."""
    request = {"inputs": [{"name": "X", "shape": [4], "data": ["0" * PARSED_JSON_MAX_BYTES]}]}
    assert peek(json.dumps(request).encode(), ("X", 0)) == (1, None)

    request["parameters"] = {"sequence_id": "s"}  # type: ignore[assignment]
    assert peek(json.dumps(request).encode(), ("X", 0)) == (1, "s")


@pytest.mark.parametrize(
    ("shape", "large"),
    [
        ("1,100", False),
        (" 10 , 10 ", False),
        ("", False),
        ("-1, 4", False),
        ("1 2, 3", False),
        ("4000000000, 0", True),
        ("2147483648,64", True),
        ("11, 10", True),
        ("1" * 100_000, True),
        ("2," * 100_000 + "2", True),
        ("1," * 100_000 + "1", False),
    ],
)
def test_a_shape_of_more_elements_than_a_request_can_have_is_noticed(shape: str, large: bool) -> None:
    """A shape with more elements than the request can have is found; malformed shapes are ignored."""
    header = f'{{"inputs": [{{"shape": [1, 2]}}, {{"name": "x", "shape" : [{shape}], "data": [1]}}]}}'
    assert bool(overstated(header.encode(), 100)) is large
    assert len(overstated(header.encode(), 100)) < 300


@pytest.mark.parametrize("sequence", [7, -1, 2**64 - 1, "s", 'a "quoted" \\ one', "\ud800", ""])
def test_a_sequence_is_found_without_parsing(sequence: Any) -> None:
    """A sequence id is found without parsing, also after text that looks like one."""
    request = {"inputs": ['"sequence_id": 1', "sequence_id"], "parameters": {"sequence_id": sequence}}

    assert peek(json.dumps(request, indent=1).encode(), None) == (1, sequence)
    assert peek(b'{"sequence_id":' + b"9" * 5000, None) == (1, None)


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_no_more_is_decoded_than_asked_for(compress: Any) -> None:
    """Of compressed data, only the requested beginning is decoded."""
    data = compress(b'{"id":1}' + bytes(1 << 20))

    assert decoded(data, "deflate", 8) == b'{"id":1}'
    assert decoded(data, "deflate", 0) == b""


def test_own_words() -> None:
    """A refusal by the gateway has the form of Triton's errors."""
    status, headers, body = for_client(Refusal(StatusCode.UNAVAILABLE, 'no "worker" für m'))

    assert (status, headers["Content-Type"]) == (503, "application/json")
    assert body.decode() == '{"error":"no \\"worker\\" für m"}'

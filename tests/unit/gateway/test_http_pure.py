"""Errors of workers and of the gateway over HTTP, without a connection."""

from __future__ import annotations

from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from rsrv_gateway.http_protocol import for_client, http_refusal
from rsrv_gateway.outcomes import Refusal


@given(st.binary(max_size=40))
def test_any_bytes_may_be_an_error(data: bytes) -> None:
    """Any bytes can be the body of a worker's error."""
    assert http_refusal(400, CIMultiDict(), data, generated=True).body == data


def test_own_words() -> None:
    """A refusal by the gateway has the form of Triton's errors."""
    status, headers, body = for_client(Refusal(StatusCode.UNAVAILABLE, 'no "worker" für m'))

    assert (status, headers["Content-Type"]) == (503, "application/json")
    assert body.decode() == '{"error":"no \\"worker\\" für m"}'

"""For any bytes, the frame readers return a result or raise ProtocolError."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.wire import calls, frames, generation, traces
from rsrv.wire.frames import HEADER, Kind, ProtocolError

READERS: list[Callable[[bytes, int], Iterable[Any]]] = [
    frames.unpack_submissions,
    frames.unpack_completions,
    frames.unpack_ids,
    calls.unpack_entrances,
    calls.unpack_leavings,
    calls.unpack_calls,
    calls.unpack_releases,
    generation.unpack_tokens,
    traces.unpack_marks,
]


@pytest.mark.parametrize("reader", READERS)
@given(
    st.one_of(st.integers(0, 5), st.integers(0, 2**32 - 1)),
    st.one_of(st.binary(max_size=300), st.integers(0, 300).map(bytes)),
)
def test_entries_are_as_many_as_said(
    reader: Callable[[bytes, int], Iterable[Any]], count: int, body: bytes
) -> None:
    """For any announced number and any bytes, a reader returns this number of entries or raises ProtocolError."""
    try:
        entries = list(reader(HEADER.pack(Kind.SUBMIT, 0, 0) + body, count))
    except ProtocolError:
        return
    assert len(entries) == count


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 20_000, b'{"a":' + b"9" * 5000 + b"}", b"\xff", b"1"]
)  # fmt: skip
def test_json_that_is_none_is_a_protocol_error(body: bytes) -> None:
    """A text that is not JSON raises ProtocolError, whatever its length."""
    with pytest.raises(ProtocolError):
        frames.unpack_json(HEADER.pack(Kind.REGISTER, 0, 0) + body)


@given(st.binary(max_size=200))
def test_any_json_is_an_object_or_a_protocol_error(body: bytes) -> None:
    """Random bytes are either read as a JSON object, or raise ProtocolError."""
    with suppress(ProtocolError):
        assert isinstance(frames.unpack_json(HEADER.pack(Kind.REGISTER, 0, 0) + body), dict)


@given(st.binary(max_size=2 * HEADER.size))
def test_any_header_is_that_of_a_frame_or_a_protocol_error(raw: bytes) -> None:
    """Any bytes either are a valid header or raise ProtocolError, for example if they are too few or name an unknown kind."""
    with suppress(ProtocolError):
        assert isinstance(frames.read_header(raw)[0], Kind)

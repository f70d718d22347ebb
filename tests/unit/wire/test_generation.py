"""Frames of generations are unpacked as they were packed, and malformed frames are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv.wire import frames
from rsrv.wire.frames import Kind, ProtocolError
from rsrv.wire.generation import Generate, pack_generate, pack_tokens, read_generate, unpack_tokens

tokens = st.integers(0, 2**31 - 1)
generations = st.builds(
    Generate,
    request=st.integers(0, 2**40 - 1),
    prompt=st.lists(tokens, max_size=20),
    max_tokens=st.none() | st.integers(),
    temperature=st.floats(allow_nan=False),
    top_k=st.integers(0, 2**31),
    top_p=st.floats(0, 1),
    seed=st.integers(0, 2**24 - 1),
    stop=st.none() | st.lists(tokens, max_size=3),
    deadline_ns=st.integers(0, 2**63 - 1),
    priority=st.integers(0, 2**16 - 1),
    tag=st.integers(0, 2**64 - 1),
    tokens_per_s=st.floats(allow_nan=False),
)


@given(generations)
def test_a_generation_survives(sent: Generate) -> None:
    """The runtime unpacks the generation that a stub packs."""
    frame = pack_generate(sent)

    assert frames.read_header(frame)[0] is Kind.GENERATE
    assert read_generate(frames.unpack_json(frame)) == sent


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), tokens), max_size=20))
def test_tokens_survive(sent: list[tuple[int, int]]) -> None:
    """A stub unpacks the tokens that the runtime packs, in their order."""
    received: list[tuple[int, int]] = []
    for frame in pack_tokens(sent):
        kind, count = frames.read_header(frame)
        assert kind is Kind.TOKENS
        received += unpack_tokens(frame, count)

    assert received == sent


def test_many_tokens_are_split_over_frames() -> None:
    """Tokens that do not fit one frame are packed into several frames. Each of these is below the limit."""
    sent = [(request, 7) for request in range(20_000)]

    packed = pack_tokens(sent)

    assert len(packed) > 1
    assert all(len(frame) <= frames.MAX_FRAME for frame in packed)
    assert [token for f in packed for token in unpack_tokens(f, frames.read_header(f)[1])] == sent


@pytest.mark.parametrize(
    "wrong",
    [
        {}, {"request": -1}, {"request": "1"}, {"request": True}, {"prompt": None}, {"prompt": "hi"}, {"prompt": [-1]},
        {"prompt": [1 << 31]}, {"prompt": [1.0]}, {"stop": [None]}, {"max_tokens": 1.5}, {"temperature": "hot"},
        {"top_p": None}, {"seed": -1}, {"deadline_ns": None}, {"more": 1},
    ],
)  # fmt: skip
def test_a_generation_of_other_types_is_refused(wrong: dict[str, Any]) -> None:
    """A GENERATE frame with a missing or wrong value is refused, because only a broken stub sends it."""
    good = {"request": 1, "prompt": [1]} if wrong else {}

    with pytest.raises(ProtocolError, match="GENERATE"):
        read_generate({**good, **wrong})

"""Frames of generations: the request for one, and its tokens.

The runtime sends a token as soon as it is read from the device. docs/protocol.md is the specification.
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rsrv.wire.frames import HEADER, MAX_FRAME, Kind, ProtocolError, pack_entries, pack_json, unpack_entries

#: a request and its token; four bytes are reserved
_TOKEN = struct.Struct("<Qi4x")
#: entries of one TOKENS frame
_MAX_TOKENS = (MAX_FRAME - HEADER.size) // _TOKEN.size


class Generate(NamedTuple):
    """One generation. Sampling values have the meaning of the manifest's `sampling` tensor."""

    request: int  # unique on this connection, like the number of a submission
    prompt: Sequence[int]
    max_tokens: int | None = None  # None: the model's
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0
    stop: Sequence[int] | None = None  # tokens that end the answer; None: the model's
    deadline_ns: int = 0  # CLOCK_MONOTONIC, 0: none
    priority: int = 0  # Triton's: 0 default, 1 highest
    tag: int = 0  # `request_tag` of the client's id; 0: none
    tokens_per_s: float = 0.0  # when `edf` wants each token, counted from the arrival; 0: by the deadline


def pack_generate(one: Generate) -> bytes:
    """Return a GENERATE frame. Raises ProtocolError if the prompt does not fit."""
    return pack_json(Kind.GENERATE, {**one._asdict(), "prompt": list(one.prompt)})


def read_generate(value: dict[str, Any]) -> Generate:
    """Return the generation that GENERATE's JSON asks for. Values may be senseless, but have the right types.

    Raises ProtocolError.
    """
    try:
        one = Generate(**value)
    except TypeError as error:
        raise ProtocolError(f"GENERATE: {error}") from None
    counts = (one.request, one.top_k, one.seed, one.deadline_ns, one.priority, one.tag)
    if (
        not all(type(count) is int and count >= 0 for count in counts)
        or not (one.max_tokens is None or type(one.max_tokens) is int)
        or not all(type(share) in (int, float) for share in (one.temperature, one.top_p, one.tokens_per_s))
        or not _are_tokens(one.prompt)
        or not (one.stop is None or _are_tokens(one.stop))
    ):
        raise ProtocolError("GENERATE with a field of another type, or a negative number")
    return one


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def pack_tokens(tokens: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the fewest TOKENS frames for these pairs of a request and its next token."""
    return [
        pack_entries(Kind.TOKENS, _TOKEN, tokens[at : at + _MAX_TOKENS])
        for at in range(0, len(tokens), _MAX_TOKENS)
    ]


#: makes pairs of a request and its next token
unpack_tokens = partial(unpack_entries, Kind.TOKENS, _TOKEN)

"""Frames of generations: the requests that begin them, and their tokens.

GENERATE begins a generation. The runtime sends each token in TOKENS as soon as it is read from the device, except a token of
`stop` that ends the answer. A completion with OK or an error ends the generation. An error may follow some tokens. The text of OK
is `stop` or `length`: `length` means that `max_tokens` tokens were sent, or that the context is full. CANCEL ends a generation
after the execution in progress.
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rsrv.wire.frames import HEADER, MAX_FRAME, Kind, ProtocolError, pack_entries, pack_json, unpack_entries

#: A request and its token. Four bytes are reserved.
_TOKEN = struct.Struct("<Qi4x")
#: Maximum number of entries in one TOKENS frame.
_MAX_TOKENS = (MAX_FRAME - HEADER.size) // _TOKEN.size


class Generate(NamedTuple):
    """One generation. Sampling values have the meaning of the manifest's `sampling` tensor."""

    request: int  # Unique on its connection, like the number of a submission.
    prompt: Sequence[int]
    max_tokens: int | None = None  # None for the model's own value.
    temperature: float = 0.0  # 0 for greedy.
    top_k: int = 0  # 0 for off.
    top_p: float = 1.0  # 1 for off.
    seed: int = 0
    stop: Sequence[int] | None = None  # Tokens that end the answer, or None for the model's own ones.
    deadline_ns: int = 0  # CLOCK_MONOTONIC, or 0 for none.
    priority: int = 0  # Triton's priority: 0 default, 1 highest.
    tag: int = 0  # `request_tag` of the client's id, or 0 for none.
    tokens_per_s: float = (
        0.0  # Rate at which tokens are due, counted from the arrival, or 0 to use the deadline.
    )


def find_length_problem(tokens: int, context: int) -> str:
    """Return why a prompt of `tokens` tokens does not fit into a context of `context` tokens, or "" if it fits."""
    if 0 < tokens < context:
        return ""
    return (
        f"the prompt has {tokens} tokens, and this model takes 1 to {context - 1}, as {context} are for prompt and "
        "answer together"
    )


def pack_generate(request: Generate) -> bytes:
    """Return a GENERATE frame. Raises ProtocolError if the prompt is too long for a frame."""
    return pack_json(Kind.GENERATE, {**request._asdict(), "prompt": list(request.prompt)})


def read_generate(value: dict[str, Any]) -> Generate:
    """Return the generation that GENERATE's JSON describes.

    Its values have the right types, but may be out of range. Raises ProtocolError.
    """
    try:
        request = Generate(**value)
    except TypeError as error:
        raise ProtocolError(f"GENERATE: {error}") from None
    counts = (
        request.request,
        request.top_k,
        request.seed,
        request.deadline_ns,
        request.priority,
        request.tag,
    )
    if (
        not all(type(count) is int and count >= 0 for count in counts)
        or not (request.max_tokens is None or type(request.max_tokens) is int)
        or not all(
            type(share) in (int, float)
            for share in (request.temperature, request.top_p, request.tokens_per_s)
        )
        or not _are_tokens(request.prompt)
        or not (request.stop is None or _are_tokens(request.stop))
    ):
        raise ProtocolError("GENERATE with a field of another type, or a negative number")
    return request


def _are_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def pack_tokens(tokens: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return the fewest TOKENS frames for these pairs of a request and its next token."""
    return [
        pack_entries(Kind.TOKENS, _TOKEN, tokens[at : at + _MAX_TOKENS])
        for at in range(0, len(tokens), _MAX_TOKENS)
    ]


#: Reads pairs of a request and its next token.
unpack_tokens = partial(unpack_entries, Kind.TOKENS, _TOKEN)

"""Parameters of a request for generated tokens. A client may set these; others are refused."""

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rsrv.stub.replies import invalid
from rsrv.stub.request import OURS
from rsrv.text import nearest

#: Maximum number of stop texts or stop tokens of a request.
_MAX_STOPS = 16
#: Maximum number of characters of a stop text.
_MAX_STOP_CHARACTERS = 256
#: A seed and a number of tokens below this are exact as f32.
_EXACT = 1 << 24
_MAX_TEMPERATURE = 100.0
_MAX_RATE = 1000.0
#: Parameters that any request may have, and that other modules read. Triton turns the field `id` of `generate` into a parameter.
_OTHERS = ("id", *OURS, "reactant_timeout_ns")
#: Headers of one word that Triton may forward. Other headers contain a hyphen or a capital letter.
_HEADERS = ("traceparent", "tracestate", "authorization", "baggage", "host", "cookie", "accept", "b3")


class GenerationParams(NamedTuple):
    """The parameters of one answer."""

    max_tokens: int | None = None  # None: the model's own limit applies
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_texts: Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None  # None: the model's own tokens apply
    tokens_per_s: float = 0.0  # 0: no rate is asked for
    #: True for a response for each piece, False for one response with the whole answer.
    stream: bool = True
    #: True if the prompt is a whole chat, with delimiters around the contents (rsrv.hooks.text).
    chat: bool = False
    #: True if the answer is the prompt's tokens, and nothing is generated.
    tokenize: bool = False
    #: True if the prompt is a list of tokens, the answer is their text, and nothing is generated.
    detokenize: bool = False


#: For each parameter that is a number: its type, a function that checks its value, and the rule in words.
_NUMBERS: Mapping[str, tuple[type, Callable[[float], bool], str]] = {
    "max_tokens": (int, lambda value: value >= 1, "a whole number from 1 on"),
    "temperature": (float, lambda value: 0 <= value <= _MAX_TEMPERATURE, "a number from 0 (greedy) to 100"),
    "top_k": (int, lambda value: 0 <= value < _EXACT, "a whole number from 0 (off) below 2^24"),
    "top_p": (float, lambda value: 0 < value <= 1, "a number above 0, at most 1 (off)"),
    "seed": (int, lambda value: 0 <= value < _EXACT, "a whole number from 0 below 2^24"),
    "tokens_per_s": (float, lambda value: 0 < value <= _MAX_RATE, "a number above 0, at most 1000"),
}
_FLAGS = frozenset({"chat", "detokenize", "stream", "tokenize"})
_KNOWN = (*_NUMBERS, "stop", *_FLAGS)


def read_generation_params(
    parameters: Mapping[str, Any], *, context: int, stop: Sequence[int], text: bool
) -> GenerationParams:
    """Return the parameters of a request. Raises RequestFailure for wrong or unknown parameters.

    `context` and `stop` are the model's context in tokens and its stop tokens. `text` is True if clients send and get text;
    the parameter `stop` is then also text.
    """
    for name in parameters:
        if name not in _KNOWN and not _is_for_others(name):
            raise invalid(f"unknown parameter {name[:80]!r}{nearest(name, _KNOWN)}")
    params: dict[str, Any] = {"seed": random.randrange(_EXACT)}
    for name, (kind, is_right, rule) in _NUMBERS.items():
        if name in parameters:
            value = _number(parameters[name], kind)
            if value is None or not is_right(value):
                raise invalid(f"parameter {name} must be {rule}, got {parameters[name]!r:.50}")
            params[name] = value
    if params.get("max_tokens", 0) > context:
        raise invalid(f"parameter max_tokens must be at most this model's context, {context} tokens")
    for name in parameters.keys() & _FLAGS:
        params[name] = parameters[name]
        if not isinstance(params[name], bool):
            raise invalid(f"parameter {name} must be true or false, got {parameters[name]!r:.50}")
    if not text and (params.get("tokenize") or params.get("detokenize")):
        raise invalid("this model has no tokenizer: its clients send and get tokens")
    if "stop" in parameters:
        if text:
            params["stop_texts"] = _stop_texts(parameters["stop"])
        else:
            params["stop_tokens"] = [*stop, *_stop_tokens(parameters["stop"])]
    return GenerationParams(**params)


def _is_for_others(name: str) -> bool:
    """Return True if a parameter is not about generation: Triton's own, rsrv's, or a header that Triton forwards."""
    return name.startswith("triton_") or name in (*_OTHERS, *_HEADERS) or "-" in name or name != name.lower()


def _number(value: Any, kind: type) -> float | int | None:
    """Return `value` as a number, or None. `value` may be text, because tritonclient sends no floating-point parameters."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value[:40] if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        return None
    if not math.isfinite(number) or (kind is int and number != int(number)):
        return None
    return kind(number)  # type: ignore[no-any-return]


def _stop_texts(value: Any) -> list[str]:
    texts = _listed(value) if isinstance(value, str) and value.startswith("[") else [value]
    if (
        texts is None
        or len(texts) > _MAX_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= _MAX_STOP_CHARACTERS for text in texts)
    ):
        raise invalid(
            f"parameter stop must be a text, or a JSON list of at most {_MAX_STOPS} texts, of 1 to {_MAX_STOP_CHARACTERS} "
            "characters each"
        )
    return texts


def _stop_tokens(value: Any) -> list[int]:
    tokens = _listed(value) if isinstance(value, str) else [value]
    if (
        tokens is None
        or len(tokens) > _MAX_STOPS
        or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens)
    ):
        raise invalid(f"parameter stop must be a token, or a JSON list of at most {_MAX_STOPS} tokens")
    return tokens


def read_tokens(text: str) -> list[int]:
    """Return tokens of a JSON list. Raises RequestFailure."""
    tokens = _listed(text)
    if tokens is None or not all(type(token) is int and 0 <= token < 1 << 31 for token in tokens):
        raise invalid("with the parameter detokenize, the text must be a JSON list of tokens")
    return tokens


def _listed(text: str) -> list[Any] | None:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, list) else None

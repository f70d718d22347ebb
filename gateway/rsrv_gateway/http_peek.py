"""What the JSON of an inference request says of where it goes. Pure.

Whatever is no such JSON says nothing: it is for a worker to say what is wrong with it.
"""

import json
from typing import Any

#: Bytes of JSON that are read for the sake of the items: more keep the event loop busy for longer than any request may.
MOST_JSON = 1 << 18
_SEQUENCE = b'"sequence_id"'


def peek(header: bytes, measured: tuple[str, int] | None) -> tuple[int, int | str | None]:
    """Items, and the id of the request's sequence.

    `header` is the request's JSON, without the binary data that may come after it; `measured` is the input that tells
    the items, and which axis.
    """
    counts = measured is not None and len(header) <= MOST_JSON
    if not counts and _SEQUENCE not in header:
        return 1, None
    try:
        request = json.loads(header)
    except (ValueError, RecursionError):
        return 1, None
    if not isinstance(request, dict):
        return 1, None
    return (_items(request, *measured) if measured is not None else 1), _sequence(request)


def _items(request: dict[str, Any], name: str, axis: int) -> int:
    inputs = request.get("inputs")
    for each in inputs if isinstance(inputs, list) else ():
        if isinstance(each, dict) and each.get("name") == name:
            shape = each.get("shape")
            if isinstance(shape, list) and axis < len(shape) and type(shape[axis]) is int:
                return shape[axis] if 0 < shape[axis] < 2**31 else 1
    return 1


def _sequence(request: dict[str, Any]) -> int | str | None:
    parameters = request.get("parameters")
    found = parameters.get("sequence_id") if isinstance(parameters, dict) else None
    return found if isinstance(found, str) or type(found) is int else None

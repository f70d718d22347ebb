"""What the JSON of an inference request says of where it goes. Pure.

Whatever is no such JSON says nothing: it is for a worker to say what is wrong with it.
"""

import json
import re
from typing import Any

#: Bytes of JSON that are read for the sake of the items: more keep the event loop busy for longer than any request may.
MOST_JSON = 1 << 18
#: bytes of JSON in which a sequence is looked for, in some milliseconds
MOST_SEARCHED = 1 << 24
#: Found without parsing, which takes forty times as long. In texts the quotes would be escaped.
_SEQUENCE = re.compile(rb'"sequence_id"\s*:\s*(-?[0-9]+|"(?:[^"\\]|\\.)*")')


def peek(header: bytes, measured: tuple[str, int] | None) -> tuple[int, int | str | None]:
    """Items, and the id of the request's sequence.

    `header` is the request's JSON, without the binary data that may come after it; `measured` is the input that tells
    the items, and which axis.
    """
    items = 1
    if measured is not None and len(header) <= MOST_JSON:
        items = _items(_parsed(header), *measured)
    return items, _sequence(header)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _items(request: Any, name: str, axis: int) -> int:
    inputs = request.get("inputs") if isinstance(request, dict) else None
    for each in inputs if isinstance(inputs, list) else ():
        if isinstance(each, dict) and each.get("name") == name:
            shape = each.get("shape")
            if isinstance(shape, list) and axis < len(shape) and type(shape[axis]) is int:
                return shape[axis] if 0 < shape[axis] < 2**31 else 1
    return 1


def _sequence(header: bytes) -> int | str | None:
    found = _SEQUENCE.search(header)
    sequence: int | str | None = None if found is None else _parsed(found[1])
    return sequence

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
#: likewise, the shape of an input
_SHAPE = re.compile(rb'"shape"\s*:\s*\[([0-9,\s]*)\]')


def peek(header: bytes, measured: tuple[str, int] | None) -> tuple[int, int | str | None]:
    """Items, and the id of the request's sequence.

    `header` is the request's JSON, without the binary data that may come after it; `measured` is the input that tells
    the items, and which axis.
    """
    items = 1
    if measured is not None and len(header) <= MOST_JSON:
        items = _items(_parsed(header), *measured)
    return items, _sequence(header)


def overstated(header: bytes, size: int) -> str:
    """Return what is wrong with a request of `size` bytes that has an input of more elements; empty if nothing is.

    Triton 24.10 takes the memory for all elements before it reads one, and ends where there is not so much; the next
    server would follow.
    """
    for found in _SHAPE.finditer(header):
        elements = 1
        for extent in found[1].split(b","):
            text = extent.strip()
            if text.isdigit():  # else this is no JSON, which is for the server to say
                # One with more digits than this is too large in any case, and takes its time to read.
                elements *= int(text) if len(text) < 20 else size + 1
            if elements > size:
                shape = found[1][:100].decode()
                return f"an input of shape [{shape}] has more elements than the request has bytes, {size}"
    return ""


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

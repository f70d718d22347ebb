"""Reader of YAML without YAML 1.1's traps.

In YAML 1.1 the words n, y, no, on and off are booleans, and they are legal shape strings and axis letters here.
ruamel.yaml in its pure safe mode speaks YAML 1.2, where they are text.
"""

from __future__ import annotations

import datetime
import math
import re
from contextlib import suppress
from typing import Any

from rsrv_bundle.common_yaml import Uncommon, parse

# A manifest is a few kilobytes. Both limits bound what a hostile one can cost, the second also after aliases
# have been expanded. The parser takes up to 20 microseconds for each byte.
MAX_BYTES = 64 * 1024
_MAX_NODES = 50_000
_MAX_DEPTH = 50
# More than any text that happens to hold unmatched brackets.
_MAX_BRACKETS = 200
_MAX_BITS = 64


def load(data: bytes) -> Any:
    """Parse one YAML document into dicts with text keys, lists, text, numbers, booleans and None.

    Dates become ISO text. Raises ValueError, in one line, for anything that is not such a document: bad UTF-8 or
    YAML, duplicate keys, YAML 1.1's merge keys, unsafe tags, over MAX_BYTES, nested too deeply, aliases that expand
    without bound, or whole numbers of more than 64 bits.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"holds {len(data)} bytes; the limit is {MAX_BYTES}")
    if _open_brackets(data) > _MAX_BRACKETS:
        raise ValueError("is nested too deeply")
    with suppress(Uncommon, UnicodeDecodeError):
        return parse(data.decode())
    from ruamel.yaml import YAML
    from ruamel.yaml.constructor import ConstructorError, SafeConstructor

    class Constructor(SafeConstructor):
        def flatten_mapping(self, node: Any) -> Any:
            # Merge keys belong to YAML 1.1, and a few of them, each merging the one before, expand without bound.
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise ConstructorError(
                        problem="merge keys (<<) are not supported", problem_mark=key.start_mark
                    )

    reader = YAML(typ="safe", pure=True)
    reader.Constructor = Constructor
    try:
        document = reader.load(data.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ValueError(f"is not UTF-8 (byte {e.start})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except Exception as e:  # noqa: BLE001 - hostile text brings the parser to raise nearly anything
        raise ValueError(f"is not valid YAML 1.2: {_one_line(e)}") from None
    return _Plain().convert(document, 0)


def _open_brackets(data: bytes) -> int:
    """Return the largest number of open brackets, brackets in quoted text included.

    The parser takes seconds for a few thousand before it gives up, so they are counted first.
    """
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", data):
        depth = depth + 1 if bracket in b"[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _one_line(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return f"line {mark.line + 1}: {problem}" if mark is not None else str(problem)


class _Plain:
    """Copy of a parsed document as plain data, within a budget of nodes."""

    def __init__(self) -> None:
        self.nodes = 0

    def convert(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _MAX_NODES:
            raise ValueError(f"expands to more than {_MAX_NODES} values; remove its aliases")
        if depth > _MAX_DEPTH:
            raise ValueError(f"is nested more than {_MAX_DEPTH} levels deep")
        if isinstance(value, dict):
            plain: dict[str, Any] = {}
            for key, item in value.items():
                text = _key(key)
                if text in plain:
                    raise ValueError(f"has the key '{text}' twice")
                plain[text] = self.convert(item, depth + 1)
            return plain
        if isinstance(value, list):
            return [self.convert(item, depth + 1) for item in value]
        if isinstance(value, datetime.date):
            return value.isoformat()
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            # Its value cannot be printed: Python refuses to write long integers in decimal.
            raise ValueError(f"holds a number of {value.bit_length()} bits; {_MAX_BITS} are allowed")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"holds the number {value}; only finite numbers are allowed")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        raise ValueError(f"holds a value of the type {type(value).__name__}, which no key takes")


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return "true" if key else "false"
    if isinstance(key, str | float) or (isinstance(key, int) and key.bit_length() <= _MAX_BITS):
        return str(key)
    raise ValueError(f"has a key of the type {type(key).__name__}; keys are text")

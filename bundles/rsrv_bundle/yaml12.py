"""YAML 1.2's core schema, over PyYAML's parser, within limits for hostile documents.

PyYAML itself reads YAML 1.1, in which the words no, on and off are booleans, but they are valid shapes in a manifest. So this
module makes values from the events of PyYAML's parser. It does so while the parser runs, so that it can stop early at a document
that is too deep. The parser's time grows with the square of the depth.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import yaml

#: Maximum number of bytes of a document. A manifest has a few kilobytes.
MAX_BYTES = 64 * 1024
#: Maximum number of events that aliases may repeat.
_MAX_REPEATED = 50_000
_MAX_DEPTH = 50
_MAX_BITS = 64
#: Maximum number of characters of a whole number. Numbers of 64 bits are shorter. Python refuses to convert thousands of digits.
_MAX_DIGITS = 100

_PARSER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_TAG = "tag:yaml.org,2002:"
#: Types of plain values other than text: the tag, a pattern, and possible first characters.
_TYPES = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), "~nN"),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        "-+.0123456789",
    ),
)
_PATTERNS = {tag: pattern for tag, pattern, _ in _TYPES} | {"str": re.compile("")}
_FIRST = frozenset("".join(first for _, _, first in _TYPES))


def load(data: bytes) -> Any:
    """Parse one YAML document of at most MAX_BYTES, as `parse` does. Raises ValueError with one line of text."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"holds {len(data)} bytes; the limit is {MAX_BYTES}")
    try:
        return parse(data.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise ValueError(f"is not UTF-8 (byte {e.start})") from None


def parse(text: str) -> Any:
    """Parse one YAML document into dicts with text keys, lists, text, finite numbers, booleans and None.

    A key is always the text in the document, and dates are text. Raises ValueError with one line of text for bad YAML, duplicate keys,
    YAML 1.1's merge keys, tags outside the core schema, values that are nested too deeply, aliases that repeat too much, or whole
    numbers of more than 64 bits.
    """
    try:
        return _Document(yaml.parse(text, _PARSER)).value()
    except (
        yaml.YAMLError,
        OverflowError,
        ValueError,
    ) as error:  # PyYAML without C raises the last two for \Uffffffff.
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"is not valid YAML: {where}{problem or ' '.join(str(error).split())}") from None


#: Writer that quotes text if readers of YAML 1.1 or 1.2 would read it as a number, a date or a boolean.
_DUMPER: Any = type("_Dumper", (yaml.SafeDumper,), {})
for _tag, _pattern, _first in _TYPES:
    _DUMPER.add_implicit_resolver(_TAG + _tag, _pattern, list(_first))


def dump(value: object, *, compact: bool = True) -> str:
    """Return a value as YAML. Equal values with keys in equal order give equal text.

    With `compact`, an innermost collection is written on one line.
    """
    flow = None if compact else False
    return str(
        yaml.dump(
            value, Dumper=_DUMPER, default_flow_style=flow, sort_keys=False, width=110, allow_unicode=True
        )
    )


class _Document:
    """Converter of a document's events to values. For each alias, it reads the events of the anchor again."""

    def __init__(self, events: Iterable[Any]) -> None:
        self._coming = iter(events)
        self._events: list[Any] = []
        self._at = 0
        #: Positions of the events that have an anchor, by anchor.
        self._anchors: dict[str, int] = {}
        self._repeated = 0

    def value(self) -> Any:
        self._take()  # The start of the stream.
        if isinstance(self._take(), yaml.StreamEndEvent):
            return None
        value = self._value(self._take(), 0)
        self._take()  # The end of the document.
        if not isinstance(after := self._take(), yaml.StreamEndEvent):
            raise _wrong(after, "a second document begins; only one is allowed")
        return value

    def _take(self) -> Any:
        if self._at == len(self._events):
            self._events.append(next(self._coming))
        else:
            self._repeated += 1
        self._at += 1
        return self._events[self._at - 1]

    def _value(self, event: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _wrong(event, f"nested more than {_MAX_DEPTH} levels deep")
        if self._repeated > _MAX_REPEATED:
            raise _wrong(event, f"expands to more than {_MAX_REPEATED} values; remove its aliases")
        kind = type(event)
        if kind is yaml.AliasEvent:
            if event.anchor not in self._anchors:
                raise _wrong(event, f"the alias *{event.anchor} has no anchor")
            behind, self._at = self._at, self._anchors[event.anchor]
            value = self._value(self._take(), depth)
            self._at = behind
            return value
        self._note_anchor(event)
        if kind is yaml.ScalarEvent:
            return _scalar(event)
        mapping = kind is yaml.MappingStartEvent
        if event.tag not in (None, "!", _TAG + ("map" if mapping else "seq")):
            raise _wrong(event, f"the tag {event.tag} is not supported")
        return self._mapping(depth + 1) if mapping else self._list(depth + 1)

    def _note_anchor(self, event: Any) -> None:
        """Record the position of the event that was taken last, if it has an anchor."""
        at = self._at - 1
        if event.anchor is not None and self._anchors.setdefault(event.anchor, at) != at:
            raise _wrong(event, f"the anchor &{event.anchor} is defined twice")

    def _list(self, depth: int) -> list[Any]:
        items = []
        while type(event := self._take()) is not yaml.SequenceEndEvent:
            items.append(self._value(event, depth))
        return items

    def _mapping(self, depth: int) -> dict[str, Any]:
        items: dict[str, Any] = {}
        while type(key := self._take()) is not yaml.MappingEndEvent:
            if type(key) is not yaml.ScalarEvent or key.tag not in (None, "!", _TAG + "str"):
                raise _wrong(key, "a key is not text; keys are text")
            self._note_anchor(key)
            # Refuse merge keys, because a few of them, each merging the one before, would expand without bound.
            if key.value == "<<" and key.implicit[0]:
                raise _wrong(key, "merge keys (<<) are not supported")
            if key.value in items:
                raise _wrong(key, f"duplicate key '{key.value}'")
            items[key.value] = self._value(self._take(), depth)
        return items


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.implicit[0]:
        if text and text[0] not in _FIRST:
            return text
        tag = next((tag for tag, pattern, _ in _TYPES if pattern.match(text)), "str")
    elif event.tag in (None, "!"):
        return text
    else:
        tag = event.tag.removeprefix(_TAG)
        if tag not in _PATTERNS or not _PATTERNS[tag].match(text):
            raise _wrong(event, f"the tag {event.tag} is not supported here")
    if tag == "bool":
        return text in ("true", "True", "TRUE")
    if tag == "int" and len(text) <= _MAX_DIGITS:
        number = int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if number.bit_length() <= _MAX_BITS:
            return number
    if tag == "int":
        raise _wrong(event, f"whole numbers have at most {_MAX_BITS} bits")
    if tag == "float":
        if not math.isfinite(real := float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))):
            raise _wrong(
                event, f"the number {text[:_MAX_DIGITS]} is not finite; only finite numbers are allowed"
            )
        return real
    return None if tag == "null" else text


def _wrong(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)

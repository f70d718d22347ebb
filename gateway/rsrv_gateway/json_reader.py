"""Reader for a few members of a JSON document. The document may be too large for the memory.

`JsonReader` takes the document in pieces, returns the members that are in a pattern, and skips all others without storing them.
It reads members as rapidjson does in tritonserver: keys are decoded, only the first of several equal keys is used, and `NaN` and
`Inf` are numbers. It does not check skipped values, because tritonserver checks them itself.
"""

import json
import re
from collections.abc import Generator, Mapping
from typing import Any

from rsrv_gateway.peek import MOST_FIELDS, Malformed

#: A pattern for a number, a text, true, false or null.
SCALAR: Any = object()
#: A pattern for a value of which only the presence matters.
PRESENT: Any = object()
#: Documents up to this size are parsed as a whole by the module json, in a tenth of the time.
_SMALL_BYTES = 4 << 10
#: Maximum number of brackets in a document that the module json parses, because it fails at deeply nested values.
_SMALL_BRACKETS = 64
#: Maximum number of levels of nested values. Tritonserver 24.10 overflows its stack between 30,000 and 100,000
#: levels.
_MOST_NESTED = 1000
#: Maximum number of bytes of a text.
_TEXT_BYTES = 16 << 10
#: Maximum number of bytes of a number.
_NUMBER_BYTES = 400
#: Maximum number of bytes of a key, as it is written in the document. All keys of the patterns are shorter.
_KEY_BYTES = 128

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"', re.DOTALL)
_REST_OF_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WORD = re.compile(rb'[^ \t\r\n,:\[\]{}"]*+')
#: Byte-order mark. Rapidjson skips each byte of the mark, even if the other bytes are missing.
_MARK = re.compile(rb"\xef?\xbb?\xbf?")

#: A regular expression for the content of an array or object up to the next bracket.
_FLAT_CONTENT = rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+'


def _pattern_of_content(levels: int) -> bytes:
    """Return a regular expression for the content of an array or object with up to this many levels inside."""
    content = _FLAT_CONTENT
    for _ in range(levels):
        content = _FLAT_CONTENT + rb"(?:[\[{]" + content + rb"[\]}]" + _FLAT_CONTENT + rb")*+"
    return content


_CONTENT, _FLAT = re.compile(_pattern_of_content(16), re.DOTALL), re.compile(_FLAT_CONTENT, re.DOTALL)
#: After this many opening brackets without a closing bracket, the reader handles each bracket separately. In such deep values,
#: the expression for 16 levels would fail at each bracket and take longer.
_DESCENT = 3

_QUOTE, _COMMA, _COLON, _OPEN_LIST, _CLOSE_LIST, _OPEN, _CLOSE = b'",:[]{}'
_WRONG = "the request's JSON is malformed"
_INCOMPLETE = "the request's JSON is not complete"


def _first_of_equals(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(pairs))


_LIBRARY = json.JSONDecoder(object_pairs_hook=_first_of_equals, strict=False)


class JsonReader:
    """Reads a document, which must be an object. `tree` has the members of the pattern that were read so far.

    A pattern is a dict of patterns by key, a list with one pattern for all its elements, SCALAR or PRESENT. If the kind of a value
    differs from its pattern, `tree` has None for it. `tree` may also have members that are not in the pattern.
    """

    def __init__(self, pattern: Mapping[str, Any]) -> None:
        self._pattern = pattern
        self._data = b""
        self._at = 0
        self._last = False
        self._fields = 0
        self._parser: Generator[None, None, None] | None = None
        #: Number of bytes of the document so far.
        self.size = 0
        self.tree: dict[str, Any] = {}

    def feed(self, data: bytes, last: bool) -> bool:
        """Read the next bytes, and return True at the end of the document. Raises Malformed.

        `last` is True if no more data follows.
        """
        if self._parser is None:
            if last and len(data) <= _SMALL_BYTES and self._is_read_by_library(data):
                return True
            self._parser = self._document()
        self.size += len(data)
        self._data = self._data[self._at :] + data
        self._at, self._last = 0, last
        try:
            next(self._parser)
        except StopIteration:
            self.size -= len(self._data) - self._at
            self._data = b""
            return True
        return False

    def _is_read_by_library(self, data: bytes) -> bool:
        if data.count(b"[") + data.count(b"{") > _SMALL_BRACKETS:
            return False
        text = data.decode(errors="surrogateescape").lstrip(" \t\r\n")
        if not text.startswith("{"):
            return False
        try:
            self.tree, _ = _LIBRARY.raw_decode(text)
        except ValueError:
            return False
        self.size = len(data)
        return True

    def _document(self) -> Generator[None, None, None]:
        while len(self._data) < 3 and not self._last:
            yield
        mark = _MARK.match(self._data)
        assert mark is not None
        self._at = mark.end()
        if (yield from self._peek()) != _OPEN:
            raise Malformed("the request's JSON is not an object")
        yield from self._object(self._pattern, self.tree)

    # Each of these methods reads from `_at` and moves `_at` to the end of the read bytes. It yields when it needs more data.

    def _more(self) -> Generator[None, None, None]:
        if self._last:
            raise Malformed(_INCOMPLETE)
        yield

    def _peek(self) -> Generator[None, None, int]:
        """Return the next byte after blanks, without reading it."""
        while True:
            blanks = _SPACE.match(self._data, self._at)
            assert blanks is not None
            self._at = blanks.end()
            if self._at < len(self._data):
                return self._data[self._at]
            yield from self._more()

    def _count(self) -> None:
        self._fields += 1
        if self._fields > MOST_FIELDS:
            raise Malformed(f"the request's JSON has more than {MOST_FIELDS} fields")

    def _value(self, pattern: Any) -> Generator[None, None, Any]:
        first = self._data[self._at]
        if first == _OPEN and isinstance(pattern, Mapping):
            members: dict[str, Any] = {}
            yield from self._object(pattern, members)
            return members
        if first == _OPEN_LIST and isinstance(pattern, list):
            return (yield from self._list(pattern[0]))
        if first in (_OPEN, _OPEN_LIST):
            yield from self._skip_container()
        elif first == _QUOTE:
            if pattern is SCALAR:
                return (yield from self._text())
            yield from self._skip_string()
        else:
            word = yield from self._word()
            if pattern is SCALAR:
                return _number(word)
        return None

    def _object(self, patterns: Mapping[str, Any], members: dict[str, Any]) -> Generator[None, None, None]:
        """Read an object into `members`. A member is added when it is complete."""
        self._at += 1
        if (yield from self._peek()) == _CLOSE:
            self._at += 1
            return
        while True:
            if (yield from self._peek()) != _QUOTE:
                raise Malformed(_WRONG)
            self._count()
            key = yield from self._key()
            if (yield from self._peek()) != _COLON:
                raise Malformed(_WRONG)
            self._at += 1
            yield from self._peek()
            if key in patterns and key not in members:
                members[key] = yield from self._value(patterns[key])
            else:
                yield from self._value(PRESENT)
            end = yield from self._peek()
            self._at += 1
            if end == _CLOSE:
                return
            if end != _COMMA:
                raise Malformed(_WRONG)

    def _list(self, pattern: Any) -> Generator[None, None, list[Any]]:
        elements: list[Any] = []
        self._at += 1
        if (yield from self._peek()) == _CLOSE_LIST:
            self._at += 1
            return elements
        while True:
            self._count()
            yield from self._peek()
            elements.append((yield from self._value(pattern)))
            end = yield from self._peek()
            self._at += 1
            if end == _CLOSE_LIST:
                return elements
            if end != _COMMA:
                raise Malformed(_WRONG)

    def _key(self) -> Generator[None, None, str]:
        """Return a key, or an empty text if it is too long for any pattern."""
        while (match := _STRING.match(self._data, self._at)) is None:
            if len(self._data) - self._at > _KEY_BYTES:
                yield from self._skip_string()
                return ""
            yield from self._more()
        self._at = match.end()
        return _text(match[0]) if len(match[1]) <= _KEY_BYTES else ""

    def _text(self) -> Generator[None, None, str]:
        while (match := _STRING.match(self._data, self._at)) is None:
            if len(self._data) - self._at > _TEXT_BYTES:
                break
            yield from self._more()
        if match is None or len(match[1]) > _TEXT_BYTES:
            raise Malformed(f"a name or an id in the request's JSON has more than {_TEXT_BYTES} bytes")
        self._at = match.end()
        return _text(match[0])

    def _word(self) -> Generator[None, None, bytes]:
        """Return a number or another word. If it is long, return only its start."""
        word = b""
        while True:
            match = _WORD.match(self._data, self._at)
            assert match is not None
            if len(word) <= _NUMBER_BYTES:
                word += match[0][: _NUMBER_BYTES + 1]
            self._at = match.end()
            if self._at < len(self._data) or self._last:
                break
            yield
        if not word:
            raise Malformed(_WRONG)
        return word

    def _skip_string(self) -> Generator[None, None, None]:
        self._at += 1
        while True:
            data, at = self._data, self._at
            end = data.find(b'"', at)
            if (
                end > at and data[end - 1] == 0x5C
            ):  # The quote is escaped, or it follows an escaped backslash.
                end = -1
            if end < 0:
                match = _REST_OF_STRING.match(data, at)
                assert match is not None
                end = match.end()
            if end < len(data) and data[end] == _QUOTE:
                self._at = end + 1
                return
            self._at = end
            yield from self._more()

    def _skip_container(self) -> Generator[None, None, None]:
        nested = descent = 0
        #: Level from which each bracket is read separately, or 0 if there is no such level.
        deep = 0
        while True:
            data, at = self._data, self._at
            if nested:
                content = _FLAT.match(data, at) if deep else _CONTENT.match(data, _end_of_numbers(data, at))
                assert content is not None
                at = self._at = content.end()
            if at == len(data):
                yield from self._more()
            elif data[at] == _QUOTE:  # The end of this string is not in the data yet.
                yield from self._skip_string()
            elif data[at] in (_OPEN, _OPEN_LIST):
                nested += 1
                descent += 1
                if nested > _MOST_NESTED:
                    raise Malformed(f"the request's JSON has values nested more than {_MOST_NESTED} deep")
                if descent == _DESCENT and not deep:
                    deep = nested
                self._at += 1
            else:
                nested -= 1
                descent = 0
                if nested < deep:
                    deep = 0
                self._at += 1
                if not nested:
                    return


def _end_of_numbers(data: bytes, at: int) -> int:
    """Return the end of a list of plain numbers, or of its part in `data`. Return `at` if the list has other values.

    This takes a tenth of the time of a regular expression, and tensors often are such lists.
    """
    end = data.find(b"]", at)
    if end < 0:
        end = len(data)
    for opening in (b"[", b'"', b"{", b"}"):
        if data.find(opening, at, end) >= 0:
            return at
    return end


def _text(token: bytes) -> str:
    """Return the text of a string with its quotes. Raises Malformed."""
    text = token.decode(errors="surrogateescape")
    if "\\" not in text:
        return text[1:-1]
    try:
        decoded: str = json.loads(text, strict=False)
    except ValueError:
        raise Malformed(_WRONG) from None
    return decoded


def _number(word: bytes) -> Any:
    try:
        return json.loads(word) if len(word) <= _NUMBER_BYTES else None
    except ValueError:
        return None

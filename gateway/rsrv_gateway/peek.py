"""Reader for the parts of a ModelInferRequest that decide its route. Tensors are skipped, never read.

Only these parts are checked, so a worker may still refuse the message. Groups, which no version of the
protocol has had, are refused.
"""

from collections.abc import Iterable, Iterator

# Tags of the fields to read: field number << 3 | wire type. Strings and messages have a length (2).
_MODEL_NAME, _ID, _PARAMETERS, _INPUTS = 0x0A, 0x1A, 0x22, 0x2A
_INPUT_NAME, _SHAPE, _SHAPE_PACKED = 0x0A, 0x18, 0x1A
_KEY, _VALUE = 0x0A, 0x12
_BOOL, _INT64, _STRING, _DOUBLE, _UINT64 = 0x08, 0x10, 0x1A, 0x21, 0x28

#: Limit of fields in one message; more would block the event loop for too long.
_MOST_FIELDS = 10_000
_MOST_ITEMS = 2**31 - 1

#: position of a field's content in the message, [start, end)
Span = tuple[int, int]


class Malformed(ValueError):
    """The bytes are no ModelInferRequest; the message is for the client."""


class Peeked:
    """The parts of a request that decide its route."""

    __slots__ = ("data", "inputs", "model", "parameters", "span_of_id")

    def __init__(self, data: bytes, whole: bool = True) -> None:
        """Read the top-level fields in O(fields), not O(bytes). Raises Malformed.

        If it is not `whole`, `data` is the beginning of a request, and what it cuts off is absent.
        """
        self.data = data
        self.parameters: list[Span] = []
        self.inputs: list[Span] = []
        self.span_of_id = model = (0, 0)
        at, end = 0, len(data)
        try:
            for _ in range(_MOST_FIELDS):
                if at == end:
                    break
                # Nearly all tags and many lengths have one byte, so this case is inlined.
                tag = data[at]
                at += 1
                if tag >= 0x80:
                    tag, at = _varint(data, at - 1)
                if tag & 7 != 2:
                    at = _skip(data, at, tag)
                    if at > end:
                        raise IndexError
                    continue
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = _varint(data, at - 1)
                start = at
                at += size
                if at > end:
                    raise IndexError
                if tag == _INPUTS:
                    self.inputs.append((start, at))
                elif tag == _MODEL_NAME:
                    model = (start, at)
                elif tag == _PARAMETERS:
                    self.parameters.append((start, at))
                elif tag == _ID:
                    self.span_of_id = (start, at)
                elif tag < 8 or tag > 0xFFFFFFFF:
                    raise Malformed(_WRONG)
            else:
                raise Malformed(f"a ModelInferRequest has more than {_MOST_FIELDS} fields")
        except IndexError:
            if whole:
                raise Malformed(_WRONG) from None
        #: the model's name
        self.model = _text(data, model)

    @property
    def id(self) -> str:
        """Id of the request. Raises Malformed."""
        return _text(self.data, self.span_of_id)

    def items(self, name: str, axis: int) -> int:
        """Return the extent of the input's axis; 1 if the axis or the input is absent. Raises Malformed."""
        data, wanted = self.data, name.encode()
        budget = iter(range(_MOST_FIELDS))
        for start, end in self.inputs:
            found = b""
            shape: list[int] = []
            for tag, first, last in _fields(data, start, end, budget):
                if tag == _INPUT_NAME:
                    found = data[first:last]
                elif tag == _SHAPE_PACKED:
                    shape += _varints(data, first, last, budget)
                elif tag == _SHAPE:
                    shape.append(_varint(data, first)[0])
            if found == wanted:
                return shape[axis] if axis < len(shape) and 0 < shape[axis] <= _MOST_ITEMS else 1
        return 1

    def parameter(self, name: str) -> int | str | None:
        """Return a parameter that is a whole number or a text; else None. Raises Malformed."""
        if not self.parameters:
            return None
        data, wanted = self.data, name.encode()
        budget = iter(range(_MOST_FIELDS))
        answer: int | str | None = None
        for start, end in self.parameters:
            key, value = b"", None
            for tag, first, last in _fields(data, start, end, budget):
                if tag == _KEY:
                    key = data[first:last]
                elif tag == _VALUE:
                    value = _value(data, first, last, budget, value)
            if key == wanted:
                answer = value
        return answer


def int_parameter(name: str, value: int) -> bytes:
    """Return the bytes that, appended to a request, give it a parameter.

    `name` has fewer than 100 characters, and 0 <= `value` < 2**63.
    """
    number = bytearray()
    while value >= 0x80:
        number.append(value & 0x7F | 0x80)
        value >>= 7
    number.append(value)
    alternative = bytes([_INT64]) + number
    key = name.encode()
    entry = bytes([_KEY, len(key)]) + key + bytes([_VALUE, len(alternative)]) + alternative
    return bytes([_PARAMETERS, len(entry)]) + entry


_WRONG = "the request is not a ModelInferRequest"


def _value(
    data: bytes, start: int, end: int, budget: Iterator[int], before: int | str | None
) -> int | str | None:
    """Return the value of an InferParameter; the last of its alternatives counts."""
    value = before
    for tag, first, last in _fields(data, start, end, budget):
        if tag == _STRING:
            value = _text(data, (first, last))
        elif tag == _INT64:
            value = _signed(_varint(data, first)[0])
        elif tag == _UINT64:
            value = _varint(data, first)[0]
        elif tag in (_BOOL, _DOUBLE):
            value = None
    return value


def _fields(data: bytes, at: int, end: int, budget: Iterator[int]) -> Iterable[tuple[int, int, int]]:
    """Yield tag and span of each field of the message in [at, end). Raises Malformed."""
    try:
        while at < end:
            if next(budget, None) is None:
                raise Malformed(f"a part of a ModelInferRequest has more than {_MOST_FIELDS} fields")
            tag, start = _varint(data, at)
            if tag & 7 == 2:
                size, start = _varint(data, start)
                at = start + size
            else:
                at = _skip(data, start, tag)
            if at > end or not 8 <= tag <= 0xFFFFFFFF:
                raise Malformed(_WRONG)
            yield tag, start, at
    except IndexError:
        raise Malformed(_WRONG) from None


def _skip(data: bytes, at: int, tag: int) -> int:
    """Return the end of a field without length whose content begins at `at`."""
    kind = tag & 7
    if not 8 <= tag <= 0xFFFFFFFF or kind in (2, 3, 4, 6, 7):
        raise Malformed(_WRONG)
    if kind == 0:
        return _varint(data, at)[1]
    return at + (8 if kind == 1 else 4)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number at `at` and its end. Raises IndexError, Malformed."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at
        shift += 7
    raise Malformed(_WRONG)


def _varints(data: bytes, at: int, end: int, budget: Iterator[int]) -> Iterable[int]:
    while at < end:
        if next(budget, None) is None:
            raise Malformed(f"a shape in a ModelInferRequest has more than {_MOST_FIELDS} extents")
        value, at = _varint(data, at)
        yield value
    if at != end:
        raise Malformed(_WRONG)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _text(data: bytes, span: Span) -> str:
    try:
        return data[span[0] : span[1]].decode()
    except UnicodeDecodeError:
        raise Malformed(_WRONG) from None

"""Reader for the parts of a ModelInferRequest that decide its route.

protobuf reads them as the worker does, in 2 us for a small request. A large one is first cut down to them, in a time that
does not depend on its bytes: a message of empty inputs would take 50 times its size, and the event loop for as long.
Only these parts are checked, so a worker may still refuse the message.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

from google.protobuf.message import DecodeError

from rsrv_gateway.v1 import infer_head_pb2 as pb

#: bytes of a request that is read as it is
_SMALL_BYTES = 16 << 10
#: fields of any request; more would block the event loop for too long
_MOST_FIELDS = 10_000
#: numbers of the fields that are read: name, id, parameters and inputs; name and shape of an input
_MODEL_NAME, _ID, _PARAMETERS, _INPUTS = 1, 3, 4, 5
_INPUT_NAME, _SHAPE = 1, 3
#: elements of an input: no message holds more, and a product of extents that overflows in Triton fails the whole batch
_MOST_ELEMENTS = 2**31 - 1
#: extents of an input
_MOST_EXTENTS = 100
_WRONG = "the request is not a ModelInferRequest"
_NUMBERS_AND_TEXTS = ("int64_param", "uint64_param", "string_param")


class Malformed(ValueError):
    """The bytes are no ModelInferRequest that a worker could execute; the message is for the client."""


class Peeked:
    """The parts of a request that decide its route."""

    __slots__ = ("_head", "model")

    def __init__(self, data: bytes, whole: bool = True) -> None:
        """Read the request. Raises Malformed.

        If it is not `whole`, `data` is the beginning of a request, and what it cuts off is absent.
        """
        try:
            self._head: Any = pb.InferHead.FromString(
                data if whole and len(data) <= _SMALL_BYTES else _cut_down(data, whole)
            )
        except DecodeError:
            raise Malformed(_WRONG) from None
        #: the model's name
        self.model: str = self._head.model_name
        for one in self._head.inputs:
            shape = one.shape
            if len(shape) > _MOST_EXTENTS or prod([n for n in shape if n > 0]) > _MOST_ELEMENTS:
                raise _too_large(one.name)

    @property
    def id(self) -> str:
        return str(self._head.id)

    def items(self, measured: tuple[str, int] | None) -> int:
        """Return the extent of an input's axis; 1 for None, and if the axis or the input is absent."""
        if measured is not None:
            name, axis = measured
            for one in self._head.inputs:
                if one.name == name:
                    return max(one.shape[axis], 1) if axis < len(one.shape) else 1
        return 1

    def parameter(self, name: str) -> int | str | None:
        """Return a parameter that is a whole number or a text; else None."""
        if name not in self._head.parameters:
            return None
        parameter = self._head.parameters[name]
        kind = parameter.WhichOneof("parameter_choice")
        value: int | str | None = getattr(parameter, kind) if kind in _NUMBERS_AND_TEXTS else None
        return value


def int_parameter(name: str, value: int) -> bytes:
    """Return the bytes that, appended to a request, give it a parameter."""
    head = pb.InferHead(parameters={name: pb.InferHeadParameter(int64_param=value)})
    return bytes(head.SerializeToString())


def _too_large(name: str) -> Malformed:
    return Malformed(
        f"input {name[:100]!r} of the ModelInferRequest has more than {_MOST_ELEMENTS} elements, or more than "
        f"{_MOST_EXTENTS} extents"
    )


def _cut_down(data: bytes, whole: bool) -> bytes:
    """Return a request with what is read of it. Raises Malformed."""
    budget = iter(range(_MOST_FIELDS))
    kept = []
    for number, start, content, end in _fields(data, 0, len(data), budget, whole):
        if number == _INPUTS:
            parts = []
            name = b""
            for part, first, inside, last in _fields(data, content, end, budget, whole=True):
                if part == _INPUT_NAME:
                    name = data[inside:last]
                elif part != _SHAPE:
                    continue
                elif last - inside > 10 * _MOST_EXTENTS:
                    raise _too_large(name.decode(errors="replace"))
                parts.append(data[first:last])
            one = pb.InferHeadInput.FromString(b"".join(parts))
            kept.append(bytes(pb.InferHead(inputs=[one]).SerializeToString()))
        elif number in (_MODEL_NAME, _ID, _PARAMETERS):
            kept.append(data[start:end])
    return b"".join(kept)


def _fields(
    data: bytes, at: int, limit: int, budget: Iterator[int], whole: bool
) -> Iterator[tuple[int, int, int, int]]:
    """Yield each field's number, its start, the start of its content, and its end. Raises Malformed.

    If the message is not `whole`, a field that is cut off is the last one, and absent.
    """
    try:
        while at < limit:
            if next(budget, None) is None:
                raise Malformed(f"the ModelInferRequest has more than {_MOST_FIELDS} fields")
            tag, content = _varint(data, at)
            match tag & 7:
                case 0:
                    _, end = _varint(data, content)
                case 1:
                    end = content + 8
                case 2:
                    size, content = _varint(data, content)
                    end = content + size
                case 5:
                    end = content + 4
                case _:
                    # A group, which no version of the message has had, or nothing that protobuf knows.
                    raise Malformed(_WRONG)
            if end > limit:
                raise IndexError
            yield tag >> 3, at, content, end
            at = end
    except IndexError:
        if whole:
            raise Malformed(_WRONG) from None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the unsigned number at `at` and its end. Raises IndexError if it is cut off, or has no end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise IndexError

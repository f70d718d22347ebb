"""Reader for the parts of a ModelInferRequest that decide its route.

protobuf reads them as the worker does, in 2 us for a small request; for a large one the tensors are copied once, at 70 us
per MB. Only these parts are checked, so a worker may still refuse the message.
"""

from math import prod
from typing import Any

from google.protobuf.message import DecodeError

from rsrv_gateway.v1 import infer_head_pb2 as pb

#: fields that are looked for at the beginning of a request; more would block the event loop for too long
_MOST_FIELDS = 1000
#: elements of an input: no message holds more, and a product of extents that overflows in Triton fails the whole batch
_MOST_ELEMENTS = 2**31 - 1
#: extents of an input
_MOST_EXTENTS = 100
_NUMBERS_AND_TEXTS = ("int64_param", "uint64_param", "string_param")


class Malformed(ValueError):
    """The bytes are no ModelInferRequest that a worker could execute; the message is for the client."""


class Peeked:
    """The parts of a request that decide its route. Drop it before waiting, because it holds the tensors' bytes."""

    __slots__ = ("_head", "model")

    def __init__(self, data: bytes, whole: bool = True) -> None:
        """Read the request. Raises Malformed.

        If it is not `whole`, `data` is the beginning of a request, and what it cuts off is absent.
        """
        try:
            self._head: Any = pb.InferHead.FromString(data if whole else data[: _end_of_fields(data)])
        except DecodeError:
            raise Malformed("the request is not a ModelInferRequest") from None
        #: the model's name
        self.model: str = self._head.model_name
        for one in self._head.inputs:
            shape = one.shape
            if len(shape) > _MOST_EXTENTS or prod([n for n in shape if n > 0]) > _MOST_ELEMENTS:
                raise Malformed(
                    f"input {one.name[:100]!r} of the ModelInferRequest has more than {_MOST_ELEMENTS} elements, or more than "
                    f"{_MOST_EXTENTS} extents"
                )

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


def _end_of_fields(data: bytes) -> int:
    """Return where the last field of a message ends that is there as a whole."""
    at = 0
    try:
        for _ in range(_MOST_FIELDS):
            tag, end = _varint(data, at)
            match tag & 7:
                case 0:
                    _, end = _varint(data, end)
                case 1 | 5 as kind:
                    end += 8 if kind == 1 else 4
                case 2:
                    size, end = _varint(data, end)
                    end += size
                case _:
                    # A group, which no version of the message has had, or nothing that protobuf knows.
                    return len(data)
            if end > len(data):
                break
            at = end
    except IndexError:
        pass
    return at


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

"""Reader for the parts of a ModelInferRequest that decide its route.

protobuf reads these parts as the worker does, in 2 us for a small request. A large request is first reduced to these parts, in a
time that does not depend on the size of its tensors. Otherwise, a message with many empty inputs would take 50 times its size in
memory, and block the event loop. Only these parts are checked, so a worker may still refuse the message.
"""

from collections.abc import Generator
from math import prod
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode

from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.v1 import infer_head_pb2 as pb

#: Requests of at most this many bytes are read without reducing them.
SMALL_BYTES = 16 << 10
#: Maximum number of fields of a request. More fields would block the event loop for too long.
MOST_FIELDS = 10_000
#: Numbers of the fields that are read.
_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS = 1, 2, 3, 4, 5, 6
_RAW_CONTENTS = 7
#: Numbers of the fields that are copied unchanged.
_KEPT_FIELDS = (_MODEL_NAME, _MODEL_VERSION, _ID, _PARAMETERS, _OUTPUTS)
#: Numbers of the fields of an input that are read.
_NAME_AND_SHAPE = _INPUT_NAME, _SHAPE = 1, 3
#: Maximum number of elements of an input. No message is large enough for more elements. A shape with more could overflow the
#: product of its extents in Triton, and the whole batch would fail.
MOST_ELEMENTS = 2**31 - 1
#: Maximum number of extents of an input.
MOST_EXTENTS = 100
#: Wire type of length-delimited fields, such as texts and messages.
_OF_LENGTH = 2
#: Wire types of the fields with a fixed size -> number of bytes.
_SIZES = {1: 8, 5: 4}
_WRONG = "the request is not a ModelInferRequest"
_NUMBERS_AND_TEXTS = ("int64_param", "uint64_param", "string_param")


class Malformed(ValueError):
    """The request is malformed, so that no worker could execute it. The message is for the client."""

    def __init__(self, message: str, code: StatusCode = StatusCode.INVALID_ARGUMENT) -> None:
        super().__init__(message)
        self.refusal = Refusal(code, message)


def sequence_of(value: object) -> int | str | None:
    """Return the sequence that tritonserver reads from a parameter's value.

    Return None if this is not a sequence, or if tritonserver refuses the value.
    """
    if isinstance(value, str):
        return value.partition("\0")[0] or None
    if type(value) is int and -(2**63) <= value < 2**64:
        return value % 2**64 or None
    return None


class Peeked:
    """The parts of a request that decide its route."""

    __slots__ = ("_head", "model")

    def __init__(self, data: bytes) -> None:
        """Read the request. Raises Malformed."""
        try:
            self._head: Any = pb.InferHead.FromString(data if len(data) <= SMALL_BYTES else _cut_down(data))
        except DecodeError:
            raise Malformed(_WRONG) from None
        #: Name of the model.
        self.model: str = self._head.model_name
        for tensor in self._head.inputs:
            shape = tensor.shape
            if len(shape) > MOST_EXTENTS or prod([n for n in shape if n > 0]) > MOST_ELEMENTS:
                raise _too_large(tensor.name)

    @property
    def id(self) -> str:
        return str(self._head.id)

    @property
    def version(self) -> str:
        return str(self._head.model_version)

    @property
    def sequence(self) -> int | str | None:
        return sequence_of(self.parameter("sequence_id"))

    @property
    def classified(self) -> tuple[str, ...]:
        """Names of the outputs that the client wants as classes."""
        return tuple(
            [
                output.name.partition("\0")[0]
                for output in self._head.outputs
                if "classification" in output.parameters and output.parameters["classification"].int64_param
            ]
        )

    def items(self, measured: tuple[str, int] | None) -> int:
        """Return the extent of an axis of an input, given as (input, axis).

        Return 1 for None, or if the axis or the input is absent.
        """
        if measured is not None:
            name, axis = measured
            for tensor in self._head.inputs:
                if tensor.name == name:
                    return max(tensor.shape[axis], 1) if axis < len(tensor.shape) else 1
        return 1

    def parameter(self, name: str) -> int | str | None:
        """Return the value of a parameter if it is a whole number or a text, otherwise None."""
        if name not in self._head.parameters:
            return None
        parameter = self._head.parameters[name]
        kind = parameter.WhichOneof("parameter_choice")
        value: int | str | None = getattr(parameter, kind) if kind in _NUMBERS_AND_TEXTS else None
        return value


def int_parameter(name: str, value: int) -> bytes:
    """Return bytes that add a parameter to a request if they are appended to it."""
    head = pb.InferHead(parameters={name: pb.InferHeadParameter(int64_param=value)})
    return bytes(head.SerializeToString())


def _encoded_input(parts: bytes) -> bytes:
    """Return an encoded request with one input, whose encoded fields are `parts`. Raises DecodeError."""
    tensor = pb.InferHeadInput.FromString(parts)
    return bytes(pb.InferHead(inputs=[tensor]).SerializeToString())


def _too_large(name: str) -> Malformed:
    return Malformed(
        f"input {name[:100]!r} of the ModelInferRequest has more than {MOST_ELEMENTS} elements, or more than "
        f"{MOST_EXTENTS} extents"
    )


def _cut_down(data: bytes) -> bytes:
    """Return a request reduced to the fields that are read. Raises Malformed."""
    reader = MessageReader(len(data))
    reader.feed(data, last=True)
    return bytes(reader.without_tensors)


class MessageReader:
    """Reads the fields of `InferHead` from a message that arrives in pieces, and skips tensors."""

    def __init__(self, most: int) -> None:
        """Start a message. At most `most` of its bytes are stored."""
        self._most = most
        self._data = b""
        self._at = 0
        self._last = False
        self._fields = 0
        #: All bytes that were read so far, without the tensors.
        self.without_tensors = bytearray()
        self._parser = self._message()
        #: True once the tensors have begun. All serialisers write the other parts before the tensors.
        self.has_tensors = False

    def feed(self, data: bytes, last: bool) -> None:
        """Read the next bytes. `last` is True if the message ends with them. Raises Malformed."""
        self._data = self._data[self._at :] + data
        self._at, self._last = 0, last
        try:
            next(self._parser, None)
        except DecodeError:
            raise Malformed(_WRONG) from None

    # Each of these methods yields when it needs more data.

    def _message(self) -> Generator[None, None, None]:
        while (yield from self._has_more()):
            tag, field = yield from self._tag()
            number, kind = tag >> 3, tag & 7
            if number == _INPUTS and kind == _OF_LENGTH:
                size, _ = yield from self._varint()
                self._keep(_encoded_input((yield from self._input(size))))
            elif number in _KEPT_FIELDS and kind == _OF_LENGTH:
                size, length = yield from self._varint()
                self._keep(field + length + (yield from self._take(size)))
            else:
                self.has_tensors = self.has_tensors or number == _RAW_CONTENTS
                yield from self._skip(kind)

    def _input(self, size: int) -> Generator[None, None, bytes]:
        """Return the name and the shape of an input of this size."""
        fields = name = b""
        while size > 0:
            tag, field = yield from self._tag()
            size -= len(field)
            if tag >> 3 in _NAME_AND_SHAPE and tag & 7 in (0, _OF_LENGTH):
                number, more = yield from self._varint()
                size -= len(more)
                content = b""
                if tag & 7 == _OF_LENGTH:
                    if tag >> 3 == _SHAPE and number > 10 * MOST_EXTENTS:
                        raise _too_large(name.decode(errors="replace"))
                    content = yield from self._take(number)
                    name = content if tag >> 3 == _INPUT_NAME else name
                fields += field + more + content
                size -= len(content)
                if len(fields) > self._most:
                    raise self._too_much()
            else:
                size -= yield from self._skip(tag & 7)
        if size < 0:
            raise Malformed(_WRONG)
        return fields

    def _keep(self, field: bytes) -> None:
        self.without_tensors += field
        if len(self.without_tensors) > self._most:
            raise self._too_much()

    def _has_more(self) -> Generator[None, None, bool]:
        while self._at == len(self._data):
            if self._last:
                return False
            yield
        return True

    def _tag(self) -> Generator[None, None, tuple[int, bytes]]:
        self._fields += 1
        if self._fields > MOST_FIELDS:
            raise Malformed(f"the ModelInferRequest has more than {MOST_FIELDS} fields")
        return (yield from self._varint())

    def _varint(self) -> Generator[None, None, tuple[int, bytes]]:
        """Return an unsigned number and its bytes."""
        value = 0
        digits = b""
        for shift in range(0, 70, 7):
            if not (yield from self._has_more()):
                raise Malformed(_WRONG)
            byte = self._data[self._at]
            digits += self._data[self._at : self._at + 1]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, digits
        raise Malformed(_WRONG)

    def _take(self, size: int) -> Generator[None, None, bytes]:
        if size > self._most:
            raise self._too_much()
        while len(self._data) - self._at < size:
            if self._last:
                raise Malformed(_WRONG)
            yield
        start, self._at = self._at, self._at + size
        return self._data[start : self._at]

    def _skip(self, kind: int) -> Generator[None, None, int]:
        """Skip the content of a field, and return its number of bytes."""
        skipped = 0
        if kind == _OF_LENGTH:
            size, digits = yield from self._varint()
            skipped = len(digits)
        elif kind == 0:
            _, digits = yield from self._varint()
            return len(digits)
        elif kind in _SIZES:
            size = _SIZES[kind]
        else:
            # The field is a group, or its wire type does not exist. No version of the message has ever had a group.
            raise Malformed(_WRONG)
        left = size
        while left:
            if not (yield from self._has_more()):
                raise Malformed(_WRONG)
            step = min(left, len(self._data) - self._at)
            self._at += step
            left -= step
        return skipped + size

    def _too_much(self) -> Malformed:
        return Malformed(f"names and parameters of the ModelInferRequest have more than {self._most} bytes")

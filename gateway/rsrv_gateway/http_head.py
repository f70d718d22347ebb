"""Reader for the parts of an inference request over HTTP that decide its route.

`HttpHead` takes the body in pieces, as the client sent them, and stores little of it. It reads the body as tritonserver 24.10
does: it detects gzip and deflate by the first bytes, and reads JSON by the rules of rapidjson. Whole numbers have 64 bits, and a
text ends at a NUL. It refuses a body that it cannot read, instead of guessing.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from grpc import StatusCode

from rsrv_gateway.json_reader import PRESENT, SCALAR, JsonReader
from rsrv_gateway.peek import MOST_ELEMENTS, MOST_EXTENTS, Malformed, sequence_of

_INFER = {
    "parameters": {"sequence_id": SCALAR},
    "inputs": [{"name": SCALAR, "shape": [SCALAR], "data": PRESENT}],
    "outputs": [{"name": SCALAR, "parameters": {"classification": SCALAR}}],
}
#: Pattern of a request for a generation. The parameters may be members of the request itself or of its `parameters`.
_GENERATE = {
    "sequence_id": SCALAR,
    "stream": PRESENT,
    "parameters": {"sequence_id": SCALAR, "stream": PRESENT},
}
#: A decompressed body has at most _INFLATED_BYTES bytes plus _INFLATED_RATIO times its compressed size. Without a limit, a body
#: could become 1,000 times as large.
_INFLATED_BYTES, _INFLATED_RATIO = 16 << 20, 100
#: Maximum number of bytes that are decompressed at once.
_SLICE_BYTES = 1 << 18
_MOST_LENGTH_DIGITS = 10


@dataclass(frozen=True, slots=True)
class InferenceHead:
    """The parts of a request that decide its route."""

    sequence: int | str | None = None
    #: Names and shapes of the inputs.
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Names of the outputs that the client wants as classes.
    classified: tuple[str, ...] = ()
    #: True if the request says whether the answer is a stream.
    has_stream: bool = False

    def items(self, measured: tuple[str, int] | None) -> int:
        """Return the extent of an axis of an input, given as (input, axis).

        Return 1 for None, or if the axis or the input is absent.
        """
        if measured is not None:
            measured_input, axis = measured
            for name, shape in self.inputs:
                if name == measured_input:
                    return max(shape[axis], 1) if axis < len(shape) else 1
        return 1


class Inflater:
    """Decompresses a body in pieces."""

    def __init__(self, encoding: str) -> None:
        """Start a body. Raises Malformed."""
        if encoding not in ("gzip", "deflate"):
            raise Malformed(
                f"the compression {encoding[:100]!r} is not supported; use gzip, deflate or identity",
                StatusCode.UNIMPLEMENTED,
            )
        self._zlib = zlib.decompressobj(47)  # The first bytes distinguish gzip from zlib, as in tritonserver.
        self._received = self._inflated = 0

    @property
    def ended(self) -> bool:
        """True at the end of the compressed data. Later bytes are ignored."""
        return self._zlib.eof

    def slices(self, data: bytes) -> Iterator[bytes]:
        """Yield the decompressed data in parts. Raises Malformed."""
        if self.ended:
            return  # Ignore later bytes, because zlib would store all of them, and copy them at each call.
        self._received += len(data)
        size = _SLICE_BYTES
        while data or size == _SLICE_BYTES:
            try:
                inflated = self._zlib.decompress(data, _SLICE_BYTES)
            except zlib.error as error:
                raise Malformed(f"the request cannot be decompressed: {error}") from None
            data, size = self._zlib.unconsumed_tail, len(inflated)
            self._inflated += size
            if self._inflated > _INFLATED_BYTES + _INFLATED_RATIO * self._received:
                raise Malformed(
                    f"the decompressed request is larger than {_INFLATED_BYTES >> 20} MiB, and more than {_INFLATED_RATIO} times as "
                    "large as the compressed body. Send less in one request, or send it without compression"
                )
            if inflated:
                yield inflated


class HttpHead:
    """Reads the body of a request. `head` is None until enough of the body was read."""

    def __init__(self, operation: str, encoding: str | None, length: str | None, most: int) -> None:
        """Start a body. Raises Malformed.

        `encoding` and `length` are the headers Content-Encoding and Inference-Header-Content-Length. At most `most` bytes of JSON
        are accepted, after decompression.
        """
        self._generates = operation != "infer"
        self._reader = JsonReader(_GENERATE if self._generates else _INFER)
        self._most = most
        #: Number of bytes of JSON that have not arrived yet, or None if the whole body is JSON.
        self._left = None if length is None or self._generates else _length(length)
        self._inflater = None if encoding in (None, "identity") else Inflater(encoding)
        #: True until the first byte of the body is read.
        self._empty = True
        self.head: InferenceHead | None = None
        if self._left == 0:  # The body has no JSON.
            self.head = InferenceHead()

    @property
    def sequence(self) -> int | str | None:
        """The sequence in the bytes that were read so far."""
        return (
            _sequence(_object(self._reader.tree.get("parameters")))
            if self.head is None
            else self.head.sequence
        )

    @property
    def knows_sequence(self) -> bool:
        """True if later bytes cannot change `sequence`."""
        return self.head is not None or (not self._generates and "parameters" in self._reader.tree)

    @property
    def is_compressed(self) -> bool:
        return self._inflater is not None

    def feed(self, data: bytes, last: bool) -> None:
        """Read the next data. `last` is True if the body ends with it. Raises Malformed."""
        for _ in self.steps(data, last):
            pass

    def steps(self, data: bytes, last: bool) -> Iterator[None]:
        """Read the next data like `feed`. Each step reads a part of it, so that other work can run between the steps."""
        if self._inflater is None:
            if self.head is None:
                self._read(data, last)
            return
        for inflated in self._inflater.slices(data):
            if self.head is not None:
                return
            self._read(inflated, last=False)
            yield
        if self.head is None and (last or self._inflater.ended):
            self._read(b"", last=True)

    def _read(self, data: bytes, last: bool) -> None:
        """Read decompressed bytes. Raises Malformed."""
        if self._left is not None:
            data, last = data[: self._left], last or len(data) >= self._left
            self._left -= len(data)
        self._empty = self._empty and not data
        if last and self._empty:
            self.head = InferenceHead()
        elif self._reader.feed(data, last):
            self.head = _head(self._reader.tree, self._reader.size, self._generates)
        elif self._reader.size > self._most:
            raise Malformed(
                f"the request's JSON has more than {self._most} bytes, which is gateway.max_message_bytes",
                StatusCode.OUT_OF_RANGE,
            )


def _length(text: str) -> int:
    """Return the number in the header with the length. Raises Malformed."""
    if not (text.isascii() and text.isdigit()) or len(text.lstrip("0")) > _MOST_LENGTH_DIGITS:
        raise Malformed(f"Inference-Header-Content-Length must be a number of bytes, not {text[:100]!r}")
    return int(text)


def _head(request: Mapping[str, Any], size: int, generates: bool) -> InferenceHead:
    """Return the head of a request whose JSON has `size` bytes. Raises Malformed."""
    parameters = _object(request.get("parameters"))
    sequence = _sequence(parameters)
    if generates:
        return InferenceHead(
            sequence or _sequence(request), has_stream="stream" in request or "stream" in parameters
        )
    inputs = []
    for tensor in _list(request.get("inputs")):
        tensor = _object(tensor)
        name, shape = tensor.get("name"), _list(tensor.get("shape"))
        # Skip other inputs, because tritonserver refuses them before it uses them.
        if isinstance(name, str) and all(type(extent) is int and 0 <= extent < 2**64 for extent in shape):
            _check(name, shape, size if "data" in tensor else MOST_ELEMENTS)
            inputs.append((name.partition("\0")[0], tuple(shape)))
    classified = []
    for output in _list(request.get("outputs")):
        output = _object(output)
        name = output.get("name")
        classes = _object(output.get("parameters")).get("classification")
        if isinstance(name, str) and type(classes) is int and classes > 0:
            classified.append(name.partition("\0")[0])
    return InferenceHead(sequence, tuple(inputs), tuple(classified))


def _sequence(parameters: Mapping[str, Any]) -> int | str | None:
    value = parameters.get("sequence_id")
    # Only gRPC has negative ids.
    return None if isinstance(value, int) and value < 0 else sequence_of(value)


def _check(name: str, shape: Sequence[int], most: int) -> None:
    """Check that an input has at most `most` elements. Raises Malformed.

    Tritonserver 24.10 allocates memory for all elements of an input in JSON before it reads the first element, and crashes if
    this fails. It also reads large extents as negative numbers.
    """
    if len(shape) > MOST_EXTENTS:
        raise Malformed(f"input {name[:100]!r} has more than {MOST_EXTENTS} extents")
    if any(extent > MOST_ELEMENTS for extent in shape) or prod(shape) > most:
        raise Malformed(
            f"input {name[:100]!r} of shape {str(list(shape))[:100]} has more elements than the request can hold, {most}"
        )


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

"""Frames of traces: marks of traced requests, and the spans that stubs record of these requests.

If `traces.enabled` of REGISTERED is true, a stub sends TRACE before the frame of a traced request. The marks of TRACE have the
ids of the trace and of the parent span for the runtime's spans of these requests. If a connection has more than 4,096 unused
marks, the runtime drops all of them. The stub sends its own spans later, as SPANS on a connection for REPORT. SPANS has no
answer.
"""

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rsrv.wire.frames import Kind, ProtocolError, pack_entries, pack_json, unpack_entries

#: Maximum number of spans in one frame. While the runtime reads a frame, requests wait for about 6 us per span.
MAX_SPANS = 32
#: Maximum number of characters of a text in a span.
MAX_TEXT = 200

Attributes = Mapping[str, str | int | float]

_TRACE_ID, _SPAN_ID = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16}")
MARK = struct.Struct("<Q16s8s")


class Mark(NamedTuple):
    """Mark of a traced request. It applies to the next request with this number on the connection."""

    request: int
    #: 32 hexadecimal digits.
    trace: str
    #: 16 hexadecimal digits: the parent of the runtime's spans of the request.
    span: str


class Span(NamedTuple):
    """A finished part of a trace. Ids are hexadecimal digits; times are nanoseconds of CLOCK_MONOTONIC."""

    trace: str
    #: Id of the parent: another span of rsrv, or the client's span.
    parent: str
    #: Id of this span, or empty if no other span refers to it.
    id: str
    name: str
    start_ns: int
    end_ns: int
    #: Reason of the failure, or empty.
    error: str
    attributes: Attributes


def pack_marks(marks: Sequence[Mark]) -> bytes:
    """Return one TRACE frame with at most frames.MAX_ENTRIES entries."""
    entries = [(mark.request, bytes.fromhex(mark.trace), bytes.fromhex(mark.span)) for mark in marks]
    return pack_entries(Kind.TRACE, MARK, entries)


def unpack_marks(frame: bytes | memoryview, count: int) -> Iterator[Mark]:
    entries = unpack_entries(Kind.TRACE, MARK, frame, count)
    return (Mark(request, trace.hex(), span.hex()) for request, trace, span in entries)


def pack_spans(spans: Sequence[Span], dropped: int) -> list[bytes]:
    """Return the SPANS frames for these spans. `dropped` is the number of spans dropped since the last frame."""
    if len(spans) <= MAX_SPANS:
        try:
            return [pack_json(Kind.SPANS, {"spans": spans, "dropped": dropped})]
        except ProtocolError:
            # Texts may be long. A single span always fits.
            if len(spans) < 2:
                raise
    half = len(spans) // 2
    return [*pack_spans(spans[:half], dropped), *pack_spans(spans[half:], 0)]


def read_spans(document: Mapping[str, Any]) -> tuple[list[Span], int]:
    """Return the spans of a SPANS frame, and the number of dropped spans. Raises ProtocolError."""
    try:
        spans, dropped = [_read(value) for value in document["spans"]], int(document["dropped"])
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ProtocolError(f"SPANS that cannot be read: {type(error).__name__}: {error}") from None
    if not 0 <= dropped < 1 << 63:
        raise ProtocolError(f"SPANS with an invalid number of dropped spans: {dropped}")
    if len(spans) > MAX_SPANS:
        raise ProtocolError(f"SPANS has {len(spans)} spans; at most {MAX_SPANS} are allowed")
    return spans, dropped


def _read(value: Sequence[Any]) -> Span:
    """Return a span. Raises TypeError or ValueError if it is invalid."""
    span = Span(*value)
    if not (
        _TRACE_ID.fullmatch(span.trace)
        and _SPAN_ID.fullmatch(span.parent)
        and (span.id == "" or _SPAN_ID.fullmatch(span.id))
        and isinstance(span.start_ns, int)
        and isinstance(span.end_ns, int)
        and 0 <= span.start_ns <= span.end_ns < 1 << 63
    ):
        raise ValueError("invalid ids or times")
    texts = (span.name, span.error, *span.attributes.keys())
    values = span.attributes.values()
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_value, values)):
        raise ValueError("invalid texts or attributes")
    if any(len(text) > MAX_TEXT for text in (*texts, *values) if isinstance(text, str)):
        raise ValueError(f"texts of more than {MAX_TEXT} characters")
    return span


def _is_value(value: object) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and -(1 << 63) <= value < 1 << 63)

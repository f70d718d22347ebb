"""Spans as OpenTelemetry has them, made of those that the runtime and the stubs tell. Pure."""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from rsrv.wire.traces import Span

_SCOPE = InstrumentationScope("rsrv")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def make_spans(told: Iterable[Sequence[Any]], offset_ns: int, resource: Resource) -> list[ReadableSpan]:
    """`told`: as the answer to the command `traces` has them (docs/protocol.md); equal ones give equal spans.

    `offset_ns`: what the calendar's time is ahead of CLOCK_MONOTONIC, by which they are told, in nanoseconds.
    """
    return [_make(Span(*one), offset_ns, resource) for one in told]


def _make(span: Span, offset_ns: int, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        _text(span.name),
        _context(span.trace, span.id or _id(span)),
        _context(span.trace, span.parent),
        resource,
        {
            _text(key): _text(value) if isinstance(value, str) else value
            for key, value in span.attributes.items()
        },
        status=Status(StatusCode.ERROR, _text(span.error)) if span.error else Status(),
        start_time=span.start_ns + offset_ns,
        end_time=span.end_ns + offset_ns,
        instrumentation_scope=_SCOPE,
    )


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=_SAMPLED)


def _id(span: Span) -> str:
    """Of one that nobody refers to. Told twice, it is the same, so that a collector may notice."""
    what = f"{span.trace} {span.parent} {span.name} {span.start_ns}"
    return blake2b(what.encode(errors="replace"), digest_size=8).hexdigest()


def _text(text: str) -> str:
    """A client's id may be no proper text, which would cost all spans beside it."""
    return text.encode(errors="replace").decode()

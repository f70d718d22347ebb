"""Traces go to their collector: the runtime is asked for spans, and OpenTelemetry's exporter sends them.

The runtime keeps the latest ones, so it is the only buffer: while the collector takes its time, older ones are
forgotten there, and counted here. No request waits for any of this.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NoReturn, Protocol

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

import rsrv
from rsrv.control.grpc_service import StatusError
from rsrv.control.overrides import Command
from rsrv.wire.traces import Span

log = logging.getLogger("rsrv.control")

_SCOPE = InstrumentationScope("rsrv")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def make_spans(told: Iterable[Sequence[Any]], offset_ns: int, resource: Resource) -> list[ReadableSpan]:
    """Make OpenTelemetry's spans of those that the runtime and the stubs tell.

    `told`: as the answer to the command `traces` has them (docs/protocol.md); equal ones give equal spans.
    `offset_ns`: what the calendar's time is ahead of CLOCK_MONOTONIC, by which they are told, in nanoseconds.
    """
    return [_make_span(Span(*one), offset_ns, resource) for one in told]


def _make_span(span: Span, offset_ns: int, resource: Resource) -> ReadableSpan:
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


#: seconds between two looks for spans
_PAUSE = 1.0


class Runtime(Protocol):
    """What is asked: a `RuntimeLink`."""

    async def command(self, command: Command) -> dict[str, Any]:
        """Raises StatusError."""


class Collector:
    """Where spans go. `send` may take as long as OTEL_EXPORTER_OTLP_TIMEOUT, and is for one thread."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # It says every time why something failed; here that is said once.
        self._said = _First()
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self._said)
        self._exporter = OTLPSpanExporter(endpoint)
        self._well = True

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Whether they were taken."""
        self._said.text = ""
        well = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if not well and self._well:
            log.error(
                "traces.endpoint: %s does not take spans, which are lost until it does: %s",
                self._endpoint,
                self._said.text,
            )
        elif well and not self._well:
            log.info("traces.endpoint: %s takes spans again", self._endpoint)
        self._well = well
        return well


class _First(logging.Handler):
    """Keeps what was logged first since `text` was cleared: the reason. Later lines say that it was given up."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class Exporting:
    """`run` asks and sends; `counts` has how many spans were exported, failed to be, or were dropped before that."""

    def __init__(
        self, runtime: Runtime, send: Callable[[Sequence[ReadableSpan]], bool], *, pause: float = _PAUSE
    ) -> None:
        self._runtime = runtime
        self._send = send
        self._pause = pause
        #: the runtime that is asked, the number of the next span there, and how many its stubs had dropped
        self._instance = ""
        self._next = self._dropped = 0
        self._counts = {"exported": 0, "failed": 0, "dropped": 0}
        ours = {"service.name": "rsrv", "service.version": rsrv.__version__}
        # What the environment says wins.
        self._resource = Resource.create(ours).merge(OTELResourceDetector().detect())

    @property
    def counts(self) -> Mapping[str, int]:
        return self._counts

    async def run(self) -> NoReturn:
        while True:
            try:
                more = await self.step()
            except StatusError:
                more = False  # there is no runtime now
            if not more:
                await asyncio.sleep(self._pause)

    async def step(self) -> bool:
        """Take what there is, as much as comes at a time, and send it; whether there is more. Raises StatusError."""
        said = await self._runtime.command({"command": "traces", "since": self._next})
        if said["instance"] != self._instance:
            first = not self._instance
            self._instance, self._next, self._dropped = said["instance"], 0, 0
            if first:
                # What it has forgotten by now a control process before this one may have exported.
                self._next, self._dropped = said["first"], said["dropped"]
            return True
        self._counts["dropped"] += said["first"] - self._next + said["dropped"] - self._dropped
        self._next, self._dropped = said["next"], said["dropped"]
        if said["spans"]:
            well = await asyncio.to_thread(self._export, said["spans"])
            self._counts["exported" if well else "failed"] += len(said["spans"])
        return bool(said["next"] < said["end"])

    def _export(self, told: Sequence[Sequence[Any]]) -> bool:
        offset_ns = time.time_ns() - time.monotonic_ns()
        resource = self._resource.merge(Resource({"service.instance.id": self._instance}))
        return self._send(make_spans(told, offset_ns, resource))

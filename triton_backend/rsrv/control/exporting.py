"""The export of traces. It reads spans from the runtimes, and sends them with OpenTelemetry's exporter.

Only the runtimes store spans, and only the latest ones. While the collector is slow, a runtime drops older spans,
and this module counts them. No request waits for the export.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

import rsrv
from rsrv.control.grpc_service import StatusError
from rsrv.control.runtimes import Runtimes
from rsrv.wire.traces import Span

log = logging.getLogger(__name__)

_SCOPE = InstrumentationScope("rsrv")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def make_spans(values: Iterable[Sequence[Any]], offset_ns: int, resource: Resource) -> list[ReadableSpan]:
    """Convert spans of the runtime and the stubs to OpenTelemetry's spans. Equal values give equal spans.

    Each item of `values` has the fields of a `rsrv.wire.traces.Span`, with times of CLOCK_MONOTONIC. `offset_ns` is Unix time
    minus this clock, in nanoseconds.
    """
    return [_make_span(Span(*value), offset_ns, resource) for value in values]


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
    """Return an id for a span that has none. Equal spans get the same id, so that a collector can drop duplicates."""
    identity = f"{span.trace} {span.parent} {span.name} {span.start_ns}"
    return blake2b(identity.encode(errors="replace"), digest_size=8).hexdigest()


def _text(text: str) -> str:
    """Return text that can be encoded. A client's id may contain surrogates, which would make the whole export fail."""
    return text.encode(errors="replace").decode()


#: Seconds between two reads of the runtimes' spans.
_POLL_S = 1.0


class Collector:
    """The collector of spans. Only one thread may call `send`, which takes at most OTEL_EXPORTER_OTLP_TIMEOUT."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        # OpenTelemetry's exporter logs a reason at each failure. Catch its log, so that `send` can log the reason only once.
        self._reason = _First()
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.addHandler(self._reason)
        self._exporter = OTLPSpanExporter(endpoint)
        self._healthy = True

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        """Send spans; return True if the collector took them."""
        self._reason.text = ""
        well = self._exporter.export(spans) is SpanExportResult.SUCCESS
        if not well and self._healthy:
            log.error(
                "traces.endpoint: the collector %s does not accept spans. Spans are lost until it accepts them again: %s",
                self._endpoint,
                self._reason.text,
            )
        elif well and not self._healthy:
            log.info("traces.endpoint: the collector %s accepts spans again", self._endpoint)
        self._healthy = well
        return well


class _First(logging.Handler):
    """Stores the first log line after `text` was cleared. This line has the reason. Later lines only report the failure."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()


class _Position(NamedTuple):
    """Position in the spans of a runtime: the number of the next span, and how many spans the runtime's stubs had dropped."""

    instance: str
    next: int
    dropped: int


class Exporting:
    """The export of all runtimes' spans.

    `counts` has the number of spans that were exported, that the collector did not accept ("failed"), and that a runtime or a
    stub dropped before they were read ("dropped").
    """

    def __init__(
        self,
        runtimes: Runtimes,
        send: Callable[[Sequence[ReadableSpan]], bool],
        *,
        pause: float = _POLL_S,
    ) -> None:
        self._runtimes = runtimes
        self._send = send
        self._pause = pause
        #: Positions at which the next answers begin, by device.
        self._positions: dict[int, _Position] = {}
        self.counts = {"exported": 0, "failed": 0, "dropped": 0}
        ours = {"service.name": "rsrv", "service.version": rsrv.__version__}
        # The attributes in OpenTelemetry's environment variables take precedence.
        self._resource = Resource.create(ours).merge(OTELResourceDetector().detect())

    async def run(self) -> NoReturn:
        while True:
            try:
                more = await self.step()
            except StatusError:
                more = False  # No runtime answers.
            if not more:
                await asyncio.sleep(self._pause)

    async def step(self) -> bool:
        """Read one answer of each device and send its spans. Return True if more spans are ready. Raises StatusError."""
        since = {number: (position.instance, position.next) for number, position in self._positions.items()}
        answers = await self._runtimes.read_on("traces", since)
        return any([await self._take(number, answer) for number, answer in answers.items()])

    async def _take(self, number: int, answer: Mapping[str, Any]) -> bool:
        """Send the spans of a device's answer. Return True if the device has more."""
        before = self._positions.get(number)
        if before is None:
            # Do not count the spans that the runtime dropped before the first answer, because an earlier control process may
            # have exported them.
            before = _Position(answer["instance"], answer["first"], answer["dropped"])
        elif before.instance != answer["instance"]:
            before = _Position(answer["instance"], 0, 0)
        self.counts["dropped"] += answer["first"] - before.next + answer["dropped"] - before.dropped
        self._positions[number] = _Position(answer["instance"], answer["next"], answer["dropped"])
        if answer["spans"]:
            well = await asyncio.to_thread(self._export, number, answer["instance"], answer["spans"])
            self.counts["exported" if well else "failed"] += len(answer["spans"])
        return bool(answer["next"] < answer["end"])

    def _export(self, device: int, instance: str, spans: Sequence[Sequence[Any]]) -> bool:
        offset_ns = time.time_ns() - time.monotonic_ns()
        resource = self._resource.merge(Resource({"service.instance.id": instance, "rsrv.device": device}))
        return self._send(make_spans(spans, offset_ns, resource))

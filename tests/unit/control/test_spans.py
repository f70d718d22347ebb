"""Spans for OpenTelemetry, and their transport from the runtime to a collector."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import StatusCode

from rsrv.control.exporting import Collector, Exporting, make_spans
from rsrv.control.runtime_link import RuntimeDown
from rsrv.control.runtimes import Positions
from rsrv.wire.traces import Span
from tests.waiting import looped

TRACE, PARENT, OWN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "00f067aa0ba902b7"
SECOND = 10**9


def part(name: str = "queue", id: str = "", error: str = "", **attributes: str | float) -> Span:
    return Span(TRACE, PARENT, id, name, 5 * SECOND, 7 * SECOND, error, attributes)


def test_a_span_has_its_times_ids_and_attributes() -> None:
    """A span has its calendar times, its trace, its parent and its attributes."""
    resource = Resource({"service.name": "rsrv"})
    (made,) = make_spans([part(id=OWN, rows=3, model="a")], 100 * SECOND, resource)

    assert (made.name, made.start_time, made.end_time) == ("queue", 105 * SECOND, 107 * SECOND)
    context, parent = made.context, made.parent
    assert context is not None
    assert parent is not None
    assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (TRACE, OWN)
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE, PARENT)
    assert context.trace_flags.sampled
    assert made.attributes == {"rows": 3, "model": "a"}
    assert made.status.status_code is StatusCode.UNSET
    assert made.resource is resource


def test_a_span_that_failed_says_why() -> None:
    """A failed span has its error. Invalid text is repaired, because it would make the collector refuse all spans of the batch."""
    (made,) = make_spans([part(error="no \ud800", who="\udcff")], 0, Resource({}))

    assert (made.status.status_code, made.status.description) == (StatusCode.ERROR, "no ?")
    assert made.attributes == {"who": "?"}


def test_a_span_that_is_told_twice_is_the_same() -> None:
    """If a span is read twice, it gets the same id both times. Spans without an id get different ids."""

    def ids(*spans: Span) -> list[int]:
        return [made.context.span_id for made in make_spans(spans, 0, Resource({})) if made.context]

    assert ids(part("queue"), part("load")) == ids(part("queue"), part("load"))
    assert len(set(ids(part("queue"), part("load"), part(id=OWN)))) == 3


class Device:
    """A fake runtime of a device, which keeps the latest three spans. While `down` is true, it does not answer."""

    def __init__(self, instance: str = "first") -> None:
        self.instance = instance
        self.spans: list[Span] = []
        self.dropped = 0
        self.down = False

    def answer(self, instance: str, since: int) -> dict[str, Any]:
        end = len(self.spans)
        first = max(min(since if instance == self.instance else 0, end), end - 3)
        spans = self.spans[first : first + 2]
        header = {"instance": self.instance, "first": first, "next": first + len(spans), "end": end}
        answer: dict[str, Any] = json.loads(json.dumps({**header, "dropped": self.dropped, "spans": spans}))
        return answer

    def new(self) -> None:
        self.instance, self.spans, self.dropped = "second", [], 0


class FakeRuntimes:
    def __init__(self, *devices: Device) -> None:
        self._devices = devices

    async def read_on(self, command: str, since: Positions) -> dict[int, dict[str, Any]]:
        live = {number: device for number, device in enumerate(self._devices) if not device.down}
        if not live:
            raise RuntimeDown
        return {number: device.answer(*since.get(number, ("", 0))) for number, device in live.items()}


class Sink:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.instances: set[object] = set()
        self.well = True

    def send(self, spans: Sequence[ReadableSpan]) -> bool:
        self.names += [span.name for span in spans]
        named = ("service.instance.id", "rsrv.device")
        self.instances |= {tuple(span.resource.attributes[key] for key in named) for span in spans}
        return self.well


def export(sink: Sink, *devices: Device, pause: float = 1.0) -> Exporting:
    """Return the export of these devices' spans to a sink."""
    runtimes: Any = FakeRuntimes(*devices)
    return Exporting(runtimes, sink.send, pause=pause)


async def all_of(exporting: Exporting) -> None:
    while await exporting.step():
        pass


@looped
async def test_spans_are_sent_once_and_losses_counted() -> None:
    """Each span is sent once. Spans that the runtime, a stub or the collector loses are counted."""
    runtime, sink = Device(), Sink()
    exporting = export(sink, runtime)
    runtime.spans = [part(name) for name in "ab"]
    await all_of(exporting)
    await all_of(exporting)
    assert (sink.names, sink.instances) == (["a", "b"], {("first", 0)})

    runtime.spans += [part(name) for name in "cdefg"]
    runtime.dropped = 4
    await all_of(exporting)
    assert sink.names == ["a", "b", "e", "f", "g"]
    assert exporting.counts == {"exported": 5, "failed": 0, "dropped": 2 + 4}

    sink.well = False
    runtime.spans.append(part("h"))
    await all_of(exporting)
    assert exporting.counts == {"exported": 5, "failed": 1, "dropped": 6}


@looped
async def test_a_new_control_process_counts_no_losses_of_the_time_before_it() -> None:
    """A new control process sends the kept spans again. It does not count losses from before its start."""
    runtime, sink = Device(), Sink()
    before = export(sink, runtime)
    runtime.dropped = 4
    for name in "abcdefgh":
        runtime.spans.append(part(name))
        await all_of(before)
    after = export(sink, runtime)
    await all_of(after)
    assert before.counts["exported"] == 8
    assert "".join(sink.names) == "abcdefgh" + "fgh"
    assert after.counts == {"exported": 3, "failed": 0, "dropped": 0}

    runtime.spans += [part(name) for name in "ijklm"]
    runtime.dropped += 1
    await all_of(after)
    assert after.counts == {"exported": 6, "failed": 0, "dropped": 2 + 1}


@looped
async def test_another_runtimes_spans_are_all_new() -> None:
    """All spans of a new runtime are sent, although their numbers begin again. Without a runtime, nothing is sent."""
    runtime, sink = Device(), Sink()
    exporting = export(sink, runtime, pause=0.001)
    runtime.spans = [part(name) for name in "abc"]
    running = asyncio.create_task(exporting.run())

    async def exported(count: int) -> None:
        while exporting.counts["exported"] < count:
            await asyncio.sleep(0)

    await exported(3)
    runtime.down = True
    await asyncio.sleep(0)
    runtime.new()
    runtime.spans, runtime.dropped, runtime.down = [part("d")], 1, False
    await exported(4)
    running.cancel()

    assert "".join(sink.names) == "abcd"
    assert sink.instances == {("first", 0), ("second", 0)}
    assert exporting.counts == {"exported": 4, "failed": 0, "dropped": 1}


@looped
async def test_spans_of_all_devices_are_sent() -> None:
    """Spans of each device are read from the device's own position on, and name the device.

    No span is lost when the runtime of another device ends.
    """
    first, second, sink = Device("first"), Device("other"), Sink()
    exporting = export(sink, first, second)
    first.spans, second.spans = [part(name) for name in "abc"], [part("x")]
    await all_of(exporting)
    first.down = True
    second.spans.append(part("y"))
    await all_of(exporting)
    first.new()
    first.down, first.spans = False, [part("d")]
    await all_of(exporting)

    assert sorted(sink.names) == ["a", "b", "c", "d", "x", "y"]
    assert sink.instances == {("first", 0), ("other", 1), ("second", 0)}
    assert exporting.counts == {"exported": 6, "failed": 0, "dropped": 0}


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME names the service. Without this variable, the name is rsrv."""

    def name() -> object:
        return export(Sink(), Device())._resource.attributes["service.name"]

    assert name() == "rsrv"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "models")
    assert name() == "models"


def test_a_collector_that_is_not_there_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unreachable collector is logged once, with the exporter's reason. The spans are lost."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    telemetry = logging.getLogger("opentelemetry")
    monkeypatch.setattr(telemetry, "propagate", True)
    monkeypatch.setattr(telemetry, "handlers", [])
    collector = Collector("http://127.0.0.1:9/v1/traces")
    spans = make_spans([part()], 0, Resource({}))

    assert not collector.send(spans)
    assert not collector.send(spans)

    (line,) = caplog.messages
    assert "traces.endpoint: the collector http://127.0.0.1:9/v1/traces does not accept spans" in line
    assert len(line.rpartition(": ")[2]) > 5


def test_the_log_says_why_the_collector_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has the reason of the current failure, although the exporter's last line has no reason."""
    telemetry = logging.getLogger("opentelemetry")
    monkeypatch.setattr(telemetry, "propagate", True)
    monkeypatch.setattr(telemetry, "handlers", [])
    collector = Collector("http://127.0.0.1:9/v1/traces")
    lines: list[str] = []

    def export(spans: object) -> SpanExportResult:
        for line in lines:
            telemetry.error(line)
        return SpanExportResult.FAILURE if lines else SpanExportResult.SUCCESS

    monkeypatch.setattr(collector._exporter, "export", export)
    for errors in (["connection refused", "gave up"], [], ["no route", "gave up"]):
        lines[:] = errors
        collector.send([])

    refused, unreachable = caplog.messages
    assert refused.endswith("until it accepts them again: connection refused")
    assert unreachable.endswith("until it accepts them again: no route")


_SCRIPT = """
import sys
from rsrv.control import grpc_server, health, reconciler, live, metrics, runtime_link, service
from rsrv.control.__main__ import _exporting
from rsrv.settings import Settings
import rsrv.runtime.loop
assert _exporting(Settings(), None) is None
print([name for name in sys.modules if name.startswith(("opentelemetry", "aiohttp"))])
"""


def test_without_traces_and_a_page_their_libraries_are_not_loaded() -> None:
    """Neither the control process nor the runtime imports OpenTelemetry or aiohttp before a setting needs them."""
    out = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"

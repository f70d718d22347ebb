"""The metrics for Prometheus, and the HTTP server that serves them."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rsrv.control import http
from rsrv.control.bundle_states import BundleFailure
from rsrv.control.findings import ServerFinding
from rsrv.control.http import HttpServer
from rsrv.control.metric_catalog import FAMILIES, table
from rsrv.control.metrics import ServerFacts, expose
from rsrv.control.v1 import control_pb2 as pb
from rsrv.histogram import LONG_SECONDS, PADDING, ROWS, SECONDS, Histogram
from rsrv.live.routes import LivePage
from rsrv_gateway.metrics import table as gateway_table
from tests.unit.control.peers import records, served, trimmed, until
from tests.unit.control.test_live_routes import FakeSource
from tests.waiting import looped

ROOT = Path(__file__).resolve().parents[3]
DEVICE_0 = (("device", "0"),)
NAMES = {family.name for family in FAMILIES}
FINDING = ServerFinding("padding", "note", "86 % of a's rows are padding", "rows", "export size 4")
ALONE = ServerFacts(
    restarts={0: 2},
    models=["a"],
    failed=["b"],
    version="1.2.3",
    spans={"exported": 5},
    states={"cold": 3, "failed": 1},
    findings=[FINDING, FINDING],
)


def measured(bounds: tuple[float, ...], *values: float) -> pb.Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    return trimmed(histogram)


COMMON: dict[str, Any] = {
    "queued": 4,
    "outcomes": {"answered": 3, "failed": 0},
    "device_seconds": 0.5,
    "hooks": {"pre": measured(SECONDS, 0.01)},
    "request": measured(SECONDS, 0.02, 0.03),
    "responses": {"ok": 3},
    "refused": {"queue_full": 1},
    "missed": {"load": 2},
}
MODEL = pb.ModelRecord(
    name='od"d',
    weights=pb.WEIGHTS_RESIDENT,
    host_bytes=10,
    device_bytes=20,
    dispatches=2,
    useful_rows=5,
    padded_rows=3,
    misses=1,
    loads=1,
    evictions={"room": 1},
    queue_wait=measured(SECONDS, 0.1, 100.0),
    execute=measured(SECONDS, 0.001),
    load=measured(SECONDS, 0.2),
    batch_rows=measured(ROWS, 1, 4),
    batch_padding=measured(PADDING, 0, 3),
    aliases={"champion": pb.Counts(counts={"ok": 4})},
    shadows={"champion": pb.Counts(counts={"same": 3, "different": 1})},
    sequences={"idle": 3},
    generations=2,
    tokens={"prompt": 40, "answer": 30},
    first_token=measured(SECONDS, 0.05),
    between_tokens=measured(SECONDS, 0.004),
    **COMMON,
)
DEVICE: dict[str, Any] = {
    "memory": {
        "budget_bytes": 100,
        "pinned_bytes": 1,
        "logical_bytes": 2,
        "physical_bytes": 3,
        "held_bytes": 4,
    },
    "host": {"logical_bytes": 5, "physical_bytes": 6, "tensors": 7},
    "scratch_bytes": 8,
    "kept_bytes": 9,
    "compiled": 1,
    "from_cache": 2,
    "shared_executables": 3,
    "compile": measured(LONG_SECONDS, 1.5),
    "loop_bans": 1,
}
#: Records of a runtime, with values for each kind of metric.
SAID = records(MODEL, pb.ModelRecord(name="chain", meta=True, executing=1, calls=7, **COMMON), **DEVICE)


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_shows_metrics_that_exist() -> None:
    """The metrics and labels on the page are in the lists that the commands print."""
    text = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    listed = re.findall(r"`(rsrv_\w+\{[\w,]+\})`", text)

    assert len(listed) > 15
    assert {*listed} <= {*re.findall(r"^\| `([^`]+)`", f"{table()}\n{gateway_table()}", re.MULTILINE)}


def test_every_family_is_served_and_has_its_labels() -> None:
    """According to Prometheus' own parser, exactly the metrics of the table are served, with their labels."""
    families = {
        metric.name + ("_total" if metric.type == "counter" else ""): metric
        for metric in text_string_to_metric_families(expose({0: SAID}, ALONE))
    }

    assert families.keys() == NAMES
    for family in FAMILIES:
        parsed = families[family.name]
        assert (parsed.type, parsed.documentation) == (family.kind, family.help)
        extra = {"le"} if family.kind == "histogram" else set()
        for sample in parsed.samples:
            assert sample.labels.keys() - extra == set(family.labels), sample


def test_samples_are_what_the_runtime_says() -> None:
    """The samples have the runtime's values, even for names with quotes and for values beyond all buckets."""
    values = samples(expose({0: SAID}, ALONE))
    device, model = ("device", "0"), ("model", 'od"d')

    assert values["rsrv_queue_wait_seconds_bucket", (device, ("le", "60.0"), model)] == 1
    assert values["rsrv_queue_wait_seconds_bucket", (device, ("le", "+Inf"), model)] == 2
    assert values["rsrv_queue_wait_seconds_sum", (device, model)] == pytest.approx(100.1)
    assert values["rsrv_batch_rows_bucket", (device, ("le", "2.0"), model)] == 1
    assert values["rsrv_weight_loads_total", (device, model)] == 1
    assert values["rsrv_deadline_missed_total", (device, model, ("stage", "load"))] == 2
    by_alias = (("alias", "champion"), device, model, ("status", "ok"))
    assert values["rsrv_alias_responses_total", by_alias] == 4
    assert values["rsrv_sequences", (device, model, ("state", "idle"))] == 3
    assert values["rsrv_generations", (device, model)] == 2
    assert values["rsrv_tokens_total", (device, model, ("of", "answer"))] == 30
    assert values["rsrv_first_token_seconds_sum", (device, model)] == 0.05
    assert values["rsrv_meta_calls_total", (device, ("model", "chain"))] == 7
    assert values["rsrv_loop_bans_total", (device,)] == 1
    assert ("rsrv_device_memory_bytes", (device, ("kind", "limit"))) not in values
    assert values["rsrv_reload_failed", (("model", "b"),)] == 1
    assert values["rsrv_models", (("state", "cold"),)] == 3
    assert values["rsrv_trace_spans_total", (("outcome", "exported"),)] == 5
    assert values["rsrv_findings", (("name", "padding"), ("severity", "note"))] == 2
    assert values["rsrv_build_info", (("version", "1.2.3"),)] == 1


def test_without_a_runtime_there_is_what_is_known() -> None:
    """Without a runtime, only its state and the failed bundles are served."""
    values = samples(expose({}, ALONE))

    assert {name for name, _ in values} == {
        "rsrv_reload_failed",
        "rsrv_models",
        "rsrv_runtime_up",
        "rsrv_runtime_restarts_total",
        "rsrv_findings",
        "rsrv_trace_spans_total",
        "rsrv_build_info",
    }
    assert values["rsrv_runtime_up", DEVICE_0] == 0
    assert values["rsrv_runtime_restarts_total", DEVICE_0] == 2


def test_each_device_has_its_samples() -> None:
    """Samples of runtimes have the label of their device. For a device with a dead runtime, only its state and its restarts are served."""
    server = ServerFacts(restarts={0: 0, 1: 3, 2: 0}, models=["a"], failed=[], version="1", spans={})
    values = samples(expose({0: SAID, 2: SAID}, server))

    def devices(name: str) -> dict[str, float]:
        return {dict(labels)["device"]: value for (family, labels), value in values.items() if family == name}

    assert devices("rsrv_executions_total") == {"0": 2, "2": 2}
    assert devices("rsrv_runtime_up") == {"0": 1, "1": 0, "2": 1}
    assert devices("rsrv_runtime_restarts_total") == {"0": 0, "1": 3, "2": 0}
    assert values["rsrv_reload_failed", (("model", "a"),)] == 0


def test_of_several_devices_histograms_without_values_are_left_out() -> None:
    """With several devices, a model has histograms only for devices that executed it. With one device, all are there from the start."""
    model = pb.ModelRecord()
    model.CopyFrom(MODEL)
    model.ClearField("execute")
    idle = records(model, **DEVICE)

    def executed(devices: dict[int, Any]) -> list[str]:
        values = samples(expose(devices, ALONE))
        return [dict(labels)["device"] for name, labels in values if name == "rsrv_execute_seconds_count"]

    assert executed({0: idle}) == ["0"]
    assert executed({0: idle, 1: SAID}) == ["1"]


@looped
async def test_the_service_gives_the_page_while_the_runtime_is_and_is_not_there(tmp_path: Path) -> None:
    """GetMetrics answers with and without a runtime. It always has the failed bundles."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.models[MODEL.name] = MODEL
        # The stub of a new version imports its model.py, while the current version serves.
        server.runtime.record.importing["a"].seconds = 40.0
        server.lifecycle.failures["a"] = BundleFailure("no module", since=0.0)

        up = samples((await server.control.GetMetrics(pb.GetMetricsRequest())).text)
        server.runtime.die()
        await until(server.runtimes, lambda: not server.link.up)
        down = samples((await server.control.GetMetrics(pb.GetMetricsRequest())).text)

    assert up["rsrv_runtime_up", DEVICE_0] == 1
    assert up["rsrv_models", (("state", "resident"),)] == 1
    assert down["rsrv_models", (("state", "failed"),)] == 1
    assert up["rsrv_executions_total", (*DEVICE_0, ("model", 'od"d'))] == 2
    assert down["rsrv_runtime_up", DEVICE_0] == 0
    assert up["rsrv_reload_failed", (("model", "a"),)] == down["rsrv_reload_failed", (("model", "a"),)] == 1


# --- HTTP ---------------------------------------------------------------------------------------------------


def server_of(text: str = "") -> HttpServer:
    async def make() -> str:
        return text

    return HttpServer(make, LivePage(FakeSource(), None))


@asynccontextmanager
async def page(text: str = "rsrv_up 1\n") -> AsyncIterator[int]:
    server = server_of(text)
    port = await server.start("127.0.0.1:0")
    yield port
    await server.stop()


async def say(port: int, request: bytes) -> bytes:
    """Send bytes and return the whole answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


@looped
async def test_get_metrics_serves_the_page() -> None:
    """GET /metrics is answered, whatever its query and its headers are."""
    async with page() as port:
        answer = await say(
            port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        )

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Content-Type: text/plain; version=0.0.4; charset=utf-8" in head
    assert body == b"rsrv_up 1\n"


@looped
async def test_pages_of_other_sites_read_nothing() -> None:
    """Metrics and live page are refused if the Host is another site's name."""
    async with page() as port:
        for path in (b"/metrics", b"/", b"/live/stream", b"/live/trace"):
            request = b"GET %s HTTP/1.1\r\nHost: evil.example:8004\r\nConnection: close\r\n\r\n"
            assert (await say(port, request % path)).startswith(b"HTTP/1.1 421")


@looped
async def test_too_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection above the limit is closed at once. After another connection ends, the next one is answered."""
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 1)
    async with page() as port:
        idle, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await idle.readuntil(b"rsrv_up 1\n")
        third, other = await asyncio.open_connection("127.0.0.1", port)
        assert await third.read() == b""
        for stream in (other, writer):
            stream.close()
            await stream.wait_closed()
        answer = b""
        while not answer:
            # The server has not noticed the end of the first connection yet, and closes this one with the request unread.
            with suppress(ConnectionError):
                answer = await say(port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")


@looped
async def test_an_idle_connection_is_closed_for_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, a connection that was silent for too long is closed. A connection with a request in progress is not."""
    monkeypatch.setattr(http, "_MAX_CONNECTIONS", 2)
    monkeypatch.setattr(http, "_IDLE_S", 0.0)
    async with page() as port:
        watcher, watching = await asyncio.open_connection("127.0.0.1", port)
        watching.write(b"GET /live/stream HTTP/1.1\r\nHost: a\r\n\r\n")
        await watcher.readuntil(b"hello")
        silent, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HT")
        answer = await say(port, b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await silent.read() == b""
        assert not watcher.at_eof()
        for stream in (writer, watching):
            stream.close()
            await stream.wait_closed()


@looped
async def test_an_address_that_cannot_be_had_is_said() -> None:
    """The error says whether the port is taken or the address is invalid."""
    async with page() as port:
        with pytest.raises(OSError, match="address already in use"):
            await server_of().start(f"127.0.0.1:{port}")
    for address in ("8004", "a:b", "127.0.0.1:70000"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            await server_of().start(address)

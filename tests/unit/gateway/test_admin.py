"""The gateway's HTTP port for operators: metrics, health and the live page."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme
from aiohttp import ClientSession, web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rsrv.control.grpc_server import ListenError
from rsrv.histogram import Histogram
from rsrv.placement.contract import ModelView, WeightsView, WorkerView
from rsrv.renewal import Renewals, end_of
from rsrv_gateway.admin import Admin
from rsrv_gateway.metrics import DepartedWorkers, expose, merge
from rsrv_gateway.traffic import DURATION_BOUNDS, TrafficCounts
from tests.unit.gateway.worlds import World
from tests.waiting import looped

TRITON = """# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="m",version="1"} 7
# HELP nv_cpu_utilization CPU utilization rate [0.0 - 1.0]
# TYPE nv_cpu_utilization gauge
nv_cpu_utilization 0.25
# HELP nv_latencies Latencies
# TYPE nv_latencies summary
nv_latencies_count{model="m"} 1
nv_latencies_sum{model="m"} 2
nv_latencies{model="m",quantile="0.5"} 3
"""


def test_several_texts_become_one() -> None:
    """The metrics of several workers are merged. Each metric has one HELP and TYPE, and each sample a worker label."""
    other = TRITON.replace("} 7", "} 8").replace("rate", "share")
    text = merge("# TYPE own gauge\nown 1\nbare 2\n", [("a", TRITON), ('we"ird', other)])

    assert text.count("# TYPE nv_inference_request_success counter") == 1
    assert text.count("# HELP nv_cpu_utilization ") == 1
    assert 'nv_inference_request_success{worker="a",model="m",version="1"} 7' in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [(s.labels, s.value) for s in families["nv_cpu_utilization"].samples] == [
        ({"worker": "a"}, 0.25),
        ({"worker": 'we"ird'}, 0.25),
    ]
    assert len(families["nv_latencies"].samples) == 6
    assert (families["own"].samples[0].value, families["bare"].samples[0].labels) == (1, {})
    lines = [re.split("[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")]
    together = [name for at, name in enumerate(lines) if at == 0 or lines[at - 1] != name]
    assert [name for name in together if name.startswith("nv_i")] == ["nv_inference_request_success"]


@pytest.mark.parametrize(
    ("line", "merged"),
    [
        ("a{} 1", 'a{worker="w"} 1'),
        ("a 1 1700000000000", 'a{worker="w"} 1 1700000000000'),
        ('a{x="{ } ,"} NaN', 'a{worker="w",x="{ } ,"} NaN'),
        ("# a comment", None),
        ("", None),
        ("nonsense", None),
        ("{} 1", None),
        ('a{worker="1",x="2"} 3', 'a{worker="w",exported_worker="1",x="2"} 3'),
        ('a{worker="1",exported_worker="2"} 3', None),
        ('a{x="1",x="2"} 3', None),
        ('a{x="1", y="2", }\t3', 'a{worker="w",x="1", y="2"} 3'),
        ('a{__x="1"} 2', None),
        ('a{x="1} 2', None),
        ("a one", None),
        ("a 1_0", None),
        ("a 1 2 3", None),
        ("<p>It's 5", None),
        ("<html> 5", None),
        ("# TYPE a nonsense\na 1", 'a{worker="w"} 1'),
        ("# HELP a\na 1", '# HELP a\na{worker="w"} 1'),
    ],
)
def test_each_kind_of_line_gets_its_label(line: str, merged: str | None) -> None:
    """Each kind of sample gets the label. Lines that are not samples are left out."""
    assert merge("", [("w", line)]) == ("" if merged is None else merged + "\n")


_ODD = st.text(st.sampled_from('ab_:"\\{}=, \t\r\n\0#<>/1.eE+-\x85\u2028é'), max_size=30)
_LINES = st.sampled_from(
    [
        *TRITON.splitlines(),
        'a{x="1"} 2',
        "# HELP a b",
        "# TYPE a gauge",
        "<html><body>",
        "<p>502 Bad Gateway</p>",
    ]
)


@st.composite
def _spoilt(draw: st.DrawFn) -> str:
    """Draw lines in the format of metrics with inserted errors."""
    lines = []
    for line in draw(st.lists(_LINES, max_size=5)):
        at = draw(st.integers(0, len(line)))
        lines.append(line[:at] + draw(_ODD) + line[at + draw(st.integers(0, 3)) :])
    return "\n".join(lines)


@pytest.mark.long
@given(st.just("own 1\n"), st.lists(st.tuples(st.text(), st.one_of(st.text(), _ODD, _spoilt())), max_size=5))
def test_whatever_workers_say_can_be_read(own: str, texts: list[tuple[str, str]]) -> None:
    """For any texts of workers, the merged text can be parsed, and each sample of a worker names this worker."""
    for family in text_string_to_metric_families(merge(own, texts)):
        whose = {sample.labels.get("worker", "") for sample in family.samples}
        assert whose <= {"", *(name for name, _ in texts)}


@given(
    st.dictionaries(st.tuples(st.text(), st.text()), st.floats(allow_nan=False), max_size=5),
    st.text(),
    st.text(),
)
def test_what_is_right_is_kept(values: dict[tuple[str, str], float], help: str, worker: str) -> None:
    """Valid samples with any labels, values and help texts are kept, as prometheus_client writes them."""
    registry = CollectorRegistry()
    gauge = Gauge("g", help.replace("\0", ""), ["x", "y"], registry=registry)
    expected = {}
    for (x, y), value in values.items():
        x, y = x.replace("\0", ""), y.replace("\0", "")
        gauge.labels(x, y).set(value)
        expected[worker, x, y] = value

    merged = merge("", [(worker, generate_latest(registry).decode())])

    samples = [sample for family in text_string_to_metric_families(merged) for sample in family.samples]
    assert {(s.labels["worker"], s.labels["x"], s.labels["y"]): s.value for s in samples} == expected


@asynccontextmanager
async def triton(text: str | None, kind: str = "text/plain") -> AsyncIterator[int]:
    """Yield the port of a metrics server. If `text` is None, the server never answers."""

    async def answer(_: web.Request) -> web.Response:
        if text is None:
            await asyncio.Event().wait()
        return web.Response(text=text, content_type=kind)

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@asynccontextmanager
async def watched(
    world: World, token: bytes | None = None, renewals: Renewals | None = None
) -> AsyncIterator[str]:
    renewals = Renewals() if renewals is None else renewals
    admin = Admin(world.gateway, None if token is None else lambda: token, renewals)
    await admin.start("127.0.0.1:0")
    yield f"http://127.0.0.1:{admin.port}"
    await admin.stop()


async def get(url: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


@looped
async def test_one_scrape_has_the_gateway_and_all_workers() -> None:
    """A scrape has the metrics of the gateway and of all workers. A late or invalid worker is left out and counted."""
    model = ModelView(400, WeightsView.RESIDENT)
    view = WorkerView(True, frozenset({"m"}), "1", backlog_s=0.5, models={"m": model})
    async with (
        triton(TRITON) as first_port,
        triton(None) as second_port,
        triton("away 5", "text/html") as third_port,
    ):
        section = {
            "mode": "lpt_packing",
            "workers_dns": None,
            "workers": [
                {"host": "a", "metrics_port": None},
                {"host": "127.0.0.1", "name": "one", "grpc_port": 1, "metrics_port": first_port},
                {"host": "127.0.0.1", "name": "two", "grpc_port": 2, "metrics_port": second_port},
                {"host": "127.0.0.1", "name": "three", "grpc_port": 3, "metrics_port": third_port},
            ],
        }
        world = World(section, a=view, one=view, two=view, three=view)
        buckets = [3, 1, *([0] * (len(DURATION_BOUNDS) - 1))]
        world.proxy.counted = TrafficCounts(
            {("m", "one", "OK"): 3, ("m", "one", "INTERNAL"): 1},
            {"m": 8},
            {"one": 1.5},
            {("m", "one"): 2},
            {"two": 1},
            {"m": Histogram(DURATION_BOUNDS, buckets, 0.25)},
        )
        async with world.running(), watched(world) as url:
            status, text = await get(f"{url}/metrics")
            # On a busy machine, any worker may be late in some scrapes.
            while 'rsrv_gateway_worker_metrics_up{worker="one"} 1.0' not in text:
                status, text = await get(f"{url}/metrics")
    assert status == 200
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    requests = "rsrv_gateway_requests_total"
    assert samples[requests, ("code", "OK"), ("model", "m"), ("worker", "one")] == 3
    assert samples["rsrv_gateway_items_total", ("model", "m")] == 8
    assert samples["rsrv_gateway_request_duration_seconds_count", ("model", "m")] == 4
    assert samples["rsrv_gateway_request_duration_seconds_sum", ("model", "m")] == 0.25
    assert samples["rsrv_gateway_worker_up", ("worker", "two")] == 1
    assert samples["rsrv_gateway_worker_backlog_seconds", ("worker", "a:8001")] == 0.5
    assert samples["rsrv_gateway_worker_metrics_up", ("worker", "one")] == 1
    assert samples["rsrv_gateway_worker_metrics_up", ("worker", "two")] == 0
    assert samples["rsrv_gateway_worker_metrics_up", ("worker", "three")] == 0
    assert not any("away" in name for name, *_ in samples)
    assert ("rsrv_gateway_worker_metrics_up", ("worker", "a:8001")) not in samples
    assert samples["nv_cpu_utilization", ("worker", "one")] == 0.25
    assert sum(key[0] == "rsrv_gateway_model_placed" for key in samples) == 1
    assert samples["rsrv_gateway_repacks_total", ("trigger", "start")] == 1


def test_a_gateway_that_knows_no_server_says_so() -> None:
    """The number of servers is exposed even if it is 0, so that an alert can use it."""
    nobody = expose(TrafficCounts(), {}, None, {})
    assert 'rsrv_gateway_workers{state="up"} 0.0' in nobody.splitlines()
    three = {"a": WorkerView(True), "b": WorkerView(False), "c": WorkerView(True)}
    some = expose(TrafficCounts(), three, None, {}).splitlines()
    assert 'rsrv_gateway_workers{state="up"} 2.0' in some
    assert 'rsrv_gateway_workers{state="down"} 1.0' in some


def test_a_departed_worker_is_forgotten_after_a_while() -> None:
    """The counters of a departed worker are left out after ten minutes. If the worker returns, they continue."""
    leavers = DepartedWorkers()
    counts = TrafficCounts(
        {("m", "a", "OK"): 3, ("m", "b", "OK"): 5, ("", "", "NOT_FOUND"): 1},
        {"m": 8},
        {"a": 1.0, "b": 0.0},
        {("m", "b"): 1},
        {"b": 2},
    )
    without = replace(
        counts,
        requests={("m", "a", "OK"): 3, ("", "", "NOT_FOUND"): 1},
        load={"a": 1.0},
        outstanding={},
        failovers={},
    )
    assert leavers.without(counts, ["a", "b"], 0.0) == counts
    assert leavers.without(counts, ["a"], 600.0) == counts
    assert leavers.without(counts, ["a"], 601.0) == without
    assert leavers.without(counts, ["a"], 5000.0) == without
    assert leavers.without(counts, ["a", "b"], 5001.0) == counts
    unseen = DepartedWorkers()
    assert unseen.without(counts, ["a"], 0.0) == counts
    assert unseen.without(counts, ["a"], 601.0) == without


@looped
async def test_ready_with_a_worker_and_healthy_without() -> None:
    """The gateway is healthy while it runs. It is ready while it accepts requests and a worker answers."""
    world = World(a="m")
    async with watched(world) as url:
        assert await get(f"{url}/readyz") == (503, "the gateway is starting or stopping\n")
        assert await get(f"{url}/healthz") == (200, "ok\n")
        async with world.running():
            assert await get(f"{url}/readyz") == (200, "ok\n")
            world.ready.clear()
            await world.gateway.probes.probe()
            assert await get(f"{url}/readyz") == (503, "no worker answers\n")
            assert (await get(f"{url}/metrics"))[0] == 200
        assert (await get(f"{url}/readyz"))[0] == 503
        assert (await get(f"{url}/other"))[0] == 404


@pytest.mark.parametrize("token", [None, b"s3cret"])
@looped
async def test_the_live_page_of_all_workers_is_there(token: bytes | None) -> None:
    """The live page shows each worker. Commands need the configured token."""
    world = World(a="m")
    async with world.running(), watched(world, token) as url, ClientSession() as client:
        status, page = await get(f"{url}/")
        assert (status, "<title>rsrv</title>" in page) == (200, True)
        async with client.get(f"{url}/live/stream") as stream:
            events = ""
            while "no control service" not in events:
                events += (await stream.content.readline()).decode()
            assert f'"writable": {"true" if token else "false"}' in events
            assert '"server": "a:8001"' in events
        headers = {"Authorization": "Bearer s3cret"}
        command = {"server": "a:8001", "model": "m", "what": "pin"}
        async with client.post(f"{url}/live/steer", json=command, headers=headers) as answer:
            assert answer.status == (403 if token is None else 409)


@looped
async def test_the_end_of_certificates_and_failed_renewals_are_metrics(tmp_path: Path) -> None:
    """The metrics show when the certificate in use ends, and whether its renewal failed."""
    certificate = tmp_path / "cert"
    ends = datetime(2031, 1, 1, tzinfo=UTC)
    issued = trustme.CA().issue_cert("localhost", not_after=ends).cert_chain_pems[0].bytes()
    certificate.write_bytes(issued)
    renewals = Renewals()
    renewals.of(
        "gateway.tls_certificate", [certificate], lambda: end_of(certificate.read_bytes()), certificate
    )
    world, labels = World(a="m"), '{setting="gateway.tls_certificate"}'
    async with world.running(), watched(world, renewals=renewals) as url:
        for content, failed in ((issued, 0.0), (b"broken", 1.0)):
            certificate.write_bytes(content)
            renewals.check(ends.timestamp() - 86400)
            lines = (await get(f"{url}/metrics"))[1].splitlines()
            values = dict(line.rsplit(" ", 1) for line in lines if line.endswith(tuple("0123456789")))
            assert (
                float(values[f"rsrv_gateway_certificate_end_timestamp_seconds{labels}"]) == ends.timestamp()
            )
            assert float(values[f"rsrv_gateway_renewal_failed{labels}"]) == failed


@looped
async def test_pages_of_other_sites_read_nothing() -> None:
    """Metrics, live page and traces are refused if the Host is another site's name. Health is answered for any Host."""
    world = World(a="m")
    async with world.running(), watched(world) as url, ClientSession() as session:
        for path, status in (
            ("metrics", 421),
            ("", 421),
            ("live/trace", 421),
            ("healthz", 200),
            ("readyz", 200),
        ):
            async with session.get(f"{url}/{path}", headers={"Host": "evil.example:8002"}) as answer:
                assert answer.status == status


@looped
async def test_a_port_that_is_taken_is_named() -> None:
    """If the port is taken or the address is invalid, the error names `gateway.admin`."""
    world = World(a="m")
    async with watched(world) as url:
        for address in (url.removeprefix("http://"), "127.0.0.1:x"):
            with pytest.raises(ListenError, match=r"gateway\.admin: cannot listen on 127\.0\.0\.1"):
                await Admin(world.gateway).start(address)

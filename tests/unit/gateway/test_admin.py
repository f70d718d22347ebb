"""What whoever watches is told over HTTP."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientSession, web
from prometheus_client.parser import text_string_to_metric_families

from rsrv_gateway.admin import Admin
from rsrv_gateway.contract import ModelView, Weights, WorkerView
from rsrv_gateway.merging import merge
from rsrv_gateway.plane import DURATION_BOUNDS, Counts, Durations, ListenError
from tests.unit.gateway.workers import looped
from tests.unit.gateway.worlds import World

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
    """One HELP and TYPE of each family, its samples together, and a label that says whose each is."""
    other = TRITON.replace("} 7", "} 8").replace("rate", "share")
    text = merge("# TYPE own gauge\nown 1\nbare 2\n", [("a", TRITON), ('we"ird', other)])

    assert text.count("# TYPE nv_inference_request_success counter") == 1
    assert text.count("# HELP nv_cpu_utilization ") == 1
    assert 'nv_inference_request_success{worker="a",model="m",version="1"} 7' in text
    families = {one.name: one for one in text_string_to_metric_families(text)}
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
    ],
)
def test_each_kind_of_line_gets_its_label(line: str, merged: str | None) -> None:
    """What is no sample is left out."""
    assert merge("", [("w", line)]) == ("" if merged is None else merged + "\n")


@asynccontextmanager
async def triton(text: str | None) -> AsyncIterator[int]:
    """The port of a server of metrics; None: it never answers."""

    async def answer(_: web.Request) -> web.Response:
        if text is None:
            await asyncio.Event().wait()
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/metrics", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


@asynccontextmanager
async def watched(world: World) -> AsyncIterator[str]:
    admin = Admin(world.gateway)
    await admin.start("127.0.0.1:0")
    yield f"http://127.0.0.1:{admin.port}"
    await admin.stop()


async def get(url: str) -> tuple[int, str]:
    async with ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


@looped
async def test_one_scrape_has_the_gateway_and_all_workers() -> None:
    """A worker whose metrics do not come in time is left out, and shown to be."""
    model = ModelView(400, Weights.RESIDENT)
    view = WorkerView(True, frozenset({"m"}), "1", backlog_s=0.5, models={"m": model})
    async with triton(TRITON) as one, triton(None) as two:
        section = {
            "mode": "lpt_packing",
            "workers_dns": None,
            "workers": [
                {"host": "a", "metrics_port": None},
                {"host": "127.0.0.1", "name": "one", "grpc_port": 1, "metrics_port": one},
                {"host": "127.0.0.1", "name": "two", "grpc_port": 2, "metrics_port": two},
            ],
        }
        world = World(section, a=view, one=view, two=view)
        buckets = (3, 1, *([0] * (len(DURATION_BOUNDS) - 1)))
        world.plane.counted = Counts(
            {("m", "one", "OK"): 3, ("m", "one", "INTERNAL"): 1},
            {"m": 8},
            {"one": 1.5},
            {("m", "one"): 2},
            {"two": 1},
            {"m": Durations(buckets, 0.25)},
        )
        async with world.running(), watched(world) as url:
            status, text = await get(f"{url}/metrics")
    assert status == 200
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    requests = "rsrv_gateway_requests_total"
    assert found[requests, ("code", "OK"), ("model", "m"), ("worker", "one")] == 3
    assert found["rsrv_gateway_items_total", ("model", "m")] == 8
    assert found["rsrv_gateway_request_duration_seconds_count", ("model", "m")] == 4
    assert found["rsrv_gateway_request_duration_seconds_sum", ("model", "m")] == 0.25
    assert found["rsrv_gateway_worker_up", ("worker", "two")] == 1
    assert found["rsrv_gateway_worker_backlog_seconds", ("worker", "a:8001")] == 0.5
    assert found["rsrv_gateway_worker_metrics_up", ("worker", "one")] == 1
    assert found["rsrv_gateway_worker_metrics_up", ("worker", "two")] == 0
    assert ("rsrv_gateway_worker_metrics_up", ("worker", "a:8001")) not in found
    assert found["nv_cpu_utilization", ("worker", "one")] == 0.25
    assert sum(key[0] == "rsrv_gateway_model_placed" for key in found) == 1
    assert found["rsrv_gateway_repacks_total", ("trigger", "start")] == 1


@looped
async def test_ready_is_who_takes_requests_and_has_workers() -> None:
    """Healthy is who answers; why it is not ready is said."""
    world = World(a="m")
    async with watched(world) as url:
        assert await get(f"{url}/readyz") == (503, "the gateway starts or ends\n")
        assert await get(f"{url}/healthz") == (200, "ok\n")
        async with world.running():
            assert await get(f"{url}/readyz") == (200, "ok\n")
            world.ready.clear()
            await world.gateway.probes.look()
            assert await get(f"{url}/readyz") == (503, "no worker answers\n")
            world.plane.listens = False
            status, why = await get(f"{url}/readyz")
            assert (status, "listens has ended" in why) == (503, True)
            assert (await get(f"{url}/metrics"))[0] == 200
        assert (await get(f"{url}/readyz"))[0] == 503
        assert (await get(f"{url}/other"))[0] == 404


@looped
async def test_a_port_that_is_taken_is_named() -> None:
    """With its setting; so is what is no address."""
    world = World(a="m")
    async with watched(world) as url:
        for address in (url.removeprefix("http://"), "127.0.0.1:x"):
            with pytest.raises(ListenError, match=r"gateway\.admin: cannot listen on 127\.0\.0\.1"):
                await Admin(world.gateway).start(address)

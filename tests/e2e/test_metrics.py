"""What Prometheus sees of a real server: rsrv's own endpoint, and Triton's."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rsrv_gen import cli as rsrv_gen
from tests.e2e import bundles
from tests.e2e.calls import caller
from tests.e2e.harness import RunningTriton, running_triton, wait_until
from tests.e2e.lives import place

ROW = np.ones((1, 64), np.float32)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Metrics:
    """A server's two pages."""

    def __init__(self, server: RunningTriton, port: int) -> None:
        self.server = server
        self.own = f"http://127.0.0.1:{port}/metrics"
        self.tritons = f"http://127.0.0.1:{server.metrics_port}/metrics"

    def value(self, name: str, url: str = "", **labels: str) -> float | None:
        return self.samples(url).get((name, frozenset(labels.items())))

    def samples(self, url: str = "") -> Samples:
        """All, parsed by Prometheus' own parser; no sample is there twice."""
        try:
            with urllib.request.urlopen(url or self.own, timeout=10) as page:
                text = page.read().decode()
        except OSError:
            return {}
        found: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in found
                found[key] = sample.value
        return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """Of a server with two models, `exact` and `steady`."""
    folder, port = tmp_path_factory.mktemp("metrics"), free_port()
    (folder / "bundles").mkdir()
    for name in ("exact", "steady", "hooked"):
        if (bundles.ensure() / name).exists():
            place(bundles.ensure() / name, folder / "bundles" / name)
    (folder / "settings.yaml").write_text(
        f"lifecycle: {{look_s: 0.1, poll_s: 0.5}}\nmetrics: {{listen: '127.0.0.1:{port}'}}\n"
    )
    options = ["-o", str(folder / "gen"), "--config", str(folder / "settings.yaml")]
    assert rsrv_gen.main([str(folder / "bundles"), *options]) == 0
    flags = ["--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=1"]
    with running_triton(folder / "gen", folder / "server.log", extra_args=flags) as running:
        found = Metrics(running, port)
        wait_until(lambda: found.value("rsrv_runtime_up") == 1.0, what="rsrv's own metrics")
        yield found


def test_requests_show_on_both_pages(metrics: Metrics) -> None:
    """Ten requests of one model, each of one row."""
    with caller(metrics.server, "grpc") as call:
        for _ in range(10):
            call("exact", {"x": ROW})
    exact = {"model": "exact"}
    wait_until(
        lambda: metrics.value("rsrv_responses_total", **exact, status="ok") == 10, what="the stub's report"
    )

    samples = metrics.samples()
    assert samples["rsrv_requests_total", frozenset({**exact, "outcome": "answered"}.items())] == 10
    assert {
        name: samples[name, frozenset(exact.items())]
        for name in ("rsrv_request_seconds_count", "rsrv_queue_wait_seconds_count", "rsrv_batch_rows_sum")
    } == {"rsrv_request_seconds_count": 10, "rsrv_queue_wait_seconds_count": 10, "rsrv_batch_rows_sum": 10}
    wait_until(
        lambda: (
            metrics.value("rsrv_requests_total", metrics.tritons, **exact, version="1", outcome="answered")
            == 10
        ),
        what="Triton's own page",
    )
    print("\n".join(f"{k} {v}" for k, v in metrics.samples().items() if "bucket" not in k[0]))
    print("\n".join(f"{k} {v}" for k, v in metrics.samples(metrics.tritons).items() if "rsrv" in k[0]))

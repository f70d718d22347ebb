"""rsrv's page of metrics on a real server, as Prometheus reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from local_triton import free_ports
from rsrv.control.metric_catalog import FAMILIES
from tests.e2e import bundles
from tests.e2e.calls import caller, refusal
from tests.e2e.harness import (
    EXPLICIT,
    HURRY,
    ROOT,
    RunningTriton,
    make_repository,
    running_triton,
)
from tests.e2e.lives import place
from tests.status import read_status
from tests.waiting import PATIENCE_S, wait_until

ROW = np.ones((1, 64), np.float32)
#: A shell script that waits until the file `gate` does not exist, and then runs the runtime's Python.
_PYTHON = """#!/bin/sh
while test -e '{gate}'; do sleep 0.02; done
exec '{python}' "$@"
"""
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Metrics:
    """The metrics page of a server."""

    def __init__(self, server: RunningTriton, port: int, bundles: Path, gate: Path) -> None:
        self.server = server
        self.bundles = bundles
        #: While this file exists, no runtime starts.
        self.gate = gate
        self.own = f"http://127.0.0.1:{port}/metrics"

    def value(self, name: str, **labels: str) -> float | None:
        return self.samples().get((name, frozenset(labels.items())))

    def samples(self) -> Samples:
        """Return all samples, without the label of the only device. Prometheus' own parser reads them. No sample may exist twice."""
        try:
            with urllib.request.urlopen(self.own, timeout=PATIENCE_S) as page:
                text = page.read().decode()
        except OSError:
            return {}
        samples: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items() - {("device", "0")})
                assert key not in samples
                samples[key] = sample.value
        return samples


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metrics]:
    """The metrics of a server with three models."""
    folder, (port,) = tmp_path_factory.mktemp("metrics"), free_ports(1)
    (folder / "bundles").mkdir()
    for name in ("exact", "steady", "hooked"):
        place(bundles.ensure() / name, folder / "bundles" / name)
    repository = make_repository(folder, settings="lifecycle: {poll_s: 0.1}\nlogs: {format: json}\n")
    flags = [*EXPLICIT, HURRY]
    python, gate = folder / "python", folder / "gate"
    python.write_text(_PYTHON.format(gate=gate, python=sys.executable))
    python.chmod(0o755)
    env = {"RSRV_METRICS__LISTEN": f"127.0.0.1:{port}", "RSRV_RUNTIME_PYTHON": str(python)}
    with running_triton(repository, folder / "server.log", extra_args=flags, env=env) as running:
        page = Metrics(running, port, folder / "bundles", gate)
        wait_until(lambda: page.value("rsrv_runtime_up") == 1.0, what="rsrv's own metrics")
        yield page


def test_requests_show_on_the_page(metrics: Metrics) -> None:
    """Ten answered requests of one model are on the page.

    The page also has all metrics, except those of meta models, of findings, and of events and features that did not occur.
    """
    exact = {"model": "exact"}
    wait_until(lambda: metrics.value("rsrv_queue_depth", **exact) == 0, what="the model")
    with caller(metrics.server) as call:
        for _ in range(10):
            call("exact", {"x": ROW})
        refusal(lambda: call("hooked", {"x": np.ones((1, 3), np.float32)}))

    for name, labels in (
        ("rsrv_responses_total", {**exact, "status": "ok"}),
        ("rsrv_requests_total", {**exact, "outcome": "answered"}),
        ("rsrv_request_seconds_count", exact),
        ("rsrv_queue_wait_seconds_count", exact),
        ("rsrv_batch_rows_sum", exact),
    ):
        wait_until(lambda name=name, labels=labels: metrics.value(name, **labels) == 10, what=name)  # type: ignore[misc]
    samples = wait_until(metrics.samples)
    served = {name.removesuffix(end) for name, _ in samples for end in ("", "_bucket", "_sum", "_count")}
    assert {
        family.name for family in FAMILIES if not family.name.startswith(("rsrv_meta_", "rsrv_findings"))
    } <= served | {
        # Metrics of events that have not happened.
        "rsrv_refused_total",
        "rsrv_deadline_missed_total",
        "rsrv_weight_evictions_total",
        "rsrv_hook_seconds",
        # Metrics of features that no model has: aliases and state.
        "rsrv_alias_responses_total",
        "rsrv_alias_shadows_total",
        "rsrv_sequences",
        "rsrv_generations",
        "rsrv_tokens_total",
        "rsrv_first_token_seconds",
        "rsrv_token_seconds",
        # The server sends no traces.
        "rsrv_trace_spans_total",
    }


def test_a_runtime_that_dies_shows_and_the_next_one_too(metrics: Metrics) -> None:
    """The runtime is killed. The page shows its end, and then the next runtime."""
    before = metrics.value("rsrv_runtime_restarts_total")
    assert before is not None
    metrics.gate.touch()
    try:
        os.kill(read_status(metrics.server.pid)["pid"], signal.SIGKILL)
        wait_until(lambda: metrics.value("rsrv_runtime_up") == 0.0, what="the runtime's death")
    finally:
        metrics.gate.unlink()
    wait_until(lambda: metrics.value("rsrv_runtime_up") == 1.0, what="the next runtime")
    assert metrics.value("rsrv_runtime_restarts_total") == before + 1
    wait_until(lambda: metrics.value("rsrv_queue_depth", model="exact") == 0, what="the models")


def test_a_bundle_that_cannot_be_loaded_shows_until_it_can(metrics: Metrics) -> None:
    """A manifest is overwritten with a text that is not YAML. The page shows the failed reload until the manifest is repaired."""
    manifest = metrics.bundles / "hooked" / "manifest.yaml"
    text = manifest.read_bytes()
    wait_until(lambda: metrics.value("rsrv_reload_failed", model="hooked") == 0, what="the model")

    manifest.unlink()
    manifest.write_text("{")
    wait_until(lambda: metrics.value("rsrv_reload_failed", model="hooked") == 1, what="the failure")
    manifest.write_bytes(text)
    wait_until(lambda: metrics.value("rsrv_reload_failed", model="hooked") == 0, what="its end")


def test_a_model_that_leaves_takes_its_series_along(metrics: Metrics) -> None:
    """When a model is removed, its series vanish from the page."""
    wait_until(lambda: any(("model", "steady") in labels for _, labels in metrics.samples()))

    shutil.rmtree(metrics.bundles / "steady")

    wait_until(
        lambda: (
            (samples := metrics.samples()) and not any(("model", "steady") in labels for _, labels in samples)
        ),
        what="the end of its series",
    )
    with caller(metrics.server) as call:
        call("exact", {"x": ROW})


def kind(line: dict[str, Any]) -> tuple[object, ...]:
    """Return the kind of a log line: its logger, its event, its request, and the names of its fields."""
    return line["logger"], line.get("event"), line.get("request"), tuple(line)


def test_every_line_of_ours_in_the_log_is_an_object(metrics: Metrics) -> None:
    """With logs.format: json, each log line of stubs, runtime and control process is a JSON object. Triton's own lines are still text."""
    with caller(metrics.server) as call:
        row = np.full((1, 4), bundles.deed("preprocess", "raise"), np.float32)
        refusal(lambda: call("hooked", {"x": row}, request_id="mine"))
    place(bundles.ensure() / "exact", metrics.bundles / "guest")
    wait_until(lambda: metrics.value("rsrv_queue_depth", model="guest") == 0, what="another model")
    shutil.rmtree(metrics.bundles / "guest")
    ends = (
        '"request": "mine", "status"',
        '"model": "guest", "version": "guest@[0-9a-f]+", "event": "unloaded"',
    )
    wait_until(
        lambda: all(re.search(end, metrics.server.log_text()) for end in ends), what="the last of these lines"
    )
    # The last line may be incomplete.
    lines = metrics.server.log_text().rpartition("\n")[0].splitlines()

    assert [line for line in lines if re.match(r"\d{4}-\d\d-\d\d .* [DIWEC] (rsrv|py)", line)] == []
    records = [json.loads(line) for line in lines if line.startswith("{")]
    loggers = {record["logger"] for record in records}
    assert {
        "rsrv.runtime.process",
        "rsrv.runtime.weight_manager",
        "rsrv.runtime.models",
        "rsrv.control",
    } <= loggers
    assert any(logger.startswith("rsrv.stub.") for logger in loggers)
    assert {"compiled", "built", "loaded", "warmed_up", "unloaded"} <= {
        record.get("event") for record in records
    }
    mine = [record for record in records if record.get("request") == "mine"]
    assert {record["model"] for record in mine} == {"hooked"}
    assert any("Traceback" in record.get("exception", "") for record in mine)
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    documented = [json.loads(line) for line in page.splitlines() if line.startswith('{"time"')]
    kinds = [kind(record) for record in records]
    assert documented
    assert [record for record in documented if kind(record) not in kinds] == []

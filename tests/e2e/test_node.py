"""A node with real servers: one command over a folder of bundles."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rsrv.wire.paths import base_directory
from tests.e2e.harness import is_alive
from tests.e2e.lives import place, write_version
from tests.e2e.nodes import answer, free_block, running_node, server_pid
from tests.waiting import wait_until

MODEL = "versioned"
#: Changed bundles need not be polled for.
QUICK = "lifecycle: {look_s: 0.1}\n"


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "one", 1), tmp_path / "bundles" / MODEL)
    return tmp_path / "bundles"


def wait_gone(pids: list[int], what: str) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), 20, what=what)


def runtime_directories(pids: list[int]) -> list[Path]:
    """Return the runtime directories of the servers among these processes."""
    return [found for pid in pids for found in base_directory().glob(f"{pid}-*")]


def on_the_live_page(url: str) -> set[str]:
    """Return the devices on the live page, once two of them have the model."""
    found: set[str] = set()
    with urllib.request.urlopen(f"{url}live/stream", timeout=20) as stream:
        while len(found) < 2:
            line = stream.readline()
            if line.startswith(b"data: ") and b'"up": true' in line and MODEL.encode() in line:
                found.add(json.loads(line.removeprefix(b"data: "))["server"])
    return found


def public(start: int) -> str:
    """Return the section `gateway` with three ports from this one on."""
    http, grpc, admin = (f"127.0.0.1:{start + step}" for step in range(3))
    return f"gateway: {{http: '{http}', grpc: '{grpc}', admin: '{admin}'}}\n"


def answering(url: str) -> set[str]:
    """Return the workers with answered requests on this page, by rsrv's metrics and by Triton's."""
    with urllib.request.urlopen(url, timeout=10) as page:
        families = {one.name: one for one in text_string_to_metric_families(page.read().decode())}

    def workers(family: str) -> set[str]:
        samples = families[family].samples if family in families else []
        return {sample.labels["worker"] for sample in samples if sample.value}

    return workers("rsrv_queue_wait_seconds") & workers("nv_inference_request_success")


def test_two_workers_serve_as_one_and_one_that_dies_comes_back(bundles: Path, tmp_path: Path) -> None:
    """Two workers with own ports, repositories and cores follow the bundles, survive a death, and end on SIGTERM."""
    start = free_block(30)
    grpc = start + 21
    settings = f"{QUICK}{public(start + 20)}node: {{first_port: {start}, drain_s: 5}}\n"
    with running_node(bundles, tmp_path, settings, "--cpu-workers", 2) as node:
        workers = wait_until(node.workers, 30, what=f"the workers:\n{node.tail()}")
        assert [worker.name for worker in workers] == ["worker0", "worker1"]
        assert [node.wait_answer(worker.grpc_port, MODEL) for worker in workers] == [1, 1]
        assert node.wait_answer(grpc, MODEL) == 1
        wait_until(
            lambda: answering(f"http://127.0.0.1:{start + 22}/metrics") == {"worker0", "worker1"},
            what="all metrics in one scrape",
        )
        assert on_the_live_page(f"http://127.0.0.1:{start + 22}/") == {"worker0", "worker1"}
        assert f"live page: http://127.0.0.1:{start + 22}/" in node.log_text
        first, second = map(server_pid, workers)
        if len(os.sched_getaffinity(0)) > 1:
            assert os.sched_getaffinity(first).isdisjoint(os.sched_getaffinity(second))

        before = runtime_directories([first])
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server_pid(node.workers()[0]) != first, 30, what="another server")
        # The dead one leaves its successor no obstacle.
        assert not any(map(Path.exists, before))
        place(write_version(tmp_path / "two", 2), bundles / MODEL)
        ports = [*(worker.grpc_port for worker in workers), grpc]
        wait_until(lambda: [answer(port, MODEL) for port in ports] == [2, 2, 2], 60, what="the new version")
        assert server_pid(node.workers()[1]) == second
        assert {"[worker0]", "[worker1]", "[gateway]", "[node]"} <= {
            line.split()[0] for line in node.log_text.splitlines()
        }

        left = node.pids()
        node.process.terminate()

        assert node.process.wait(30) == 0, node.tail()
        assert not any(map(is_alive, left))
        assert runtime_directories(left) == []


def test_one_worker_has_the_public_ports_and_dies_with_its_node(bundles: Path, tmp_path: Path) -> None:
    """One worker has the public ports without a gateway, ends with a killed node, and logs objects."""
    start = free_block(10)
    settings = f"{public(start)}logs: {{format: json}}\n"
    with running_node(bundles, tmp_path, settings, "--cpu-workers", 1) as node:
        assert node.wait_answer(start + 1, MODEL) == 1
        assert "rsrv_gateway" not in node.log_text
        wait_until(lambda: "worker0 serves: 1 of 1 models are ready" in node.log_text, what=node.tail())
        lines = node.log_text.split("\n")[:-1]
        told = [json.loads(line) for line in lines if line.startswith("{")]
        assert {(line["process"], line["logger"]) for line in told} >= {
            ("node", "rsrv.node"),
            ("worker0", "rsrv.runtime"),
            ("worker0", "rsrv.control"),
        }
        assert [line for line in lines if not line.startswith(("{", "[worker0] "))] == []
        assert [line for line in lines if re.search(r"\] \d{4}-\d\d-\d\d .* rsrv", line)] == []
        left = node.pids()

        node.process.kill()

        wait_gone(left, "the end of the server, its stub, its runtime and its control process")
        wait_until(lambda: runtime_directories(left) == [], 10, what="an empty place")


@pytest.mark.long
def test_an_empty_folder_gets_a_bundle_and_a_server_that_hangs_is_replaced(tmp_path: Path) -> None:
    """A node with an empty folder serves a later bundle, and replaces a server that hangs."""
    (tmp_path / "bundles").mkdir()
    start = free_block(10)
    settings = f"{QUICK}{public(start)}node: {{hang_s: 6}}\n"
    with running_node(tmp_path / "bundles", tmp_path, settings, "--cpu-workers", 1) as node:
        wait_until(lambda: is_live(start), 30, what=f"a server without models:\n{node.tail()}")

        place(write_version(tmp_path / "one", 1), tmp_path / "bundles" / MODEL)

        assert node.wait_answer(start + 1, MODEL) == 1
        # One that does not listen for HTTP yet counts as starting.
        wait_until(lambda: is_live(start), 30, what=f"HTTP:\n{node.tail()}")
        first = server_pid(node.workers()[0])
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: server_pid(node.workers()[0]) != first, 40, what="another server")
        assert node.wait_answer(start + 1, MODEL) == 1
        assert "worker0 has not answered for 6 s and was killed" in node.log_text


def is_live(port: int) -> bool:
    """Return whether a server answers there over HTTP."""
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=5) as answer:
        return bool(answer.status == 200)
    return False

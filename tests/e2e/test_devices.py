"""One server with several devices. Two runtimes on the CPU represent two GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.cli import main as rsrv
from rsrv.control.v1 import control_pb2 as pb
from tests.bench.places import paced
from tests.e2e import bundles, metas
from tests.e2e.calls import Caller, assert_same, caller, random_u32
from tests.e2e.harness import RunningTriton, StartTriton, make_repository, running_triton
from tests.e2e.test_control import SERVING, Control
from tests.status import read_status
from tests.waiting import wait_until

SETTINGS = """
runtime: {devices: [cpu, cpu]}
models:
  left: {devices: [0]}
  right: {devices: [1]}
"""
#: Environment in which the execution of a row lasts 20 ms, and of eight rows 160 ms.
PACED = paced(row_ms=20)
CUT = """
runtime: {devices: [cpu, cpu]}
placement: {mode: least_outstanding}
models: {exact: {front: python}}
"""
STAGED = """
def run(inputs, call):
    first = call("left", inputs, keep_on_device=True)["y"]
    return {"y": call("right", {"x": first})["y"]}
"""
#: Log lines of either front.
_LOST = re.compile(r"rsrv\.(stub\.\w+|native:) steady: lost the runtime: ")
_BACK = re.compile(r"rsrv\.(stub\.\w+|native:) steady: reconnected to the runtime")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTriton]:
    folder = tmp_path_factory.mktemp("devices")
    sources = [bundles.ensure() / name for name in ("steady", "exact")]
    sources += [
        metas.write_scale(folder / "left", 2),
        metas.write_scale(folder / "right", 3),
        metas.write_meta(folder / "staged", STAGED, ["left", "right"]),
    ]
    repository = make_repository(folder, *sources, settings=SETTINGS)
    cache = {"RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(folder / "cache")}
    with running_triton(repository, folder / "server.log", env=cache, spare=True) as server:
        yield server


def answered(server: RunningTriton, device: int, model: str) -> int:
    status: dict[str, Any] = read_status(server.pid, str(device))["models"][model]
    return int(status["outcomes"].get("answered", 0))


def resident(server: RunningTriton, device: int) -> bool:
    return bool(read_status(server.pid, str(device))["models"]["exact"]["weights"] == "resident")


def ask(server: RunningTriton, seed: int) -> None:
    x = random_u32(np.random.default_rng(seed), 1)
    with caller(server) as call:
        got = call("steady", {"x": x})
    assert_same(got, {"y": bundles.stepped(x, bundles.STEADY_STEPS)})


def test_the_second_runtime_compiles_nothing(server: RunningTriton) -> None:
    """Two runtimes start with an empty cache. The first one compiles each module, and the second one compiles nothing."""
    first, second = (read_status(server.pid, str(device)) for device in (0, 1))

    assert first["compiled"] == second["from_cache"] > 0
    assert first["from_cache"] == second["compiled"] == 0


def test_each_model_is_placed_on_a_device(server: RunningTriton, capsys: pytest.CaptureFixture[str]) -> None:
    """The control process places each idle model on one device, and a pinned model on its own device.

    `rsrv placement` shows the reasons.
    """

    def placement() -> dict[str, Any]:
        capsys.readouterr()
        assert rsrv.main(["placement", "--json", "--server", str(server.http_port)]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    def placed() -> bool:
        by_model = {
            entry["name"]: entry.get("devices", []) for entry in placement()["models"] if entry["reason"]
        }
        alone = by_model.keys() >= {"steady", "exact"} and all(
            len(devices) == 1 for devices in by_model.values()
        )
        return alone and (by_model.get("left"), by_model.get("right")) == ([0], [1])

    wait_until(placed, what="a device for each model")


def test_a_run_goes_by_stage_where_its_callees_are_pinned_apart(server: RunningTriton) -> None:
    """Two callees are pinned to different devices, and each device executes its own callee.

    A tensor reaches the second device although the meta model asks to keep it on the first one.
    """

    def run(call: Caller, value: int) -> list[int]:
        """Run the meta model. Return how many calls of `left` the first device has answered, and of `right` the second one."""
        before = [answered(server, 0, "left"), answered(server, 1, "right")]
        got = call("staged", {"x": np.full((2, metas.COLUMNS), value, np.float32)})
        assert_same(got, {"y": np.full((2, metas.COLUMNS), 6 * value, np.float32)})
        more = [answered(server, 0, "left"), answered(server, 1, "right")]
        return [now - then for now, then in zip(more, before, strict=True)]

    with caller(server) as call:
        # The stub gets the placement a little later than `rsrv placement` shows it.
        wait_until(lambda: run(call, 1) == [1, 1], what="a run by stage")
        assert [run(call, value) for value in range(5)] == [[1, 1]] * 5


def test_a_busy_device_leaves_requests_to_the_other(server: RunningTriton) -> None:
    """Requests of one client go to the model's home. With four clients, the other device also answers some requests."""
    before = counts = [answered(server, device, "steady") for device in (0, 1)]

    def has_one_home() -> bool:
        """Return True if one device answers three requests in turn. The stub gets the placement a little later than the status shows it."""
        nonlocal before, counts
        before = [answered(server, device, "steady") for device in (0, 1)]
        for seed in range(3):
            ask(server, seed)
        counts = [answered(server, device, "steady") for device in (0, 1)]
        return 0 in (now - then for now, then in zip(counts, before, strict=True))

    wait_until(has_one_home, what="a device that answers all of one client")
    home, enough = int(counts[0] == before[0]), threading.Event()

    def keep_asking(seed: int) -> None:
        while not enough.is_set():
            ask(server, seed)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(keep_asking, seed) for seed in range(4)]
        try:
            wait_until(
                lambda: answered(server, 1 - home, "steady") > counts[1 - home] + 1,
                what="the other device's answers",
            )
        finally:
            enough.set()
        for future in asking:
            future.result()

    assert answered(server, home, "steady") > counts[home]


def test_a_device_whose_runtime_died_leaves_requests_to_the_other(server: RunningTriton) -> None:
    """After a runtime's death, the other device answers requests at once. Later, the next runtime connects."""

    def wait_for_line(line: re.Pattern[str], times: int) -> None:
        def count() -> int:
            return len(line.findall(server.log_text()))

        wait_until(lambda: count() == times, what=f"{times} of {line.pattern!r}")

    for device in (0, 1):
        old = read_status(server.pid, str(device))["pid"]
        os.kill(old, signal.SIGKILL)
        wait_for_line(_LOST, device + 1)
        ask(server, device)
        wait_for_line(_BACK, device + 1)
        assert read_status(server.pid, str(device))["pid"] != old


def test_a_silent_device_leaves_the_server_ready_and_gets_what_it_missed(server: RunningTriton) -> None:
    """While one runtime is stopped, the server is healthy, and the status shows which device is down.

    A pin takes effect on the other device at once. The stopped runtime gets it when it continues.
    """
    control = Control(server)
    pid = read_status(server.pid, "1")["pid"]

    def devices() -> list[bool]:
        return [device.HasField("record") for device in control.status().devices]

    def pinned(device: int) -> bool:
        model = read_status(server.pid, str(device))["models"].get("exact")
        return model is not None and model["residency"] == "device"

    wait_until(lambda: devices() == [True, True], what="both runtimes")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: devices() == [True, False], what="the silence")
        assert control.status().devices[1].down_since_unix_s > 0
        assert control.health() == SERVING
        request = pb.SetResidencyRequest(model="exact", residency=pb.RESIDENCY_DEVICE)
        control.stub.SetResidency(request, timeout=20)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: devices() == [True, True], what="its end")
    wait_until(lambda: pinned(0) and pinned(1), what="the pin on both devices")
    load = control.stub.GetLoad(pb.GetLoadRequest(), timeout=20)
    assert [device.number for device in load.devices if device.instance] == [0, 1]


@pytest.mark.long
def test_two_devices_share_a_batch(tmp_path: Path, start_triton: StartTriton) -> None:
    """Triton makes one batch of eight requests. Each device executes four rows of it, and all answers are right."""
    bundle = bundles.with_sizes(bundles.ensure() / "exact", tmp_path / "exact", [4, 8])
    repository = make_repository(tmp_path, bundle, settings=CUT)
    config = repository / "exact" / "config.pbtxt"
    batch = "dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 60000000 }"
    text, count = re.subn(r"dynamic_batching \{\s*\}", batch, config.read_text())
    assert count == 1
    config.write_text(text)
    server = start_triton(repository, env=PACED)
    wait_until(lambda: resident(server, 0) and resident(server, 1), what="the weights on both devices")
    before = [answered(server, device, "exact") for device in (0, 1)]

    def ask_exact(seed: int) -> None:
        x = np.random.default_rng(seed).integers(-8, 8, (1, 64)).astype(np.float32)
        with caller(server) as call:
            assert_same(call("exact", {"x": x}), {"y": x @ bundles.exact_kernel()})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask_exact, range(8)))

    (statistics,) = server.grpc.get_inference_statistics("exact").model_stats
    assert (statistics.inference_count, statistics.execution_count) == (8, 1)
    more = [answered(server, device, "exact") for device in (0, 1)]
    assert [now - then for now, then in zip(more, before, strict=True)] == [4, 4]

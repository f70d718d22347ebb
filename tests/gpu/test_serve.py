"""The whole product on fake cards: `rsrv serve` with the real tritonserver."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import tritonclient.grpc

from local_triton import LOOPBACK
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.serve import demo
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory
from rsrv.wire.socket import Closed
from tests.e2e.lives import COLUMNS, first_value, place, write_version
from tests.e2e.test_serve import serving
from tests.gpu.fake_gpu import EXCLUSIVE_PROCESS, GIB, FakeGpu
from tests.status import read_status
from tests.waiting import wait_until

#: A busy machine needs minutes to compile models and to time kernels.
pytestmark = pytest.mark.timeout(540)

#: Seconds that a request waits for a runtime. A busy machine may need this long to start one.
PATIENCE_S = 80
PATIENT = f"stub: {{retry_s: {PATIENCE_S}}}\n"


def environment(gpu: FakeGpu, folder: Path) -> dict[str, str]:
    """Return environment variables with which a server and its runtimes find the cards."""
    python = folder / "python"
    # Triton's launcher sets LD_LIBRARY_PATH for its own libraries, so the runtime's script sets these variables again.
    exports = "".join(f"export {name}='{value}'\n" for name, value in gpu.environment.items())
    python.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    # With `auto`, rsrv looks for the device node of a card. The fake driver has none.
    own = {"RSRV_RUNTIME_PYTHON": str(python), "RSRV_RUNTIME__PLATFORM": "cuda"}
    return {**gpu.environment, **own}


def test_the_demo_is_served_from_a_card(gpu: FakeGpu, tmp_path: Path) -> None:
    """A runtime finds the card through CUDA. Models compile, load, warm up and answer there.

    The models have convolutions, for which cuDNN offers one plan, and products of matrices.
    """
    shutil.copytree(demo.DATA / demo.BUNDLES, tmp_path / "bundles")

    with serving(tmp_path, gpu=environment(gpu, tmp_path)) as terminal:
        # The first run compiles models, and times kernels.
        terminal.wait_for("Stop with Ctrl-C", timeout=400)
        assert "Serving 7 of 7 models" in terminal.text
        url = f"http://{LOOPBACK}:{terminal.grpc_port - 1}/v2/models/{demo.MODEL}/infer"
        with urlopen(Request(url, (demo.DATA / demo.REQUEST).read_bytes()), timeout=20) as reply:
            assert json.load(reply)["outputs"]  # The values can be any, because the card computes nothing.
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text

    (process,) = {call.pid for call in gpu.calls("alloc")}
    calls = [call for call in gpu.calls() if call.pid == process]
    assert {"alloc", "h2d", "d2h", "kernel"} <= {call.kind for call in calls}
    assert "cudnn" in {call.detail for call in calls}


@pytest.mark.parametrize(
    ("count", "mig_instances", "arena", "selectors"),
    [
        (2, 0, 72 * GIB, [f"GPU-0{card}000000-0000-0000-0000-000000000000" for card in (1, 2)]),
        (1, 2, 36 * GIB, [f"MIG-01000000-0000-0000-0000-00000000000{instance}" for instance in (0, 1)]),
    ],
    ids=["two cards", "two instances of a card"],
)
def test_one_server_uses_all_cards(
    gpu: FakeGpu, tmp_path: Path, count: int, mig_instances: int, arena: int, selectors: list[str]
) -> None:
    """Each card has a runtime, which takes nine tenths of its memory and names its own card.

    A process of CUDA sees one instance of a partitioned card, with the instance's share of the memory. Each card admits only one
    process, so no other process of rsrv may have a context on it.
    """
    gpu.settings.count, gpu.settings.mig_instances = count, mig_instances
    gpu.settings.compute_mode = EXCLUSIVE_PROCESS
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "new", 1), tmp_path / "bundles" / "cats")

    with serving(tmp_path, "--log=-", gpu=environment(gpu, tmp_path)) as terminal:
        terminal.wait_for("Serving 1 of 1 models", timeout=150)
        for number, selector in enumerate(selectors):
            device = wait_until(partial(device_status, terminal.server_pid, number))
            assert selector in device["name"]
            assert device["limit_bytes"] == arena
        cards = [entry.card for entry in control_status(terminal.server_pid).devices]
        # The fake driver counts the instances of a partitioned card as one card.
        assert all(card.used_bytes >= arena and card.total_bytes == 80 * GIB for card in cards)
        assert len(cards) == len(selectors)
        first_value(terminal.grpc_port, "cats")  # The values can be any, because the card computes nothing.
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text

    takers = gpu.calls("alloc")
    assert sorted((call.stream, call.bytes) for call in takers) == [(0, arena), (1, arena)]
    assert len({call.pid for call in takers}) == 2


@contextmanager
def asking(port: int) -> Iterator[None]:
    """Let 16 clients send requests to `cats` during the block. Each request must be answered, even if late."""
    stop = threading.Event()

    def ask() -> None:
        client = tritonclient.grpc.InferenceServerClient(f"{LOOPBACK}:{port}")
        tensor = tritonclient.grpc.InferInput("x", [1, COLUMNS], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, COLUMNS), np.float32))
        while not stop.wait(0.1):
            client.infer("cats", [tensor], client_timeout=PATIENCE_S)
        client.close()

    with ThreadPoolExecutor(16) as pool:
        clients = [pool.submit(ask) for _ in range(16)]
        try:
            yield
        finally:
            stop.set()
    for client in clients:
        client.result()


def test_no_request_fails_when_the_only_runtime_ends(gpu: FakeGpu, tmp_path: Path) -> None:
    """The only runtime is killed, and the next one loses its CUDA context. No request fails, because clients wait for the next runtime."""
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "new", 1), tmp_path / "bundles" / "cats")

    with serving(tmp_path, "--log=-", gpu=environment(gpu, tmp_path), settings=PATIENT) as terminal:
        terminal.wait_for("Serving 1 of 1 models", timeout=150)

        def next_after(earlier: int) -> int:
            pid = runtime_of(terminal.server_pid, 0, "cats")
            return pid if pid != earlier else 0

        first = runtime_of(terminal.server_pid, 0, "cats")
        with asking(terminal.grpc_port):
            os.kill(first, signal.SIGKILL)
            second = wait_until(partial(next_after, first), what="the second runtime", timeout=90)
            gpu.settings.launches_until_fault = 0
            wait_until(partial(next_after, second), what="the third runtime", timeout=90)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text
    assert [call.pid for call in gpu.calls("fault")] == [second]


def test_a_failed_card_leaves_the_requests_to_the_other(gpu: FakeGpu, tmp_path: Path) -> None:
    """An error of CUDA ends only the runtime of its card, and the other card answers the requests. The next runtime uses this card again.

    A card that is lost for a while also gets a runtime when it is back.
    """
    gpu.settings.count = 2
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "new", 1), tmp_path / "bundles" / "cats")

    with serving(tmp_path, "--log=-", gpu=environment(gpu, tmp_path), settings=PATIENT) as terminal:
        terminal.wait_for("Serving 1 of 1 models", timeout=150)

        def pids() -> dict[int, int]:
            """Return the pids of the runtimes in which the model is ready, by device."""
            return {
                number: pid for number in (0, 1) if (pid := runtime_of(terminal.server_pid, number, "cats"))
            }

        def both_but(earlier: Mapping[int, int]) -> dict[int, int]:
            current = pids()
            return current if len(current) == 2 and current != earlier else {}

        before = wait_until(partial(both_but, {}), what="both devices", timeout=90)
        with asking(terminal.grpc_port):
            gpu.settings.launches_until_fault = 0
            after = wait_until(partial(both_but, before), what="the failed card's next runtime", timeout=90)
            assert len(before.items() & after.items()) == 1

            gpu.settings.count = 1
            os.kill(after[1], signal.SIGKILL)
            terminal.wait_for("jax finds no GPU", timeout=90)
        assert pids() == {0: after[0]}
        gpu.settings.count = 2
        wait_until(lambda: 1 in pids(), what="the returned card's runtime", timeout=90)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text


@pytest.mark.long
def test_a_full_card_leaves_its_models_to_the_empty_one(gpu: FakeGpu, tmp_path: Path) -> None:
    """While a card's memory is full, the status says why, and the other card serves.

    When the memory is free, the card serves without a restart of the server.
    """
    gpu.settings.count = 2
    gpu.settings.cards[0].others_bytes = 80 * GIB
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "new", 1), tmp_path / "bundles" / "cats")

    with serving(tmp_path, "--log=-", gpu=environment(gpu, tmp_path)) as terminal:
        terminal.wait_for("Serving 1 of 1 models", timeout=150)
        first_value(terminal.grpc_port, "cats")  # The values can be any, because the card computes nothing.
        assert runtime_of(terminal.server_pid, 1, "cats")
        assert not runtime_of(terminal.server_pid, 0, "cats")

        reasons, pids = set(), set()

        def is_replaced() -> bool:
            full = control_status(terminal.server_pid).devices[0]
            reasons.add(full.error)
            if full.HasField("record"):
                pids.add(full.record.pid)
            return len(pids) > 1

        wait_until(is_replaced, what="another runtime that looks for a device", timeout=90)
        (reason,) = reasons
        assert "other processes hold the memory of NVIDIA H100 80GB HBM3 (GPU-01" in reason
        assert [call.stream for call in gpu.calls("alloc", "no-room")] == [1]

        gpu.settings.cards[0].others_bytes = 0
        wait_until(lambda: runtime_of(terminal.server_pid, 0, "cats"), what="the emptied card", timeout=150)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text


@pytest.mark.long
def test_cards_of_two_kinds_compile_for_themselves(gpu: FakeGpu, tmp_path: Path) -> None:
    """Two kinds of cards share a cache on disk. Each compiles its own executables, and takes nine tenths of its own memory."""
    gpu.settings.count = 2
    gpu.settings.cards[1].memory_bytes, gpu.settings.cards[1].is_t4 = 15 * GIB, 1
    (tmp_path / "bundles").mkdir()
    place(write_version(tmp_path / "new", 1), tmp_path / "bundles" / "cats")
    variables = {**environment(gpu, tmp_path), "RSRV_RUNTIME__COMPILATION_CACHE_DIR": str(tmp_path / "cache")}

    with serving(tmp_path, "--log=-", gpu=variables) as terminal:
        terminal.wait_for("Serving 1 of 1 models", timeout=150)
        for number in (0, 1):
            ready = partial(runtime_of, terminal.server_pid, number, "cats")
            wait_until(ready, what=f"device {number}", timeout=90)
        h100, t4 = (read_status(terminal.server_pid, str(number)) for number in (0, 1))
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text

    assert h100["memory"]["name"].startswith("NVIDIA H100 80GB HBM3 (GPU-01")
    assert t4["memory"]["name"].startswith("Tesla T4 (GPU-02")
    assert sorted((call.stream, call.bytes) for call in gpu.calls("alloc")) == [
        (0, 72 * GIB),
        (1, 15 * GIB * 9 // 10),
    ]
    assert "compute capability 9.0" in terminal.text
    assert "compute capability 7.5" in terminal.text
    # The programs are a probe, which is a product of matrices, and two sizes.
    assert [(status["compiled"], status["from_cache"]) for status in (h100, t4)] == [(3, 0), (3, 0)]
    assert {call.detail for call in gpu.calls("kernel") if call.pid == t4["pid"]} >= {"cublasLt"}


def control_status(server_pid: int) -> pb.GetStatusResponse:
    """Return the status from the control process."""
    socket = runtime_directory(server_pid, "0") / CONTROL_SOCKET
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub: Any = control_pb2_grpc.ControlStub(channel)
        status: pb.GetStatusResponse = stub.GetStatus(pb.GetStatusRequest(), timeout=20)
        return status


def runtime_of(server_pid: int, number: int, model: str) -> int:
    """Return the pid of the runtime of a device if the model is ready there, or 0."""
    try:
        status = read_status(server_pid, str(number))
    except (OSError, Closed):
        return 0
    return int(status["pid"]) if status["models"].get(model, {}).get("state") == "ready" else 0


def device_status(server_pid: int, number: int) -> dict[str, Any]:
    """Return what the runtime of a device reports about the device, or nothing if there is no runtime with a device."""
    try:
        device: dict[str, Any] = read_status(server_pid, str(number))["memory"]
    except OSError:
        return {}
    return device if device.get("name") else {}

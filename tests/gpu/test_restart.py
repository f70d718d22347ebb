"""A planned restart on a card that has room for one runtime: what the next one does before it has the memory."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np

from rsrv.stub.engine import Engine
from tests.fakes import FakeRequest
from tests.gpu.conftest import StartServed
from tests.gpu.fake_gpu import GIB, MIB, FakeGpu
from tests.runtime_commands import command
from tests.status import read_status
from tests.waiting import wait_until

#: Seconds that a request waits for a runtime: a busy machine may take as long to start one.
PATIENCE_S = 80
PATIENT = f"\nstub: {{retry_s: {PATIENCE_S}}}"


def ask(engine: Engine) -> None:
    request = FakeRequest({"x": np.ones((1, 3), np.float32)})
    answers = engine.execute([request]) or [request.answers.get(timeout=PATIENCE_S)]
    assert answers[0].error is None


def test_the_next_runtime_has_its_context_and_executables_before_the_memory(
    gpu: FakeGpu, serve: StartServed, doubling: Path, tmp_path: Path
) -> None:
    """So a restart without an answer is only the end of one process, and the loads of the next one."""
    gpu.settings.context_bytes = 500 * MIB
    # A model repository has its bundles there.
    bundle = tmp_path / "doubling" / "1" / "bundle"
    shutil.copytree(doubling, bundle)
    runtime = f"{{platform: cuda, compilation_cache_dir: {tmp_path / 'cache'}}}"
    engine = serve(bundle, "doubling", runtime + PATIENT)
    ask(engine)
    before = read_status(os.getpid(), "0")

    command(os.getpid(), {"command": "restart", "drain_s": 10.0}, timeout=PATIENCE_S)
    ended = time.monotonic()
    ask(engine)

    after = read_status(os.getpid(), "0")
    assert after["pid"] != before["pid"]
    assert after["memory"]["limit_bytes"] == 72 * GIB
    assert before["compiled"]
    assert not after["compiled"]
    contexts = {call.pid: call.end for call in gpu.calls("context")}
    assert contexts[after["pid"]] < ended
    taken = [call for call in gpu.calls("alloc", "no-room") if call.pid == after["pid"]]
    assert [(call.kind, call.bytes) for call in taken] == [("alloc", 72 * GIB)]


def test_a_card_without_room_for_a_second_context_is_restarted_all_the_same(
    gpu: FakeGpu, serve: StartServed, doubling: Path
) -> None:
    """The next runtime then starts its device when the one before has ended."""
    gpu.settings.context_bytes = 5 * GIB
    engine = serve(doubling, "doubling", "{platform: cuda, compilation_cache_dir: null}" + PATIENT)
    ask(engine)
    before = read_status(os.getpid(), "0")

    command(os.getpid(), {"command": "restart", "drain_s": 10.0}, timeout=PATIENCE_S)
    ask(engine)

    after = read_status(os.getpid(), "0")
    assert after["pid"] != before["pid"]
    assert after["memory"]["limit_bytes"] == 72 * GIB


def test_settings_that_change_after_the_preparation_wait_for_the_next_restart(
    gpu: FakeGpu, serve: StartServed, doubling: Path, tmp_path: Path
) -> None:
    """None of them applies before: jax's client, which the process has made, keeps its share of the card."""
    gpu.settings.context_bytes = 500 * MIB
    shares = "memory_fraction: 0.25, weight_budget_bytes: 1000000"
    runtime = f"{{platform: cuda, compilation_cache_dir: null, {shares}}}{PATIENT}"
    engine = serve(doubling, "doubling", runtime)
    ask(engine)
    before = read_status(os.getpid(), "0")
    restart = threading.Thread(
        target=command, args=(os.getpid(), {"command": "restart", "drain_s": 10.0}, "0", PATIENCE_S)
    )

    restart.start()
    wait_until(lambda: any(call.pid != before["pid"] for call in gpu.calls("context")))
    settings = tmp_path / "rsrv.yaml"
    changed = settings.read_text().replace(shares, "memory_fraction: 0.5, weight_budget_bytes: 2000000")
    settings.write_text(changed)
    restart.join(PATIENCE_S)
    ask(engine)

    after = read_status(os.getpid(), "0")
    assert after["pid"] != before["pid"]
    assert after["memory"]["limit_bytes"] == 20 * GIB
    assert after["memory"]["budget_bytes"] == 1_000_000

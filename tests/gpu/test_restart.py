"""A planned restart on a card with memory for only one runtime: what the next runtime does before it gets the memory."""

from __future__ import annotations

import os
import shutil
import threading
import time
from hashlib import sha256
from pathlib import Path

import jax.monitoring
import numpy as np

from rsrv.runtime.device_executables import ExecutableSources
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.known_modules import KnownModules
from rsrv.runtime.numerics import probe
from rsrv.runtime.preparation import prepare
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.wire.paths import MODULES
from rsrv_bundle import read_bundle
from rsrv_bundle.modules import Signature, check_signatures, signature_of
from tests.fakes import FakeRequest
from tests.gpu.conftest import StartServed
from tests.gpu.fake_gpu import GIB, MIB, FakeGpu
from tests.runtime_commands import command
from tests.status import read_status
from tests.unit.runtime.conftest import build_here
from tests.waiting import wait_until

#: Seconds that a request waits for a runtime. A busy machine may need this long to start one.
PATIENCE_S = 80
PATIENT = f"\nstub: {{retry_s: {PATIENCE_S}}}"


def ask(engine: Engine) -> None:
    request = FakeRequest({"x": np.ones((1, 3), np.float32)})
    answers = engine.execute([request]) or [request.answers.get(timeout=PATIENCE_S)]
    assert answers[0].error is None


def test_the_next_runtime_has_its_context_and_executables_before_the_memory(
    gpu: FakeGpu, serve: StartServed, doubling: Path, tmp_path: Path
) -> None:
    """The next runtime has a context and all executables before the old one ends.

    So clients wait only for the end of the old process and for the loads of the next one.
    """
    gpu.settings.context_bytes = 500 * MIB
    # A model repository has bundles at such a path.
    bundle = tmp_path / "doubling" / "1" / "bundle"
    shutil.copytree(doubling, bundle)
    runtime = f"{{platform: cuda, compilation_cache_dir: {tmp_path / 'cache'}}}"
    engine = serve(bundle, "doubling", runtime + PATIENT)
    ask(engine)
    before = read_status(os.getpid(), "0")

    command(os.getpid(), {"command": "restart", "drain_s": 10.0}, timeout=PATIENCE_S)
    end = time.monotonic()
    ask(engine)

    after = read_status(os.getpid(), "0")
    assert after["pid"] != before["pid"]
    assert after["memory"]["limit_bytes"] == 72 * GIB
    assert before["compiled"]
    assert not after["compiled"]
    contexts = {call.pid: call.end for call in gpu.calls("context")}
    assert contexts[after["pid"]] < end
    taken = [call for call in gpu.calls("alloc", "no-room") if call.pid == after["pid"]]
    assert [(call.kind, call.bytes) for call in taken] == [("alloc", 72 * GIB)]


def programs_of_a_start(repository: Path, directory: Path, prepares: bool) -> tuple[int, int]:
    """Start a device and a model as a runtime does, with or without a preparation.

    Return how many programs were compiled or read before the device's memory was allocated, and how many after that.
    """
    programs = 0

    def count(event: str, duration_secs: float, **_: object) -> None:
        nonlocal programs
        programs += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(count)
    settings = load_settings(f"runtime: {{platform: cuda, compilation_cache_dir: {directory / 'cache'}}}")
    known = KnownModules(directory / MODULES)
    if prepares:
        prepared = prepare(settings, repository, directory, ["0"], 0)
        assert prepared is not None
        device = prepared.device
        before = programs
        device.claim(lambda reason: None)
    else:
        device = JaxDevice("cuda", ExecutableSources(directory / "cache", None, known))
        before = programs
    probe(device, "auto")
    bundle = repository / "doubling" / "1" / "bundle"
    build_here(bundle, device, settings)

    def note(module: bytes, file: str) -> Signature:
        return known.setdefault(sha256(module).hexdigest(), signature_of(module, file))

    check_signatures(read_bundle(bundle), note)
    return before, programs - before


def test_the_next_runtime_has_all_programs_before_the_memory(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """A prepared runtime has compiled or read all programs before it gets the card's memory.

    This matters because the old runtime ends at this time, and requests wait for the next one.
    """
    repository = tmp_path / "gen"
    shutil.copytree(doubling, repository / "doubling" / "1" / "bundle")

    # The programs are the probe, three sizes, and one that allocates memory for the weights.
    assert gpu.run(programs_of_a_start, repository, tmp_path, False) == (0, 5)
    assert gpu.run(programs_of_a_start, repository, tmp_path, True) == (5, 0)


def test_a_card_without_room_for_a_second_context_is_restarted_all_the_same(
    gpu: FakeGpu, serve: StartServed, doubling: Path
) -> None:
    """The card has no room for a second context. The next runtime starts its device after the end of the old one."""
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
    """Settings change after the next runtime has prepared itself. None of them applies before another restart.

    The process has already made jax's client, which keeps its share of the card's memory.
    """
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

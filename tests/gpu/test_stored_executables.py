"""Executables that rsrv-gen compiled without a card, on XLA's CUDA client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from rsrv.runtime.device import run
from rsrv.runtime.jax_device import JaxDevice
from rsrv.runtime.numerics import probes
from rsrv_gen.cli import main as rsrv_gen
from tests.gpu.fake_gpu import INSTALLED, FakeGpu
from tests.unit.runtime.conftest import build_here


def start(repository: Path, cache: Path) -> tuple[int, int]:
    """Start on the card as a server does; return how many modules were compiled, and how many were loaded."""
    device = JaxDevice("cuda", cache, repository=repository)
    # Not executed: the fake cuBLAS multiplies nothing.
    for module, signature in probes("auto"):
        device.compile(module, signature)
    model = build_here(repository / "doubling" / "1" / "bundle", device)
    assert model.weights is not None
    for (_, size), executable in model.executables.items():
        (y,), _ = run(device, executable, model.weights, [np.ones((size, 3), np.float32)])
        assert y.shape == (size, 3)
    return device.cache_counts.compiled, device.cache_counts.from_cache


def compile_for(repository: Path, card: str) -> str:
    """Run what `rsrv-gen --compile-for` runs; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(INSTALLED / "site"), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-m", "rsrv.runtime.compile_for", str(repository), card]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_server_loads_what_rsrv_gen_compiled_without_a_card(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """Nothing is compiled at its start; for another card everything is. A second rsrv-gen compiles nothing."""
    repository = tmp_path / "gen"
    assert rsrv_gen([str(doubling), "-o", str(repository)]) == 0
    # The device's probe, and three sizes.
    compile_for(repository, "a100")
    assert gpu.run(start, repository, tmp_path / "first cache") == (4, 0)

    assert "doubling: 3 modules" in compile_for(repository, "h100")
    assert gpu.run(start, repository, tmp_path / "second cache") == (0, 4)
    assert "3 kept" in compile_for(repository, "h100")

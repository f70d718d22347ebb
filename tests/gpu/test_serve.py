"""The whole product on a fake card: `rsrv serve` and the real tritonserver."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.e2e.lives import place, write_version
from tests.e2e.nodes import first_value
from tests.e2e.test_serve import serving
from tests.gpu.fake_gpu import FakeGpu


def test_bundles_are_served_from_a_card(gpu: FakeGpu, tmp_path: Path) -> None:
    """NVML names the card, the runtime finds it through CUDA, and models compile, load, warm up and answer there."""
    python = tmp_path / "python"
    # Triton's launcher sets LD_LIBRARY_PATH for its own libraries.
    exports = "".join(f"export {name}='{value}'\n" for name, value in gpu.environment.items())
    python.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "bundles").mkdir()
    for number, name in enumerate(("cats", "dogs"), 1):
        place(write_version(tmp_path / f"{name}.new", number), tmp_path / "bundles" / name)

    with serving(tmp_path, gpu={**gpu.environment, "RSRV_RUNTIME_PYTHON": str(python)}) as terminal:
        terminal.wait_for("Stop with Ctrl-C")
        assert "on NVIDIA H100 80GB HBM3 (GPU-01000000-" in terminal.text
        assert "Serving 2 of 2 models" in terminal.text
        first_value(terminal.grpc_port, "cats")  # any number: the card computes nothing
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text

    (process,) = {call.pid for call in gpu.calls("alloc")}
    kinds = {call.kind for call in gpu.calls() if call.pid == process}
    assert {"alloc", "h2d", "d2h", "kernel"} <= kinds

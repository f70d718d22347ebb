"""The whole product on fake cards: `rsrv serve` and the real tritonserver."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from urllib.request import Request, urlopen

from local_triton import LOOPBACK
from rsrv.serve import demo
from tests.e2e.test_serve import serving
from tests.gpu.fake_gpu import FakeGpu


def environment(gpu: FakeGpu, folder: Path) -> dict[str, str]:
    """Return variables of a server that finds the cards, as do its runtimes."""
    python = folder / "python"
    # Triton's launcher sets LD_LIBRARY_PATH for its own libraries.
    exports = "".join(f"export {name}='{value}'\n" for name, value in gpu.environment.items())
    python.write_text(f'#!/bin/sh\n{exports}exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return {**gpu.environment, "RSRV_RUNTIME_PYTHON": str(python)}


def test_the_demo_is_served_from_a_card(gpu: FakeGpu, tmp_path: Path) -> None:
    """NVML names the card, the runtime finds it through CUDA, and models compile, load, warm up and answer there.

    They have convolutions, of which cuDNN offers one plan, and products.
    """
    shutil.copytree(demo.DATA / demo.BUNDLES, tmp_path / "bundles")

    with serving(tmp_path, gpu=environment(gpu, tmp_path)) as terminal:
        # The first run compiles, and times kernels.
        terminal.wait_for("Stop with Ctrl-C", timeout=150)
        assert "on NVIDIA H100 80GB HBM3 (GPU-01000000-" in terminal.text
        assert "Serving 6 of 6 models" in terminal.text
        url = f"http://{LOOPBACK}:{terminal.grpc_port - 1}/v2/models/{demo.MODEL}/infer"
        with urlopen(Request(url, (demo.DATA / demo.REQUEST).read_bytes()), timeout=20) as reply:
            assert json.load(reply)["outputs"]  # any number: the card computes nothing
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(40) == 0, terminal.text

    (process,) = {call.pid for call in gpu.calls("alloc")}
    calls = [call for call in gpu.calls() if call.pid == process]
    assert {"alloc", "h2d", "d2h", "kernel"} <= {call.kind for call in calls}
    assert "cudnn" in {call.detail for call in calls}

"""`rsrv gpu first-hour` on a card that computes nothing: what checks answers fails, and the rest runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.fake_gpu import GIB, ROOT, FakeGpu


@pytest.mark.timeout(540)
def test_every_part_runs_and_a_card_with_wrong_answers_fails(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """Wrong answers are found wherever answers are checked; memory, order and errors are XLA's own and pass."""
    gpu.settings.cards[0].memory_bytes = 2 * GIB
    gpu.settings.kernel_ns = 2_000_000
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "rsrv.cli.main", "gpu", "first-hour", str(doubling), "--quick"]

    done = subprocess.run(
        [*command, f"--json={file}"],
        env={
            **os.environ,
            **gpu.environment,
            # Without a tritonserver.
            "PATH": "/usr/bin:/bin",
            "XDG_CACHE_HOME": str(tmp_path),
            # XLA would compile and time each kernel that may be fast, for a minute.
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
        },
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    found = json.loads(file.read_text())
    assert found["device"]["name"] == "NVIDIA H100 80GB HBM3"
    verdicts = {
        part: {finding["what"]: finding["verdict"] for finding in one["findings"]}
        for part, one in found["parts"].items()
    }
    assert set(verdicts["correctness"].values()) == {"FAIL"}, done.stdout
    assert set(verdicts["numerics"].values()) == {"FAIL"}, done.stdout
    assert len(verdicts["bandwidth"]) == 8, done.stdout
    assert verdicts["overlap"]["a second launch beside an execution"] == "PASS", done.stdout
    assert "FAIL" not in {**verdicts["budget"], **verdicts["out-of-memory"]}.values(), done.stdout
    assert verdicts["latency"] == {"weights of 1.05 MB": "MEASURED", "answers with 1.05 MB": "FAIL"}
    assert verdicts["eviction"] == {"answers": "FAIL", "swaps": "PASS", "requests": "MEASURED"}
    assert verdicts["many"]["answers"] == "FAIL", done.stdout
    for part in ("interruptions", "comparison"):
        (skipped,) = found["parts"][part]["findings"]
        assert skipped["verdict"] == "SKIPPED"
        assert "rsrv triton install" in skipped["reason"]

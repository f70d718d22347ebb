"""`rsrv gpu check` on a card that computes nothing. Parts that check answers fail, and the other parts pass."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from example_bundles import OUTPUT
from rsrv.gpu.report import PARTS
from tests.gpu.fake_gpu import GIB, MIB, ROOT, FakeGpu
from tests.waiting import wait_until

CONTEXT = 100 * MIB


def start(gpu: FakeGpu, folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], Path, Path]:
    """Start the check with small amounts. It finds no tritonserver. Return the process, and the files of its output and its errors."""
    (temporary := folder / "temporary").mkdir()
    out, errors = folder / "out", folder / "errors"
    with out.open("wb") as stdout, errors.open("wb") as stderr:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rsrv.cli.main", "gpu", "check", "--quick", "--minutes=30"),
                *(f"--json={folder / 'figures.json'}", *arguments),
            ],
            env={
                **os.environ,
                **gpu.environment,
                "PATH": "/usr/bin:/bin",
                "TMPDIR": str(temporary),
                "XDG_CACHE_HOME": str(folder),
                # Without this flag, XLA would compile and time fast kernels for a minute.
                "XLA_FLAGS": "--xla_gpu_autotune_level=0",
            },
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
        )
    return process, out, errors


def figures(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return document


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_a_run_that_is_cut_off_keeps_its_rows_and_leaves_nothing(
    gpu: FakeGpu, doubling: Path, tmp_path: Path, part: str
) -> None:
    """The check is killed during a part. The rows of earlier parts are printed and in the file, and no process or folder is left."""
    gpu.settings.cards[0].memory_bytes = 2 * GIB
    before = "bandwidth" if part == "budget" else "budget"
    command, out, errors = start(
        gpu, tmp_path, str(doubling), f"--parts={before},{part}", f"--models={OUTPUT}"
    )
    wait_until(lambda: f"rsrv gpu check: {part}, at most" in errors.read_text())
    calls = len(gpu.calls())
    if part != "fronts":  # Without tritonserver, this part only exports.
        wait_until(lambda: len(gpu.calls()) > calls, what=f"work on the card: {errors.read_text()}")

    (runner,) = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
    for pid in (int(runner), command.pid):
        os.kill(pid, signal.SIGKILL)
    command.wait()

    assert f"| `{before}` |" in out.read_text()
    assert figures(tmp_path)["parts"][before]["seconds"] > 0
    assert figures(tmp_path)["parts"][before]["findings"]
    wait_until(lambda: not any(map(is_alive, {call.pid for call in gpu.calls()})), what="free card")
    wait_until(lambda: not list((tmp_path / "temporary").iterdir()), what="removed folders")


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
@pytest.mark.timeout(540)
def test_every_part_runs_and_a_card_with_wrong_answers_fails(
    gpu: FakeGpu, doubling: Path, tmp_path: Path
) -> None:
    """Each part that checks answers finds the wrong answers of the card.

    Checks of memory, order and errors pass, because the fake card does not change these: XLA controls them.
    """
    gpu.settings.cards[0].memory_bytes = 2 * GIB
    gpu.settings.kernel_ns = 2_000_000
    gpu.settings.context_bytes = CONTEXT

    command, out, errors = start(gpu, tmp_path, str(doubling))

    assert command.wait() == 1, errors.read_text()
    table = out.read_text()
    document = figures(tmp_path)
    assert document["device"]["name"] == "NVIDIA H100 80GB HBM3"
    verdicts = {
        part: {finding["what"]: finding["verdict"] for finding in report["findings"]}
        for part, report in document["parts"].items()
    }
    assert set(verdicts["correctness"].values()) == {"FAIL"}, table
    assert set(verdicts["numerics"].values()) == {"FAIL"}, table
    assert len(verdicts["bandwidth"]) == 8, table
    assert verdicts["overlap"]["a second launch during an execution"] == "PASS", table
    assert "FAIL" not in {**verdicts["budget"], **verdicts["out-of-memory"]}.values(), table
    assert verdicts["latency"] == {"weights of 1.05 MB": "MEASURED", "answers with 1.05 MB": "FAIL"}
    assert verdicts["eviction"] == {"requests": "MEASURED", "loads of weights": "PASS", "answers": "FAIL"}
    assert verdicts["many"]["answers"] == "FAIL", table
    assert set(verdicts["outputs"].values()) == {"FAIL"}, table
    assert verdicts["interruptions"]["SIGKILL of the runtime"] == "FAIL", table
    assert verdicts["models"] == {"resnet18, vit_tiny, minilm_encoder": "NOT RUN"}
    (skipped,) = document["parts"]["fronts"]["findings"]
    assert skipped["verdict"] == "NOT RUN"
    assert "rsrv triton install" in skipped["reason"]
    contexts = {finding["what"]: finding["figures"] for finding in document["parts"]["contexts"]["findings"]}
    plain, here = contexts["plain models"], contexts["models in rsrv"]
    for count in (1, 2, 4, 8):
        assert count * CONTEXT < plain[f"bytes_{count}"] < count * (CONTEXT + 8 * MIB), table
        assert CONTEXT < here[f"bytes_{count}"] < CONTEXT + 16 * MIB, table

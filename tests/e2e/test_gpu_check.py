"""`rsrv gpu check` on the CPU, where all answers are right."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from example_bundles import OUTPUT
from local_triton import INSTALLATION, path_with_tritonserver
from rsrv.cli.main import main
from tests.unit.runtime.conftest import export_doubling
from tests.unit.runtime.counting import export_counting

pytestmark = pytest.mark.long


def test_the_answers_of_a_bundle_are_compared_on_the_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A bundle with right answers passes, and a bundle that cannot be read fails. The table and the file have both.

    A model with state is skipped, because its requests are steps of sequences.
    """
    export_doubling(tmp_path / "bundles" / "doubling", w=[1, 1, 1])
    export_counting(tmp_path / "bundles" / "counting")
    (tmp_path / "bundles" / "broken").mkdir()
    (tmp_path / "bundles" / "broken" / "manifest.yaml").write_text("{}")
    file = tmp_path / "found.json"

    status = main(
        ["gpu", "check", str(tmp_path / "bundles"), "--cpu", "--parts", "correctness", f"--json={file}"]
    )

    broken, counting, doubling = json.loads(file.read_text())["parts"]["correctness"]["findings"]
    assert (broken["what"], broken["verdict"]) == ("broken", "FAIL")
    assert (counting["what"], counting["verdict"]) == ("counting", "NOT RUN")
    assert (doubling["what"], doubling["verdict"]) == ("bundles, numerics auto", "PASS")
    assert doubling["value"] == "1 of 1 as on the CPU, largest error 0"
    assert status == 1
    assert (
        "| `correctness` | bundles, numerics auto | PASS: 1 of 1 as on the CPU, largest error 0 |"
        in capfd.readouterr().out
    )


def test_a_served_model_answers_as_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tritonserver serves a model with both fronts and as a plain model, and the answers agree. Each is measured with 1 and 16 clients."""
    monkeypatch.setenv("PATH", f"{INSTALLATION.perf_analyzer.parent}:{path_with_tritonserver()}")

    alike, *measured = run("fronts", tmp_path)

    assert alike["verdict"] == "PASS"
    assert [(finding["what"], finding["verdict"]) for finding in measured] == [
        ("1 client", "MEASURED"),
        ("16 clients", "MEASURED"),
    ]
    for finding in measured:
        assert finding["reason"] == "load by perf_analyzer"
        assert all(finding["figures"][f"{side}_per_s"] > 0 for side in ("plain", "native", "python"))


def test_no_request_fails_while_the_runtime_dies_restarts_and_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of several clients are checked while the runtime dies, restarts and sleeps. No request fails."""
    monkeypatch.setenv("PATH", path_with_tritonserver())

    findings = run("interruptions", tmp_path)

    assert {finding["what"]: finding["verdict"] for finding in findings} == {
        "SIGKILL of the runtime": "PASS",
        "SIGSEGV of the runtime": "PASS",
        "rsrv restart": "PASS",
        "rsrv sleep": "MEASURED",
        "a request after rsrv sleep": "PASS",
    }


def test_a_death_is_measured_where_triton_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If tritonserver does not start, a death of the runtime is still measured. The other findings are NOT RUN, with the reason."""
    (program := tmp_path / "tritonserver").write_text(
        "#!/bin/sh\necho error while loading shared libraries >&2\nexit 127\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    death, rest = run("interruptions", tmp_path)

    assert (death["what"], death["verdict"]) == ("SIGKILL of the runtime", "PASS")
    assert rest["verdict"] == "NOT RUN"
    assert rest["reason"] == f"{program} does not start: error while loading shared libraries"


def test_real_models_are_measured_with_rsrv_and_in_pytorch(tmp_path: Path) -> None:
    """A model is measured with rsrv and in PyTorch. Models whose bundles are missing are NOT RUN."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "vit_tiny").symlink_to(OUTPUT / "vit_tiny")

    missing, small, large = run("models", tmp_path, f"--models={tmp_path / 'models'}")

    assert (missing["what"], missing["verdict"]) == ("resnet18, minilm_encoder", "NOT RUN")
    assert [small["what"], large["what"]] == ["vit_tiny, 1 row", "vit_tiny, 8 rows"]
    for finding in (small, large):
        assert finding["figures"]["rsrv_per_s"] > 0
        assert finding["figures"]["torch_eager_per_s"] > 0


def run(part: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run one part of the check on the CPU, and return its findings."""
    file = folder / "found.json"
    assert main(["gpu", "check", "--cpu", "--parts", part, f"--json={file}", *arguments]) == 0
    findings: list[dict[str, Any]] = json.loads(file.read_text())["parts"][part]["findings"]
    return findings

"""`rsrv gpu first-hour` on the CPU, whose answers are right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import native_front
from local_triton import INSTALLATION
from rsrv.cli.main import main
from tests.unit.runtime.conftest import export_doubling
from tests.unit.runtime.counting import export_counting


@pytest.mark.long
def test_the_answers_of_a_bundle_are_compared_on_the_cpu(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Correct answers pass; the table and the file have each finding; a bundle that cannot be read fails alone.

    A model with state is skipped: its requests are steps of sequences.
    """
    export_doubling(tmp_path / "bundles" / "doubling", w=[1, 1, 1])
    export_counting(tmp_path / "bundles" / "counting")
    (tmp_path / "bundles" / "broken").mkdir()
    (tmp_path / "bundles" / "broken" / "manifest.yaml").write_text("{}")
    file = tmp_path / "found.json"

    status = main(
        ["gpu", "first-hour", str(tmp_path / "bundles"), "--cpu", "--parts", "correctness", f"--json={file}"]
    )

    broken, counting, doubling = json.loads(file.read_text())["parts"]["correctness"]["findings"]
    assert (broken["what"], broken["verdict"]) == ("broken", "FAIL")
    assert (counting["what"], counting["verdict"]) == ("counting, numerics auto", "SKIPPED")
    assert (doubling["what"], doubling["verdict"]) == ("doubling, numerics auto", "PASS")
    assert doubling["value"] == "3 modules, largest error 0"
    assert status == 1
    assert "correctness    PASS      doubling, numerics auto" in capfd.readouterr().out


@pytest.mark.long
def test_a_served_model_answers_as_a_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real tritonserver serves it with both fronts beside the plain one, and all are measured."""
    native_front.ensure()
    monkeypatch.setenv("PATH", f"{INSTALLATION.launcher.parent}:{os.environ['PATH']}")
    file = tmp_path / "found.json"

    assert main(["gpu", "first-hour", "--cpu", "--parts", "comparison", f"--json={file}"]) == 0

    alike, *measured = json.loads(file.read_text())["parts"]["comparison"]["findings"]
    assert alike["verdict"] == "PASS"
    assert [one["what"] for one in measured] == [
        f"{front} front, {clients}"
        for clients in ("1 client", "16 clients")
        for front in ("python", "native")
    ]
    assert {one["verdict"] for one in measured} == {"MEASURED"}
    assert all(one["figures"]["ratio"] > 0 for one in measured)


@pytest.mark.long
def test_no_request_fails_while_the_runtime_dies_restarts_and_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of several clients are checked before, meanwhile and after."""
    monkeypatch.setenv("PATH", f"{INSTALLATION.launcher.parent}:{os.environ['PATH']}")
    file = tmp_path / "found.json"

    assert main(["gpu", "first-hour", "--cpu", "--parts", "interruptions", f"--json={file}"]) == 0

    found = {
        one["what"]: one["verdict"]
        for one in json.loads(file.read_text())["parts"]["interruptions"]["findings"]
    }
    assert found == {
        "SIGKILL of the runtime": "PASS",
        "SIGSEGV of the runtime": "PASS",
        "rsrv restart": "PASS",
        "rsrv sleep": "MEASURED",
        "a request after it": "PASS",
    }

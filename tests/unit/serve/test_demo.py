"""The models of `rsrv serve --demo` are complete, small, and copied once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rsrv.cli import main as command_line
from rsrv.serve import demo
from rsrv.settings import load_settings
from rsrv_bundle import load_weights, read_bundle
from rsrv_bundle.cli import main as rsrv_bundle
from rsrv_gen.sources import read_sources

#: The largest number of bytes that the demo may add to the wheel.
MAX_BYTES = 550_000


def test_the_bundles_are_what_rsrv_bundle_accepts() -> None:
    """Every bundle of the demo passes `rsrv-bundle check`, and all together can be served."""
    folder = demo.DATA / demo.BUNDLES
    assert rsrv_bundle(["check", *(str(path) for path in sorted(folder.iterdir()))]) == 0
    sources = read_sources([folder])
    assert demo.MODEL in sources.good
    assert not sources.broken


def test_the_data_are_small_and_their_weights_exceed_the_budget() -> None:
    """The demo's data are small. The weights exceed the budget, so that the demo shows evictions."""
    files = [file for file in demo.DATA.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
    settings = load_settings((demo.DATA / demo.SETTINGS).read_text(), demo.SETTINGS)
    bundles = [read_bundle(folder) for folder in (demo.DATA / demo.BUNDLES).iterdir()]
    distinct = {array.tobytes() for bundle in bundles for array in load_weights(bundle)}
    budget = settings.runtime.weight_budget_bytes
    assert budget is not None
    assert max(bundle.weight_bytes for bundle in bundles) < budget < sum(map(len, distinct))


def test_the_request_and_the_images_fit_the_model() -> None:
    """The request has the shape that the model takes, and each held-out image has a right answer."""
    (spec,) = read_bundle(demo.DATA / demo.BUNDLES / demo.MODEL).manifest.inputs
    (tensor,) = json.loads((demo.DATA / demo.REQUEST).read_text())["inputs"]
    assert tensor["name"] == spec.name
    assert len(tensor["data"]) == np.prod(tensor["shape"]) == 64
    with np.load(demo.DATA / demo.HELD_OUT) as data:
        assert {len(data[name]) for name in data.files} == {360}


def test_a_second_start_keeps_what_the_user_changed(tmp_path: Path) -> None:
    """Bundles are copied only if there are none. A bundle that the user removed or changed stays as it is."""
    demo.copy_to(tmp_path)
    assert {path.name for path in (tmp_path / demo.BUNDLES).iterdir()} >= {demo.MODEL, "unet"}
    (tmp_path / demo.BUNDLES / demo.MODEL / "manifest.yaml").write_text("mine")
    (tmp_path / demo.SETTINGS).write_text("mine")
    demo.copy_to(tmp_path)
    assert (tmp_path / demo.BUNDLES / demo.MODEL / "manifest.yaml").read_text() == "mine"
    assert (tmp_path / demo.SETTINGS).read_text() == "mine"


def test_serve_takes_bundles_or_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv serve` does not accept bundles together with --demo. The error names both."""
    with pytest.raises(SystemExit) as raised:
        command_line.main(["serve", "--demo", "bundles"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert "BUNDLES" in error
    assert "--demo" in error


def test_a_dry_run_of_the_demo_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run of the demo prints the command and makes no directory."""
    monkeypatch.chdir(tmp_path)
    assert (
        command_line.main(["serve", "--demo", "--devices=cpu", "--dry-run", "--tritonserver=/bin/true"]) == 0
    )
    assert "/bin/true" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())

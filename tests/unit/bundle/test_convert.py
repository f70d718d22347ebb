"""`rsrv-bundle convert`: another format or StableHLO version with the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import v2_affine
from rsrv_bundle import BundleError, cli, load_weights, read_bundle
from rsrv_bundle.commands import converting
from rsrv_bundle.commands.converting import convert
from rsrv_bundle.modules import artifact_version, known_version, rewritten
from tests.unit.bundle.forge import META, changed, make_bundle
from tests.unit.bundle.test_modules import X4, Y4, W, returning


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of format 2.0, written by hand."""
    path = tmp_path_factory.mktemp("bundles") / "v2_affine"
    v2_affine.make(path)
    return path


def test_an_old_bundle_becomes_a_new_one(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An old bundle is rewritten with axes and weights in the modules' order; other files are copied."""
    out = tmp_path / "new" / "affine"
    (old / "notes.txt").write_text("kept")
    assert cli.main(["convert", str(old), "-o", str(out)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    new = read_bundle(out)
    version = known_version(None)
    assert line == (
        f"{out}: format 3, from 2.0; 2 modules of StableHLO {version}, whose answers are the same bit by bit; sha256"
        f" {new.digest[:12]}"
    )
    before = read_bundle(old)
    assert new.manifest.inputs == before.manifest.inputs
    assert new.manifest.outputs == before.manifest.outputs
    assert "shape: nhw" in (out / "manifest.yaml").read_text()
    assert [weight.name for weight in new.weights] == ["kernel", "bias"]
    for converted, original in zip(load_weights(new), load_weights(before), strict=True):
        np.testing.assert_array_equal(converted, original)
    assert (out / "notes.txt").read_text() == "kept"
    assert new.manifest.provenance["written_by"] == "hand"
    assert new.manifest.provenance["converted_from"]["format"] == "2.0"
    assert [path.name for path in out.parent.iterdir()] == ["affine"]


def test_modules_are_written_for_the_version_that_is_asked_for(old: Path, tmp_path: Path) -> None:
    """Modules are written for the requested StableHLO version, and converting back restores them."""
    convert(old, tmp_path / "a", stablehlo="1.0.0")
    back = convert(tmp_path / "a", tmp_path / "b", stablehlo=known_version(None))
    versions = {artifact_version(file.read_bytes()) for file in read_bundle(tmp_path / "a").modules.values()}
    assert versions == {"1.0.0"}
    assert {key: file.read_bytes() for key, file in back.modules.items()} == {
        key: rewritten(file.read_bytes(), known_version(None))
        for key, file in read_bundle(old).modules.items()
    }


def test_other_answers_are_not_written(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written if the converted modules' answers differ by one bit, here through a weight."""

    def changed_weights(bundle: Any) -> list[Any]:
        return [np.nextafter(array, np.float32(np.inf)) for array in load_weights(bundle)]

    monkeypatch.setattr(converting, "load_weights", changed_weights)
    with pytest.raises(BundleError, match=r"model\.b1\.mlir: output 'y': is not the same, bit by bit"):
        convert(old, tmp_path / "new", stablehlo=known_version(None))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_that_is_there_stays(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing bundle is replaced only with `--overwrite`, even if it is the source itself."""
    convert(old, tmp_path / "m", stablehlo="1.0.0")
    digest = read_bundle(tmp_path / "m").digest
    assert cli.main(["convert", str(old), "-o", str(tmp_path / "m")]) == 2
    assert "m exists; pass --overwrite to replace it" in capsys.readouterr().err
    assert read_bundle(tmp_path / "m").digest == digest
    assert cli.main(["convert", str(tmp_path / "m"), "-o", str(tmp_path / "m"), "--overwrite"]) == 0
    assert read_bundle(tmp_path / "m").digest != digest


def test_a_bundle_is_not_written_into_itself(
    old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A conversion into the bundle itself, or into a link to it, is refused."""
    (tmp_path / "link").symlink_to(old)
    before = sorted(old.rglob("*"))
    for out in (old / "inside", old / "a" / "b", tmp_path / "link" / "inside"):
        assert cli.main(["convert", str(old), "-o", str(out)]) == 2
        assert f"{out}: is inside {old}" in capsys.readouterr().err
    assert sorted(old.rglob("*")) == before


def test_a_meta_model_has_only_a_manifest_to_convert(tmp_path: Path) -> None:
    """The conversion of a meta model rewrites only its manifest."""
    calls = {"calls": ["first"], "external": ["resnet"], "restartable": True}
    document = changed(META, format_version="2.0", meta=calls, description="Two.", made_up=1)
    old = make_bundle(tmp_path, document, modules=(), hooks="def run(inputs, call): ...\n")
    new = convert(old, tmp_path / "new", stablehlo="1.0.0").manifest
    before = read_bundle(old).manifest
    for key in (
        "kind",
        "description",
        "client_inputs",
        "client_outputs",
        "meta_calls",
        "meta_external",
        "meta_restartable",
        "inputs",
    ):
        assert getattr(new, key) == getattr(before, key)


@pytest.mark.parametrize(
    ("version", "problem"),
    [("2.0", "'2.0' is not a version"), ("0.0.1", "this jaxlib writes"), ("99.0.0", "this jaxlib writes")],
)
def test_a_version_that_cannot_be_written_is_wrong_usage(
    version: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown StableHLO version is refused with the versions that can be written."""
    flags = ["--stablehlo-version", version, "-o", str(tmp_path / "new")]
    assert cli.main(["convert", str(tmp_path), *flags]) == 2
    assert problem in capsys.readouterr().err


def test_what_a_version_cannot_say_is_refused() -> None:
    """A module that the version cannot express is refused with jaxlib's reason."""
    blob = returning(Y4, takes=(X4, W))
    assert rewritten(blob, artifact_version(blob)) == blob
    with pytest.raises(ValueError, match=r"is StableHLO \S+ and cannot be written as 0\.0\.1: "):
        rewritten(blob, "0.0.1")
    with pytest.raises(ValueError, match="is not a StableHLO portable artifact"):
        rewritten(b"junk", "1.0.0")

"""The models of a repository with the native front, and the files of such a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_gen import fronts, known, plan
from rsrv_gen.cli import main
from rsrv_gen.write import front_of, newest, touch
from tests.unit.bundle.forge import COUNTER, make_bundle
from tests.unit.gen.bundles_for_tests import write_bundle


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a file in place of the built library, and return it."""
    path = tmp_path / "libtriton_rsrv.so"
    path.write_bytes(b"\x7fELF")
    monkeypatch.setattr(plan, "LIBRARY", path)
    return path


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with two plain bundles, and one with hooks."""
    for name in ("one", "two", "hooked"):
        write_bundle(tmp_path / "bundles" / name)
    (tmp_path / "bundles/hooked/model.py").write_text("def preprocess(inputs): return inputs\n")
    return tmp_path / "bundles"


def generate(bundles: Path, settings: str) -> int:
    file = bundles.parent / "settings.yaml"
    file.write_text(settings)
    return main([str(bundles), "-o", str(bundles.parent / "gen"), "--config", str(file)])


def test_models_with_the_native_front_share_one_library(bundles: Path, library: Path) -> None:
    """Each model has a link to one copy of the library, and no Python file. A second run changes nothing."""
    assert generate(bundles, "stub: {front: native}") == 0
    gen = bundles.parent / "gen"
    files = {str(path.relative_to(gen / "one")) for path in (gen / "one").rglob("*") if path.is_file()}
    assert {"config.pbtxt", library.name, "1/native"} <= files
    assert not any(name.endswith(".py") for name in files)
    config = (gen / "one/config.pbtxt").read_text()
    assert 'backend: "rsrv"' in config
    assert "dynamic_batching" not in config  # Dynamic batching would need a thread per model.
    assert (gen / "one" / library.name).samefile(gen / "two" / library.name)
    assert not (gen / "one" / library.name).samefile(library)

    assert generate(bundles, "stub: {front: native}") == 0
    assert main([str(bundles), "-o", str(gen), "--config", str(gen / "rsrv.yaml"), "--check"]) == 0


def test_a_model_that_triton_batches_has_its_guard(bundles: Path, library: Path) -> None:
    """Each batched model has a link to one copy of the library. Models with state or with the native front have no link."""
    make_bundle(bundles, COUNTER, name="counter")
    assert generate(bundles, "models: {two: {front: native}}\naliases: {either: {one: 1}}") == 0
    gen = bundles.parent / "gen"
    for name in ("one", "hooked", "either"):
        assert (gen / name / "batchstrategy.so").samefile(gen / library.name)
        assert "dynamic_batching" in (gen / name / "config.pbtxt").read_text()
    for name in ("two", "counter"):
        assert not (gen / name / "batchstrategy.so").exists()
        assert "dynamic_batching" not in (gen / name / "config.pbtxt").read_text()


def test_without_the_library_triton_batches_nothing(bundles: Path, library: Path) -> None:
    """Without the library, Triton sends each request alone. When the library exists, each model changes."""
    library.unlink()
    assert generate(bundles, "aliases: {either: {one: 1}}") == 0
    configs = [bundles.parent / "gen" / name / "config.pbtxt" for name in ("one", "hooked", "either")]
    assert not any("dynamic_batching" in config.read_text() for config in configs)

    library.write_bytes(b"\x7fELF")
    assert generate(bundles, "aliases: {either: {one: 1}}") == 0
    assert all("dynamic_batching" in config.read_text() for config in configs)


def test_a_newer_library_reaches_all_models(bundles: Path, library: Path) -> None:
    """The library of another version of rsrv replaces the copy and the models' links."""
    assert generate(bundles, "stub: {front: native}") == 0
    library.write_bytes(b"\x7fELF, and newer")
    assert generate(bundles, "stub: {front: native}") == 0
    gen = bundles.parent / "gen"
    assert (gen / "one" / library.name).read_bytes() == library.read_bytes()
    assert (gen / "one" / library.name).samefile(gen / "two" / library.name)


def test_a_model_with_hooks_gets_the_python_front(
    bundles: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with hooks gets the Python front, and its line has the reason."""
    assert generate(bundles, "stub: {front: native}") == 0
    assert "hooked (Python front: it has hooks)" in capsys.readouterr().out
    assert 'backend: "python"' in (bundles.parent / "gen/hooked/config.pbtxt").read_text()


def test_a_models_own_front_wins(bundles: Path, library: Path) -> None:
    """models.NAME.front takes precedence over stub.front."""
    assert generate(bundles, "stub: {front: native}\nmodels: {one: {front: python}}") == 0
    gen = bundles.parent / "gen"
    assert (gen / "one/1/model.py").is_file()
    assert not (gen / "two/1/model.py").exists()


def test_without_the_library_the_python_front_serves(
    bundles: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the library, models get the Python front, and their lines say how to get the library."""
    library.unlink()
    assert generate(bundles, "models: {two: {front: native}}") == 0
    assert "libtriton_rsrv.so is missing. Install" in capsys.readouterr().out
    assert (bundles.parent / "gen/two/1/model.py").is_file()


def test_a_model_with_the_native_front_can_be_loaded_again(bundles: Path, library: Path) -> None:
    """After a touch, the newest file of a model is newer than before, so that Triton loads the model again.

    The shared library keeps its time.
    """
    assert generate(bundles, "stub: {front: native}") == 0
    model = bundles.parent / "gen/one"
    before, linked = newest(model), (model / library.name).stat().st_mtime_ns
    assert touch(model) > before
    assert (model / library.name).stat().st_mtime_ns == linked


def test_a_model_with_state_gets_the_python_front(
    bundles: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with state gets the Python front, even if the settings ask for the native one, because sequences need it."""
    make_bundle(bundles, COUNTER, name="counter")
    assert generate(bundles, "stub: {front: native}") == 0
    assert "counter (Python front: it keeps state)" in capsys.readouterr().out
    assert "sequence_batching" in (bundles.parent / "gen/counter/config.pbtxt").read_text()


def test_auto_chooses_the_native_front_where_a_model_needs_no_python(
    bundles: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `auto`, a model without Python gets the native front.

    The printed lines and the models' folders state the front and the reason.
    """
    monkeypatch.setattr(plan, "load_obstacle", lambda library: "")
    monkeypatch.setattr(plan, "triton_obstacle", lambda tritonserver: "")
    assert generate(bundles, "stub: {front: auto}\nmodels: {two: {front: python}}") == 0
    lines = capsys.readouterr().out
    assert "one (native front: it needs no Python)" in lines
    assert "hooked (Python front: it has hooks)" in lines
    by_model = {name: front_of(bundles.parent / "gen" / name) for name in ("one", "two", "hooked")}
    assert by_model == {
        "one": "native front: it needs no Python",
        "two": "Python front",
        "hooked": "Python front: it has hooks",
    }
    assert (bundles.parent / "gen/one" / library.name).is_file()
    assert (bundles.parent / "gen/hooked/1/model.py").is_file()


def test_auto_chooses_the_python_front_if_the_library_does_not_load(
    bundles: Path, library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the library cannot be loaded, the Python front is chosen, and the reason is the loader's message."""
    assert generate(bundles, "stub: {front: auto}") == 0
    assert "one (Python front: the library cannot be loaded: " in capsys.readouterr().out
    assert (bundles.parent / "gen/one/1/model.py").is_file()


def test_auto_chooses_the_python_front_for_an_untested_triton(
    bundles: Path, library: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` chooses the native front for tested versions of Triton's backend API, and if there is no Triton."""
    monkeypatch.setattr(plan, "load_obstacle", lambda library: "")
    monkeypatch.setattr(fronts, "backend_api", lambda tritonserver: "1.99")
    assert generate(bundles, "stub: {front: auto}") == 0
    assert "one (Python front: Triton's backend API 1.99 is not tested" in capsys.readouterr().out
    for version in ("1.19", ""):
        monkeypatch.setattr(fronts, "backend_api", lambda tritonserver, version=version: version)
        assert fronts.triton_obstacle("tritonserver") == ""


def test_the_version_of_a_triton_that_cannot_be_asked_is_unknown(tmp_path: Path) -> None:
    """The version is unknown for a script in PATH, for a broken library, and without a tritonserver."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tritonserver").write_text("#!/bin/sh\n")
    assert fronts.backend_api(str(tmp_path / "bin/tritonserver")) == ""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libtritonserver.so").write_bytes(b"\x7fELF")
    fronts.backend_api.cache_clear()
    assert fronts.backend_api(str(tmp_path / "bin/tritonserver")) == ""
    assert fronts.backend_api(None) == ""


def test_another_front_is_a_change_of_old_bundles(
    bundles: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the front's setting changes, models are written again, although the notes of the earlier run show unchanged bundles."""
    monkeypatch.setattr(known, "SETTLED_NS", -(10**12))
    assert generate(bundles, "stub: {front: python}") == 0
    assert generate(bundles, "stub: {front: native}") == 0
    assert front_of(bundles.parent / "gen/one") == "native front"

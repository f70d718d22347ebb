"""The server's repository equals the one that rsrv-gen makes of the bundles."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rsrv.serve import repositories
from rsrv.serve.plan import ServeError
from rsrv.serve.repositories import (
    call_through_triton,
    check,
    compile_for,
    find,
    generate,
    is_empty,
    watched,
)
from rsrv.settings import load_settings
from rsrv_gen import cli as rsrv_gen
from rsrv_gen import plan
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_bundle(tmp_path / "bundles" / name)
    return tmp_path / "bundles"


def made(repository: Path, *bundles: Path) -> list[str]:
    """Make it as a starting server does, and return the models that could not be written."""
    return generate(repository, find(bundles)[0], watched(load_settings(""), bundles))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_is_what_rsrv_gen_makes(bundles: Path, tmp_path: Path) -> None:
    """A repository equals rsrv-gen's, with the settings for the control process."""
    assert made(tmp_path / "a" / "models", bundles) == []

    assert rsrv_gen.main([str(bundles), "-o", str(tmp_path / "gen")]) == 0
    assert tree(tmp_path / "a" / "models") == tree(tmp_path / "gen")


@pytest.mark.parametrize(
    ("external", "text", "calling"),
    [([], "", False), (["resnet"], "", True), ([], "meta: {transport: bls}", True)],
)
def test_calls_through_triton_are_found(bundles: Path, external: list[str], text: str, calling: bool) -> None:
    """Calls of models that are not rsrv's go through Triton, and with the transport bls all calls do."""
    settings = load_settings(text)
    assert not call_through_triton(find([bundles])[0], settings)
    write_meta(bundles / "meta", ["one"], external)
    assert call_through_triton(find([bundles])[0], settings) == calling


def test_what_the_settings_say_is_watched(bundles: Path) -> None:
    """Bundle folders of the settings are watched, as inside a container."""
    settings = load_settings("lifecycle: {bundles: [/elsewhere]}")

    assert watched(settings, [bundles]).lifecycle.bundles == [Path("/elsewhere")]
    assert watched(load_settings(""), [bundles]).lifecycle.bundles == [bundles]


def test_a_bundle_removed_while_the_server_was_down_is_not_served(bundles: Path, tmp_path: Path) -> None:
    """A bundle that was removed between two runs of the server is not served."""
    made(tmp_path / "models", bundles)
    shutil.rmtree(bundles / "one")
    made(tmp_path / "models", bundles)

    assert not (tmp_path / "models" / "one").exists()
    assert (tmp_path / "models" / "two").is_dir()


def test_a_disk_that_is_not_mounted_takes_no_models_away(bundles: Path, tmp_path: Path) -> None:
    """An empty one of two bundle folders removes no model: its disk may be missing."""
    (tmp_path / "disk").mkdir()
    write_bundle(tmp_path / "disk" / "three")
    made(tmp_path / "models", bundles, tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk" / "three")
    made(tmp_path / "models", bundles, tmp_path / "disk")

    assert (tmp_path / "models" / "three").is_dir()


def test_a_native_front_that_is_not_built_is_reported(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each of a thousand models has a process, and nothing says why."""
    monkeypatch.setattr(plan, "LIBRARY", tmp_path / "missing.so")
    sources = find([bundles])[0]
    (problem,) = generate(tmp_path / "models", sources, load_settings("stub: {front: native}"))
    assert problem.startswith("all models have the Python front, a process each: ")
    assert generate(tmp_path / "models", sources, load_settings("")) == []


def test_a_broken_bundle_is_reported_and_the_others_are_served(bundles: Path, tmp_path: Path) -> None:
    """A broken bundle is reported and its earlier version kept, and the others are served."""
    made(tmp_path / "models", bundles)
    (bundles / "one" / "manifest.yaml").write_text("format_version: '9'")

    sources, problems = find([bundles])
    assert [line.partition(":")[0] for line in problems] == ["one is not served"]
    assert generate(tmp_path / "models", sources, load_settings("")) == []
    assert (tmp_path / "models" / "one").is_dir()


def test_a_foreign_model_is_left_alone(bundles: Path, tmp_path: Path) -> None:
    """It is not overwritten, and the others are written."""
    (tmp_path / "models" / "one").mkdir(parents=True)

    (failed,) = made(tmp_path / "models", bundles)

    assert failed == f"{tmp_path}/models/one: was not made by rsrv: move it away, or rename the bundle"
    assert (tmp_path / "models" / "two").is_dir()


def test_a_folder_without_bundles_may_get_some(bundles: Path, tmp_path: Path) -> None:
    """A server starts with a folder that has no bundles yet."""
    (tmp_path / "later").mkdir()
    check([tmp_path / "missing", tmp_path / "later"], load_settings(""))
    made(tmp_path / "models", tmp_path / "missing")
    assert is_empty(tmp_path / "models")

    made(tmp_path / "models", bundles)
    assert not is_empty(tmp_path / "models")


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    """A missing folder is an error."""
    with pytest.raises(ServeError, match="missing: there is no such file or directory"):
        check([tmp_path / "missing"], load_settings(""))


def test_models_are_compiled_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler is interrupted, so is the start; models that it cannot compile are the server's."""
    asked: list[tuple[object, ...]] = []

    def compile(*words: object) -> int:
        asked.append(words)
        return 1

    monkeypatch.setattr(repositories, "run_in_runtime", compile)
    compile_for("l4", tmp_path)
    assert asked == [("rsrv.runtime.compile_for", tmp_path, "l4")]

    monkeypatch.setattr(repositories, "run_in_runtime", lambda *_: 130)
    with pytest.raises(KeyboardInterrupt):
        compile_for("l4", tmp_path)

"""The server's repository equals the repository that rsrv-gen makes of the bundles."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rsrv.serve import repositories
from rsrv.serve.plan import ServeError
from rsrv.serve.repositories import (
    call_through_triton,
    check,
    compile_for,
    complaints,
    cost_of_missing_library,
    generate,
    model_folders,
    watched,
)
from rsrv.settings import load_settings
from rsrv_gen import cli as rsrv_gen
from rsrv_gen import plan
from rsrv_gen.sources import read_sources
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        write_bundle(tmp_path / "bundles" / name)
    return tmp_path / "bundles"


def made(repository: Path, *bundles: Path) -> list[str]:
    """Make the repository as a starting server does. Return the models that could not be written."""
    return generate(repository, read_sources(bundles), watched(load_settings(""), bundles))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_is_what_rsrv_gen_makes(bundles: Path, tmp_path: Path) -> None:
    """The repository equals rsrv-gen's, including the settings for the control process."""
    assert made(tmp_path / "a" / "models", bundles) == []

    assert rsrv_gen.main([str(bundles), "-o", str(tmp_path / "gen")]) == 0
    assert tree(tmp_path / "a" / "models") == tree(tmp_path / "gen")


@pytest.mark.parametrize(
    ("external", "text", "calling"),
    [([], "", False), (["resnet"], "", True), ([], "meta: {transport: bls}", True)],
)
def test_calls_through_triton_are_found(bundles: Path, external: list[str], text: str, calling: bool) -> None:
    """Calls to models that rsrv does not serve are sent through Triton. With the transport `bls`, all calls are."""
    settings = load_settings(text)
    assert not call_through_triton(read_sources([bundles]), settings)
    write_meta(bundles / "meta", ["one"], external)
    assert call_through_triton(read_sources([bundles]), settings) == calling


def test_what_the_settings_say_is_watched(bundles: Path) -> None:
    """If the settings name folders of bundles, for example in a container, these folders are watched, not the given ones."""
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
    """If one of two folders of bundles is empty at a start, its models stay, because its disk may not be mounted."""
    (tmp_path / "disk").mkdir()
    write_bundle(tmp_path / "disk" / "three")
    made(tmp_path / "models", bundles, tmp_path / "disk")
    shutil.rmtree(tmp_path / "disk" / "three")
    made(tmp_path / "models", bundles, tmp_path / "disk")

    assert (tmp_path / "models" / "three").is_dir()


@pytest.mark.parametrize(
    ("settings", "cost"),
    [
        ("", "requests do not share executions, because "),
        (
            "stub: {front: native}",
            "all models have the Python front, which takes a process for each model, and requests do not share ",
        ),
    ],
)
def test_a_server_without_the_library_reports_the_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, cost: str
) -> None:
    """If the library of the native front is missing, a message names the cost.

    The cost is that the server is slow with many clients, or that each of a thousand models has its own process.
    """
    library = tmp_path / "library.so"
    monkeypatch.setattr(plan, "LIBRARY", library)
    text = cost_of_missing_library(load_settings(settings))
    assert text.startswith(cost)
    assert f"because {library} is missing. Install " in text
    library.touch()
    assert cost_of_missing_library(load_settings(settings)) == ""


def test_a_broken_bundle_is_reported_and_the_others_are_served(bundles: Path, tmp_path: Path) -> None:
    """A broken bundle is reported and its earlier version kept, and the others are served."""
    made(tmp_path / "models", bundles)
    (bundles / "one" / "manifest.yaml").write_text("format_version: '9'")

    sources = read_sources([bundles])
    assert [line.partition(":")[0] for line in complaints(sources)] == ["one is not served"]
    assert made(tmp_path / "models", bundles) == []
    assert (tmp_path / "models" / "one").is_dir()
    os.utime(tmp_path / "models" / "one" / "config.pbtxt", (0, 0))
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(0))
    (line,) = complaints(sources, tmp_path / "models")
    assert line.startswith(f"one serves its earlier version of {day}, because its bundle cannot be served: ")


@pytest.mark.parametrize("other", ["broken", "empty"])
def test_models_of_a_folder_that_is_no_longer_given_are_not_served(
    bundles: Path, tmp_path: Path, other: str
) -> None:
    """Models of a folder that is not given at the next start are not served.

    This also holds if the new folder is empty, or has a broken bundle with the name of such a model.
    """
    made(tmp_path / "models", bundles)
    (tmp_path / other).mkdir()
    if other == "broken":
        write_bundle(tmp_path / other / "one")
        (tmp_path / other / "one" / "manifest.yaml").write_text("format_version: '9'")

    assert made(tmp_path / "models", tmp_path / other) == []

    assert not model_folders(tmp_path / "models")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return another folder of bundles."""
    write_bundle(tmp_path / "other" / "three")
    return tmp_path / "other"


def break_one(bundles: Path) -> None:
    (bundles / "one" / "manifest.yaml").write_text("format_version: '9'")


def unmount(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize("change", [break_one, unmount])
def test_a_folder_keeps_its_models_when_another_is_no_longer_given(
    change: Callable[[Path], None], bundles: Path, other: Path, tmp_path: Path
) -> None:
    """If the second folder is not given again, its models are removed.

    The first folder keeps its models, even if its bundles broke or its disk is unmounted.
    """
    made(tmp_path / "models", bundles, other)
    change(bundles)
    made(tmp_path / "models", bundles)
    assert model_folders(tmp_path / "models") == {"one", "two"}


@pytest.mark.parametrize("spelling", ["link", "bundles/../link", "bundles"])
@pytest.mark.parametrize("back", [False, True])
def test_another_spelling_of_the_same_folder_keeps_its_models(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, back: bool
) -> None:
    """A folder keeps its models if one start names it directly and another start by a link or a relative path."""
    (tmp_path / "link").symlink_to(bundles)
    monkeypatch.chdir(tmp_path)
    before, now = (Path(spelling), bundles) if back else (bundles, Path(spelling))
    made(tmp_path / "models", before)
    break_one(bundles)
    made(tmp_path / "models", now)
    assert model_folders(tmp_path / "models") == {"one", "two"}


def test_a_folder_whose_link_leads_nowhere_keeps_its_models(bundles: Path, tmp_path: Path) -> None:
    """A folder that is given by a link keeps its models even if the link now leads elsewhere, as when a disk is not mounted.

    The path is also compared as the user wrote it.
    """
    (tmp_path / "link").symlink_to(bundles)
    made(tmp_path / "models", tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    made(tmp_path / "models", tmp_path / "link")
    assert model_folders(tmp_path / "models") == {"one", "two"}


@pytest.mark.parametrize("back", [False, True])
def test_a_bundle_that_is_a_link_to_elsewhere_is_in_its_folder(
    bundles: Path, tmp_path: Path, back: bool
) -> None:
    """A bundle that is a link belongs to the folder with the link, even if this folder is given through a link."""
    (bundles / "one").rename(tmp_path / "stored")
    (bundles / "one").symlink_to(tmp_path / "stored")
    (tmp_path / "link").symlink_to(bundles)
    before, now = (tmp_path / "link", bundles) if back else (bundles, tmp_path / "link")
    made(tmp_path / "models", before)
    break_one(bundles)
    made(tmp_path / "models", now)
    assert model_folders(tmp_path / "models") == {"one", "two"}


@pytest.mark.parametrize("back", [False, True])
def test_bundles_given_instead_of_their_folder_keep_their_models(
    bundles: Path, tmp_path: Path, back: bool
) -> None:
    """A bundle keeps its model whether the bundle itself or the folder with the bundle is given."""
    commands = [[bundles], [bundles / "one", bundles / "two"]]
    before, now = reversed(commands) if back else commands
    made(tmp_path / "models", *before)
    break_one(bundles)
    made(tmp_path / "models", *now)
    assert model_folders(tmp_path / "models") == {"one", "two"}


def test_a_model_without_notes_stays(bundles: Path, other: Path, tmp_path: Path) -> None:
    """If the notes about the sources of models are missing, all models stay, because a model may be from the given folder."""
    made(tmp_path / "models", bundles)
    (tmp_path / ".models-known.json").unlink()
    unmount(other)
    made(tmp_path / "models", other)
    assert model_folders(tmp_path / "models") == {"one", "two"}


def test_a_broken_bundle_is_still_known_after_several_starts(bundles: Path, tmp_path: Path) -> None:
    """After several starts with a broken bundle, the bundle's folder is still known.

    When a start names only another folder, the earlier version of the broken bundle is not served any more.
    """
    made(tmp_path / "models", bundles)
    break_one(bundles)
    for _ in range(2):
        made(tmp_path / "models", bundles)
    assert model_folders(tmp_path / "models") == {"one", "two"}
    (tmp_path / "empty").mkdir()
    made(tmp_path / "models", tmp_path / "empty")
    assert not model_folders(tmp_path / "models")


def test_a_folder_that_is_given_but_not_watched_keeps_its_models(bundles: Path, tmp_path: Path) -> None:
    """A given folder keeps its models even if the settings name only other folders to watch."""
    settings = load_settings("lifecycle: {bundles: [/elsewhere]}")
    generate(tmp_path / "models", read_sources([bundles]), settings)
    break_one(bundles)
    generate(tmp_path / "models", read_sources([bundles]), settings)
    assert model_folders(tmp_path / "models") == {"one", "two"}


def test_an_alias_of_a_model_that_is_no_longer_given_is_not_served(bundles: Path, tmp_path: Path) -> None:
    """If the bundle of a model is not given again, an alias of this model is not served. The alias would contain the bundle."""
    aliases = load_settings("aliases: {champion: one}")
    generate(tmp_path / "models", read_sources([bundles]), watched(aliases, [bundles]))
    assert model_folders(tmp_path / "models") == {"one", "two", "champion"}
    write_bundle(tmp_path / "other" / "three")

    sources = read_sources([tmp_path / "other"])
    (refused,) = generate(tmp_path / "models", sources, watched(aliases, [tmp_path / "other"]))

    assert "champion: an alias of 'one', which is not a bundle here" in refused
    assert model_folders(tmp_path / "models") == {"three"}


def test_a_further_folder_takes_no_model_of_the_others_away(bundles: Path, tmp_path: Path) -> None:
    """A folder that is missing, because its disk is not mounted, keeps its models if it is given together with a new folder."""
    made(tmp_path / "models", bundles)
    bundles.rename(tmp_path / "away")
    write_bundle(tmp_path / "more" / "three")

    made(tmp_path / "models", bundles, tmp_path / "more")

    assert model_folders(tmp_path / "models") == {"one", "two", "three"}


def test_a_foreign_model_is_left_alone(bundles: Path, tmp_path: Path) -> None:
    """A model folder that rsrv has not made is not overwritten. The other models are written."""
    (tmp_path / "models" / "one").mkdir(parents=True)

    (failed,) = made(tmp_path / "models", bundles)

    assert failed == f"{tmp_path}/models/one: was not made by rsrv: move it away, or rename the bundle"
    assert (tmp_path / "models" / "two").is_dir()


def test_a_folder_without_bundles_may_get_some(bundles: Path, tmp_path: Path) -> None:
    """A server starts with a folder without bundles, because the folder may get bundles later."""
    (tmp_path / "later").mkdir()
    check([tmp_path / "missing", tmp_path / "later"], load_settings(""))
    made(tmp_path / "models", tmp_path / "missing")
    assert not model_folders(tmp_path / "models")

    made(tmp_path / "models", bundles)
    assert model_folders(tmp_path / "models")


def test_a_folder_that_is_not_there_is_a_mistake(tmp_path: Path) -> None:
    """A missing folder is an error."""
    with pytest.raises(ServeError, match="missing: there is no such file or directory"):
        check([tmp_path / "missing"], load_settings(""))


def test_models_are_compiled_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start compiles all models for a card. A model that cannot be compiled does not stop the start, but Ctrl-C does."""
    calls: list[tuple[object, ...]] = []

    def compile(*words: object) -> int:
        calls.append(words)
        return 1

    monkeypatch.setattr(repositories, "run_in_runtime", compile)
    compile_for("l4", tmp_path)
    assert calls == [("rsrv.runtime.compile_for", tmp_path, "l4")]

    monkeypatch.setattr(repositories, "run_in_runtime", lambda *_: 130)
    with pytest.raises(KeyboardInterrupt):
        compile_for("l4", tmp_path)

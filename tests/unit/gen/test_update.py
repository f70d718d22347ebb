"""rsrv-gen in a running server: updates of chosen models, undo, and the places of bundles."""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rsrv.settings import load_settings
from rsrv_gen import staging
from rsrv_gen.cli import main
from rsrv_gen.signatures import LINK_BYTES
from rsrv_gen.sources import read_sources
from rsrv_gen.staging import Replaced, unfinished, version_of
from rsrv_gen.update import (
    Broken,
    Failed,
    Gone,
    Later,
    RepositorySettings,
    RepositoryUpdate,
    Unchanged,
    Update,
    UpdatePolicy,
    Written,
    remove,
)
from rsrv_gen.write import is_ours, newest, open_repository, our_models, touch
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with the bundles `one` and `two`."""
    for name in ("one", "two"):
        write_bundle(tmp_path / "bundles" / name, "v1")
    return tmp_path / "bundles"


@pytest.fixture
def gen(bundles: Path, tmp_path: Path) -> Path:
    """Return the repository of these bundles."""
    assert run(bundles, "-o", tmp_path / "gen") == 0
    return tmp_path / "gen"


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


class Policy(UpdatePolicy):
    """A policy with test values for what may be read, reserved, kept and written."""

    def __init__(
        self,
        *,
        ready: Callable[[str], bool] = lambda _: True,
        take: Callable[[str], bool] = lambda _: True,
        stays: str = "",
        write: bool = True,
    ) -> None:
        self._ready, self._take, self._stays, self.may_write = ready, take, stays, write

    def reason_to_keep(self, name: str) -> str:
        return self._stays

    def is_readable(self, name: str) -> bool:
        return self._ready(name)

    def reserve(self, name: str) -> bool:
        return self._take(name)


def bring(gen: Path, bundles: Path, *names: str, **options: Any) -> Update:
    """Update the models with these names, or all models."""
    policy = Policy(**options)
    return RepositoryUpdate(gen, [bundles], RepositorySettings(), policy).write(names or None)


def text(gen: Path, name: str) -> str:
    return (gen / name / "1/bundle/model.b1.mlir").read_text()


def left_aside(gen: Path) -> list[str]:
    return [path.name for path in gen.parent.iterdir() if path.name.startswith(f".{gen.name}.")]


# --- selected models
# ------------------------------------------------------------------------------------------------


def test_only_the_chosen_models_are_updated(gen: Path, bundles: Path) -> None:
    """Only chosen models are updated. Removed models are listed, but not removed."""
    for name in ("one", "two", "three"):
        write_bundle(bundles / name, "v2")
    done = bring(gen, bundles, "one", "three")
    assert done.names(Written) == {"one", "three"}
    assert (text(gen, "one"), text(gen, "two"), text(gen, "three")) == ("v2 1", "v1 1", "v2 1")
    shutil.rmtree(bundles / "two")
    shutil.rmtree(bundles / "one")
    done = bring(gen, bundles, "two", "three")
    assert (done.names(Written), done.names(Unchanged), done.of(Gone)) == (set(), {"three"}, {"two": Gone()})
    assert is_ours(gen / "two")
    remove(gen, "two", "hard")
    assert our_models(gen) == {"one", "three"}


def test_metas_come_with_what_they_carry(gen: Path, bundles: Path) -> None:
    """If a callee changes, is removed or returns, its meta models are updated. The callee's own directory follows its new state."""
    write_meta(bundles / "meta", ["one"])
    write_bundle(bundles / "one", "v1", internal=True)
    done = bring(gen, bundles, "meta")
    assert (done.names(Written), done.of(Gone)) == ({"meta"}, {"one": Gone(("meta",))})
    remove(gen, "one", "hard")
    write_bundle(bundles / "one", "v2", internal=True)
    assert bring(gen, bundles, "one").names(Written) == {"meta"}
    (bundles / "one").rename(bundles / "elsewhere")
    done = bring(gen, bundles, "one", "elsewhere")
    assert "calls 'one', which is not a bundle here" in done.of(Broken)["meta"].reason
    assert done.names(Written) == set()
    (bundles / "elsewhere").rename(bundles / "one")
    assert bring(gen, bundles, "one").names(Unchanged) == {"meta"}
    shutil.rmtree(bundles / "meta")
    write_bundle(bundles / "one", "v2")
    done = bring(gen, bundles, "one", "meta")
    assert (done.names(Written), done.of(Gone)) == ({"one"}, {"meta": Gone()})


def test_a_bundle_that_is_being_written_is_left_for_later(gen: Path, bundles: Path) -> None:
    """A bundle that is being written is postponed with its meta models, even if only the second check notices this."""
    write_bundle(bundles / "one", "v2")
    write_meta(bundles / "meta", ["one"])
    done = bring(gen, bundles, ready=lambda name: name != "one")
    assert (done.names(Written), done.names(Later)) == (set(), {"meta", "one"})
    answers = iter([True, False])
    done = bring(gen, bundles, "two", ready=lambda name: next(answers))
    assert (done.names(Unchanged), done.of(Written)) == ({"two"}, {})
    write_bundle(bundles / "two", "v2")
    answers = iter([True, False])
    done = bring(gen, bundles, "two", ready=lambda name: next(answers))
    assert (done.names(Later), done.of(Written)) == ({"two"}, {})
    assert text(gen, "two") == "v1 1"
    assert not left_aside(gen)
    (bundles / "two" / "manifest.yaml").write_text("half")
    done = bring(gen, bundles, "two", ready=lambda name: False)
    assert (done.names(Later), done.of(Broken)) == ({"two"}, {})


def test_a_model_that_is_reserved_is_left_for_later(gen: Path, bundles: Path) -> None:
    """A changed model that another operation has reserved is postponed. An unchanged model needs no reservation."""
    write_bundle(bundles / "one", "v2")
    names: list[str] = []

    def refuse(name: str) -> bool:
        names.append(name)
        return False

    done = bring(gen, bundles, take=refuse)
    assert (names, done.names(Later), done.names(Unchanged), done.of(Written)) == (
        ["one"],
        {"one"},
        {"two"},
        {},
    )
    assert text(gen, "one") == "v1 1"


def test_what_cannot_be_written_is_said(gen: Path, bundles: Path) -> None:
    """If a directory is foreign, or the repository may not be written, the update reports the reason."""
    write_bundle(bundles / "taken")
    (gen / "taken").mkdir()
    write_bundle(bundles / "one", "v2")
    done = bring(gen, bundles, write=False)
    assert "was not made by rsrv-gen" in done.of(Broken)["taken"].reason
    assert done.of(Failed) == {"one": Failed("its bundle is changed, but the repository is not updated")}
    assert text(gen, "one") == "v1 1"


def test_a_large_file_that_was_rewritten_in_place_is_a_change(gen: Path, bundles: Path) -> None:
    """A hard-linked file that is rewritten in place is noticed as changed by its modification time."""
    large = bundles / "one" / "labels.txt"
    large.write_bytes(bytes(LINK_BYTES))
    assert bring(gen, bundles).names(Written) == {"one"}
    assert (gen / "one/1/bundle/labels.txt").samefile(large)
    assert bring(gen, bundles).names(Unchanged) == {"one", "two"}
    large.write_bytes(bytes(LINK_BYTES - 1) + b"x")
    after = (gen / "one/config.pbtxt").stat().st_mtime_ns + 1
    os.utime(large, ns=(after, after))
    assert bring(gen, bundles).names(Written) == {"one"}
    # After the file is linked again, the model is unchanged, whatever the file's time is.
    os.utime(large, ns=(2**62, 2**62))
    assert bring(gen, bundles).names(Written) == {"one"}
    assert bring(gen, bundles).names(Unchanged) == {"one", "two"}


def test_a_file_that_cannot_be_read_fails_its_own_model_only(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a file cannot be read, only its own model fails."""
    for name in ("one", "two"):
        write_bundle(bundles / name, "v2", files={"labels.txt": "a"})
    assert bring(gen, bundles).names(Written) == {"one", "two"}
    write_bundle(bundles / "two", "v3")

    def refusing(function: Callable[..., object]) -> Callable[..., object]:
        def refuse(source: Path, *rest: object, **options: object) -> object:
            if source == bundles / "one" / "labels.txt":
                raise PermissionError(13, "Permission denied")
            return function(source, *rest, **options)

        return refuse

    monkeypatch.setattr(filecmp, "cmp", refusing(filecmp.cmp))
    monkeypatch.setattr(shutil, "copy2", refusing(shutil.copy2))
    done = bring(gen, bundles)
    assert done.names(Written) == {"two"}
    assert "Permission denied" in done.of(Failed)["one"].reason


def test_a_file_that_changes_under_its_size_and_time_is_a_change(gen: Path, bundles: Path) -> None:
    """A process that compares twice notices a change of a file, even if its size and modification time stay."""
    labels = write_bundle(bundles / "one", "v1", files={"labels.txt": "a"}) / "labels.txt"
    assert bring(gen, bundles).names(Written) == {"one"}
    assert bring(gen, bundles).names(Unchanged) == {"one", "two"}
    age = labels.stat()
    labels.write_text("b")
    os.utime(labels, ns=(age.st_atime_ns, age.st_mtime_ns))
    assert bring(gen, bundles).names(Written) == {"one"}


# --- undo
# -----------------------------------------------------------------------------------------------------------


def test_what_was_put_can_be_undone_or_kept(gen: Path, bundles: Path) -> None:
    """An undo restores the directory, or its absence. A keep makes the new version final. No directory is left beside the repository."""
    before = {name: version_of(gen / name) for name in ("one", "two", "three")}
    for name in ("one", "two", "three"):
        write_bundle(bundles / name, "v2")
    done = bring(gen, bundles)
    assert len(left_aside(gen)) == 3
    assert done.of(Written)["one"].replaced.undo()
    assert done.of(Written)["three"].replaced.undo()
    done.of(Written)["two"].replaced.forget()
    assert version_of(gen / "one") == before["one"]
    assert text(gen, "one") == "v1 1"
    assert not (gen / "three").exists()
    assert text(gen, "two") == "v2 1"
    assert version_of(gen / "two") != before["two"]
    assert not left_aside(gen)


def test_the_old_version_outlives_an_undo_that_fails(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an undo that fails, the old version still exists. The next undo restores it."""
    write_bundle(bundles / "one", "v2")
    put = bring(gen, bundles).of(Written)["one"].replaced

    def refuse(first: Path, second: Path) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "exchange", refuse)
        with pytest.raises(OSError, match="no"):
            put.undo()
    assert put.undo()
    assert text(gen, "one") == "v1 1"
    assert not left_aside(gen)


def test_a_version_that_another_run_replaced_is_not_undone(gen: Path, bundles: Path) -> None:
    """If another run has replaced a version, the version cannot be undone, and the version before it is forgotten."""
    write_bundle(bundles / "one", "v2")
    put = bring(gen, bundles).of(Written)["one"].replaced
    write_bundle(bundles / "one", "v3")
    assert run(bundles, "-o", gen) == 0
    assert not put.undo()
    assert text(gen, "one") == "v3 1"
    assert not left_aside(gen)


def test_another_run_leaves_alone_what_may_be_wanted_back(gen: Path, bundles: Path) -> None:
    """A run removes old versions that a crashed process left. It does not remove those that a living process keeps."""
    write_bundle(bundles / "one", "v2")
    put = bring(gen, bundles).of(Written)["one"].replaced
    (gen.parent / ".gen.rsrv-gen-crashed" / "one").mkdir(parents=True)
    assert run(bundles, "-o", gen) == 0
    assert len(left_aside(gen)) == 1
    assert put.undo()
    assert text(gen, "one") == "v1 1"


def crash(*puts: Replaced) -> None:
    """Release the locks of these versions, as if their process had ended."""
    for put in puts:
        put.leave()


def test_what_a_crash_left_undecided_is_found_and_can_be_ended(gen: Path, bundles: Path) -> None:
    """After a crash, the undecided versions are found, even after a manual run or other updates."""
    for name in ("one", "two", "three"):
        write_bundle(bundles / name, "v2")
    crash(*(entry.replaced for entry in bring(gen, bundles).of(Written).values()))
    write_bundle(bundles / "four")
    assert run(bundles, "-o", gen) == 0
    puts = unfinished(gen)
    assert set(puts) == {"one", "two", "three"}
    assert not unfinished(gen), "they are somebody's now"
    assert puts["one"].undo()
    puts["two"].forget()
    assert puts["three"].undo()
    assert (text(gen, "one"), text(gen, "two")) == ("v1 1", "v2 1")
    assert our_models(gen) == {"one", "two", "four"}
    assert not left_aside(gen)


def test_what_somebody_else_replaced_after_a_crash_has_no_way_back(gen: Path, bundles: Path) -> None:
    """If somebody replaces a version after a crash, it cannot be undone."""
    write_bundle(bundles / "one", "v2")
    crash(bring(gen, bundles).of(Written)["one"].replaced)
    write_bundle(bundles / "one", "v3")
    assert run(bundles, "-o", gen) == 0
    assert not unfinished(gen)
    assert not left_aside(gen)


def test_half_of_what_was_forgotten_is_no_version_to_go_back_to(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process ends while it removes an old version, this version is not restored."""
    write_bundle(bundles / "one", "v2")
    put = bring(gen, bundles).of(Written)["one"].replaced
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        put.forget()
    assert not unfinished(gen)
    assert text(gen, "one") == "v2 1"
    assert not left_aside(gen)


def test_the_way_back_is_given_up_aloud_where_it_would_stop_a_server(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If old versions are inside the repository, because it is a mount point, a run removes them and reports this.

    Otherwise, no server would start.
    """
    monkeypatch.setattr(staging, "place_beside", lambda repository: repository)
    write_bundle(bundles / "one", "v2")
    crash(bring(gen, bundles).of(Written)["one"].replaced)
    capsys.readouterr()
    assert run(bundles, "-o", gen) == 0
    assert "one: a server ended while it loaded this version" in capsys.readouterr().err
    assert sorted(path.name for path in gen.iterdir()) == ["one", "rsrv.yaml", "two"]


@pytest.mark.parametrize("renames", [1, 2])
def test_a_crash_between_the_renames_of_a_put_leaves_its_way_back(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Without atomic exchange, a crash before or after the second rename leaves a state that can be restored."""

    class Crash(BaseException):
        pass

    done: list[Path] = []
    rename = Path.rename

    def some(path: Path, target: Path) -> Path:
        if path.name in ("one", ".one") and len(done) == renames:
            raise Crash
        done.append(path)
        return rename(path, target)

    write_bundle(bundles / "one", "v2")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_rename_exchange", lambda *_: False)
        patch.setattr(Path, "rename", some)
        patch.setattr(staging.SwapFolder, "remove", staging.SwapFolder.leave)
        with pytest.raises(Crash):
            bring(gen, bundles, "one")
    puts = unfinished(gen)
    assert text(gen, "one") == f"v{renames} 1"
    assert set(puts) == ({"one"} if renames == 2 else set())
    assert all(put.undo() for put in puts.values())
    assert text(gen, "one") == "v1 1"
    assert not left_aside(gen)


def test_a_crash_between_two_renames_is_put_right(gen: Path, bundles: Path) -> None:
    """Without atomic exchange, a crash between two renames may remove a model. The next run restores it."""
    crashed = gen.parent / ".gen.rsrv-gen-crashed"
    crashed.mkdir()
    shutil.copytree(gen / "one", crashed / "one")
    (gen / "one").rename(crashed / ".one")
    with open_repository(gen, "hard"):
        pass
    assert is_ours(gen / "one")
    assert not left_aside(gen)


def test_each_version_is_younger_than_the_one_before(gen: Path, bundles: Path) -> None:
    """For any clock and any file times, each version is newer than the previous one, so that Triton loads it."""
    future = 2**61
    os.utime(gen / "one/1/bundle/manifest.yaml", ns=(future, future))
    write_bundle(bundles / "one", "v2")
    assert bring(gen, bundles).names(Written) == {"one"}
    put = newest(gen / "one")
    assert put > future
    before = version_of(gen / "one")
    stamp = touch(gen / "one")
    assert stamp == newest(gen / "one") > put
    assert version_of(gen / "one") == before
    assert touch(gen / "one", later_than=2 * future) > 2 * future
    assert bring(gen, bundles).names(Unchanged) == {"one", "two"}


# --- sources of bundles
# ---------------------------------------------------------------------------------------------


def recorded(gen: Path) -> tuple[list[Path], str]:
    lifecycle = load_settings((gen / "rsrv.yaml").read_text()).lifecycle
    return lifecycle.bundles, lifecycle.link


def test_the_settings_say_where_the_bundles_are(
    gen: Path, bundles: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The settings have the absolute places of bundles of all runs, until a run with --prune. Invalid places are left out."""
    assert recorded(gen) == ([bundles], "hard")
    monkeypatch.chdir(bundles)
    assert run("one", "-o", gen) == 0
    assert recorded(gen) == ([bundles], "hard")
    write_bundle(tmp_path / "more" / "three")
    assert run("../more/three", "../mroe", "-o", gen, "--link", "copy") == 1
    assert recorded(gen) == ([bundles, tmp_path / "more" / "three"], "copy")
    assert run("../more", "-o", gen) == 0
    assert recorded(gen) == ([bundles, tmp_path / "more"], "hard")
    assert run("../more", "-o", gen, "--prune") == 0
    assert recorded(gen) == ([tmp_path / "more"], "hard")
    assert our_models(gen) == {"three"}


def test_where_the_bundles_are_is_no_difference_to_a_check(gen: Path, bundles: Path, tmp_path: Path) -> None:
    """For --check, other places of the same bundles are no difference. Other settings are."""
    shutil.copytree(bundles, tmp_path / "copy")
    assert run(tmp_path / "copy", "-o", gen, "--check", "--link", "copy") == 0
    config = tmp_path / "settings.yaml"
    config.write_text("lifecycle: {poll_s: 7}\n")
    assert run(bundles, "-o", gen, "--check", "--config", config) == 1


def test_settings_may_say_it_themselves(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The user's settings may name the places of bundles, as for a container. Inputs outside of these places are reported."""
    config = tmp_path / "settings.yaml"
    config.write_text("lifecycle: {bundles: [/models], link: copy}\n")
    assert run(bundles, "-o", tmp_path / "gen", "--config", config) == 0
    assert recorded(tmp_path / "gen") == ([Path("/models")], "copy")
    assert f"{bundles} will not be watched" in capsys.readouterr().err


def test_unreadable_settings_of_a_repository_are_written_anew(gen: Path, bundles: Path) -> None:
    """If the settings of a repository are unreadable, they are written again."""
    for nonsense in (b"lifecycle: 7\n", b"- a\n", b"lifecycle: {bundles: 7}\n", b"{", b"\xff\xfe\x00"):
        (gen / "rsrv.yaml").write_bytes(nonsense)
        assert run(bundles, "-o", gen, "--check") == 1
        assert run(bundles, "-o", gen) == 0
        assert recorded(gen) == ([bundles], "hard")


def test_sources_that_hold_nothing_are_named(gen: Path, bundles: Path, tmp_path: Path) -> None:
    """A place without bundles is named, and the update continues."""
    done = RepositoryUpdate(
        gen, [bundles, tmp_path / "missing"], RepositorySettings(), Policy(stays="kept")
    ).write(None)
    assert len(done.unusable) == len(read_sources([tmp_path / "missing"]).unusable) == 1
    assert done.names(Unchanged) == {"one", "two"}

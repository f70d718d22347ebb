"""Many bundles: a later run reads only the bundles that changed, even if the notes of the earlier run are damaged or gone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rsrv_bundle import read_bundle as read_whole
from rsrv_gen import known, plan, run, sources, update
from rsrv_gen.cli import main
from rsrv_gen.write import is_current, our_models
from tests.unit.bundle.forge import safetensors_bytes, seal
from tests.unit.gen.bundles_for_tests import MANIFEST, write_bundle, write_meta, write_unsummed

NAMES = [f"m{number:02d}" for number in range(20)]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat files as unchanged for a long time, although the tests have just written them."""
    monkeypatch.setattr(known, "SETTLED_NS", -(10**12))


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a folder of bundles, one of which is a meta model."""
    for name in NAMES:
        write_bundle(tmp_path / "bundles" / name, "v1")
    write_meta(tmp_path / "bundles" / "meta", ["m00"])
    return tmp_path / "bundles"


class Runs:
    """Runs of the generator, with the bundles that each run read."""

    def __init__(
        self, bundles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.bundles, self.gen = bundles, bundles.parent / "gen"
        self.notes = bundles.parent / ".gen-known.json"
        self.complaints = ""
        self._capsys = capsys
        self._read: set[str] = set()

        def read_bundle(path: Path, **options: Any) -> object:
            self._read.add(path.name)
            return read_whole(path, **options)

        for module in (sources, plan):
            monkeypatch.setattr(module, "read_bundle", read_bundle)

    def run(self, *options: str, status: int = 0) -> tuple[dict[str, str], set[str]]:
        """Generate. Return the verb of each model that is not unchanged, and the bundles that were read."""
        self._read.clear()
        assert main([*options, str(self.bundles), "-o", str(self.gen)]) == status
        captured = self._capsys.readouterr()
        self.complaints = captured.err
        verbs = {line.split()[1]: line.split()[0] for line in captured.out.splitlines()}
        return {name: verb for name, verb in verbs.items() if verb != "unchanged"}, set(self._read)

    def lead_to(self, version: str) -> None:
        """Replace the bundle `linked` by a link to a folder outside of the folder of bundles."""
        new = self.bundles.with_name("new")
        new.symlink_to(self.bundles.with_name(version))
        new.replace(self.bundles / "linked")


@pytest.fixture
def runs(bundles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runs:
    """Return the runs, after the first run has written all models."""
    runs = Runs(bundles, monkeypatch, capsys)
    assert set(runs.run()[0].values()) == {"new"}
    return runs


def test_unchanged_bundles_are_not_read_again(runs: Runs) -> None:
    """If no bundle changed, a run reads no bundle. After one change, it reads the changed bundle and its meta model."""
    assert runs.run() == ({}, set())
    write_bundle(runs.bundles / "m07", "v2")
    assert runs.run() == ({"m07": "changed"}, {"m07"})
    write_bundle(runs.bundles / "m00", "v2")
    assert runs.run() == ({"m00": "changed", "meta": "changed"}, {"m00", "meta"})
    assert (runs.gen / "meta/1/calls/m00/model.b1.mlir").read_text() == "v2 1"
    assert runs.run() == ({}, set())


def test_a_change_without_a_new_size_or_time_is_seen(runs: Runs) -> None:
    """A file that is rewritten with the same size and modification time is noticed as changed, because its ctime is new."""
    file = write_unsummed(runs.bundles / "m03", "v1") / "model.b1.mlir"
    runs.run()
    status = file.stat()
    file.write_text("v9 1")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert runs.run() == ({"m03": "changed"}, {"m03"})


def test_bundles_that_changed_a_moment_ago_are_read_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For bundles that changed in the last seconds, the notes have only the place, so the next run reads them again."""
    runs.notes.unlink()
    monkeypatch.setattr(known, "SETTLED_NS", 10**12)
    for _ in range(2):
        assert runs.run() == ({}, {*NAMES, "meta"})
    noted = json.loads(runs.notes.read_text())
    assert (noted["bundles"], noted["models"]) == ({}, {})
    assert noted["places"] == {name: str(runs.bundles / name) for name in (*NAMES, "meta")}


def test_the_places_are_known_to_another_version_and_until_the_model_goes(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a bundle is broken, its place stays in the notes while the model exists.

    This holds even if another version of the program wrote the notes.
    """
    place = str(runs.bundles / "m03")
    (runs.bundles / "m03" / "manifest.yaml").write_text("format_version: '9'")
    monkeypatch.setattr(known, "_program", lambda: "another version")
    runs.run(status=1)
    assert known.Known(runs.gen).place("m03") == place
    shutil.rmtree(runs.bundles / "m03")
    runs.run("--prune")
    assert known.Known(runs.gen).place("m03") is None


@pytest.mark.parametrize(
    "garbage",
    [b"", b"\xff\x00garbage", b"[1, 2]", b'{"bundles": {"x": [0, "y", {"meta": 1}]}}', b"{" * 10**5],
)
def test_damaged_notes_cost_time_and_nothing_else(runs: Runs, garbage: bytes) -> None:
    """Damaged notes are ignored without a message, and the next run writes new ones."""
    runs.notes.write_bytes(garbage)
    assert runs.run() == ({}, {*NAMES, "meta"})
    assert runs.run() == ({}, set())


def test_notes_that_cannot_be_written_fail_no_run(runs: Runs) -> None:
    """If a folder is in the place of the notes, no run fails, but later runs take longer."""
    runs.notes.unlink()
    runs.notes.mkdir()
    for _ in range(2):
        assert runs.run() == ({}, {*NAMES, "meta"})


def test_notes_that_are_no_file_of_ours_are_not_read(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes of another user, a link to notes, and a pipe are ignored. The next run replaces them."""
    aside = runs.notes.with_name("aside")
    shutil.copy(runs.notes, aside)
    runs.notes.unlink()
    runs.notes.symlink_to(aside)
    assert runs.run() == ({}, {*NAMES, "meta"})
    assert not runs.notes.is_symlink()
    runs.notes.unlink()
    os.mkfifo(runs.notes)
    assert runs.run() == ({}, {*NAMES, "meta"})
    with monkeypatch.context() as patch:
        status = os.fstat
        patch.setattr(os, "fstat", lambda handle: _foreign(status(handle)))
        assert runs.run() == ({}, {*NAMES, "meta"})
    assert runs.run() == ({}, set())


def _foreign(status: os.stat_result) -> os.stat_result:
    return os.stat_result((*status[:4], 12345, *status[5:]))


def test_notes_are_written_through_no_link(runs: Runs) -> None:
    """A run writes its notes under a temporary name first.

    If a link has this name, the run does not write to the link's target.
    """
    precious = runs.notes.with_name("precious")
    precious.write_text("precious")
    runs.notes.unlink()
    runs.notes.with_name(f"{runs.notes.name}.{os.getpid()}").symlink_to(precious)
    runs.run()
    assert precious.read_text() == "precious"
    assert runs.notes.is_file()


def test_a_bundle_with_the_name_of_a_file_of_the_repository_is_refused(runs: Runs) -> None:
    """The repository also has files beside the models, such as the settings. A bundle with such a name fails alone."""
    for name in ("libtriton_rsrv.so", "rsrv.yaml"):
        write_bundle(runs.bundles / name, "v1")
        assert runs.run(status=1) == ({}, set())
        assert f"{name} is the name of a file of the repository" in runs.complaints
        shutil.rmtree(runs.bundles / name)


def test_a_model_that_was_edited_by_hand_is_written_again(runs: Runs) -> None:
    """A model's directory that somebody has edited is written again, although no bundle changed."""
    (runs.gen / "m05/1/bundle/model.b1.mlir").write_text("by hand")
    shutil.rmtree(runs.gen / "m06")
    assert runs.run() == ({"m05": "changed", "m06": "new"}, {"m05", "m06"})


def test_other_settings_make_other_models(runs: Runs, tmp_path: Path) -> None:
    """If a setting changes that affects a model's directory, the model is written again."""
    (tmp_path / "config.yaml").write_text("models: {m04: {max_rows: 4}}")
    verbs, read = runs.run("--config", str(tmp_path / "config.yaml"))
    assert verbs["m04"] == "changed"
    assert read == {"m04"}


def test_another_size_of_shared_memory_makes_other_models(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a container restarts with a smaller /dev/shm, the limits on rows are computed again."""
    monkeypatch.setattr(plan, "request_room", lambda: 64)
    verbs, read = runs.run()
    assert (verbs["m04"], read) == ("changed", {*NAMES, "meta"})


def test_three_broken_bundles_among_many_are_named_and_the_others_served(runs: Runs) -> None:
    """Each run names each broken bundle, whose old version stays. The other bundles are written."""
    for name in ("m01", "m11", "m12"):
        (runs.bundles / name / "manifest.yaml").write_text("format_version: '9'")
    write_bundle(runs.bundles / "m13", "v2")
    for changed in ({"m13": "changed"}, {}):
        verbs, _ = runs.run(status=1)
        assert verbs == {"m01": "kept", "m11": "kept", "m12": "kept", **changed}
        assert all(f"{name} is skipped" in runs.complaints for name in ("m01", "m11", "m12"))
    assert our_models(runs.gen) == {*NAMES, "meta"}


def test_two_bundles_of_one_name_are_refused_though_both_are_known(runs: Runs, tmp_path: Path) -> None:
    """Each run refuses a second bundle of a name, and the model stays. When the second one is gone, the model is served again."""
    write_bundle(tmp_path / "more/m02", "v1")
    for _ in range(2):
        runs.run(str(tmp_path / "more"), status=1)
        assert "m02 is skipped" in runs.complaints
    assert "m02" in our_models(runs.gen)
    shutil.rmtree(tmp_path / "more/m02")
    write_bundle(tmp_path / "more/other", "v1")
    assert runs.run(str(tmp_path / "more"))[0] == {"other": "new"}


def test_a_full_disk_fails_the_models_that_do_not_fit_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that does not fit on the disk is named and stays as it is. The next run writes it."""
    for name in ("m08", "m09"):
        write_bundle(runs.bundles / name, "v2")
    real = shutil.copy2

    def full(source: Path, target: Path) -> object:
        if "m08" in source.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return real(source, target)

    monkeypatch.setattr(shutil, "copy2", full)
    assert runs.run(status=1)[0] == {"m09": "changed"}
    assert "m08: [Errno 28] No space left on device" in runs.complaints
    assert (runs.gen / "m08/1/bundle/model.b1.mlir").read_text() == "v1 1"
    monkeypatch.setattr(shutil, "copy2", real)
    assert runs.run()[0] == {"m08": "changed"}
    # Beside the repository are only the notes.
    assert [path.name for path in runs.gen.parent.glob(".gen*")] == [runs.notes.name]


def test_a_bundle_that_goes_while_it_is_read_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle that disappears after its check fails alone, and its model stays."""
    write_bundle(runs.bundles / "m14", "v2")
    write_bundle(runs.bundles / "m15", "v2")
    after_checks(monkeypatch, lambda: shutil.rmtree(runs.bundles / "m14"))
    assert runs.run(status=1)[0] == {"m15": "changed"}
    assert "m14 is skipped: it changed while it was read" in runs.complaints
    assert (runs.gen / "m14/1/bundle/model.b1.mlir").read_text() == "v1 1"


def test_a_bundle_that_changes_after_its_check_is_planned_as_it_is_then(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a bundle changes after its check, the model's configuration and files are those of the new version."""
    bundle = runs.bundles / "m15"
    write_bundle(bundle, "v2")
    wider = MANIFEST.replace("c: 2", "c: 3")
    after_checks(monkeypatch, lambda: write_bundle(bundle, "v3", manifest=wider))
    assert runs.run()[0] == {"m15": "changed"}
    assert "dims: 3" in (runs.gen / "m15/config.pbtxt").read_text()
    assert (runs.gen / "m15/1/bundle/model.b1.mlir").read_text() == "v3 1"


def test_a_bundle_that_becomes_another_kind_of_model_after_its_check_is_named(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that gets hooks after its check, when its front is already chosen, fails alone. The next run writes it."""
    hooks = {"model.py": "def preprocess(inputs): return inputs\n"}
    with monkeypatch.context() as patch:
        after_checks(patch, lambda: write_bundle(runs.bundles / "m15", "v2", files=hooks))
        write_bundle(runs.bundles / "m14", "v2")
        write_bundle(runs.bundles / "m15", "v2")
        assert runs.run(status=1)[0] == {"m14": "changed"}
    assert "m15 is skipped: it changed while it was read (m15: the bundle's kind, hooks" in runs.complaints
    assert runs.run()[0] == {"m15": "changed"}


def test_a_bundle_that_changes_while_it_is_copied_is_named(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that is replaced during its copy fails alone. No model has files of two versions."""
    for name in ("m14", "m15"):
        write_bundle(runs.bundles / name, "v2")
    real = sources.verify

    def change(name: str, *arguments: Any) -> None:
        real(name, *arguments)
        if name == "m14":
            write_bundle(runs.bundles / name, "v3")

    with monkeypatch.context() as patch:
        patch.setattr(run, "verify", change)
        assert runs.run(status=1)[0] == {"m15": "changed"}
    assert "m14: its bundle changed while it was copied" in runs.complaints
    assert (runs.gen / "m14/1/bundle/model.b1.mlir").read_text() == "v1 1"
    assert runs.run()[0] == {"m14": "changed"}


def test_bundles_of_many_weights_take_the_room_of_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between check and plan, new bundles are kept in memory only up to a limit, which a bundle with many weights uses up faster."""
    order = [f"w{number}" for number in range(200)]
    header = {
        weight: {"dtype": "F32", "shape": [], "data_offsets": [4 * number, 4 * number + 4]}
        for number, weight in enumerate(order)
    }
    weights = safetensors_bytes(
        {"__metadata__": {"argument_order": json.dumps(order)}, **header}, bytes(4 * len(order))
    )
    for name in ("a", "b", "c"):
        (write_bundle(tmp_path / "many" / name) / "weights.safetensors").write_bytes(weights)
        seal(tmp_path / "many" / name)
    monkeypatch.setattr(sources, "_MAX_KEPT_BUNDLES", 5)
    good = sources.read_sources([tmp_path / "many"]).good
    assert [name for name, source in good.items() if source.checked is not None] == ["a", "b"]


@pytest.mark.parametrize("when", ["check", "plan"])
def test_a_bundle_that_changes_back_is_served_as_it_is(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, when: str
) -> None:
    """If a bundle's link leads to another version during one run only, the next run serves the first version."""
    write_bundle(tmp_path / "one", "one")
    wider = MANIFEST.replace("c: 2", "c: 3") + ("internal: true\n" if when == "check" else "")
    write_bundle(tmp_path / "two", "two", manifest=wider)
    lead_to = runs.lead_to
    lead_to("one")
    with monkeypatch.context() as patch:
        if when == "plan":
            after_checks(patch, lambda: lead_to("two"))
        else:
            check = sources._check

            def change(path: Path) -> object:
                lead_to("two")
                return check(path)

            patch.setattr(sources, "_check", change)
        runs.run()
    lead_to("one")
    assert runs.run()[0] == {"linked": "changed" if when == "plan" else "new"}
    assert (runs.gen / "linked/1/bundle/model.b1.mlir").read_text() == "one 1"
    assert "dims: 2" in (runs.gen / "linked/config.pbtxt").read_text()
    assert runs.run() == ({}, set())


def test_a_model_that_was_compared_with_another_version_is_compared_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a link leads to the model's version only during the comparison, the next run compares the model again."""
    for version in ("one", "two"):
        write_bundle(tmp_path / version, version)
    runs.lead_to("two")
    assert runs.run()[0] == {"linked": "new"}
    runs.lead_to("one")

    def change(*arguments: Any) -> bool:
        runs.lead_to("two")
        return is_current(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(update, "is_current", change)
        assert runs.run()[0] == {}
    runs.lead_to("one")

    assert runs.run()[0] == {"linked": "changed"}
    assert (runs.gen / "linked/1/bundle/model.b1.mlir").read_text() == "one 1"


def after_checks(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call a function after the check of all bundles, and before their plan."""

    def read_sources(*arguments: Any) -> sources.Sources:
        result = sources.read_sources(*arguments)
        act()
        return result

    monkeypatch.setattr(run, "read_sources", read_sources)

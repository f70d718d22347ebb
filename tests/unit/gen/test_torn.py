"""rsrv-gen on bundles whose files do not match their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_gen.cli import main
from rsrv_gen.signatures import LINK_BYTES
from rsrv_gen.update import Later, RepositorySettings, RepositoryUpdate, Unchanged, Unsure, Written
from tests.unit.bundle.forge import seal
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta, write_unsummed

TORN = "model.b8.mlir does not match the manifest: it is being written, or was changed without exporting"


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with the bundles `one` and `two`, of format 3."""
    for name in ("one", "two"):
        write_bundle(tmp_path / "bundles" / name, files={"weights.txt": name})
    return tmp_path / "bundles"


@pytest.mark.parametrize("link", ["hard", "copy"])
@pytest.mark.parametrize("large", [True, False])
def test_a_torn_bundle_is_refused_by_name(
    tmp_path: Path, bundles: Path, link: str, large: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn bundle is refused by name, also by --check, and also if the repository has a hard link to its file."""
    file = bundles / "one" / "model.b8.mlir"
    if large:
        file.write_bytes(bytes(LINK_BYTES))
        seal(bundles / "one")
    options = [str(bundles), "-o", str(tmp_path / "gen"), "--link", link]
    assert main(options) == 0
    content = file.read_bytes()
    file.write_bytes(b"torn" + content[4:])
    (bundles / "two" / "weights.txt").write_text("changed")
    capsys.readouterr()
    for more in (["--check"], []):
        assert main([*options, *more]) == 1
        captured = capsys.readouterr()
        assert f"rsrv-gen: one is skipped:\n  {TORN}" in captured.err
        assert "two" in captured.out
        assert "changed    one" not in captured.out
    file.write_bytes(content)
    assert main(options) == 0


def test_a_meta_model_of_a_torn_bundle_is_refused(
    tmp_path: Path, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A meta model with a torn callee is refused. The reason names the callee."""
    write_meta(bundles / "meta", ["one"])
    (bundles / "one" / "model.b8.mlir").write_text("torn")
    assert main([str(bundles), "-o", str(tmp_path / "gen")]) == 1
    assert f"meta is skipped:\n  model 'one', which it calls: {TORN}" in capsys.readouterr().err
    assert not (tmp_path / "gen" / "meta").exists()


def test_files_without_checksums_are_read_twice(tmp_path: Path) -> None:
    """A file without a checksum is used when two readings agree. A bundle of format 3 is used after the first reading."""
    bundles, gen = tmp_path / "bundles", tmp_path / "gen"
    write_bundle(bundles / "new")
    old = write_unsummed(bundles / "old")

    work = RepositoryUpdate(gen, [bundles], RepositorySettings())
    done = work.write(None, twice=True)
    assert (done.names(Written), done.names(Unsure)) == ({"new"}, {"old"})
    done.of(Written)["new"].replaced.forget()
    (old / "model.b8.mlir").write_text("not parsed 9")
    work.confirm(done)
    assert (done.names(Written), done.names(Later)) == ({"new"}, {"old"})
    done = work.write(None, twice=True)
    assert (done.names(Written), done.names(Unchanged), done.names(Unsure)) == (set(), {"new"}, {"old"})
    work.confirm(done)
    assert (done.names(Written), done.names(Unchanged)) == ({"old"}, {"new"})


def test_a_model_that_was_written_is_loaded_although_its_bundle_breaks_before_the_second_reading(
    tmp_path: Path,
) -> None:
    """The second reading is only for models without checksums. It does not change the results for other models."""
    bundles = tmp_path / "bundles"
    write_bundle(bundles / "new")
    write_unsummed(bundles / "old")
    work = RepositoryUpdate(tmp_path / "gen", [bundles], RepositorySettings())
    done = work.write(None, twice=True)
    (bundles / "new" / "manifest.yaml").write_text("half")

    work.confirm(done)

    assert done.names(Written) == {"new", "old"}
    done.of(Written)["new"].replaced.forget()

"""rsrv-gen and bundles whose files differ from their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv_gen.cli import main
from rsrv_gen.signatures import LINK_BYTES
from rsrv_gen.update import Update, update
from tests.unit.bundle.forge import seal
from tests.unit.gen.bundles_for_tests import write_bundle, write_meta

TORN = "model.b8.mlir does not match the manifest: it is being written, or was changed without exporting"


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with the bundles `one` and `two`, of format 3.1."""
    for name in ("one", "two"):
        seal(write_bundle(tmp_path / "bundles" / name, files={"weights.txt": name}))
    return tmp_path / "bundles"


@pytest.mark.parametrize("link", ["hard", "copy", "symlink"])
@pytest.mark.parametrize("large", [True, False])
def test_a_torn_bundle_is_refused_by_name(
    tmp_path: Path, bundles: Path, link: str, large: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A torn bundle is refused by name, also by --check and if the repository shares its file."""
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
        told = capsys.readouterr()
        assert f"rsrv-gen: one is skipped:\n  {TORN}" in told.err
        assert "two" in told.out
        assert "changed    one" not in told.out
    file.write_bytes(content)
    assert main(options) == 0


def test_a_meta_model_of_a_torn_bundle_is_refused(
    tmp_path: Path, bundles: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A meta model with a torn callee is refused, and the reason names the callee."""
    write_meta(bundles / "meta", ["one"])
    (bundles / "one" / "model.b8.mlir").write_text("torn")
    assert main([str(bundles), "-o", str(tmp_path / "gen")]) == 1
    assert f"meta is skipped:\n  model 'one', which it calls: {TORN}" in capsys.readouterr().err
    assert not (tmp_path / "gen" / "meta").exists()


def test_files_without_checksums_are_read_twice(tmp_path: Path) -> None:
    """A file without a checksum is taken when two readings agree; a model of format 3.1 at the first."""
    bundles, gen = tmp_path / "bundles", tmp_path / "gen"
    seal(write_bundle(bundles / "new"))
    old = write_bundle(bundles / "old")

    def read(done: Update) -> tuple[set[str], set[str], set[str]]:
        update(gen, [bundles], None, link="hard", transport="direct", into=done)
        names = set(done.put)
        while done.put:
            done.put.popitem()[1].forget()
        return names, done.later, set(done.unsure)

    done = Update()
    assert read(done) == ({"new"}, set(), {"old"})
    (old / "model.b8.mlir").write_text("not looked into 9")
    assert read(done) == (set(), {"old"}, set())
    done = Update()
    assert read(done) == (set(), set(), {"old"})
    assert read(done) == ({"old"}, set(), set())

"""Writing the bundle of a meta model."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from rsrv_bundle import BundleError, read_bundle
from rsrv_bundle.meta import write_meta_bundle
from rsrv_bundle.writer import scratch_beside

RUN = "def run(inputs, call):\n    return call('inner', inputs)\n"


def written(out_dir: Path, run: Path | str = RUN, **changes: Any) -> None:
    tensor = {"dtype": "f32", "shape": "na", "dims": {"a": -1}}
    arguments: dict[str, Any] = {
        "calls": ["inner"],
        "client_inputs": [{"name": "x", **tensor}],
        "client_outputs": [{"name": "y", **tensor}],
        "out_dir": out_dir,
        **changes,
    }
    write_meta_bundle(run, **arguments)


def test_a_written_meta_bundle_reads_back(tmp_path: Path) -> None:
    """A meta bundle reads back as it was written, and equal arguments give equal bytes."""
    (source := tmp_path / "source.py").write_text(RUN)
    written(tmp_path / "outer", source, files={"words.txt": "één\n"}, description="Calls another.")
    bundle = read_bundle(tmp_path / "outer")
    assert (bundle.manifest.kind, bundle.manifest.meta_calls) == ("meta", ("inner",))
    assert [spec.name for spec in (*bundle.manifest.wire_inputs, *bundle.manifest.wire_outputs)] == ["x", "y"]
    assert bundle.manifest.description == "Calls another."
    assert (tmp_path / "outer" / "model.py").read_text() == RUN
    assert (tmp_path / "outer" / "words.txt").read_text(encoding="utf-8") == "één\n"
    written(tmp_path / "outer", files={"words.txt": "één\n"}, description="Calls another.", overwrite=True)
    assert read_bundle(tmp_path / "outer").digest == bundle.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": "def walk(): ..."}, "defines no hook; define run"),
        ({"run": "def run("}, "is not valid Python"),
        ({"calls": ["outer"]}, "must not call itself"),
        ({"client_outputs": []}, "must list what its clients send and get"),
    ],
    ids=["no run", "no Python", "calls itself", "no outputs"],
)
def test_a_broken_rule_leaves_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    """The error names the broken rule. The earlier bundle is unchanged, and no other file is left."""
    written(tmp_path / "outer")
    before = read_bundle(tmp_path / "outer").digest
    with pytest.raises(BundleError, match=message):
        written(tmp_path / "outer", overwrite=True, **changes)
    assert read_bundle(tmp_path / "outer").digest == before
    assert [path.name for path in tmp_path.iterdir()] == ["outer"]


def test_a_place_that_cannot_be_written_is_named_with_what_to_do() -> None:
    """The error has the bundle's own path, and not the path of the hidden folder beside it."""
    with (
        pytest.raises(OSError, match="name a folder that you can write") as raised,
        scratch_beside(Path("/proc/rsrv/one")),
    ):
        pass
    assert raised.value.filename == "/proc/rsrv/one"


def test_a_full_disk_is_named_with_the_bundle(tmp_path: Path) -> None:
    """The error of a full disk names the bundle, because the system's own error names no file."""
    with pytest.raises(OSError, match="No space left on device") as raised, scratch_beside(tmp_path / "one"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == str(tmp_path / "one")
    assert [*tmp_path.iterdir()] == []

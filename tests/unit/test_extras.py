"""The command that installs an extra. It depends on the source from which rsrv was installed."""

import json
from pathlib import Path

import pytest

from rsrv.extras import install_command


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'rsrv[serve,cuda13]'"),
        ({"url": "file:///my%20src/rsrv", "dir_info": {}}, "pip install '/my src/rsrv[serve,cuda13]'"),
        (
            {"url": "file:///src/rsrv", "dir_info": {"editable": True}},
            "pip install -e '/src/rsrv[serve,cuda13]'",
        ),
        (
            {"url": "file:///tmp/rsrv-1-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/rsrv-1-py3-none-any.whl[serve,cuda13]'",
        ),
        (
            {"url": "https://host/rsrv.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'rsrv[serve,cuda13] @ git+https://host/rsrv.git@abc'",
        ),
    ],
    ids=["index", "folder", "editable folder", "wheel", "git"],
)
def test_the_command_names_the_source(
    origin: object, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command installs from the source that pip has recorded. Without a record, it installs from an index."""
    installed = tmp_path / "rsrv-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: rsrv\nVersion: 1\n")
    if origin is not None:
        (installed / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)

    assert install_command("serve", "cuda13") == command

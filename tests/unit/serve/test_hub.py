"""The bundles that `rsrv serve --hf` exports before it starts the server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rsrv.serve import hub
from rsrv.serve.plan import ServeError


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replace the export by a fake that writes an empty bundle, and fails for a model named `broken`.

    Returns the list of the export commands so far.
    """
    commands: list[list[str]] = []

    def run(argv: list[str], **_: Any) -> Any:
        commands.append(argv[3:])
        bundle = Path(argv[argv.index("-o") + 1])
        bundle.mkdir(parents=True, exist_ok=True)
        (bundle / "manifest.yaml").touch()
        return subprocess.CompletedProcess(argv, int("broken" in argv[argv.index("--hf") + 1]))

    monkeypatch.setattr("rsrv.serve.hub.subprocess.run", run)
    return commands


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def export(
    folder: Path, directories: Sequence[Path], say: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Export directories as `rsrv serve --hf` does. Return the bundles, all in `folder`/hf."""
    exports = hub.plan_exports(directories, folder / "hf", {})
    hub.export_all(exports, say)
    return list(exports)


def test_a_second_start_exports_only_what_has_changed(tmp_path: Path, exported: list[list[str]]) -> None:
    """An unchanged directory keeps its bundle. A changed file causes a new export."""
    models = [directory(tmp_path / name) for name in ("one", "two")]
    lines: list[str] = []

    for _ in range(2):
        bundles = export(tmp_path, models, lines.append)
    assert bundles == [tmp_path / "hf" / "one", tmp_path / "hf" / "two"]
    assert [command[command.index("--hf") + 1] for command in exported] == [str(model) for model in models]
    os.utime(models[1] / "config.json", (1, 1))
    export(tmp_path, models, lines.append)
    assert [command[command.index("--hf") + 1] for command in exported][2:] == [str(models[1])]
    assert lines[-2:] == [f"{models[0]}: already exported", f"{models[1]}: exporting ..."]


def test_files_with_equal_times_and_sizes_are_exported_again(
    tmp_path: Path, exported: list[list[str]]
) -> None:
    """A model is exported again if its files have changed, even if the new files have the same times and sizes.

    This happens with files from archives, which all have the same time.
    """
    models = [directory(tmp_path / part / "model") for part in ("a", "b")]
    for model in models:
        os.utime(model / "config.json", (1, 1))
        export(tmp_path, [model])
    (tmp_path / "new").write_text("[]")
    os.utime(tmp_path / "new", (1, 1))
    (tmp_path / "new").replace(models[1] / "config.json")
    export(tmp_path, [models[1]])
    assert [command[command.index("--hf") + 1] for command in exported] == [
        str(model) for model in (*models, models[1])
    ]


def test_a_failed_export_is_tried_again(tmp_path: Path, exported: list[list[str]]) -> None:
    """If a model cannot be exported, the server does not start. The next start tries the export again."""
    model = directory(tmp_path / "broken")
    for _ in range(2):
        with pytest.raises(ServeError, match="broken: cannot be exported; see the lines above"):
            export(tmp_path, [model])
    assert len(exported) == 2


def test_directories_need_names_of_their_own(tmp_path: Path, exported: list[list[str]]) -> None:
    """Two directories that would become the same model are refused. A missing directory is also refused."""
    same = [directory(tmp_path / part / "model") for part in ("a", "b")]
    with pytest.raises(ServeError, match="would both become the model model; rename one"):
        export(tmp_path, same)
    with pytest.raises(ServeError, match="missing is not a directory"):
        export(tmp_path, [tmp_path / "missing"])
    assert not exported


def test_bundles_behind_hf_are_refused(tmp_path: Path, exported: list[list[str]]) -> None:
    """A folder of bundles, or a bundle, is not exported as a model. The error says where to write it.

    A model's directory may have a bundle in it.
    """
    (tmp_path / "bundles" / "digits").mkdir(parents=True)
    (tmp_path / "bundles" / "digits" / "manifest.yaml").touch()
    model = directory(tmp_path / "model")
    for named in (tmp_path / "bundles", tmp_path / "bundles" / "digits"):
        with pytest.raises(ServeError, match=r"is a bundle, or a folder of bundles\..*write it before --hf"):
            hub.plan_exports([model, named], tmp_path / "hf", {})
    (model / "old").mkdir()
    (model / "old" / "manifest.yaml").touch()
    assert hub.plan_exports([model], tmp_path / "hf", {}) == {tmp_path / "hf" / "model": model}
    assert not exported


def test_a_model_of_the_hubs_cache_has_its_name(tmp_path: Path) -> None:
    """A snapshot in the hub's cache has the name of its model. Characters that are not allowed are replaced."""
    snapshot = directory(tmp_path / "models--org--all-MiniLM.L6" / "snapshots" / "0123abc")
    assert hub.model_name(snapshot) == "all-MiniLM_L6"
    assert hub.model_name(directory(tmp_path / "größe 1.5")) == "gr__e_1_5"

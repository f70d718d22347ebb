"""rsrv-gen on real directories: what it writes, keeps and refuses."""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from rsrv_bundle.cli import main as check_bundles
from rsrv_bundle.inspection import Inspector
from rsrv_bundle.modules import signature_of
from rsrv_gen import run as generator
from rsrv_gen import staging, write
from rsrv_gen.cli import main
from rsrv_gen.config import EXECUTE_ROWS, MARK
from rsrv_gen.signatures import LINK_BYTES
from tests.unit.bundle.forge import seal
from tests.unit.gen.bundles_for_tests import write_bundle, write_unsummed

GOLDEN = Path(__file__).parents[2] / "golden/jax_0_10_2/format_3/affine"


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    """Return a directory with the bundles `one` and `two`."""
    for name in ("one", "two"):
        write_bundle(tmp_path / "bundles" / name)
    return tmp_path / "bundles"


@pytest.fixture
def gen(tmp_path: Path) -> Path:
    """Return the path of the repository, which does not exist yet."""
    return tmp_path / "gen"


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the inode and the modification time of every path in a folder."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Return the first two words of each line of progress."""
    return [line.split()[:2] for line in capsys.readouterr().out.splitlines()]


def test_a_model_directory_is_all_that_triton_needs(bundles: Path, gen: Path) -> None:
    """A model directory has the configuration, a model.py that imports rsrv, the bundle, and no bytecode."""
    assert run(bundles, "-o", gen) == 0
    files = sorted(str(path.relative_to(gen)) for path in gen.rglob("*") if path.is_file())
    of_one = ["config.pbtxt", "1/model.py", "1/__pycache__"]
    of_one += [f"1/bundle/{name}" for name in ("manifest.yaml", "model.b1.mlir", "model.b8.mlir")]
    assert [name for name in files if name.startswith("one/")] == sorted(f"one/{name}" for name in of_one)
    assert "rsrv.stub.model" in (gen / "one/1/model.py").read_text()
    assert (gen / "one/1/__pycache__").read_bytes() == b""
    assert (gen / "rsrv.yaml").is_file()
    # Only the notes of the run are left beside the repository.
    beside = {path.name for path in gen.parent.iterdir()} - {".gen-known.json"}
    assert beside == {"bundles", "gen"}


@pytest.mark.parametrize(
    ("name", "character"), [("with space", "' '"), ("a;b", "';'"), ("gr\u00fcn", "'\u00fc'")]
)
def test_a_repository_that_triton_cannot_load_is_named(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, character: str
) -> None:
    """If the repository's path has characters with which tritonserver would hang or load no model, a warning names them."""
    assert run(bundles, "-o", tmp_path / name) == 0
    assert f"cannot load models from a path with the characters [{character}]" in capsys.readouterr().err

    assert run(bundles, "-o", tmp_path / "plain#1") == 0
    assert "characters" not in capsys.readouterr().err


def test_python_keeps_no_compiled_files_of_hooks_either(bundles: Path, gen: Path) -> None:
    """In a model's folder with Python code, a file takes the name of Python's folder for bytecode.

    The bundle's own bytecode is left out.
    """
    (bundles / "one" / "model.py").write_text("def preprocess(inputs): return inputs\n")
    (bundles / "one" / "__pycache__").mkdir()
    (bundles / "one" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"old")
    assert run(bundles, "-o", gen) == 0
    assert (gen / "one/1/bundle/__pycache__").is_file()
    assert not (gen / "two/1/bundle/__pycache__").exists()


def test_a_second_run_touches_nothing(bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second run does not touch the files of unchanged models, so a polling Triton reloads nothing."""
    run(bundles, "-o", gen)
    before = tree(gen)
    capsys.readouterr()
    assert run(bundles, "-o", gen) == 0
    assert tree(gen) == before
    assert lines(capsys) == [["unchanged", name] for name in ("one", "two", "rsrv.yaml")]


@pytest.mark.parametrize("link", ["hard", "copy"])
def test_only_the_changed_model_is_written(
    bundles: Path, gen: Path, link: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a bundle's file is replaced by a file with the same size and modification time, only this model is written."""
    write_unsummed(bundles / "one")
    run(bundles, "-o", gen, "--link", link)
    untouched = tree(gen / "two")
    module = bundles / "one" / "model.b8.mlir"
    age = module.stat()
    new = module.with_name("new")
    new.write_text(module.read_text().replace("8", "9"))
    os.utime(new, ns=(age.st_atime_ns, age.st_mtime_ns))
    new.replace(module)
    capsys.readouterr()
    assert run(bundles, "-o", gen, "--link", link) == 0
    assert lines(capsys)[:2] == [["changed", "one"], ["unchanged", "two"]]
    assert (gen / "one/1/bundle/model.b8.mlir").read_text() == module.read_text()
    assert tree(gen / "two") == untouched


def test_a_file_that_left_the_bundle_leaves_the_model(bundles: Path, gen: Path) -> None:
    """A file that is removed from the bundle is also removed from the model's directory."""
    extra = bundles / "one" / "labels.txt"
    extra.write_text("a\nb\n")
    run(bundles, "-o", gen)
    assert (gen / "one/1/bundle/labels.txt").is_file()
    extra.unlink()
    assert run(bundles, "-o", gen) == 0
    assert not (gen / "one/1/bundle/labels.txt").exists()


def test_files_are_linked_or_copied(bundles: Path, tmp_path: Path) -> None:
    """A bundle's files are hard-linked or copied."""
    source = bundles / "one" / "model.b1.mlir"
    source.write_bytes(bytes(LINK_BYTES))
    seal(bundles / "one")
    for mode in ("hard", "copy"):
        assert run(bundles, "-o", tmp_path / mode, "--link", mode) == 0
        target = tmp_path / mode / "one/1/bundle/model.b1.mlir"
        assert target.read_bytes() == source.read_bytes()
        assert target.samefile(source) == (mode != "copy")
        assert run(bundles, "-o", tmp_path / mode, "--link", mode, "--check") == 0
    # Another mode is a change, except from copies to hard links, because hard links may fall back to copies.
    assert run(bundles, "-o", tmp_path / "hard", "--link", "copy", "--check") == 1
    assert run(bundles, "-o", tmp_path / "copy", "--link", "hard", "--check") == 0


def test_an_edit_in_the_bundle_reaches_the_model_only_through_rsrv_gen(bundles: Path, gen: Path) -> None:
    """Small files are copied, so an edit of the bundle does not change the served model until rsrv-gen runs."""
    run(bundles, "-o", gen)
    with (bundles / "one" / "manifest.yaml").open("a") as manifest:
        manifest.write("# edited\n")
    assert "edited" not in (gen / "one/1/bundle/manifest.yaml").read_text()
    assert run(bundles, "-o", gen) == 0
    assert "edited" in (gen / "one/1/bundle/manifest.yaml").read_text()


def test_without_hard_links_files_are_copied(
    bundles: Path, gen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without hard links, files are copied, and the next run has nothing to do."""
    (bundles / "one" / "model.b1.mlir").write_bytes(bytes(LINK_BYTES))
    seal(bundles / "one")
    monkeypatch.setattr(write, "_hard_link", lambda source, target: False)
    assert run(bundles, "-o", gen) == 0
    assert not (gen / "one/1/bundle/model.b1.mlir").samefile(bundles / "one" / "model.b1.mlir")
    assert run(bundles, "-o", gen, "--check") == 0


def test_check_writes_nothing_and_tells(bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--check writes nothing, and exits 1 if a run would change something."""
    assert run(bundles, "-o", gen, "--check") == 1
    assert not gen.exists()
    assert lines(capsys) == [["new", name] for name in ("one", "two", "rsrv.yaml")]
    run(bundles, "-o", gen)
    assert run(bundles, "-o", gen, "--check") == 0


def test_a_broken_bundle_is_named_and_the_others_are_written(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broken bundle is named on stderr, and the run fails. Its earlier version stays, even with --prune."""
    run(bundles, "-o", gen)
    before = tree(gen / "one")
    (bundles / "one" / "manifest.yaml").write_text("format_version: 3\nsurprise: 1\n")
    write_bundle(bundles / "three")
    assert run(bundles, "-o", gen, "--prune") == 1
    errors = capsys.readouterr().err
    assert "one is skipped" in errors
    assert "surprise" in errors
    assert tree(gen / "one") == before
    assert (gen / "three/config.pbtxt").is_file()


def test_a_model_that_is_no_bundle_is_named(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of a framework among the bundles is not served. The others are, and the exit status is 0."""
    (bundles / "old.onnx").touch()
    assert run(bundles, "-o", gen) == 0
    assert (
        f"rsrv-gen: {bundles}/old.onnx is not served, because it is an ONNX model" in capsys.readouterr().err
    )


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inspect modules in this process, because another process takes a second to start."""
    monkeypatch.setattr(generator, "find_spec", find_spec)
    monkeypatch.setattr(Inspector, "__call__", lambda self, blob, file: signature_of(blob, file))


@pytest.mark.usefixtures("inspected")
def test_what_check_refuses_is_refused_in_the_same_words(
    tmp_path: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight of another shape, a missing or invalid module, and invalid hooks are refused with the words of `rsrv-bundle check`.

    The other bundles are written.
    """
    bundles = tmp_path / "bundles"
    for name in ("good", "shape", "missing", "junk", "hooks"):
        shutil.copytree(GOLDEN, bundles / name)
    weights = load_file(GOLDEN / "weights.safetensors")
    order = {"argument_order": json.dumps(list(weights))}
    save_file(
        {name: array[..., :1] for name, array in weights.items()},
        bundles / "shape" / "weights.safetensors",
        order,
    )
    next((bundles / "missing").glob("*.mlir")).unlink()
    next((bundles / "junk").glob("*.mlir")).write_bytes(b"junk")
    (bundles / "hooks" / "model.py").write_text("def preproces(inputs): ...\n")
    for name in ("shape", "junk"):
        seal(bundles / name)
    wrong = [bundles / name for name in ("shape", "missing", "junk", "hooks")]
    assert check_bundles(["check", *map(str, wrong)]) == 1
    problems = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert len(problems) >= len(wrong)
    assert run(bundles, "-o", gen) == 1
    errors = capsys.readouterr().err
    assert [problem for problem in problems if f"\n  {problem}\n" not in errors] == []
    assert [path.name for path in sorted(gen.glob("*/"))] == ["good"]
    for path in wrong:
        assert run(path, "-o", tmp_path / "alone/of/all") == 1
        assert not (tmp_path / "alone").exists()


def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    bundles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the repository cannot be made, the message has the path of the repository, even if a file is in its place."""
    assert run(bundles, "-o", "/proc/gen") == 1
    assert capsys.readouterr().err.endswith(
        "/proc/gen: No such file or directory; name a folder that you can write\n"
    )
    (file := tmp_path / "file").touch()
    assert run(bundles, "-o", file) == 1
    assert capsys.readouterr().err.endswith(f"{file}: File exists; name a folder that you can write\n")


def test_a_failed_run_changes_no_settings(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed run, the settings watch no new folder, neither a misspelt one nor one with only broken bundles."""
    (bundles.parent / "empty").mkdir()
    (write_bundle(bundles.parent / "wrong" / "three") / "model.b8.mlir").unlink()
    for path in ("empty", "wrong", "absent"):
        assert run(bundles.parent / path, "-o", gen) == (1 if path == "wrong" else 2)
        assert not gen.exists()
    run(bundles, "-o", gen)
    before = tree(gen)
    for path in ("empty", "wrong", "absent"):
        assert run(bundles.parent / path, "-o", gen) == (1 if path == "wrong" else 2)
        assert tree(gen) == before
    assert run(bundles, bundles.parent / "empty", "-o", gen) == 1
    assert "empty: neither a bundle (no manifest.yaml) nor a directory of bundles" in capsys.readouterr().err
    assert tree(gen) == before


def test_a_run_that_makes_no_model_compiles_nothing(
    bundles: Path, gen: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a run makes no model, it compiles nothing, because there are no settings for a compilation."""
    monkeypatch.setenv("RSRV_RUNTIME_PYTHON", "/nowhere/python")
    (gen / "one").mkdir(parents=True)
    assert run(bundles / "one", "-o", gen, "--compile-for", "l4") == 1
    error = capsys.readouterr().err
    assert "was not made by rsrv-gen" in error
    assert "cannot be started" not in error


def test_settings_of_a_model_without_a_bundle_are_refused(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings for an unknown model are refused with the nearest name, and nothing is written."""
    section = "models: {%s: {weight: 2}}"
    config = bundles.parent / "settings.yaml"
    config.write_text(section % "tow")
    assert run(bundles, "-o", gen, "--config", config) == 1
    assert "models.tow: no bundle has this name; did you mean 'two'?" in capsys.readouterr().err
    assert not gen.exists()
    config.write_text(section % "two")
    assert run(bundles, "-o", gen, "--config", config) == 0
    # This run does not get the bundle, but the repository still has its model.
    assert run(bundles / "one", "-o", gen, "--config", config) == 0


def test_a_name_given_twice_is_an_error(bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If two bundles have the same name, both are refused, because it is unknown which one is meant."""
    other = write_bundle(bundles.parent / "more" / "one")
    assert run(bundles, other, "-o", gen) == 1
    assert str(other) in capsys.readouterr().err
    assert not (gen / "one").exists()
    assert (gen / "two").exists()


def test_the_same_bundle_given_twice_is_one_bundle(bundles: Path, gen: Path) -> None:
    """A bundle that is given directly, and also through its directory, is one bundle."""
    assert run(bundles, bundles / "one", "-o", gen) == 0


def test_models_go_only_when_asked_for_and_only_our_own(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--prune removes models whose bundles are gone. It removes no model of another tool."""
    run(bundles, "-o", gen)
    foreign = gen / "resnet" / "1"
    foreign.mkdir(parents=True)
    (gen / "resnet" / "config.pbtxt").write_text('backend: "onnxruntime"\n')
    assert run(bundles / "one", "-o", gen) == 0
    assert (gen / "two").exists()
    capsys.readouterr()
    assert run(bundles / "one", "-o", gen, "--prune") == 0
    assert ["removed", "two"] in lines(capsys)
    assert not (gen / "two").exists()
    assert foreign.is_dir()


def test_a_missing_input_removes_nothing(bundles: Path, gen: Path, tmp_path: Path) -> None:
    """If a given path has no bundles, --prune removes nothing, because the path may be an unmounted disk."""
    run(bundles, "-o", gen)
    (tmp_path / "empty").mkdir()
    assert run(bundles / "one", tmp_path / "empty", "-o", gen, "--prune") == 1
    assert run(bundles / "one", tmp_path / "absent", "-o", gen, "--prune") == 1
    assert (gen / "two").exists()


def test_another_ones_model_is_never_replaced(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a foreign directory has the name of a bundle, the bundle is refused, and the others are written."""
    (gen / "one").mkdir(parents=True)
    (gen / "one" / "config.pbtxt").write_text(f'name: "one"\n{MARK}\n')
    assert run(bundles, "-o", gen, "--check") == 1
    assert run(bundles, "-o", gen) == 1
    assert "was not made by rsrv-gen" in capsys.readouterr().err
    assert [path.name for path in (gen / "one").iterdir()] == ["config.pbtxt"]
    assert (gen / "two" / "config.pbtxt").is_file()


@pytest.mark.parametrize("step", ["rsrv_gen.run.verify", "rsrv_gen.write.RepositoryWriter._write"])
def test_a_foreign_folder_that_appears_during_the_run_stays(
    bundles: Path,
    gen: Path,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """If another tool makes a model's folder during the copies, the folder stays, and the model is refused."""
    act = pkgutil.resolve_name(step)

    def interrupted(*arguments: Any) -> None:
        (gen / "one").mkdir(exist_ok=True)
        (gen / "one" / "theirs").touch()
        act(*arguments)

    monkeypatch.setattr(step, interrupted)
    assert run(bundles, "-o", gen) == 1
    assert f"{gen / 'one'} was not made by rsrv-gen: move it away" in capsys.readouterr().err
    assert [path.name for path in (gen / "one").iterdir()] == ["theirs"]
    assert (gen / "two" / "config.pbtxt").is_file()


def test_settings_are_checked_and_written_whole(
    bundles: Path, gen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """rsrv.yaml has all settings, including those from --config. An unknown setting stops the run."""
    config = tmp_path / "settings.yaml"
    config.write_text("scheduler: {max_queue_depth: 7}\n")
    assert run(bundles, "-o", gen, "--config", config) == 0
    text = (gen / "rsrv.yaml").read_text()
    assert "max_queue_depth: 7" in text
    assert "compilation_cache_dir" in text
    before = tree(gen)
    config.write_text("scheduler: {max_queue_dept: 7}\n")
    assert run(bundles, "-o", gen, "--config", config) == 1
    assert "did you mean 'max_queue_depth'" in capsys.readouterr().err
    assert tree(gen) == before


@pytest.mark.parametrize("name", ["gen", "gen[1]"])
def test_what_a_crash_left_is_cleared_away(bundles: Path, tmp_path: Path, name: str) -> None:
    """The next run removes half-built directories that a crashed run left beside the repository."""
    gen = tmp_path / name
    run(bundles, "-o", gen)
    leftover = tmp_path / f".{name}.rsrv-gen-crashed"
    (leftover / "one").mkdir(parents=True)
    assert run(bundles, "-o", gen) == 0
    assert not leftover.exists()


@pytest.mark.parametrize("atomic", [True, False], ids=["one step", "two renames"])
def test_directories_are_exchanged(tmp_path: Path, atomic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directories are exchanged completely, with and without the atomic system call."""
    if not atomic:
        monkeypatch.setattr(staging, "_rename_exchange", lambda source, target: False)
    first, second = tmp_path / "one", tmp_path / "other"
    for folder in (first, second):
        folder.mkdir()
        (folder / folder.name).touch()
    staging.exchange(first, second)
    assert (first / "other").exists()
    assert (second / "one").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_an_old_c_library_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the C library has no renameat2, two renames exchange the directories."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: object())
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "file").touch()
    staging.exchange(tmp_path / "one", tmp_path / "other")
    assert (tmp_path / "other" / "file").exists()


def test_actions_for_programs(bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints a list of the changes of the run. With `--check`, these are the changes that a run would make."""
    assert run(bundles, "-o", gen, "--check", "--json") == 1

    actions = json.loads(capsys.readouterr().out)
    assert {"action": "new", "name": "one", "note": ""} in actions


def test_a_run_that_is_refused_has_no_actions(
    bundles: Path, gen: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a run ends because of missing bundles, unknown settings or a system error, `--json` prints an empty list."""
    config = bundles.parent / "settings.yaml"
    config.write_text("models: {tow: {weight: 2}}")
    refused: list[tuple[int, list[str | Path]]] = [
        (2, [bundles / "absent"]),
        (1, [bundles, "--config", config]),
        (1, [bundles, "--config", bundles.parent / "absent.yaml"]),
    ]
    for status, arguments in refused:
        assert run(*arguments, "-o", gen, "--json") == status
        assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_a_reader_that_goes_stops_nothing(
    bundles: Path, gen: Path, json_too: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rsrv-gen ... | true` writes all models and the settings, although the reader of its output is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run(bundles, "-o", gen, *json_too) == 0
    assert [path.name for path in sorted(gen.iterdir())] == ["one", "rsrv.yaml", "two"]


def test_a_limit_on_rows_is_what_clients_read(bundles: Path, gen: Path, tmp_path: Path) -> None:
    """`max_rows` becomes max_batch_size in config.pbtxt, and a change updates it.

    The setting `max_batch_size`, which limits the rows of executions, has no effect on it.
    """
    config = gen / "one" / "config.pbtxt"
    settings = tmp_path / "rsrv.yaml"
    assert run(bundles, "-o", gen) == 0
    assert f"max_batch_size: {EXECUTE_ROWS}\n" in config.read_text()

    for limits, batch_size in (
        ("max_rows: 4", 4),
        ("max_rows: 5000", 5000),
        ("max_batch_size: 4", EXECUTE_ROWS),
    ):
        settings.write_text(f"models: {{one: {{{limits}}}}}")
        assert run(bundles, "-o", gen, "--config", settings) == 0
        assert f"max_batch_size: {batch_size}\n" in config.read_text()

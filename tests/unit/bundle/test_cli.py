"""The command line of `rsrv-bundle check`: exit codes and lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from rsrv_bundle import cli
from rsrv_bundle.commands import checking
from rsrv_bundle.export import export_bundle
from tests.unit.bundle.forge import GOOD, META, changed, make_bundle


def test_good_bundles_print_one_line_each_and_exit_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A good model or meta model prints one line of summary."""
    export_bundle(
        lambda p, x: x * p,
        np.float32(2),
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1, 2],
        out_dir=tmp_path / "m",
    )
    meta = make_bundle(tmp_path, META, name="meta", modules=(), hooks="def run(inputs, call): ...\n")
    calls = {"calls": ["first"], "external": ["resnet"]}
    mixed = make_bundle(
        tmp_path, changed(META, meta=calls), name="mixed", modules=(), hooks="async def run(i, c): ...\n"
    )
    assert cli.main(["check", str(tmp_path / "m"), str(meta), str(mixed)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"ok {tmp_path / 'm'}: format 3, batch sizes 1 2, 1 weight, 4 bytes, sha256 ")
    assert second.startswith(f"ok {meta}: format 3, meta model of 2 calls, hooks, sha256 ")
    assert third.startswith(f"ok {mixed}: format 3, meta model of 1 calls and 1 external, hooks, sha256 ")


def test_broken_bundles_print_one_line_per_problem_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All problems of all bundles are printed, and problems of signatures and hooks are reported together."""
    junk = make_bundle(tmp_path, hooks="pass\n")
    bad = make_bundle(tmp_path, changed(GOOD, kind="x", name=3), name="bad")
    assert cli.main(["check", str(junk), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "model.py",
        "model.b1.mlir",
        "model.b4.mlir",
        "manifest.yaml",
        "manifest.yaml",
    ]


@pytest.mark.parametrize("command", [["check"], ["show"], ["diff", "."], ["convert", "-o", "new"]])
def test_a_directory_that_is_not_there_is_wrong_usage(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing directory is an error of the command line, and no bundle is reported as broken."""
    monkeypatch.chdir(tmp_path)
    assert cli.main([*command, "none"]) == 2
    assert capsys.readouterr().err == "rsrv-bundle: none: there is no such file or directory\n"


@pytest.mark.parametrize("command", [["show"], ["diff"], ["convert", "-o", "new"]])
def test_problems_say_whose_they_are(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two bundles, every line of a problem names its bundle."""
    bad = make_bundle(tmp_path, changed(GOOD, kind="x"), name="bad")
    good = [str(make_bundle(tmp_path))] if command == ["diff"] else []
    assert cli.main([*command, *good, str(bad)]) == (2 if good else 1)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith(f"{bad}: manifest.yaml: ") for line in lines)


def test_an_internal_model_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary of an internal model says `internal`."""
    assert (
        cli.main(["check", "--no-signatures", str(make_bundle(tmp_path, changed(GOOD, internal=True)))]) == 0
    )
    assert ", internal, sha256 " in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["check"], ["chek", "."], ["check", "--nope", "."]])
def test_wrong_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments exit 2 and print the usage."""
    assert cli.main(arguments) == 2
    assert "usage: rsrv-bundle" in capsys.readouterr().err


def test_help_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` prints the commands and exits 0."""
    assert cli.main(["--help"]) == 0
    assert "check" in capsys.readouterr().out


def test_signatures_without_jaxlib_are_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without jaxlib, the check exits 2 and names `--no-signatures`. Otherwise, users could think that the check has passed."""
    monkeypatch.setattr(checking, "find_spec", lambda _: None)
    assert cli.main(["check", str(make_bundle(tmp_path))]) == 2
    assert "--no-signatures" in capsys.readouterr().err


def test_checks_and_differences_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one document. The exit status is the same as without it."""
    good, bad = make_bundle(tmp_path), make_bundle(tmp_path, changed(GOOD, kind="x"), name="bad")
    other = make_bundle(tmp_path, changed(GOOD, description="another"), name="other")

    assert cli.main(["check", "--json", "--no-signatures", str(good), str(bad)]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["directory"], first["ok"], len(first["lines"])) == (str(good), True, 1)
    assert (second["directory"], second["ok"]) == (str(bad), False)

    assert cli.main(["diff", "--json", str(good), str(other)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["same"], report["b"]["directory"]) == (False, str(other))
    assert any("description" in line for line in report["differences"])


def test_check_imports_model_py_where_hooks_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --run, a missing module, a missing file and a mistake are problems. For a good file, the line names the Python that runs it."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    end = "def postprocess(outputs): return outputs\n"
    texts = {
        "good": end,
        "package": f"import no_such_package\n{end}",
        "file": f"open('no_such_file.txt')\n{end}",
        "mistake": f"1 / 0\n{end}",
    }
    bundles = {name: str(_exported(tmp_path / name, hooks=hooks)) for name, hooks in texts.items()}
    assert cli.main(["check", bundles["good"]]) == 0
    capsys.readouterr()
    assert cli.main(["check", "--run", "--no-signatures", *bundles.values()]) == 1
    problems = {line.partition(": ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "is imported by" in problems[f"ok {bundles['good']}"]
    assert "no_such_package" in problems[bundles["package"]]
    assert "rsrv triton pip install PACKAGE" in problems[bundles["package"]]
    assert "no_such_file.txt" in problems[bundles["file"]]
    assert "ZeroDivisionError" in problems[bundles["mistake"]]


def _exported(folder: Path, hooks: Path | str) -> Path:
    """Write a small bundle with these hooks, and return its folder."""
    export_bundle(
        lambda p, x: x * p,
        np.float32(2),
        {"x": np.zeros((1, 3), np.float32)},
        batch_sizes=[1],
        hooks=hooks,
        out_dir=folder,
    )
    return folder

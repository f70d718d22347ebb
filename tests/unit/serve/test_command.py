"""The tritonserver that `rsrv serve` starts."""

import os
from pathlib import Path

import pytest

from rsrv.cli.main import main, parser
from rsrv.serve import command
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import ServeError
from rsrv.serve.triton_install import Installation, default_folder
from rsrv.serve.view import Line
from tests.unit.gen.bundles_for_tests import write_bundle
from tests.unit.serve.test_plan import planned


@pytest.fixture(autouse=True)
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "CONTAINER", tmp_path / "opt" / "tritonserver")


def put_program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def never(question: str) -> bool:
    raise AssertionError(question)


def test_a_named_server_wins_and_then_the_path_and_then_the_container(tmp_path: Path) -> None:
    """The order is the documented one, and no question is asked while there is a server."""
    container = put_program(tmp_path / "opt" / "tritonserver")
    assert find_tritonserver(None, never) == container
    on_path = put_program(tmp_path / "bin" / "tritonserver")
    assert find_tritonserver(None, never) == on_path
    named = put_program(tmp_path / "mine")
    assert find_tritonserver(named, never) == named
    with pytest.raises(ServeError, match="no program /no/such"):
        find_tritonserver("/no/such", never)


def test_without_a_server_the_user_is_asked_and_no_ends_it() -> None:
    """The message names the three ways that are left."""
    with pytest.raises(ServeError, match=r"rsrv triton install.*--tritonserver.*container"):
        find_tritonserver(None, lambda question: False)
    assert not default_folder().exists()


def test_bundles_that_are_missing_are_named_before_a_server_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user should not install a server first, and read then that the folder is misspelt."""
    assert main(["serve", str(tmp_path / "bundels")]) == 2
    assert "bundels: there is no such file or directory" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_with_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    """The user reads which option names another folder."""
    assert main(["serve", "--demo", "--directory", "/proc/rsrv"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("rsrv serve: /proc/rsrv cannot hold the demo: ")
    assert said.endswith("Name a folder that you can write with --directory\n")


def test_a_missing_jax_is_named_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the extra, each model would fail at its load."""
    monkeypatch.delenv("RSRV_RUNTIME_PYTHON", raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    write_bundle(tmp_path / "bundles" / "one")
    assert main(["serve", str(tmp_path / "bundles"), "--directory", str(tmp_path)]) == 1
    assert "jax, which executes the models, is not installed" in capsys.readouterr().err


def test_an_installation_of_the_user_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `rsrv triton install` made is used without a question; a yes makes it."""
    installed: list[Path] = []
    monkeypatch.setattr(Installation, "install", lambda self, say: installed.append(self.folder))
    launcher = find_tritonserver(None, lambda question: True)
    assert installed == [default_folder()]
    monkeypatch.setattr(Installation, "is_installed", lambda self: True)
    assert find_tritonserver(None, never) == launcher
    assert os.path.basename(launcher) == "tritonserver"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option and the folder, not only an error of the system."""
    (tmp_path / "taken").touch()
    words = ["serve", "bundles", "--tritonserver", put_program(tmp_path / "mine")]
    assert main([*words, "--directory", str(tmp_path / "taken")]) == 1
    assert f"rsrv serve: {tmp_path / 'taken' / 'serve.log'} cannot be the log" in capsys.readouterr().err


def test_the_terminal_shows_the_endpoints_once_the_server_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Changes before have the seconds since the start, later ones the time of day; the demo has commands to copy."""
    words = ["serve", "--demo", "--directory", str(tmp_path), "--metrics-port", "9002"]
    terminal = command._Terminal(planned("metrics: {listen: null}"), parser().parse(words))
    terminal.show(Line("a is ready"))
    terminal.show(Line("Serving 1 of 1 models", "serves"))
    terminal.show(Line("b is ready"))
    terminal.show(Line("Stopping.", "note"))
    first, *middle, late, last = capsys.readouterr().out.splitlines()
    assert first == "   0.0 s  a is ready"
    assert middle[:2] == ["", "Serving 1 of 1 models:"]
    assert f"  log        {tmp_path}/serve.log" in middle
    curl = f"  curl -s http://localhost:8000/v2/models/digits/infer -d @{tmp_path}/digit.json"
    assert middle[middle.index("Try:") + 1] == curl
    assert late.endswith("  b is ready")
    assert last == "Stopping."

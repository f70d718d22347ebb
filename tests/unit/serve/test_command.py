"""The tritonserver that `rsrv serve` chooses and starts."""

import errno
import os
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from local_triton import free_ports
from rsrv.cli.main import main, parser
from rsrv.serve import command
from rsrv.serve.command import find_tritonserver
from rsrv.serve.plan import ServeError
from rsrv.serve.view import Line
from rsrv.triton_install import Installation, default_folder
from rsrv_gen.write import RepositoryWriter
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
    """A named tritonserver is used first, then the one in PATH, then the container's. If there is any, the user is not asked."""
    container = put_program(tmp_path / "opt" / "tritonserver")
    assert find_tritonserver(None, never) == container
    on_path = put_program(tmp_path / "bin" / "tritonserver")
    assert find_tritonserver(None, never) == on_path
    named = put_program(tmp_path / "mine")
    assert find_tritonserver(named, never) == named
    with pytest.raises(ServeError, match="no program /no/such"):
        find_tritonserver("/no/such", never)


def test_without_a_server_the_user_is_asked_and_no_ends_it() -> None:
    """Without a tritonserver, the user is asked whether to install one.

    If the user declines, the error names the three other ways to get one, and nothing is installed.
    """
    with pytest.raises(ServeError, match=r"rsrv triton install.*--tritonserver.*container"):
        find_tritonserver(None, lambda question: False)
    assert not default_folder().exists()


def test_bundles_that_are_missing_are_named_before_a_server_is_searched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing bundles are named before the search for a server, so that nobody installs a server first."""
    assert main(["serve", str(tmp_path / "bundels")]) == 2
    assert "bundels: there is no such file or directory" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_with_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    """If a folder cannot be written, the message has the option that names another folder."""
    assert main(["serve", "--demo", "--directory", "/proc/rsrv"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("rsrv serve: the demo cannot be written to /proc/rsrv: ")
    assert message.endswith("Name a folder that you can write with --directory\n")


def test_a_missing_jax_is_named_before_a_server_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing jax is named before a server starts, because each model's load would fail."""
    monkeypatch.delenv("RSRV_RUNTIME_PYTHON", raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    write_bundle(tmp_path / "bundles" / "one")
    assert main(["serve", str(tmp_path / "bundles"), "--directory", str(tmp_path)]) == 1
    assert "jax, which executes the models, is not installed" in capsys.readouterr().err


def test_an_installation_of_the_user_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation made by `rsrv triton install` is used without a question.

    If there is no installation and the user agrees, one is made.
    """
    installed: list[Path] = []
    monkeypatch.setattr(Installation, "install", lambda self, say: installed.append(self.folder))
    launcher = find_tritonserver(None, lambda question: True)
    assert installed == [default_folder()]
    monkeypatch.setattr(Installation, "is_installed", lambda self: True)
    assert find_tritonserver(None, never) == launcher
    assert os.path.basename(launcher) == "tritonserver"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If a folder cannot be written, the message has the option and the folder, in addition to the system's error."""
    (tmp_path / "taken").touch()
    words = ["serve", "bundles", "--tritonserver", put_program(tmp_path / "mine")]
    assert main([*words, "--directory", str(tmp_path / "taken")]) == 1
    assert (
        f"rsrv serve: the log {tmp_path / 'taken' / 'serve.log'} cannot be opened" in capsys.readouterr().err
    )


def test_a_full_disk_is_named_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a disk is full, the message names the folder, because the system's error does not."""

    def full(self: RepositoryWriter, name: str, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RepositoryWriter, "put_file", full)
    write_bundle(tmp_path / "bundles" / "one")
    ports = [
        f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
    ]
    words = ["serve", str(tmp_path / "bundles"), "--directory", str(tmp_path / "full"), *ports]
    assert main([*words, "--tritonserver", put_program(tmp_path / "mine")]) == 1
    message = capsys.readouterr().err
    assert f"rsrv serve: {tmp_path / 'full' / 'models'}: No space left on device" in message


def test_a_log_that_cannot_be_written_is_named_once_and_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If the disk with the log is full, log lines are lost, and one message says so. The server continues."""
    (tmp_path / "log").symlink_to("/dev/full")
    with command._log_lines(tmp_path / "log") as put:
        put(b"one\n")
        put(b"two\n")
    message = capsys.readouterr().err
    assert message.count(f"{tmp_path}/log cannot be written: No space left on device") == 1


def test_the_terminal_shows_the_endpoints_once_the_server_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When the server serves, the terminal shows the endpoints. For the demo, it also shows commands to copy.

    Lines before that have the seconds since the start, and later lines have the time of day.
    """
    words = ["serve", "--demo", "--directory", str(tmp_path), "--metrics-port", "9002"]
    terminal = command._Terminal(planned("metrics: {listen: null}"), parser().parse(words), 1)
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


@pytest.mark.parametrize("terminal", [True, False])
def test_a_person_who_waits_for_the_first_compilation_sees_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, terminal: bool
) -> None:
    """On a terminal, a bar counts models until the server serves. A log file or a script gets no bar."""
    steps: list[str] = []
    bar = Mock(step=steps.append)
    begun = MagicMock()
    begun.return_value.__enter__.return_value = bar
    monkeypatch.setattr(command, "steps", begun)
    monkeypatch.setattr(command, "obeys_codes", lambda stream: terminal)
    words = ["serve", "--demo", "--directory", str(tmp_path)]

    with command._Terminal(planned("metrics: {listen: null}"), parser().parse(words), 3) as console:
        for line in (Line("a is ready"), Line("b failed: why"), Line("not serving after 10 s", "waits")):
            console.show(line)
        console.show(Line("Serving 2 of 3 models", "serves"))
        console.show(Line("b is ready"))

    assert steps == (["a is ready", "b failed: why"] if terminal else [])
    assert begun.call_count == begun.return_value.__exit__.call_count == int(terminal)

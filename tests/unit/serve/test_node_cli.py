"""The command rsrv-node: its output, and its refusals before a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from rsrv.serve import node
from rsrv.serve.errors import NodeError
from rsrv.serve.node_cli import main
from tests.unit.gen.bundles_for_tests import write_bundle

CPU = ("--cpu-workers", "2", "--tritonserver", "/bin/true")


@pytest.fixture
def bundles(tmp_path: Path) -> Path:
    write_bundle(tmp_path / "bundles" / "one")
    return tmp_path / "bundles"


def run(*arguments: str | Path) -> int:
    return main([str(argument) for argument in arguments])


def refused(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Return the message of a refused start."""
    assert run(*arguments) == 1
    return capfd.readouterr().err


def test_a_dry_run_says_what_it_would_run(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dry run prints the processes and makes no directory."""
    assert run(bundles, *CPU, "--directory", tmp_path / "node", "--dry-run") == 0

    said = capfd.readouterr().out
    assert "worker1 on CPU: HTTP 127.0.0.1:18010" in said
    assert "-m rsrv_gateway" in said
    assert not (tmp_path / "node").exists()


def test_the_command_line_wins_over_the_file(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line's CPU or GPUs replace those of the file."""
    config = tmp_path / "rsrv.yaml"
    config.write_text("node: {gpus: [7]}")
    assert run(bundles, *CPU, "--config", config, "--dry-run") == 0
    assert "worker1 on CPU" in capfd.readouterr().out

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1/1/0,MIG-GPU-1/2/0")
    config.write_text("node: {cpu_workers: 7}")
    options = ("--gpus", "1", "--tritonserver", "/bin/true", "--dry-run")
    assert run(bundles, *options, "--config", config) == 0
    assert "worker0 on MIG-GPU-1/2/0: " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--cpu-workers", "2", "--tritonserver", "/no/such"),
            "--tritonserver: there is no program /no/such",
        ),
        (("--gpus", "x", "--tritonserver", "/bin/true"), "node.gpus: 'x' is neither a number nor a UUID"),
        (
            (*CPU, "--config", "/no/such"),
            "/no/such cannot be read: No such file or directory. Name a file of settings",
        ),
    ],
)
def test_a_wrong_setting_is_refused(
    bundles: Path, capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    """A wrong setting is refused in a line that names it."""
    said = refused(capfd, bundles, *arguments)

    assert said.startswith("rsrv-node: ")
    assert message in said


@pytest.mark.parametrize(
    "arguments", [("--cpu-workers", "0"), ("--gpus", ","), ("--gpus", "0", "--cpu-workers", "1")]
)
def test_a_wrong_command_line_is_refused(arguments: tuple[str, ...]) -> None:
    """A wrong command line exits 2."""
    with pytest.raises(SystemExit, match="2"):
        run("bundles", *arguments)


def test_a_node_without_bundles_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A node without a bundle folder, or without watching for a first bundle, is refused."""
    said = refused(capfd, tmp_path / "missing", *CPU, "--directory", tmp_path / "node")
    assert said.endswith(f"{tmp_path}/missing: there is no such file or directory\n")

    (tmp_path / "bundles").mkdir()
    config = tmp_path / "rsrv.yaml"
    config.write_text("lifecycle: {mode: static}")
    arguments = ("--config", config, *CPU, "--directory", tmp_path / "node")
    said = refused(capfd, tmp_path / "bundles", *arguments)
    assert "with these settings (lifecycle.mode, control.enabled) no process watches for one" in said


def test_two_nodes_do_not_share_a_directory(
    bundles: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two nodes cannot share a directory, because each would write the other's repositories."""
    with node.alone(tmp_path / "node"):
        said = refused(capfd, bundles, *CPU, "--directory", tmp_path / "node")
    assert f"another server uses {tmp_path}/node: end it, or name another folder with --directory" in said

    with node.alone(tmp_path / "node"), pytest.raises(NodeError), node.alone(tmp_path / "node"):
        pass

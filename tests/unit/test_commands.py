"""Common properties of rsrv's commands."""

import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import pytest

import rsrv
import rsrv_bundle
from rsrv.cli.main import former_node, parser
from rsrv.cli.main import main as rsrv_main
from rsrv.command import command
from rsrv.extras import install_command

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    script.name: script
    for script in distribution("rsrv").entry_points
    if script.group == "console_scripts" and script.name != "rsrv-node"
}
#: asyncio is a fifth of the modules that these may load.
ALLOWED = sys.stdlib_module_names - {"asyncio"} | {one.module.partition(".")[0] for one in COMMANDS.values()}

_SCRIPT = """
import sys
before = set(sys.modules)
from {module} import {attr} as main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
print(*set(sys.modules) - before, file=sys.stderr)
"""


def test_these_are_the_commands() -> None:
    """The installed commands are those of pyproject.toml."""
    assert set(COMMANDS) == {"rsrv", "rsrv-bundle", "rsrv-gateway", "rsrv-gen", "rsrv-sim"}


def test_the_former_command_names_the_one_that_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A unit file or a container that still starts rsrv-node fails with the command to write there."""
    assert former_node() == 2
    assert "`rsrv serve BUNDLES` starts one tritonserver with all devices" in capsys.readouterr().err


def test_a_missing_command_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv gateway` alone names its commands."""
    with pytest.raises(SystemExit, match="2"):
        rsrv_main(["gateway"])
    assert "rsrv gateway: name a command: status, health, policy," in capsys.readouterr().err


def test_messages_name_commands_that_exist() -> None:
    """An operator who is told to run a command of rsrv has it."""
    sources = [
        path for folder in ("triton_backend/rsrv", "gateway") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {name for path in sources for name in re.findall(r"`rsrv ([a-z]+)", path.read_text())}
    (commands,) = (one for one in parser()._actions if one.dest == "command")
    assert named <= {*(commands.choices or ())}
    assert "prefetch" in named


@pytest.mark.parametrize("script", COMMANDS.values(), ids=COMMANDS.keys())
def test_help_comes_at_once(script: EntryPoint) -> None:
    """`--help` loads nothing heavy."""
    program = _SCRIPT.format(module=script.module, attr=script.attr)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert said.stdout.startswith(f"usage: {script.name}")
    loaded = {name.partition(".")[0] for name in said.stderr.split()}
    assert loaded <= ALLOWED


def test_the_version_is_pyproject_s_everywhere() -> None:
    """The installed package says the version of pyproject.toml, and so do files for other programs, which cannot ask."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert distribution("rsrv").version == rsrv.__version__ == version
    copies = [
        (str(file), found)
        for folder in (ROOT / "deploy", ROOT / "docker")
        for file in folder.rglob("*.y*ml")
        for found in re.findall(
            r"(?:^appVersion: |^version: |image: rsrv:)\"?([\d.]+)", file.read_text(), re.MULTILINE
        )
    ]
    assert [copy for copy in copies if copy[1] != version] == []


def test_all_names_of_the_bundle_package_are_there() -> None:
    """All exported names load when they are used, and a wrong one is an AttributeError."""
    assert [name for name in rsrv_bundle.__all__ if not hasattr(rsrv_bundle, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rsrv_bundle.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_package_that_is_not_installed_is_named_with_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    """An installation without extras needs no traceback; a missing module of rsrv itself is a bug."""

    @command("rsrv-x", extra="serve")
    def main(argv: object = None) -> int:
        import_module(str(argv))
        return 0

    assert main("no_such_package.part") == 1
    said = capsys.readouterr().err
    assert said.startswith("rsrv-x: no_such_package is not installed for /")
    assert said.endswith(f"; run {install_command('serve')}\n")
    with pytest.raises(ModuleNotFoundError):
        main("rsrv.no_such_module")


def test_a_closed_output_ends_a_command_quietly_and_another_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status is 0 only if the reader of stdout has gone: a broken connection of the command is an error."""

    @command("rsrv-x", extra="serve")
    def main(argv: object = None) -> int:
        raise BrokenPipeError

    reader, writer = os.pipe()
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(BrokenPipeError):
            main()
        os.close(reader)
        print("lost")
        assert main() == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv completion` prints a script for a shell that names every command."""
    assert rsrv_main(["completion", shell]) == 0

    script = capsys.readouterr().out
    assert [name for name in COMMANDS if name not in script] == []

"""Common properties of rsrv's commands."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

import pytest

import rsrv
import rsrv_bundle
from rsrv.cli.main import main as rsrv_main
from rsrv.cli.main import parser
from rsrv.command import command
from rsrv.extras import install_command

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
COMMANDS = {name: EntryPoint(name, value, "console_scripts") for name, value in SCRIPTS.items()}
#: Top-level modules that the help of a command may load. asyncio is excluded, because it loads many modules.
ALLOWED = sys.stdlib_module_names - {"asyncio"} | {
    entry_point.module.partition(".")[0] for entry_point in COMMANDS.values()
}

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
    """The wheel installs exactly these commands."""
    assert set(COMMANDS) == {"rsrv", "rsrv-bundle", "rsrv-gateway", "rsrv-gen", "rsrv-sim"}


def test_a_missing_command_is_answered_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv gateway` without a command prints the list of its commands."""
    with pytest.raises(SystemExit, match="2"):
        rsrv_main(["gateway"])
    assert "rsrv gateway: name a command: status, health, policy," in capsys.readouterr().err


def test_messages_name_commands_that_exist() -> None:
    """Every command of rsrv that a message recommends exists."""
    sources = [
        path for folder in ("triton_backend/rsrv", "gateway") for path in (ROOT / folder).rglob("*.py")
    ]
    named = {name for path in sources for name in re.findall(r"`rsrv ([a-z][a-z-]*)", path.read_text())}
    (commands,) = (action for action in parser()._actions if action.dest == "command")
    assert named <= {*(commands.choices or ())}
    assert "prefetch" in named


def test_every_command_is_in_one_group_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command is in one group of the help, below the group's headline."""
    top = parser()
    (commands,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    grouped = [name for names in top.command_groups.values() for name in names]

    assert sorted(grouped) == sorted(action.dest for action in commands._choices_actions)
    text = top.format_help()
    assert text.index("\nserve:\n") < text.index("\n  serve ") < text.index("\nfind out why:\n")
    assert all(re.search(rf"^ +{name}\b", text, re.MULTILINE) for name in grouped)


@pytest.mark.parametrize("words", [("help", "serve"), ("serve", "--help")])
def test_help_is_a_command_as_well(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv help serve` prints the same as `rsrv serve --help`."""
    with pytest.raises(SystemExit, match="0"):
        rsrv_main(words)
    assert capsys.readouterr().out.startswith("usage: rsrv serve ")


def test_help_names_the_nearest_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv help` alone lists all commands. An unknown command is an error with the nearest name."""
    with pytest.raises(SystemExit, match="0"):
        rsrv_main(["help"])
    assert "find out why:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        rsrv_main(["help", "serv"])
    assert "unknown command 'serv'; did you mean 'serve'?" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["version"], ["-V"], ["--version"]])
def test_the_version_has_three_spellings(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The version has three spellings, because other tools use different ones."""
    with pytest.raises(SystemExit, match="0"):
        rsrv_main(words)
    assert capsys.readouterr().out == f"rsrv {rsrv.__version__}\n"


@pytest.mark.parametrize("script", COMMANDS.values(), ids=COMMANDS.keys())
def test_help_loads_no_heavy_module(script: EntryPoint) -> None:
    """`--help` loads no heavy module."""
    program = _SCRIPT.format(module=script.module, attr=script.attr)
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert process.stdout.startswith(f"usage: {script.name}")
    loaded = {name.partition(".")[0] for name in process.stderr.split()}
    assert loaded <= ALLOWED


def test_the_version_is_pyproject_s_everywhere() -> None:
    """The installed package has the version in pyproject.toml.

    Files for other programs, which cannot read pyproject.toml, repeat this version.
    """
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert distribution("rsrv").version == rsrv.__version__ == version
    copies = [
        (str(file), text)
        for folder in (ROOT / "deploy", ROOT / "docker")
        for file in folder.rglob("*.y*ml")
        for text in re.findall(
            r"(?:^appVersion: |^version: |image: rsrv:)\"?([\d.]+)", file.read_text(), re.MULTILINE
        )
    ]
    assert [copy for copy in copies if copy[1] != version] == []


def test_all_names_of_the_bundle_package_are_there() -> None:
    """All exported names of rsrv_bundle are loaded when they are used. A wrong name is an AttributeError."""
    assert [name for name in rsrv_bundle.__all__ if not hasattr(rsrv_bundle, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rsrv_bundle.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_package_that_is_not_installed_is_named_with_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    """If a package of an extra is missing, the error has no traceback and says how to install the extra.

    A missing module of rsrv itself is a bug, so it raises an error.
    """

    @command("rsrv-x", extra="serve")
    def main(argv: object = None) -> int:
        import_module(str(argv))
        return 0

    assert main("no_such_package.part") == 1
    message = capsys.readouterr().err
    assert message.startswith("rsrv-x: no_such_package is not installed for /")
    assert message.endswith(f"; run {install_command('serve')}\n")
    with pytest.raises(ModuleNotFoundError):
        main("rsrv.no_such_module")


def test_a_closed_output_ends_a_command_quietly_and_another_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the reader of stdout has closed it, the command ends with status 0. Any other broken pipe is an error."""

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


_ENDED_AT_ITS_START = """
import os, signal, sys
import {module} as starting
starting.run = lambda *_: os.kill(os.getpid(), signal.{signal})
from {command} import main
sys.exit(main({words}))
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("starting", "program", "words"),
    [
        ("rsrv.serve.command", "rsrv.cli.main", ["serve", "bundles"]),
        ("rsrv_gateway.main", "rsrv_gateway.__main__", []),
    ],
)
def test_a_server_that_is_stopped_while_it_starts_ends_with_0(
    starting: str, program: str, words: list[str], number: str
) -> None:
    """A signal that arrives before the event loop runs ends the server with status 0, as a later signal does."""
    script = _ENDED_AT_ITS_START.format(module=starting, command=program, words=words, signal=number)

    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert (process.returncode, process.stderr) == (0, "")


def test_sigterm_ends_a_command_as_ctrl_c_does() -> None:
    """SIGTERM raises KeyboardInterrupt, so a command may finish its work. Otherwise, the exit status names the signal.

    The signal handler is restored after the command.
    """
    steps: list[str] = []

    def main(argv: Sequence[str] | None) -> int:
        if argv == ["finish"]:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            steps.append("finished")
            return 0
        signal.raise_signal(signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    run = command("rsrv", extra="serve")(main)
    assert (run(["finish"]), steps) == (0, ["finished"])
    assert run([]) == 143
    assert signal.getsignal(signal.SIGTERM) == before

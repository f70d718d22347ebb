"""Stubs of Triton's Python backend are recognised by their command lines."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rsrv.stub.model import end_if_orphaned
from rsrv.wire.stub_process import StubCommand

_WAITS = "import sys; print(flush=True); sys.stdin.read()"
#: A process id that no process has.
_ENDED = 4194302


@contextmanager
def process(*command: str | Path, folder: Path) -> Iterator[int]:
    """Run a command that waits, and yield its process id."""
    child = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child.pid
    child.kill()
    child.communicate()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)
    (tmp_path / "model.py").write_text(_WAITS)
    return program


def test_a_stub_is_known_by_its_command_line(program: Path, tmp_path: Path) -> None:
    """A process is recognised as a stub by its command line.

    If the path of model.py is relative, it is relative to the working directory of this process.
    """
    words = ["model.py", "region", "1", "2", "77", "/backend", "3", "cats_0_0", "DEFAULT"]
    with process(program, *words, folder=tmp_path) as pid:
        assert StubCommand.read(pid) == StubCommand(tmp_path / "model.py", "region", 77)


def test_a_shell_that_starts_a_stub_is_the_stub(program: Path, tmp_path: Path) -> None:
    """Up to release 25.08, Triton starts a stub through a shell, and the shell's command line ends with the stub's.

    The shell is recognised as a stub.
    """
    line = f"read -r _; exec {program} {tmp_path}/model.py region 1 2 77 /backend 3 cats_0_0 DEFAULT"
    with process("bash", "-c", f"echo; {line}", folder=tmp_path) as pid:
        assert StubCommand.read(pid) == StubCommand(tmp_path / "model.py", "region", 77)


def test_other_processes_are_no_stubs(program: Path, tmp_path: Path) -> None:
    """Other processes are not recognised as stubs.

    A process whose region is a path is not one either, because the file of another program could be removed.
    """
    assert StubCommand.read(os.getpid()) is None
    assert StubCommand.read(_ENDED) is None
    for words in (["region"], ["../region", "1", "2", "77"], ["region", "1", "2", "server"]):
        with process(program, "model.py", *words, folder=tmp_path) as pid:
            assert StubCommand.read(pid) is None


def test_another_users_process_is_no_stub(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another user is not recognised as a stub.

    Its command line could name the shared memory of a third user, and a runtime that runs as root would remove it.
    """
    with process(program, "model.py", "region", "1", "2", "77", "/backend", folder=tmp_path) as pid:
        assert StubCommand.read(pid) is not None
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert StubCommand.read(pid) is None


def test_a_stub_whose_server_has_ended_ends_with_its_shared_memory(program: Path, tmp_path: Path) -> None:
    """If the server of a stub has ended, the stub is ended and its shared memory is removed. Other stubs are left alone."""
    region = Path(f"/dev/shm/rsrv_test_{os.getpid()}")
    region.touch()
    statuses: list[int] = []
    try:
        for server, ends in ((os.getpid(), False), (_ENDED, True)):
            words = ["model.py", region.name, "1", "2", str(server), "/backend"]
            with process(program, *words, folder=tmp_path) as pid:
                end_if_orphaned(pid, statuses.append)
            assert (statuses, region.exists()) == ([1] * ends, not ends)
    finally:
        region.unlink(missing_ok=True)

"""Stubs that outlive their server: the runtime finds them, waits a moment, and kills them."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.runtime import child_processes
from tests.waiting import PATIENCE_S

_HANGS = "import signal; print(flush=True); signal.pause()"
#: Pid of a server that has ended. The parent of its stubs is another process.
_SERVER = 4194302
#: Placeholder for an argument that nothing reads.
_ANY = "1048576"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a link to Python that has the name of Triton's stub program."""
    program = tmp_path / "triton_python_backend_stub"
    program.symlink_to(sys.executable)
    return program


@pytest.fixture
def region() -> Iterator[Path]:
    path = Path(f"/dev/shm/triton_python_backend_shm_region_test_{os.getpid()}")
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def start(*command: str | Path) -> subprocess.Popen[bytes]:
    """Start a child, and wait until it has reached its signal.pause()."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def stub_of(program: Path, region: Path, server: int, repository: Path) -> subprocess.Popen[bytes]:
    """Start a process with the command line of a stub. Its code is a script that hangs."""
    code = repository / "cats" / "1" / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text(_HANGS)
    return start(program, code, region.name, _ANY, _ANY, str(server), _ANY)


def test_a_stub_that_hangs_is_killed_and_its_shared_memory_removed(
    region: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that hangs is killed, and its shared memory is removed."""
    monkeypatch.setattr(child_processes, "_STUB_EXIT_S", 0.05)
    process = stub_of(program, region, os.getpid(), tmp_path / "gen")
    stub = child_processes.open_stub(process.pid, os.getpid())
    assert stub is not None

    child_processes.end_orphans({process.pid: stub}, _SERVER, tmp_path)

    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not region.exists()
    os.close(stub.pidfd)


def test_shared_memory_of_a_stub_that_ends_by_itself_is_removed(
    region: Path, program: Path, tmp_path: Path
) -> None:
    """Stubs of Triton 26.04 and later leave shared memory when they end after their server.

    It is removed without a signal to the stub.
    """
    process = stub_of(program, region, os.getpid(), tmp_path / "gen")
    stub = child_processes.open_stub(process.pid, os.getpid())
    assert stub is not None
    process.terminate()

    child_processes.end_orphans({process.pid: stub}, _SERVER, tmp_path)

    assert process.wait(PATIENCE_S) == -signal.SIGTERM
    assert not region.exists()
    os.close(stub.pidfd)


def test_a_stub_that_has_not_connected_is_ended_with_its_server(
    region: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub whose model was loading has no connection, and is ended with its server.

    Stubs of other servers and repositories are not.
    """
    monkeypatch.setattr(child_processes, "_STUB_EXIT_S", 0.05)
    process = stub_of(program, region, _SERVER, tmp_path / "gen")
    child_processes.end_orphans({}, _SERVER, tmp_path / "other")
    child_processes.end_orphans({}, _SERVER - 1, tmp_path / "gen")
    assert process.poll() is None
    assert region.exists()

    child_processes.end_orphans({}, _SERVER, tmp_path / "gen")

    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not region.exists()


def test_stubs_are_ended_without_a_descriptor_for_further_ones(
    region: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that has no free descriptor still ends the connected stubs.

    Then the runtime ends itself, which frees the device's memory.
    """
    monkeypatch.setattr(child_processes, "_STUB_EXIT_S", 0.05)
    connected = stub_of(program, region, os.getpid(), tmp_path / "gen")
    stub = child_processes.open_stub(connected.pid, os.getpid())
    assert stub is not None
    other = stub_of(program, region, _SERVER, tmp_path / "more")

    def pidfd_open(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pidfd_open", pidfd_open)
        child_processes.end_orphans({connected.pid: stub}, _SERVER, tmp_path)

    assert connected.wait(PATIENCE_S) == -signal.SIGKILL
    assert not region.exists()
    os.close(stub.pidfd)
    other.kill()
    other.wait(PATIENCE_S)


def test_another_servers_child_is_no_stub_of_ours() -> None:
    """A child of another server, such as a tool that asks for the status, is not a stub of this server."""
    process = start(sys.executable, "-c", _HANGS)

    assert child_processes.open_stub(process.pid, os.getppid()) is None

    process.kill()
    process.wait(PATIENCE_S)
    assert child_processes.open_stub(4194303, os.getpid()) is None
    # A native front runs in the server's own process.
    assert child_processes.open_stub(os.getpid(), os.getpid()) is None

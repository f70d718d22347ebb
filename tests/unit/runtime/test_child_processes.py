"""Stubs that outlive their server: they are found, get a moment, and are ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rsrv.runtime import child_processes

_HANGS = "import signal; print(flush=True); signal.pause()"
_HOLDS_A_REGION = """
import mmap, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
memory = mmap.mmap(fd, 4096)
print(flush=True)
signal.pause()
"""


@pytest.fixture
def region() -> Iterator[Path]:
    path = Path(f"{child_processes._REGION_PREFIX}_test_{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a child, and wait until it has reached its signal.pause()."""
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_stub_that_hangs_is_killed_and_its_shared_memory_removed(
    region: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub that hangs is killed, and its shared memory is removed."""
    monkeypatch.setattr(child_processes, "_STUB_EXIT_S", 0.05)
    process = start(_HOLDS_A_REGION, str(region))
    stub = child_processes.open_stub(process.pid, os.getpid())
    assert stub is not None
    assert region.exists()

    child_processes.end_orphans({process.pid: stub})

    assert process.wait(10) == -signal.SIGKILL
    assert not region.exists()
    os.close(stub)


def test_a_stub_that_ends_by_itself_is_left_alone() -> None:
    """A stub that ends by itself gets no signal."""
    process = start(_HANGS)
    stub = child_processes.open_stub(process.pid, os.getpid())
    assert stub is not None
    process.terminate()

    child_processes.end_orphans({process.pid: stub})

    assert process.wait(10) == -signal.SIGTERM
    os.close(stub)


def test_another_servers_child_is_no_stub_of_ours() -> None:
    """A child of another server, as a tool that asks for the status, is no orphan of ours."""
    process = start(_HANGS)

    assert child_processes.open_stub(process.pid, os.getppid()) is None

    process.kill()
    process.wait(10)
    assert child_processes.open_stub(4194303, os.getpid()) is None
    # A native front is the server itself.
    assert child_processes.open_stub(os.getpid(), os.getpid()) is None

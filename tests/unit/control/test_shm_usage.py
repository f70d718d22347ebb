"""The users of /dev/shm, measured on a small file system with files and with this process's mappings."""

import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rsrv.control.shm_usage import measure_shm

KB = 1024


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a directory with weights, a region of Triton's, and a file of another program."""
    for name, size in (
        ("rsrv-weights-u0/tensors/one", 64 * KB),
        ("triton_python_backend_shm_region_1", 128 * KB),
        ("alien", 32 * KB),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    return tmp_path


def small(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Make the file system look like one of 256 KiB with this many KiB free."""
    usage = SimpleNamespace(f_bavail=free, f_blocks=256, f_frsize=KB)
    monkeypatch.setattr("rsrv.control.shm_usage.os.statvfs", lambda path: usage)


def test_each_byte_has_its_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model uses the regions that its stub has mapped. Weights are counted separately, and all other bytes belong to others."""
    small(monkeypatch, free=8)
    with (
        (directory / "triton_python_backend_shm_region_1").open("r+b") as region,
        mmap.mmap(region.fileno(), 0),
    ):
        usage = measure_shm({"a": [os.getpid()], "gone": [2**22 + 1]}, directory)

    assert usage is not None
    assert (usage.weights, dict(usage.requests)) == (64 * KB, {"a": 128 * KB})
    assert usage.others == (256 - 8 - 64 - 128) * KB


def test_no_process_is_searched_while_there_is_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is room, no process's mappings are read, because this takes long with hundreds of processes."""
    small(monkeypatch, free=100)
    monkeypatch.setattr("rsrv.control.shm_usage._mapped", None)

    usage = measure_shm({"a": [os.getpid()]}, directory)

    assert usage is not None
    assert (usage.is_short, usage.weights) == (False, 0)


def test_without_shared_memory_there_is_nothing(tmp_path: Path) -> None:
    """Without /dev/shm, as in some containers, there is no result."""
    assert measure_shm({}, tmp_path / "missing") is None

"""Host memory of weights: private, or shared in /dev/shm by processes that may be killed at any time."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.runtime import host_memory
from rsrv.runtime.allocation import LARGE, Bytes
from rsrv.runtime.host_memory import HostMemory, HostMemoryError, SharedMemory, TensorBytes, fresh
from tests.held import open_files
from tests.unit.runtime.peers import Peer
from tests.waiting import wait_until


@pytest.fixture
def start_peer(shm: Path) -> Iterator[Callable[..., Peer]]:
    started = []

    def start() -> Peer:
        started.append(Peer(shm))
        return started[-1]

    yield start
    for peer in started:
        peer.kill()


def filled(value: int, nbytes: int = LARGE) -> tuple[str, Bytes]:
    """Return digest and bytes of the tensor that a peer makes for `place VALUE NBYTES`."""
    content = np.full(nbytes, value, np.uint8)
    return hashlib.sha256(content.data).hexdigest(), content


def place(memory: SharedMemory, value: int, nbytes: int = LARGE) -> TensorBytes:
    return memory.place(*filled(value, nbytes))


def names(shm: Path) -> list[str]:
    return sorted(path.name for path in shm.glob("rsrv-weights-*/*"))


def inode(shm: Path, value: int) -> int:
    (directory,) = shm.iterdir()
    return (directory / filled(value)[0]).stat().st_ino


def mapping_of(array: np.ndarray[Any, Any]) -> str:
    """Return the line of /proc/self/maps with an array's memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split()[0].split("-"))
        if start <= array.ctypes.data < end:
            return line
    raise AssertionError("an array lies in no mapping")


@pytest.mark.parametrize("nbytes", [0, 1, 100, LARGE - 1, LARGE, LARGE + 1])
def test_new_memory_is_aligned_and_of_the_requested_size(nbytes: int) -> None:
    """Memory is aligned to 64 bytes, so that jax uses it in place.

    Memory of at least LARGE bytes is aligned to pages, because a GPU's driver locks pages.
    """
    memory = fresh(nbytes)

    assert memory.nbytes == nbytes
    if nbytes:  # numpy reports any address for an empty array.
        assert memory.ctypes.data % (4096 if nbytes >= LARGE else 64) == 0
    memory[:] = 1


def test_more_memory_than_the_machine_has_is_an_error_with_a_remedy() -> None:
    """A request for more memory than the machine has fails with a remedy. The runtime continues."""
    with pytest.raises(HostMemoryError, match="serve fewer models"):
        fresh(1 << 60)


def test_private_memory_is_not_copied() -> None:
    """Private memory takes the array itself without a copy, and makes it read-only."""
    digest, content = filled(1)

    block = HostMemory().place(digest, content)

    assert block.bytes is content
    assert not block.bytes.flags.writeable


def test_a_shared_tensor_is_one_file_for_all_and_gone_with_its_last_user(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """All processes share one file of a tensor, which is removed with its last user. Each process counts its own uses."""
    peers = [start_peer(), start_peer()]
    assert peers[0].ask(f"place 1 {LARGE}") == "placed"
    made = inode(shm, 1)
    assert peers[1].ask(f"place 1 {LARGE}") == "placed"
    assert inode(shm, 1) == made

    assert peers[0].ask("release") == "released"
    assert names(shm) == [filled(1)[0]]
    assert peers[1].ask("release") == "released"
    assert names(shm) == []


def test_a_shared_tensor_is_read_only(shm: Path) -> None:
    """A shared tensor can be written neither through its mapping nor through its file."""
    block = place(SharedMemory(shm), 1)

    assert mapping_of(block.bytes).split()[1] == "r--s"
    assert not block.bytes.flags.writeable
    (file,) = shm.glob("*/*")
    assert stat.S_IMODE(file.stat().st_mode) == 0o400
    block.release()


def test_a_view_outlives_the_release(shm: Path) -> None:
    """A view stays valid after its tensor was released. Its memory is freed with the last view."""
    memory = SharedMemory(shm)
    block = place(memory, 7)
    view = block.bytes.view(np.uint16)
    block.release()
    del block

    again = place(memory, 7)

    assert view.tobytes() == b"\7" * LARGE
    assert names(shm) == [filled(7)[0]]
    again.release()


def test_small_tensors_stay_private(shm: Path) -> None:
    """Small tensors are private. A file, a mapping and two descriptors would cost more than sharing saves."""
    assert place(SharedMemory(shm), 1, LARGE - 1).bytes.tolist() == [1] * (LARGE - 1)
    assert names(shm) == []


def test_nothing_of_a_runtime_stays_open(shm: Path) -> None:
    """After `close`, no descriptor is open: neither of the directory, nor of files that were made or found."""
    before = open_files()
    memory = SharedMemory(shm)
    blocks = [place(memory, 1), place(memory, 1), place(memory, 2)]
    for block in blocks:
        block.release()
    del block, blocks
    memory.close()

    wait_until(lambda: open_files() <= before)


def test_a_restarted_runtime_uses_the_tensors_of_a_killed_one(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """A restarted runtime uses the file of a killed one, because a file gets its name only when it is complete."""
    first = start_peer()
    assert first.ask(f"place 1 {LARGE}") == "placed"
    made = inode(shm, 1)
    first.kill()

    second = start_peer()
    assert second.ask(f"place 1 {LARGE}") == "placed"

    assert inode(shm, 1) == made
    assert second.ask("release") == "released"
    assert names(shm) == []


def test_a_sweep_removes_only_unused_tensors(shm: Path, start_peer: Callable[..., Peer]) -> None:
    """A sweep removes only tensors without a user. Tensors of any live process stay, and so do other files."""
    killed, alive = start_peer(), start_peer()
    assert killed.ask(f"place 1 {LARGE}") == "placed"
    assert alive.ask(f"place 2 {LARGE}") == "placed"
    memory = SharedMemory(shm)
    mine = place(memory, 3)
    (memory.path / "notes").touch()
    assert memory.sweep() == 0
    killed.kill()

    assert memory.sweep() == 1

    assert names(shm) == sorted([filled(2)[0], filled(3)[0], "notes"])
    mine.release()


def test_a_sweep_without_a_free_descriptor_removes_nothing(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep without a free descriptor, which reading a directory needs, removes nothing and does not fail."""
    memory = SharedMemory(shm)

    def refuse(_: object) -> list[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "listdir", refuse)
    assert memory.sweep() == 0
    memory.close()


def test_a_publisher_that_is_killed_before_the_link_leaves_nothing(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """If a process is killed before its new file has a name, the kernel frees the file."""
    peer = start_peer()
    peer.ask("pause link")
    assert peer.ask(f"place 1 {LARGE}") == "at link"

    peer.kill()

    assert names(shm) == []


def test_the_slower_of_two_publishers_uses_the_file_of_the_other(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """Two processes have filled a file for the same tensor. One file gets the name, and both use it."""
    slow, fast = start_peer(), start_peer()
    slow.ask("pause link")
    assert slow.ask(f"place 1 {LARGE}") == "at link"
    assert fast.ask(f"place 1 {LARGE}") == "placed"
    made = inode(shm, 1)

    assert slow.ask("go") == "placed"

    assert fast.ask("release") == "released"
    assert inode(shm, 1) == made
    assert slow.ask("release") == "released"
    assert names(shm) == []


def test_a_file_that_is_removed_between_opening_and_locking_is_made_again(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """A file is removed after another process has opened it and before it has locked it. The other process makes a new file.

    The lock alone does not suffice, because a file without a name can be locked as well.
    """
    leaving, coming = start_peer(), start_peer()
    assert leaving.ask(f"place 1 {LARGE}") == "placed"
    coming.ask("pause flock")
    assert coming.ask(f"place 1 {LARGE}") == "at flock"
    assert leaving.ask("release") == "released"
    assert names(shm) == []

    assert coming.ask("go") == "placed"

    assert names(shm) == [filled(1)[0]]
    assert coming.ask("release") == "released"
    assert names(shm) == []


def test_a_new_user_does_not_wait_for_views_after_the_release(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """A new user does not wait until views of a released tensor are freed. A view keeps the memory, but not the lock."""
    leaving, coming = SharedMemory(shm), start_peer()
    block = place(leaving, 1)
    view = block.bytes[:1]
    coming.ask("pause flock")
    assert coming.ask(f"place 1 {LARGE}") == "at flock"
    block.release()
    del block

    assert coming.ask("go") == "placed"

    assert view.tolist() == [1]


def test_a_new_user_during_the_removal_waits_and_makes_the_file_again(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """A new user opens the file while the last user removes it under the exclusive lock.

    The new user waits and makes the file again.
    """
    leaving, coming = start_peer(), start_peer()
    assert leaving.ask(f"place 1 {LARGE}") == "placed"
    leaving.ask("pause unlink")
    assert leaving.ask("release") == "at unlink"
    coming.ask("pause flock")
    assert coming.ask(f"place 1 {LARGE}") == "at flock"
    # The new user has opened the file. The result is the same whether it locks the file before or after the removal.
    coming.say("go")
    assert leaving.ask("go") == "released"

    assert coming.hear() == "placed"

    assert names(shm) == [filled(1)[0]]


def test_a_process_killed_during_the_removal_blocks_no_other(
    shm: Path, start_peer: Callable[..., Peer]
) -> None:
    """A process is killed while it removes a file. The kernel releases its lock, and the next process uses the file."""
    leaving, coming = start_peer(), start_peer()
    assert leaving.ask(f"place 1 {LARGE}") == "placed"
    made = inode(shm, 1)
    leaving.ask("pause unlink")
    assert leaving.ask("release") == "at unlink"
    leaving.kill()

    assert coming.ask(f"place 1 {LARGE}") == "placed"

    assert inode(shm, 1) == made


def test_a_sweep_does_not_remove_a_new_file(shm: Path, start_peer: Callable[..., Peer]) -> None:
    """A sweep does not remove a new file, because the publisher locks the file before it names it."""
    publisher = start_peer()
    publisher.ask("pause link")
    assert publisher.ask(f"place 1 {LARGE}") == "at link"
    memory = SharedMemory(shm)
    assert memory.sweep() == 0
    assert publisher.ask("go") == "placed"
    assert memory.sweep() == 0

    assert names(shm) == [filled(1)[0]]


def test_a_name_that_was_given_to_another_file_is_not_removed(shm: Path) -> None:
    """A process does not remove a name that now belongs to another file.

    This happens if an operator has emptied the directory, and another runtime has made the tensor again.
    """
    first, second = SharedMemory(shm), SharedMemory(shm)
    old = place(first, 1)
    (first.path / filled(1)[0]).unlink()
    new = place(second, 1)

    old.release()

    assert names(shm) == [filled(1)[0]]
    new.release()
    assert names(shm) == []


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (
            errno.ENOSPC,
            "has no room for a tensor of 65536 bytes; make it larger (a container's --shm-size)",
        ),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOMEM, "vm.max_map_count"),
        (errno.EIO, "Input/output error; turn runtime.shared_host_weights off"),
    ],
)
def test_an_error_of_the_system_has_a_remedy(
    shm: Path, monkeypatch: pytest.MonkeyPatch, code: int, remedy: str
) -> None:
    """An error of the operating system is reported with a remedy. No incomplete file and no descriptor is left."""
    memory = SharedMemory(shm)
    before = open_files()

    def refuse(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(HostMemoryError) as caught:
        place(memory, 1)

    assert remedy in str(caught.value)
    assert names(shm) == []
    wait_until(lambda: open_files() <= before)


def test_a_mapping_that_is_refused_leaves_no_file(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a new file cannot be mapped, it is removed, although it already has its name."""
    memory = SharedMemory(shm)
    before = open_files()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no")

    monkeypatch.setattr(host_memory, "_map", refuse)
    with pytest.raises(HostMemoryError, match="max_map_count"):
        place(memory, 1)

    assert names(shm) == []
    wait_until(lambda: open_files() <= before)


def test_the_directory_is_closed_to_others(shm: Path) -> None:
    """The directory and its files are closed to other users, whatever the umask of the process is."""
    old = os.umask(0o777)
    try:
        memory = SharedMemory(shm)
        place(memory, 1)
    finally:
        os.umask(old)

    assert memory.path.name == f"rsrv-weights-u{os.getuid()}"
    assert stat.S_IMODE(memory.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((memory.path / filled(1)[0]).stat().st_mode) == 0o400


@pytest.mark.parametrize("mode", [0o750, 0o702])
def test_a_directory_that_others_can_enter_is_refused(shm: Path, mode: int) -> None:
    """A directory that other users can enter is refused. They could put any file there."""
    path = SharedMemory(shm).path
    path.chmod(mode)

    with pytest.raises(HostMemoryError, match="must belong to"):
        SharedMemory(shm)


def test_another_users_directory_is_refused(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of another user, who made it under this user's name, is refused."""
    uid = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: uid)

    with pytest.raises(HostMemoryError, match="must belong to"):
        SharedMemory(shm)


def test_a_link_in_the_directorys_place_is_refused(shm: Path, tmp_path: Path) -> None:
    """A symbolic link in the place of the directory is refused, because it may lead anywhere."""
    (shm / f"rsrv-weights-u{os.getuid()}").symlink_to(tmp_path)

    with pytest.raises(HostMemoryError, match="off"):
        SharedMemory(shm)


@pytest.mark.parametrize("wrong", ["size", "mode", "pipe", "link"])
def test_a_file_that_rsrv_did_not_make_is_refused(shm: Path, tmp_path: Path, wrong: str) -> None:
    """A file that rsrv did not make is refused. For example, reading a file that is too short would kill the process."""
    memory = SharedMemory(shm)
    digest, content = filled(1)
    path = memory.path / digest
    if wrong == "pipe":
        os.mkfifo(path, 0o400)
    elif wrong == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_bytes(content[: -1 if wrong == "size" else None].tobytes())
        path.chmod(0o400 if wrong == "size" else 0o600)
    before = open_files()

    with pytest.raises(HostMemoryError):
        memory.place(digest, content)

    wait_until(lambda: open_files() <= before)
    assert memory.sweep() == (wrong != "link")


def test_shared_memory_by_default_leaves_half_of_it_to_triton(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With `modest`, half of the shared memory stays free for Triton. Further tensors are private, and the log has one line.

    Tensors that another runtime has placed are shared.
    """
    generous, modest = SharedMemory(shm), SharedMemory(shm, modest=True)
    first = place(generous, 1)
    real = os.statvfs

    def half_full(path: int) -> os.statvfs_result:
        fields = list(real(path))
        fields[2], fields[3], fields[4] = 100, 50, 50  # blocks, free, available
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", half_full)
    shared, *private = (place(modest, value) for value in (1, 2, 3))

    assert names(shm) == [filled(1)[0]]
    assert "rsrv-weights" in mapping_of(shared.bytes)
    assert all("rsrv-weights" not in mapping_of(tensor.bytes) for tensor in private)
    assert caplog.text.count("has no room for a tensor") == 1
    for placed_tensor in (first, shared, *private):
        placed_tensor.release()
    generous.close()
    modest.close()


def test_shared_memory_by_default_is_private_if_its_directory_is_not_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By default, memory is private if the shared directory is not safe.

    If the setting requires shared memory, this is an error.
    """

    def refuse(parent: Path, *, owner: str, modest: bool) -> SharedMemory:
        raise HostMemoryError("remove it")

    monkeypatch.setattr(host_memory, "SharedMemory", refuse)

    assert type(host_memory.open_host_memory(None, "server")) is HostMemory
    assert "remove it. Until then" in caplog.text
    assert type(host_memory.open_host_memory(False)) is HostMemory
    with pytest.raises(HostMemoryError):
        host_memory.open_host_memory(True)

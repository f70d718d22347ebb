"""Where the host's copies of weights lie: in this process's own memory, or in /dev/shm for several runtimes."""

import errno
import fcntl
import mmap
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from rsrv.runtime.aligned import LARGE, Bytes, aligned

_NAME = re.compile(r"[0-9a-f]{64}")


class HostMemoryError(Exception):
    """The host has no memory for weights, or none that is safe to share; the message says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The bytes of one tensor. The memory itself lives as long as any view of them."""

    bytes: Bytes
    #: give up the claim to them, once
    release: Callable[[], object]


class Memory(Protocol):
    """What the store needs of memory. Every method may be called from any thread."""

    def place(self, digest: str, filled: Bytes) -> Block:
        """Memory that holds these bytes, whose SHA-256 is `digest`; they may stay where they are.

        Raises HostMemoryError.
        """

    def sweep(self) -> int:
        """Remove what processes that were killed left behind; how many tensors that was."""

    def close(self) -> None: ...


def fresh(nbytes: int) -> Bytes:
    """Memory of this process to fill, aligned for every element type. Raises HostMemoryError if there is none."""
    try:
        return aligned(nbytes)
    except (OSError, MemoryError) as error:
        raise HostMemoryError(
            f"the host has no memory for a tensor of {nbytes} bytes ({error}): serve fewer models, or set their "
            "residency to unpinned"
        ) from None


class PrivateMemory:
    """This process's own: tensors stay where they were filled."""

    def place(self, digest: str, filled: Bytes) -> Block:
        return Block(_read_only(filled), _nothing)

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        pass


class SharedMemory:
    """One file per large tensor in a directory of /dev/shm, named by the tensor's digest; small tensors are private.

    A file gets its name when it is complete, by an atomic link, and is never written to again: there is nothing to
    wait for and nothing half-made. Whoever uses it holds a shared lock on it. Who can turn that into an exclusive
    one is the last, and removes it; so whoever has locked a file must look whether it still has its name. The
    kernel drops the locks of a process that is killed, and the files that it leaves are as good as any.

    Each tensor takes two descriptors (one from Python 3.13 on) and a mapping of the process.
    """

    def __init__(self, access: Literal["0600", "0660"] = "0600", parent: Path = Path("/dev/shm")) -> None:
        """Raises HostMemoryError if the directory is not safely ours."""
        private = access == "0600"
        owner = f"u{os.getuid()}" if private else f"g{os.getegid()}"
        self.path = parent / f"rsrv-weights-{owner}"
        self._owner = (os.getuid(), None) if private else (None, os.getegid())
        # Nobody has a reason to write to a file that has a name.
        self._file_mode = 0o400 if private else 0o440
        # Set group: what a member makes belongs to the group.
        mode = 0o700 if private else 0o2770
        with _explained(self.path):
            self.path.mkdir(mode=mode & 0o777, exist_ok=True)
            self._directory = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._directory)
        if not self._owned(found) or found.st_mode & ~mode & 0o777:
            os.close(self._directory)
            raise HostMemoryError(
                f"{self.path} must belong to {owner[0]}id {owner[1:]} and be closed to others; remove it, or turn "
                "runtime.shared_host_weights off"
            )
        if found.st_uid == os.getuid():
            os.fchmod(self._directory, mode)  # the umask took something away

    def place(self, digest: str, filled: Bytes) -> Block:
        nbytes = filled.nbytes
        if nbytes < LARGE:
            return Block(_read_only(filled), _nothing)
        with _explained(self.path, nbytes):
            while True:
                fd = self._attach(digest, nbytes)
                if fd is None:
                    fd = self._publish(digest, filled)
                # Neither: somebody made it or removed it between the two.
                if fd is not None:
                    break
            try:
                mapping = _map(fd, nbytes)
            except BaseException:
                self._release(digest, fd)
                raise
        return Block(np.frombuffer(mapping, np.uint8), lambda: self._release(digest, fd))

    def sweep(self) -> int:
        removed = 0
        try:
            names = os.listdir(self._directory)
        except OSError:
            return 0  # no descriptor is free: another time
        for name in names:
            if _NAME.fullmatch(name):
                try:
                    fd = self._open(name)
                except OSError:
                    continue  # gone meanwhile, or not for us to open
                removed += self._release(name, fd)
        return removed

    def close(self) -> None:
        os.close(self._directory)

    def _open(self, name: str) -> int:
        # Without blocking, should it be a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory)

    def _attach(self, name: str, nbytes: int) -> int | None:
        """The file of that name with our lock on it, or None if there is none."""
        try:
            fd = self._open(name)
        except FileNotFoundError:
            return None
        try:
            # Waits for whoever is about to remove it, which takes that one no time.
            fcntl.flock(fd, fcntl.LOCK_SH)
            found = os.fstat(fd)
            if not found.st_nlink:
                os.close(fd)
                return None
            if (
                not stat.S_ISREG(found.st_mode)
                or stat.S_IMODE(found.st_mode) != self._file_mode
                or not self._owned(found)
                or found.st_size != nbytes
            ):
                raise HostMemoryError(f"{self.path / name} was not made by rsrv, or changed since: remove it")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _publish(self, name: str, filled: Bytes) -> int | None:
        """A new file of that name with our lock on it, or None if somebody was faster."""
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            # Written, not mapped: a full /dev/shm is an error here, and the death of the process there.
            rest = filled.data
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fchmod(fd, self._file_mode)
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self._directory)
        except FileExistsError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _release(self, name: str, fd: int) -> bool:
        """Close a file; whether that removed it, because nobody else holds it."""
        removed = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                os.unlink(name, dir_fd=self._directory)
                removed = True
        except OSError:
            pass  # somebody holds it, or it is not ours to remove
        # Mappings share the lock with the descriptor, and outlive it.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        return removed

    def _owned(self, found: os.stat_result) -> bool:
        uid, gid = self._owner
        return found.st_uid == uid if uid is not None else found.st_gid == gid


def _nothing() -> None:
    """To release private memory: its last view does."""


def _read_only(filled: Bytes) -> Bytes:
    filled.flags.writeable = False
    return filled


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)


@contextmanager
def _explained(path: Path, nbytes: int = 0) -> Iterator[None]:
    """OSError becomes a HostMemoryError that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        remedy = "turn runtime.shared_host_weights off"
        if error.errno == errno.ENOSPC:
            reason = f"{path.parent} is full: no room for a tensor of {nbytes} bytes"
            remedy = f"make it larger (a container's --shm-size), or {remedy}"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = f"allow the process more open files (ulimit -n), or {remedy}"
        elif error.errno == errno.ENOMEM:
            remedy = f"allow the process more mappings (vm.max_map_count), or {remedy}"
        raise HostMemoryError(f"shared host weights: {reason}; {remedy}") from error

"""Host memory of tensors: private to the process, or files in /dev/shm.

Other runtimes also use these files, and the files outlive the runtime.
"""

import errno
import fcntl
import json
import logging
import mmap
import os
import re
import resource
import shutil
import stat
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import numpy as np

from rsrv.limits import total_memory
from rsrv.runtime.allocation import LARGE, Bytes, aligned
from rsrv.wire import paths
from rsrv_bundle.weights import WeightsFile

log = logging.getLogger(__name__)

_SHM = Path("/dev/shm")
_NAME = re.compile(r"[0-9a-f]{64}")
#: Mode of the files. They are read-only, because a file is not written after it is linked.
_FILE_MODE = 0o400
#: Share of all memory that copies must leave free by default. It is for processes, executables, requests, and the file cache
#: through which weights are read.
_RESERVE = 0.25
#: If less than this share of memory is free, evict host copies, then idle models, until twice as much is free. New copies
#: keep that reserve. Only below this share does the kernel slow processes down by reclaiming memory, or kill them.
_SCARCE = 1 / 16
#: Limits of the tensors that a `modest` process shares: an eighth of its descriptors (each tensor takes two), and 8000, which
#: is about an eighth of its mappings.
_MODEST_SHARE, _MAX_MODEST = 8, 8000


class HostMemoryError(Exception):
    """The host has no memory for weights, or the shared directory is not safe. The message says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorBytes:
    """Bytes of one tensor. The memory lives as long as any view of them."""

    bytes: Bytes
    #: Function that the store calls once, when it does not use the bytes any more.
    release: Callable[[], object]


class _Note(NamedTuple):
    """Content of a weights file, for the server's next runtime."""

    file: str
    form: str
    #: Digests of the file's tensors, in argument order.
    digests: Sequence[str]


def _read_note(path: Path) -> _Note:
    """Read a note. Raises OSError and ValueError."""
    with suppress(RecursionError):
        match json.loads(path.read_text()):
            # Check the digests, because they are used as file names in the directory of the tensors.
            case [str(file), str(form), [*digests]] if all(
                isinstance(digest, str) and _NAME.fullmatch(digest) for digest in digests
            ):
                return _Note(file, form, digests)
    raise ValueError("its content is not what rsrv writes")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Maximum size of all host copies, and the size of the memory, which everything else also uses."""

    #: Bytes that copies may take. Each tensor is counted once.
    copies: int
    #: Bytes of memory of the machine or the container.
    total: int

    def fits(self, copies: int, spare: int, nbytes: int) -> bool:
        """Return whether another `nbytes` may be taken. `copies`: bytes of the copies so far. `spare`: free bytes."""
        return copies + nbytes <= self.copies and spare - nbytes >= self.total * 2 * _SCARCE

    def excess(self, copies: int, spare: int, nbytes: int = 0) -> int:
        """Return the bytes that copies must free before another `nbytes` are taken. 0 or less: none."""
        return max(copies + nbytes - self.copies, self.lacking(spare - nbytes, ends=nbytes > 0))

    def lacking(self, spare: int, *, ends: bool = False) -> int:
        """Return the bytes to free because memory is short, or 0 if it is not short.

        Memory is short if less than the least share is free. `ends`: True if it is also short until twice that share is free,
        for example because a shortage has not ended.
        """
        enough = int(self.total * 2 * _SCARCE)
        return max(0, enough - spare) if ends or spare < self.total * _SCARCE else 0


def memory_limit(setting: int | None) -> MemoryLimit:
    """Return the limit for `runtime.host_memory_bytes`."""
    total = total_memory()
    return MemoryLimit(int(total * (1 - _RESERVE)) if setting is None else setting, total)


def fresh(nbytes: int) -> Bytes:
    """Return memory of this process, aligned for every element type. Raises HostMemoryError if none is left."""
    try:
        return aligned(nbytes)
    except (OSError, MemoryError) as error:
        raise HostMemoryError(
            f"the host has no memory for a tensor of {nbytes} bytes ({error}): serve fewer models, or set their "
            "residency to unpinned"
        ) from None


class HostMemory:
    """Memory for the tensors of a `HostStore`, private to this process.

    Tensors stay in the memory into which they were read. The process's end frees them.

    Every method may be called from any thread.
    """

    @property
    def left(self) -> int:
        """Bytes of tensors that an earlier runtime of this device left.

        The last sweep found them, and nothing has used them since.
        """
        return 0

    def forget_left(self, but: Collection[str | None], excess: int) -> None:
        """Remove left tensors, the oldest first, until `excess` bytes are removed.

        Keep the tensors of weights files with the versions `but`.
        """

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        """Return memory with the bytes of `filled`. It may be `filled` itself. `digest` is the SHA-256 of the bytes.

        Raises HostMemoryError.
        """
        filled.flags.writeable = False
        return TensorBytes(filled, _nothing)

    def find(self, digest: str, nbytes: int) -> TensorBytes | None:
        """Return a shared tensor that this process or another one has placed. None: there is none, or it cannot be used."""
        return None

    def recall(self, file: WeightsFile) -> Sequence[str] | None:
        """Return the digests of a file's tensors in argument order. None: no runtime of this server has noted them."""
        return None

    def note(self, file: WeightsFile, digests: Sequence[str]) -> None:
        """Record the digests of a file's tensors, so that the server's next runtime finds the tensors."""

    def forget(self, file: WeightsFile) -> None:
        """Remove the note of a file. The next runtime then does not look for the file's tensors."""

    def sweep(self) -> int:
        """Remove tensors that killed processes left and that are in no server's notes. Return the number of removed tensors."""
        return 0

    def close(self) -> None:
        """End the use of this memory, and remove all notes."""


class SharedMemory(HostMemory):
    """One file per large tensor in a directory of /dev/shm, named by the tensor's digest. Small tensors are private.

    A file is linked atomically when it is complete, and is not written again. So no process waits for another, and no process
    sees an incomplete file. Each user has a shared lock on the file. A process that can make its lock exclusive is the last
    user, and removes the file. So after locking a file, a process checks that the file is still linked. If a process is killed,
    the kernel drops its locks, and the files that the process leaves stay valid.

    So the next runtime of a server finds its predecessor's tensors. It finds their digests in notes: there is one note for
    each weights file, in a directory of the server's device. A sweep keeps the tensors in the notes of a live server even if
    nothing uses them, because a stub may register its model late, or only when a request arrives.

    Each tensor takes two descriptors (one from Python 3.13 on) and a mapping of the process.
    """

    def __init__(self, parent: Path, *, owner: str = "", modest: bool = False) -> None:
        """Create or open the directory. Raises HostMemoryError if other users own it or may enter it.

        `owner`: name of the directory of the server's device (`paths.runtime_directory`). If it is empty, there are no notes.
        If `modest`, files take at most half of the file system, because Triton also needs room there. Tensors that cannot be
        shared are then private.
        """
        self._uid = os.getuid()
        self._lock = Lock()
        self._modest = modest
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(soft // _MODEST_SHARE, _MAX_MODEST)
        #: Number of uses of each tensor that this process shares, by the tensor's digest.
        self._users: Counter[str] = Counter()
        #: Bytes of the tensors that the last sweep left for this device, and that nothing has used since.
        self._left: dict[str, int] = {}
        #: True if a tensor that cannot be shared was logged.
        self._said_private = False
        self.path = _shared_directory(parent)
        with _explained(self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._directory = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(self._directory)
        if status.st_uid != self._uid or status.st_mode & 0o077:
            os.close(self._directory)
            raise HostMemoryError(
                f"{self.path} must belong to uid {self._uid} and be closed to other users; remove it, or turn "
                "runtime.shared_host_weights off"
            )
        os.fchmod(self._directory, 0o700)  # The umask may have removed bits.
        self._notes = self.path / owner if owner else None
        if self._notes is not None:
            with _explained(self._notes):
                self._notes.mkdir(exist_ok=True)
                self._notes.chmod(0o700)

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        nbytes = filled.nbytes
        if nbytes < LARGE:
            return super().place(digest, filled)
        try:
            return self._share(digest, filled)
        except HostMemoryError as error:
            if not self._modest:
                raise
            if not self._said_private:
                self._said_private = True
                log.warning(
                    "%s. Until then, further tensors have a copy for each device, and are read again when a runtime has ended",
                    error,
                )
            return super().place(digest, filled)

    def _share(self, digest: str, filled: Bytes) -> TensorBytes:
        nbytes = filled.nbytes
        with _explained(self.path, nbytes):
            while True:
                fd = self._attach(digest, nbytes)
                if fd is None and self._modest:
                    self._leave_room(nbytes)
                if fd is None:
                    fd = self._publish(digest, filled)
                # If it is still None, another process has created or removed the file between the two calls.
                if fd is not None:
                    break
            return self._mapped(digest, fd, nbytes)

    def find(self, digest: str, nbytes: int) -> TensorBytes | None:
        if nbytes < LARGE:
            return None
        try:
            with _explained(self.path, nbytes):
                fd = self._attach(digest, nbytes)
                return None if fd is None else self._mapped(digest, fd, nbytes)
        except HostMemoryError:
            return None  # If `place` also fails, it reports the reason.

    def _mapped(self, digest: str, fd: int, nbytes: int) -> TensorBytes:
        """Return the tensor in a file that this process has locked."""
        try:
            mapping = _map(fd, nbytes)
        except BaseException:
            self._release(digest, fd)
            raise
        with self._lock:
            self._users[digest] += 1
            self._left.pop(digest, None)

        def release() -> None:
            with self._lock:
                self._users[digest] -= 1
                if not self._users[digest]:
                    del self._users[digest]
            self._release(digest, fd)

        return TensorBytes(np.frombuffer(mapping, np.uint8), release)

    # --- notes, and tensors that earlier runtimes left behind ---------------------------------------------

    def recall(self, file: WeightsFile) -> Sequence[str] | None:
        path = self._note_of(file)
        if path is None:
            return None
        try:
            note = _read_note(path)
            return note.digests if note.form == file.form else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read, so the weights are read from disk: %s", path, error)
            return None

    def note(self, file: WeightsFile, digests: Sequence[str]) -> None:
        path = self._note_of(file)
        if path is None:
            return
        try:
            paths.write_whole(path, json.dumps([str(file.path), file.form, list(digests)]))
        except OSError as error:
            log.warning("%s cannot be written, so the next runtime reads the weights again: %s", path, error)

    def forget(self, file: WeightsFile) -> None:
        path = self._note_of(file)
        if path is not None:
            with suppress(OSError):
                path.unlink()

    def _note_of(self, file: WeightsFile) -> Path | None:
        return None if self._notes is None or file.version is None else self._notes / file.version

    @property
    def left(self) -> int:
        with self._lock:
            return sum(self._left.values())

    def forget_left(self, but: Collection[str | None], excess: int) -> None:
        if self._notes is None:
            return
        left = self._left.copy()
        with suppress(OSError):
            for path in sorted(self._notes.iterdir(), key=lambda path: path.stat().st_mtime_ns):
                if excess > 0 and path.name not in but:
                    with suppress(ValueError):
                        excess -= sum(left.pop(digest, 0) for digest in _read_note(path).digests)
                    path.unlink()
        self.sweep()

    def sweep(self) -> int:
        unused = [name for name in self._names() if name not in self._users and self._is_unused(name)]
        noted = self._noted() if unused else {}
        removed = sum(self._remove(name) for name in unused if name not in noted)
        left = {}
        for name in unused:
            if noted.get(name):
                with suppress(OSError):
                    left[name] = os.stat(name, dir_fd=self._directory).st_size
        with self._lock:
            self._left = {name: nbytes for name, nbytes in left.items() if name not in self._users}
        return removed

    def _noted(self) -> dict[str, bool]:
        """Return the digests in the notes of live servers. The value is True if this server's device has noted the tensor.

        Remove outdated notes, and the notes of servers that have ended.
        """
        noted: dict[str, bool] = {}
        with suppress(OSError):
            for directory in self.path.glob("*-*-gpu*"):
                if paths.is_stale(directory.name):
                    shutil.rmtree(directory, ignore_errors=True)
                    continue
                for path in filter(lambda path: _NAME.fullmatch(path.name), directory.iterdir()):
                    with suppress(OSError, ValueError):
                        note = _read_note(path)
                        if WeightsFile.version_of(note.file) == path.name:
                            own = directory == self._notes
                            noted |= {name: own or noted.get(name, False) for name in note.digests}
                        else:
                            path.unlink()  # The bundle was replaced or removed while no runtime used it.
        return noted

    def _names(self) -> list[str]:
        """Return the names of all tensors. Return none if no descriptor is free."""
        with suppress(OSError):
            return [name for name in os.listdir(self._directory) if _NAME.fullmatch(name)]
        return []

    def _is_unused(self, name: str) -> bool:
        try:
            fd = self._open(name)
        except OSError:
            return False  # The file does not exist any more, or this process has no permission.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def _remove(self, name: str) -> bool:
        try:
            fd = self._open(name)
        except OSError:
            return False
        return self._release(name, fd)

    def close(self) -> None:
        if self._notes is not None:
            shutil.rmtree(self._notes, ignore_errors=True)
        os.close(self._directory)

    # --- files --------------------------------------------------------------------------------------------

    def _leave_room(self, nbytes: int) -> None:
        """Raise OSError if a file of this size would leave less than half of the file system free.

        Also raise OSError if this process already shares the maximum number of tensors.
        """
        if len(self._users) >= self._most:
            raise OSError(errno.EMFILE, f"{self._most} tensors are shared")
        space = os.statvfs(self._directory)
        if space.f_bavail * space.f_frsize - nbytes < space.f_blocks * space.f_frsize // 2:
            raise OSError(errno.ENOSPC, "half of it is taken")

    def _open(self, name: str) -> int:
        # O_NONBLOCK: do not block if the file is a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory)

    def _attach(self, name: str, nbytes: int) -> int | None:
        """Open and lock the file of this name. Return its descriptor, or None if it does not exist."""
        try:
            fd = self._open(name)
        except FileNotFoundError:
            return None
        try:
            # This waits only while another process removes the file, which is brief.
            fcntl.flock(fd, fcntl.LOCK_SH)
            status = os.fstat(fd)
            if not status.st_nlink:
                os.close(fd)
                return None
            if (
                not stat.S_ISREG(status.st_mode)
                or stat.S_IMODE(status.st_mode) != _FILE_MODE
                or status.st_uid != self._uid
                or status.st_size != nbytes
            ):
                raise HostMemoryError(f"{self.path / name} was not made by rsrv, or has changed: remove it")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _publish(self, name: str, filled: Bytes) -> int | None:
        """Create and lock a file of this name. Return its descriptor, or None if another process was faster."""
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            # Write the file instead of mapping it: if /dev/shm is full, `write` raises, but a store into a mapping kills
            # the process.
            remaining = filled.data
            while remaining:
                remaining = remaining[os.write(fd, remaining) :]
            os.fchmod(fd, _FILE_MODE)
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
        """Close a file, and remove it if no other process uses it. Return whether it was removed."""
        removed = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                os.unlink(name, dir_fd=self._directory)
                removed = True
        except OSError:
            pass  # Another process uses the file, or this process may not remove it.
        # Unlock explicitly: a mapping keeps the lock after the descriptor is closed.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        return removed


def _shared_directory(parent: Path) -> Path:
    """Return the directory of the tensors that this user's processes share."""
    return parent / f"rsrv-weights-u{os.getuid()}"


def open_host_memory(shared: bool | None, owner: str = "") -> HostMemory:
    """Return the memory for `runtime.shared_host_weights`. None: share as far as possible. Raises HostMemoryError.

    `owner`: see `SharedMemory`. If it is empty, the process belongs to no server, and shares only if `shared` is True.
    """
    if shared is False or not (shared or owner):
        remove_left(owner)
        return HostMemory()
    try:
        return SharedMemory(_SHM, owner=owner, modest=shared is None)
    except HostMemoryError as error:
        if shared:
            raise
        log.warning("%s. Until then, each runtime of the server keeps host copies of its own", error)
        return HostMemory()


def remove_left(owner: str) -> None:
    """Remove the notes and tensors that earlier runtimes of a server's device left, because no runtime will need them."""
    if owner and (_shared_directory(_SHM) / owner).exists():
        with suppress(HostMemoryError):
            memory = SharedMemory(_SHM, owner=owner)
            shutil.rmtree(memory.path / owner, ignore_errors=True)
            memory.sweep()
            memory.close()


def _nothing() -> None:
    """Do nothing: private memory is freed with its last view."""


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)


@contextmanager
def _explained(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Turn an OSError into a HostMemoryError that says what to do."""
    try:
        yield
    except OSError as error:
        reason = f"{path}: {error.strerror}"
        remedy = "turn runtime.shared_host_weights off"
        if error.errno == errno.ENOSPC:
            reason = f"{path.parent} has no room for a tensor of {nbytes} bytes"
            remedy = f"make it larger (a container's --shm-size), or {remedy}"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            remedy = f"allow the process more open files (ulimit -n), or {remedy}"
        elif error.errno == errno.ENOMEM:
            remedy = f"allow the process more mappings (vm.max_map_count), or {remedy}"
        raise HostMemoryError(f"shared host weights: {reason}; {remedy}") from error

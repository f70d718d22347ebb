"""Host copies of weights: one copy of each tensor, shared by all models that contain it."""

import errno
import fcntl
import logging
import mmap
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rsrv.runtime.allocation import LARGE, Bytes, PageLock, PageLocks, aligned
from rsrv_bundle import Bundle
from rsrv_bundle.weights import TensorKey, WeightsFile, as_array, changed_since_loaded, content_digest

log = logging.getLogger("rsrv.host")

_NAME = re.compile(r"[0-9a-f]{64}")
#: read-only: a file is not written after it is linked
_FILE_MODE = 0o400


class HostMemoryError(Exception):
    """The host has no memory for weights, or the shared directory is not safe; the message says what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorBytes:
    """Bytes of one tensor. The memory lives as long as any view of them."""

    bytes: Bytes
    #: releases the store's claim to them; called once
    release: Callable[[], object]


class HostMemory(Protocol):
    """Memory of the store. Every method may be called from any thread."""

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        """Return memory with the bytes of `filled`, whose SHA-256 is `digest`; it may be `filled` itself.

        Raises HostMemoryError.
        """

    def sweep(self) -> int:
        """Remove the tensors that killed processes left; return how many were removed."""

    def close(self) -> None: ...


def fresh(nbytes: int) -> Bytes:
    """Return memory of this process, aligned for every element type. Raises HostMemoryError if none is left."""
    try:
        return aligned(nbytes)
    except (OSError, MemoryError) as error:
        raise HostMemoryError(
            f"the host has no memory for a tensor of {nbytes} bytes ({error}): serve fewer models, or set their "
            "residency to unpinned"
        ) from None


class PrivateMemory:
    """Memory of this process: tensors stay where they were read into."""

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        return TensorBytes(_read_only(filled), _nothing)

    def sweep(self) -> int:
        return 0

    def close(self) -> None:
        pass


class SharedMemory:
    """One file per large tensor in a directory of /dev/shm, named by the tensor's digest; small tensors are private.

    A file is linked atomically when it is complete, and is not written again: no process waits for another, and none
    sees an incomplete file. Each user holds a shared lock on the file. A process that can make its lock exclusive is
    the last user, and removes the file; so after locking a file, a process checks that it is still linked. If a process
    is killed, the kernel drops its locks, and the files that it leaves stay valid.

    Each tensor takes two descriptors (one from Python 3.13 on) and a mapping of the process.
    """

    def __init__(self, parent: Path = Path("/dev/shm"), *, modest: bool = False) -> None:
        """Create or open the directory. Raises HostMemoryError if other users own it or may enter it.

        If `modest`, files take at most half of the file system, because Triton needs room there, too, and tensors that
        cannot be shared are private.
        """
        self._owner = os.getuid()
        self._modest = modest
        #: whether a tensor that cannot be shared was logged
        self._said_private = False
        self.path = parent / f"rsrv-weights-u{self._owner}"
        with _explained(self.path):
            self.path.mkdir(mode=0o700, exist_ok=True)
            self._directory = os.open(self.path, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self._directory)
        if found.st_uid != self._owner or found.st_mode & 0o077:
            os.close(self._directory)
            raise HostMemoryError(
                f"{self.path} must belong to uid {self._owner} and be closed to other users; remove it, or turn "
                "runtime.shared_host_weights off"
            )
        os.fchmod(self._directory, 0o700)  # the umask may have removed bits

    def place(self, digest: str, filled: Bytes) -> TensorBytes:
        nbytes = filled.nbytes
        if nbytes < LARGE:
            return TensorBytes(_read_only(filled), _nothing)
        try:
            return self._share(digest, filled)
        except HostMemoryError as error:
            if not self._modest:
                raise
            if not self._said_private:
                self._said_private = True
                log.warning("%s. Until then, each runtime of the server keeps copies of its own", error)
            return TensorBytes(_read_only(filled), _nothing)

    def _share(self, digest: str, filled: Bytes) -> TensorBytes:
        nbytes = filled.nbytes
        with _explained(self.path, nbytes):
            while True:
                fd = self._attach(digest, nbytes)
                if fd is None and self._modest:
                    self._leave_room(nbytes)
                if fd is None:
                    fd = self._publish(digest, filled)
                # None again: another process created or removed the file between the two calls.
                if fd is not None:
                    break
            try:
                mapping = _map(fd, nbytes)
            except BaseException:
                self._release(digest, fd)
                raise
        return TensorBytes(np.frombuffer(mapping, np.uint8), lambda: self._release(digest, fd))

    def sweep(self) -> int:
        removed = 0
        try:
            names = os.listdir(self._directory)
        except OSError:
            return 0  # no descriptor is free: the next sweep removes them
        for name in names:
            if _NAME.fullmatch(name):
                try:
                    fd = self._open(name)
                except OSError:
                    continue  # removed meanwhile, or not permitted
                removed += self._release(name, fd)
        return removed

    def close(self) -> None:
        os.close(self._directory)

    def _leave_room(self, nbytes: int) -> None:
        """Raise OSError if a file of this size would leave less than half of the file system."""
        found = os.statvfs(self._directory)
        if found.f_bavail * found.f_frsize - nbytes < found.f_blocks * found.f_frsize // 2:
            raise OSError(errno.ENOSPC, "half of it is taken")

    def _open(self, name: str) -> int:
        # Do not block if it is a pipe.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=self._directory)

    def _attach(self, name: str, nbytes: int) -> int | None:
        """Open and lock the file of that name; return its descriptor, or None if it does not exist."""
        try:
            fd = self._open(name)
        except FileNotFoundError:
            return None
        try:
            # Waits only for a process that is removing the file, which is brief.
            fcntl.flock(fd, fcntl.LOCK_SH)
            found = os.fstat(fd)
            if not found.st_nlink:
                os.close(fd)
                return None
            if (
                not stat.S_ISREG(found.st_mode)
                or stat.S_IMODE(found.st_mode) != _FILE_MODE
                or found.st_uid != self._owner
                or found.st_size != nbytes
            ):
                raise HostMemoryError(f"{self.path / name} was not made by rsrv, or has changed: remove it")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _publish(self, name: str, filled: Bytes) -> int | None:
        """Create and lock a file of that name; return its descriptor, or None if another process was faster."""
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._directory)
        try:
            # Written, not mapped: if /dev/shm is full, `write` raises, while a store into a mapping kills the process.
            rest = filled.data
            while rest:
                rest = rest[os.write(fd, rest) :]
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
        """Close a file, and remove it if no other process uses it; return whether it was removed."""
        removed = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                os.unlink(name, dir_fd=self._directory)
                removed = True
        except OSError:
            pass  # another process uses it, or may alone remove it
        # Unlock explicitly: a mapping keeps the lock after the descriptor is closed.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
        return removed


def open_host_memory(shared: bool | None) -> HostMemory:
    """Return the memory for `runtime.shared_host_weights`; None: shared as far as possible. Raises HostMemoryError."""
    if shared is False:
        return PrivateMemory()
    try:
        return SharedMemory(modest=shared is None)
    except HostMemoryError as error:
        if shared:
            raise
        log.warning("%s. Until then, each runtime of the server keeps host copies of its own", error)
        return PrivateMemory()


def _nothing() -> None:
    """Do nothing: private memory is freed with its last view."""


def _read_only(filled: Bytes) -> Bytes:
    filled.flags.writeable = False
    return filled


def _map(fd: int, nbytes: int) -> mmap.mmap:
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ, trackfd=False)
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)


@contextmanager
def _explained(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Raise a HostMemoryError that says what to do in place of an OSError."""
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


Array = npt.NDArray[Any]


class HostTensor(NamedTuple):
    """One weight of a model."""

    key: TensorKey
    nbytes: int


@dataclass(frozen=True, slots=True)
class HostCounts:
    """Sizes of the host copies."""

    #: bytes of the weights of all models with a host copy, each model counted in full
    logical: int
    #: bytes of the distinct tensors that hold them
    physical: int
    tensors: int


@dataclass(slots=True, eq=False)
class _Held:
    block: TensorBytes
    #: references of models with a host copy
    count: int = 0


class HostStore:
    """Host copies of a runtime's tensors. Every method may be called from any thread.

    `page_lock` is called once for each large mapping, and the function that it returns before the mapping is removed.
    """

    def __init__(self, memory: HostMemory, page_lock: PageLock | None = None) -> None:
        self._memory = memory
        self._page_lock = page_lock
        self._locks = PageLocks()
        # Guards the fields below. Held only briefly: no thread reads, hashes or copies tensors under it.
        self._lock = Lock()
        self._held: dict[str, _Held] = {}
        self._closed = False
        self._open: set[HostWeights] = set()
        self._kept: set[HostWeights] = set()
        self._logical = 0
        self._physical = 0

    def open(self, bundle: Bundle, *, keep: bool) -> "HostWeights":
        """Read every weight once, to identify it by content, and keep a host copy if `keep`.

        Raises HostMemoryError, and BundleError if the file is removed, has changed since the bundle was read, or does
        not match the manifest's checksum.
        """
        file = WeightsFile(bundle)
        tensors: dict[int, HostTensor] = {}
        try:
            for index, filled in file.read_all(fresh):
                weight, digest = bundle.weights[index], content_digest(filled)
                if keep and not self._take(digest):
                    self._put(digest, filled)
                tensors[index] = HostTensor(TensorKey(digest, weight.dtype, weight.shape), weight.nbytes)
        except BaseException:
            if keep:
                self._give(tensors.values())
            file.close()
            raise
        weights = HostWeights(self, file, (tensors[index] for index in range(len(tensors))))
        with self._lock:
            self._open.add(weights)
        if keep:
            self._keeps(weights)
        return weights

    @property
    def counts(self) -> HostCounts:
        with self._lock:
            return HostCounts(self._logical, self._physical, len(self._held))

    def sweep(self) -> int:
        """Remove shared tensors that no runtime uses; return how many. Call it when the models that share them are loaded."""
        return self._memory.sweep()

    def close(self) -> None:
        """Close all weights. Do not use the store afterwards; arrays that were handed out stay valid.

        If another thread is opening or keeping weights, that raises HostMemoryError.
        """
        for weights in list(self._open):
            weights.close()
        with self._lock:
            self._closed = True
            rest, self._held, self._physical = list(self._held.values()), {}, 0
        for held in rest:
            held.block.release()
        self._memory.close()

    def validate(self) -> None:
        """Raise AssertionError if the counts are wrong; reads every byte. No other thread may use the store."""
        with self._lock:
            assert self._kept <= self._open
            references = Counter(t.key.digest for weights in self._kept for t in weights.tensors)
            counts = {digest: held.count for digest, held in self._held.items()}
            assert counts == references, "the count of a tensor is its number of references"
            assert self._logical == sum(weights.nbytes for weights in self._kept)
            assert self._physical == sum(held.block.bytes.nbytes for held in self._held.values())
            for digest, held in self._held.items():
                assert content_digest(held.block.bytes) == digest, "a tensor's bytes never change"

    def _find(self, digest: str) -> Bytes | None:
        with self._lock:
            held = self._held.get(digest)
            return None if held is None else held.block.bytes

    def _take(self, digest: str) -> bool:
        """Add a reference to a tensor; return whether the store has it."""
        with self._lock:
            held = self._held.get(digest)
            if held is not None:
                held.count += 1
            return held is not None

    def _put(self, digest: str, filled: Bytes) -> None:
        """Store a tensor, with its first reference. Raises HostMemoryError."""
        block = self._memory.place(digest, filled)
        if self._page_lock is not None:
            self._locks.add(block.bytes, self._page_lock)
        with self._lock:
            held = self._held.get(digest)
            if held is None and not self._closed:
                held = self._held[digest] = _Held(block)
                self._physical += block.bytes.nbytes
            if held is not None:
                held.count += 1
        if held is None:
            block.release()
            raise HostMemoryError("the runtime is ending")
        if held.block is not block:
            block.release()  # another thread has stored the same tensor meanwhile

    def _give(self, tensors: Iterable[HostTensor]) -> None:
        """Remove a reference to each tensor, and release those without any."""
        unused = []
        with self._lock:
            for tensor in tensors if not self._closed else ():
                held = self._held[tensor.key.digest]
                held.count -= 1
                if not held.count:
                    del self._held[tensor.key.digest]
                    self._physical -= held.block.bytes.nbytes
                    unused.append(held.block)
        for block in unused:
            block.release()

    def _keeps(self, weights: "HostWeights") -> bool:
        """Note that all references of these weights are taken; return False if they were already."""
        with self._lock:
            if weights in self._kept:
                return False
            self._kept.add(weights)
            self._logical += weights.nbytes
            return True

    def _drops(self, weights: "HostWeights") -> bool:
        """Note that all references of these weights are dropped; return False if they have none."""
        with self._lock:
            if weights not in self._kept:
                return False
            self._kept.remove(weights)
            self._logical -= weights.nbytes
            return True

    def _forget(self, weights: "HostWeights") -> None:
        with self._lock:
            self._open.discard(weights)


class HostWeights:
    """Weights of one model on the host. Every method except `close` may be called from any thread."""

    def __init__(self, store: HostStore, file: WeightsFile, tensors: Iterable[HostTensor]) -> None:
        self._store = store
        self._file = file
        #: in argument order
        self.tensors = tuple(tensors)
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        #: each tensor once -> its bytes; and their sum, the device bytes of a load that finds none of them resident
        self.distinct = {tensor.key: tensor.nbytes for tensor in self.tensors}
        self.device_bytes = sum(self.distinct.values())

    @property
    def kept(self) -> bool:
        """True if the host keeps a copy for this model."""
        return self in self._store._kept

    def keep(self) -> None:
        """Keep a host copy; of tensors that it keeps for other models, the store only adds a reference.

        Raises HostMemoryError, and BundleError if the file's weights have changed since it was opened; then nothing has
        changed.
        """
        if self.kept:
            return
        taken: list[HostTensor] = []
        try:
            for index, tensor in enumerate(self.tensors):
                if not self._store._take(tensor.key.digest):
                    filled = fresh(tensor.nbytes)
                    self._file.read_into(index, filled, digest=tensor.key.digest)
                    if content_digest(filled) != tensor.key.digest:
                        raise changed_since_loaded()
                    self._store._put(tensor.key.digest, filled)
                taken.append(tensor)
        except BaseException:
            self._store._give(taken)
            raise
        if not self._store._keeps(self):
            self._store._give(taken)  # another thread has kept them meanwhile

    def drop(self) -> None:
        """Drop the host copy; the memory of tensors that no other model keeps returns to the system."""
        if self._store._drops(self):
            self._store._give(self.tensors)

    def read(self, index: int) -> Array:
        """Return a weight as a read-only array: of the host copy or, without one, from the file.

        The memory lives as long as the array. Raises HostMemoryError, and BundleError if there is no copy and the
        weight in the file has changed since it was opened.
        """
        (digest, dtype, shape), nbytes = self.tensors[index]
        raw = self._store._find(digest)
        if raw is None:
            raw = fresh(nbytes)
            self._file.read_into(index, raw, digest=digest)
        return as_array(raw, dtype, shape)

    def close(self) -> None:
        """Drop the host copy and close the file. No thread may be reading; further calls do nothing."""
        self.drop()
        self._store._forget(self)
        self._file.close()

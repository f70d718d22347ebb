"""Compilation cache on disk. A damaged entry costs only a new compilation.

A killed process, a full disk or a bad disk may damage an entry.

jax's own store writes in place, never replaces an entry, and has a checksum only where it compresses with zlib. A
damaged executable crashes the process or computes wrong results. So jax uses this store: each entry has a digest, is
written to another file and renamed, and is replaced if it is damaged.
"""

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from rsrv.limits import total_memory

log = logging.getLogger(__name__)

#: Suffix that distinguishes the entries from jax's own in the same directory.
_SUFFIX = "-checked"
_UNFINISHED = ".unfinished-"
#: At this age in seconds, no process can still be writing an unfinished entry.
_ABANDONED_S = 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
#: Maximum number of bytes of the entries in a server's own directory.
_OWN_BYTES = 256 << 20
#: Maximum size of the entries in a server's own directory, as a share of the memory. This directory may be in a container's
#: /tmp, which is often in the memory of the container.
_OWN_SHARE = 1 / 16


class CompileCacheError(Exception):
    """Other users own the directory of compiled executables, or can write to it."""


class NotCached(Exception):
    """The cache has no entry where one is required."""


class _Access(threading.local):
    """Each thread's use of the cache. These are the defaults; see `offering`, `requiring` and `bypassing`."""

    entry: bytes | None = None
    key = ""
    required = False
    bypassed = False


class CompileCache:
    """Cache that implements jax's `CacheInterface`. If it fails, models are compiled: `get` raises only within `requiring`.

    Entries that cannot be written to the directory are kept in the server's own directory, up to a limit. The next runtime
    finds them there, but the next server does not. If there is no directory at all, the cache has only the offered entries.
    """

    def __init__(
        self,
        directory: Path | None,
        own: Path | None = None,
        obstacle: str = "",
        own_bytes: int | None = None,
    ) -> None:
        """`obstacle` says why the configured directory is not used. `own_bytes` limits the server's own directory."""
        self._path = directory
        self._own = own
        self._own_bytes = (
            min(_OWN_BYTES, int(total_memory() * _OWN_SHARE)) if own_bytes is None else own_bytes
        )
        self._obstacle = obstacle
        self._logged: set[str] = set()
        self._thread = _Access()
        for folder in self._folders:
            for left in folder.glob(f"{_UNFINISHED}*"):
                with suppress(OSError):
                    if time.time() - left.stat().st_mtime > _ABANDONED_S:
                        left.unlink()

    @property
    def _folders(self) -> list[Path]:
        return [folder for folder in (self._path, self._own) if folder is not None]

    @property
    def keeps(self) -> bool:
        """True if there is a directory for entries."""
        return bool(self._folders)

    @property
    def obstacle(self) -> str:
        """Reason why entries do not outlive the server, or "" if they do, or if no cache is configured."""
        return self._obstacle

    def get(self, key: str) -> bytes | None:
        """Return the entry of a key, or None if it is missing, unreadable or damaged.

        Within `requiring`, raise NotCached instead.
        """
        if self.bypassed:
            return None
        self._thread.key = key
        entry = self._thread.entry
        if entry is None:
            values = (self._read(folder / f"{key}{_SUFFIX}") for folder in self._folders)
            entry = next((value for value in values if value is not None), None)
        if entry is None and self._thread.required:
            raise NotCached(key)
        return entry

    def _read(self, path: Path) -> bytes | None:
        try:
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s cannot be read (%s), so it is compiled again", path, error.strerror)
            return None
        digest, value = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if hashlib.sha256(value).digest() != digest:
            log.warning("%s is damaged, so it is compiled again", path)
            return None
        if path.parent == self._own:
            with suppress(OSError):
                os.utime(path)  # The least recently used entries are removed first.
        return value

    def offering(self, entry: bytes | None) -> AbstractContextManager[None]:
        """Return a context in which the calling thread gets this entry for each key, unless the entry is None."""
        return self._changed("entry", entry)

    def requiring(self) -> AbstractContextManager[None]:
        """Return a context in which each missing entry raises NotCached in the calling thread, so that it compiles nothing."""
        return self._changed("required", True)

    def bypassing(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread neither finds nor stores entries."""
        return self._changed("bypassed", True)

    @property
    def key(self) -> str:
        """Key that the calling thread asked for last."""
        return self._thread.key

    @property
    def bypassed(self) -> bool:
        """True if the calling thread compiles without the cache."""
        return self._thread.bypassed

    @contextmanager
    def _changed(self, name: str, value: object) -> Iterator[None]:
        """Change an attribute of the calling thread's access during a context. Afterwards, it has its default again."""
        setattr(self._thread, name, value)
        try:
            yield
        finally:
            delattr(self._thread, name)

    def put(self, key: str, value: bytes) -> None:
        """Store the entry of a key, and replace an earlier one."""
        if self.bypassed:
            return
        if self._path is not None:
            why = _write(self._path, key, value)
            if not why:
                self._obstacle = ""
                return
            self._obstacle = f"{self._path} cannot be written: {why}"
            self._log_once(f"{self._obstacle}; executables {_kept(self._own)}")
        if self._own is not None:
            self._put_own(self._own, key, value)

    def _put_own(self, own: Path, key: str, value: bytes) -> None:
        """Store an entry in the server's own directory. Remove the least recently used entries if there is no room."""
        if len(value) > self._own_bytes:
            self._log_once(
                f"an executable of {len(value)} bytes is not kept: {own} is limited to {self._own_bytes} bytes"
            )
            return
        try:
            own.mkdir(mode=0o700, exist_ok=True)
            check_private(own)
            entries = [(entry.stat(), entry) for entry in own.glob(f"*{_SUFFIX}")]
        except (OSError, CompileCacheError) as error:  # Another runtime may replace an entry.
            self._log_once(f"executables are not kept in {own}: {error}")
            return
        used = sum(status.st_size for status, _ in entries) + len(value) + _DIGEST_BYTES
        for status, entry in sorted(entries, key=lambda entry: entry[0].st_mtime_ns):
            if used <= self._own_bytes:
                break
            entry.unlink(missing_ok=True)
            used -= status.st_size
        if why := _write(own, key, value):
            self._log_once(f"{own} cannot be written: {why}")

    def _log_once(self, text: str) -> None:
        """Log a warning once: a model may have dozens of executables."""
        if text not in self._logged:
            self._logged.add(text)
            log.warning("%s", text)


def _kept(own: Path | None) -> str:
    return "are not kept" if own is None else "are kept until the server ends"


def _write(folder: Path, key: str, value: bytes) -> str:
    """Write an entry in one step. Return the reason if that fails, or ""."""
    unfinished = None
    try:
        fd, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=folder)
        with open(fd, "wb") as file:
            file.write(hashlib.sha256(value).digest())
            file.write(value)
        os.replace(unfinished, folder / f"{key}{_SUFFIX}")
    except OSError as error:
        if unfinished is not None:
            with suppress(OSError):
                os.unlink(unfinished)
        return error.strerror or str(error)
    return ""


def check_private(directory: Path) -> None:
    """Close a directory to other users, because the runtime executes the files in it.

    Raises CompileCacheError if the directory belongs to another user, or if other users can write to it. Raises OSError if it
    does not exist.
    """
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileCacheError(
            f"runtime.compilation_cache_dir {directory} must belong to uid {os.getuid()} and be writable "
            "by no other user, who could run code in the runtime. Change its owner and mode, or set another directory"
        )
    if status.st_mode & 0o077:
        directory.chmod(0o700)


def open_cache(configured: Path | None, own: Path | None = None) -> CompileCache:
    """Return the cache in the configured directory. The directory is created, and closed to other users.

    Entries that cannot be stored there are stored in `own`, a folder of the server's private directory. Without a configured
    directory, no entries are stored. Raises CompileCacheError if other users can write to the configured directory.
    """
    if configured is None:
        return CompileCache(None)
    obstacle = ""
    directory: Path | None = configured
    try:
        directory = configured.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
        if not os.access(directory, os.W_OK | os.X_OK):
            obstacle = f"{directory} cannot be written: its file system, or its mode, allows only reading"
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        directory, obstacle = None, str(error)
    if obstacle:
        log.warning(
            "runtime.compilation_cache_dir cannot be used, so executables %s: %s", _kept(own), obstacle
        )
    return CompileCache(directory, own, obstacle)

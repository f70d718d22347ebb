"""Compilation cache on disk: an entry damaged by a killed process, a full disk or a bad one costs a compilation.

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

log = logging.getLogger("rsrv.compiled")

#: distinguishes the entries from jax's own in the same directory
_SUFFIX = "-checked"
_UNFINISHED = ".unfinished-"
#: age from which no process still writes an unfinished entry
_ABANDONED_S = 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size


class CompileCacheError(Exception):
    """Other users own the directory of compiled executables, or can write to it."""


class NotCached(Exception):
    """The cache has no entry where one is required."""


class _Access(threading.local):
    """How each thread uses the cache, by default; see `offering`, `requiring` and `bypassing`."""

    entry: bytes | None = None
    key = ""
    required = False
    bypassed = False


class CompileCache:
    """jax's `CacheInterface`. Methods raise nothing unless an entry is required: if the cache fails, models are compiled.

    Without a directory it holds nothing but what is offered.
    """

    def __init__(self, directory: Path | None) -> None:
        self._path = directory
        self._thread = _Access()
        if directory is None:
            return
        for left in directory.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED_S:
                    left.unlink()

    def get(self, key: str) -> bytes | None:
        """Return the entry of a key; None if it is missing, unreadable or damaged. Raises NotCached in `requiring`."""
        if self.bypassed:
            return None
        self._thread.key = key
        entry = self._thread.entry
        if entry is None and self._path is not None:
            entry = self._read(self._path / f"{key}{_SUFFIX}")
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
        return value

    def offering(self, entry: bytes | None) -> AbstractContextManager[None]:
        """Return this entry, unless it is None, for each key that the calling thread asks for."""
        return self._changed("entry", entry)

    def requiring(self) -> AbstractContextManager[None]:
        """Raise NotCached for each missing entry that the calling thread asks for, so that it compiles nothing."""
        return self._changed("required", True)

    def bypassing(self) -> AbstractContextManager[None]:
        """Neither find nor keep entries for the calling thread."""
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
        """Change an attribute of the calling thread's access; afterwards it has its default."""
        setattr(self._thread, name, value)
        try:
            yield
        finally:
            delattr(self._thread, name)

    def put(self, key: str, value: bytes) -> None:
        """Store the entry of a key, and replace an earlier one."""
        if self._path is None or self.bypassed:
            return
        unfinished = None
        try:
            fd, unfinished = tempfile.mkstemp(prefix=_UNFINISHED, dir=self._path)
            with open(fd, "wb") as file:
                file.write(hashlib.sha256(value).digest())
                file.write(value)
            os.replace(unfinished, self._path / f"{key}{_SUFFIX}")
        except OSError as error:
            log.warning("%s: %d bytes cannot be kept: %s", self._path, len(value), error.strerror)
            if unfinished is not None:
                with suppress(OSError):
                    os.unlink(unfinished)


def check_private(directory: Path) -> None:
    """Close a directory to other users, because the executables in it are run.

    Raises CompileCacheError if other users could write to it until now, OSError if it does not exist.
    """
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CompileCacheError(
            f"runtime.compilation_cache_dir {directory} must belong to uid {os.getuid()} and be writable "
            "by no other user, who could run code in the runtime. Change its owner and mode, or set another directory"
        )
    if found.st_mode & 0o077:
        directory.chmod(0o700)


def prepare_cache_directory(directory: Path) -> Path | None:
    """Create the cache's directory, closed to other users. Returns None if that fails.

    Raises CompileCacheError if other users can write there.
    """
    try:
        directory = directory.expanduser()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_private(directory)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        log.warning("runtime.compilation_cache_dir is not used, so every start compiles: %s", error)
        return None
    return directory

"""The compilation cache on disk: what a killed process, a full disk or a bad one leaves there costs a compilation.

jax's own store writes in place, never replaces what is there, and has a checksum only where it compresses with zlib.
A damaged executable that it loads ends the process or computes something else. So jax keeps its entries here: each
with a digest, written aside and renamed into place, and replaced when it turns out to be bad.
"""

import hashlib
import logging
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("rsrv.compiled")

#: what jax's own entries, in the same directory, are not called
_SUFFIX = "-checked"
_UNFINISHED = ".unfinished-"
#: seconds after which nobody finishes it any more
_ABANDONED = 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size


class CompileCacheError(Exception):
    """The directory for compiled executables is not safely ours."""


class CompileCache:
    """What jax calls a `CacheInterface`. Raises nothing: a cache that fails is none."""

    def __init__(self, directory: Path) -> None:
        self._path = directory
        for left in directory.glob(f"{_UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink()

    def get(self, key: str) -> bytes | None:
        """What was put there under that key; None if nothing was, or something else than what was put is there."""
        path = self._path / f"{key}{_SUFFIX}"
        try:
            entry = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: cannot be read (%s): compiled anew", path, error.strerror)
            return None
        digest, value = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if hashlib.sha256(value).digest() != digest:
            log.warning("%s: damaged: compiled anew", path)
            return None
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, in the place of what may be there."""
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
    """Have only this user enter a directory, for what lies in it is run.

    Raises CompileCacheError if others could write to it so far, OSError if it is not there.
    """
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise CompileCacheError(
            f"runtime.compilation_cache_dir {directory} must belong to uid {os.getuid()} and be writable "
            "by nobody else: whoever can write it can run code here"
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
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        log.warning("runtime.compilation_cache_dir: every start compiles anew: %s", error)
        return None
    return directory

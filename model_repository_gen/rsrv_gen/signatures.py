"""Signatures of directories. A signature is computed from the names, sizes, times and inodes of all files. No file is read."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rsrv.native import GUARD, LIBRARY

#: Smaller files are always copied instead of linked, because editing a manifest in place must not change the served model.
LINK_BYTES = 2**20
#: Errors of reading a file that last until the file is changed. Such a file gets an entry in the signature; after any other
#: error, the directory has no signature.
_BROKEN = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM)

#: Signature of a directory. Directories with different files have different signatures. None: the directory could not be read
#: completely.
Signature = str | None


def sign(folder: str | os.PathLike[str], *, linked: bool) -> Signature:
    """Return the signature of a directory, or None if it cannot be read.

    `linked` is True if rsrv-gen makes hard links of large files.
    """
    try:
        return signature(_files(os.fspath(folder), "", linked))
    except (OSError, RecursionError):  # A RecursionError means that a thousand directories are nested.
        return None


def signature(files: Iterable[tuple[str, int, int, int, int]]) -> str:
    """Return the signature of these files.

    Each file is given by its relative name, its size, its mtime and ctime in nanoseconds, and its inode.
    """
    total = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        total.update(f"{file!r}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def last_change(folder: Path) -> int:
    """Return the latest mtime or ctime of a directory's files in nanoseconds. Raises OSError."""
    return max((max(mtime, ctime) for _, _, mtime, ctime, _ in _files(str(folder), "", False)), default=0)


def _files(folder: str, prefix: str, linked: bool) -> Iterator[tuple[str, int, int, int, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir() and (entry.name == "__pycache__" or not entry.is_symlink()):
                if entry.name != "__pycache__":
                    yield from _files(entry.path, f"{name}/", linked)
                continue
            try:
                status = entry.stat()
            except OSError as error:
                if error.errno not in _BROKEN:
                    raise
                yield name, -1, 0, 0, 0
                continue
            # A hard link changes the ctime of a file. Ignore such changes by rsrv-gen itself.
            shared = linked and (status.st_size >= LINK_BYTES or entry.name in (LIBRARY.name, GUARD))
            ctime = 0 if shared else status.st_ctime_ns
            yield name, status.st_size, status.st_mtime_ns, ctime, status.st_ino

"""Folders next to a model repository.

They hold new versions until these are complete, and old versions until no rollback is possible. They are not inside the
repository, because Triton treats every folder there as a model, even a hidden one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rsrv_gen.plan import VERSION

#: File next to a replaced version that names the version that replaced it. No model's name contains a "~".
_RECORD = "put~"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def version_of(folder: Path) -> tuple[int, int] | None:
    """Return a value that is unique among all directories that were or will be in the model's place. None without a directory."""
    try:
        status = (folder / VERSION).stat()
    except OSError:
        return None
    # Neither `touch` nor an exchange with another directory changes these two.
    return status.st_ino, status.st_ctime_ns


class Replaced:
    """New version of a model, and the version that it replaced. One of the two must be removed.

    The pair survives the process that installed it: `unfinished` finds it.
    """

    def __init__(self, repository: Path, name: str, aside: SwapFolder, version: object) -> None:
        self.name = name
        self._target = repository / name
        self._aside = aside
        self._version = version

    def forget(self) -> None:
        """Remove the replaced version."""
        self._aside.remove()

    def undo(self) -> bool:
        """Restore the replaced version, if there was one. Return False if the model has changed since the replacement.

        Raises OSError if that is impossible. The replaced version is kept then.
        """
        with locked(self._target.parent):
            ours = version_of(self._target) == self._version
            old = self._aside.path / self.name
            if ours and old.exists():
                exchange(old, self._target)
            elif ours:
                self._target.rename(old)
        self._aside.remove()
        return ours

    def leave(self) -> None:
        """Let the next process decide whether the replacement is kept or undone."""
        self._aside.leave()


def unfinished(repository: Path) -> dict[str, Replaced]:
    """Return, by model, the replacements of processes that ended before they decided. The caller must decide now.

    This waits until no rsrv-gen works on the repository.
    """
    repository = repository.absolute()
    with locked(repository):
        return {put.name: put for put in clear_away(repository)}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's exclusive lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class SwapFolder:
    """Directory for versions that are not in their place, on the repository's file system.

    It is locked while a process uses it.
    """

    def __init__(self, path: Path) -> None:
        """Raise OSError if another process uses it."""
        self.path = path
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    @classmethod
    def new(cls, repository: Path) -> SwapFolder:
        return cls(Path(tempfile.mkdtemp(prefix=_prefix(repository), dir=place_beside(repository))))

    def install(self, name: str, repository: Path) -> Replaced:
        """Exchange the complete directory `name` in this folder with the model."""
        version = version_of(self.path / name)
        (self.path / _RECORD).write_text(json.dumps([name, version]))
        self.swap(name, repository)
        return Replaced(repository, name, self, version)

    def swap(self, name: str, repository: Path) -> None:
        """Exchange the complete directory `name` with the model. Keep no record that could undo it.

        If this process crashes, the remains in this folder are removed.
        """
        new, target = self.path / name, repository / name
        if target.exists():
            exchange(new, target)
        else:
            new.rename(target)

    def remove(self) -> None:
        # Remove the record first. With it, a partly removed version would count as a model after a crash.
        with suppress(OSError):
            (self.path / _RECORD).unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        os.close(self._lock)


def place_beside(repository: Path) -> Path:
    """Return the folder for files that belong to a repository but are not part of it."""
    # The parent of a mount point is on another file system, where a rename is impossible. A parent of another user accepts no
    # folder. In both cases, use a hidden folder inside the repository, although a polling Triton logs an error while it exists.
    foreign = repository.parent.stat().st_dev != repository.stat().st_dev
    inside = foreign or not os.access(repository.parent, os.W_OK)
    return repository if inside else repository.parent


def _prefix(repository: Path) -> str:
    """Return the prefix of the names of a repository's swap folders."""
    return f".{repository.name}.rsrv-gen-"


def clear_away(repository: Path) -> list[Replaced]:
    """Remove the remains of crashes from the locked repository. Returns the replacements that can be undone."""
    replaced: list[Replaced] = []
    for left in place_beside(repository).glob(f"{glob.escape(_prefix(repository))}*"):
        try:
            aside = SwapFolder(left)
        except OSError:
            continue  # Another process uses this folder.
        for spare in left.glob(".*"):
            name = spare.name.removeprefix(".")
            target = repository / name
            spare.rename(left / name if target.exists() else target)
        name, version = _recorded(left)
        if version is not None and version_of(repository / name) == version:
            replaced.append(Replaced(repository, name, aside, version))
        else:
            aside.remove()
    return replaced


def leave_open(repository: Path, puts: Iterable[Replaced]) -> list[str]:
    """Leave the choice of the version to the next server. Returns the models whose old version was removed."""
    lost = []
    for put in puts:
        if place_beside(repository) == repository:
            # If the old version were kept, no server would start, because Triton would treat it as a model that cannot be loaded.
            put.forget()
            lost.append(put.name)
        else:
            put.leave()
    return lost


def _recorded(aside: Path) -> tuple[str, tuple[int, int] | None]:
    """Return the model that replaced the version in this folder, and the model's version.

    The version is None if it is incomplete.
    """
    try:
        name, (inode, changed) = json.loads((aside / _RECORD).read_text())
    except (OSError, ValueError, TypeError):
        return "", None
    return name, (inode, changed)


def exchange(first: Path, second: Path) -> None:
    """Exchange two directories, atomically where the kernel and the file system can."""
    if _rename_exchange(first, second):
        return
    # For a moment, `second` does not exist. If Triton polls at that moment, it unloads the model and loads it again. After a
    # crash at that moment, the next rsrv-gen finds the directory by the dot in its name, and restores it.
    spare = first.with_name(f".{first.name}")
    second.rename(spare)
    try:
        first.rename(second)
    except OSError:
        spare.rename(second)
        raise
    spare.rename(first)


def _rename_exchange(first: Path, second: Path) -> bool:
    """Exchange atomically. Returns False if the kernel or the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = library.renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))

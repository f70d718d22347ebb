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

#: File next to a replaced version. It names the new version. No model's name contains a "~".
_RECORD = "put~"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def version_of(folder: Path) -> tuple[int, int] | None:
    """Return an identifier of the model's directory that no earlier or later directory of this model has.

    Return None if there is no directory.
    """
    try:
        status = (folder / VERSION).stat()
    except OSError:
        return None
    # Neither `touch` nor an exchange of directories changes the inode and the ctime of the version's folder.
    return status.st_ino, status.st_ctime_ns


class Replaced:
    """New version of a model, and the version that it replaced. The caller must call `forget`, `undo` or `leave`.

    If the process ends before that, the next process gets this object from `unfinished`.
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
        """Restore the replaced version, or remove the model if it is new.

        If the model was changed again after the replacement, leave it as it is, and return False. Raises OSError if the version
        cannot be restored; the version then remains in the swap folder.
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
    """Return, by model, the replacements that ended processes neither kept nor undid. The caller must now keep or undo them.

    This function waits until no rsrv-gen works on the repository.
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
    """Directory for new and replaced versions of models, on the repository's file system.

    A process that uses the directory holds its lock.
    """

    def __init__(self, path: Path) -> None:
        """Lock the directory. Raise OSError if another process uses it."""
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
        # Remove the record first. If the record were still there after a crash, a partly removed version would be restored.
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
    """Keep the old versions, so that the next server decides which version it serves.

    Return the models whose old version was removed, because the swap folder is inside the repository.
    """
    lost = []
    for put in puts:
        if place_beside(repository) == repository:
            # If the old version were kept here, no server would start: Triton would treat its folder as a model that cannot be
            # loaded.
            put.forget()
            lost.append(put.name)
        else:
            put.leave()
    return lost


def _recorded(aside: Path) -> tuple[str, tuple[int, int] | None]:
    """Return the name and the identifier of the model that replaced the version in this folder.

    The identifier is None if the folder has no complete record.
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

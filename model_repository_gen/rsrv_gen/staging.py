"""What is kept beside a model repository: new versions until they are whole, old ones until nobody may want them back.

Not in it, because Triton takes every folder there for a model, hidden ones too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rsrv_gen.plan import VERSION

#: Beside what a model has replaced; no model's name has a "~".
_RECORD = "put~"

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def version_of(folder: Path) -> tuple[int, int] | None:
    """What tells a model's directory from every other that was or will be in its place; None when there is none."""
    try:
        status = (folder / VERSION).stat()
    except OSError:
        return None
    # Neither `touch` nor an exchange with another directory changes these two.
    return status.st_ino, status.st_ctime_ns


class Replaced:
    """A model that was put, and what was in its place before: one of both has to go.

    It outlasts the process that put it: then `unfinished` finds it.
    """

    def __init__(self, repository: Path, name: str, aside: SwapFolder, version: object) -> None:
        self.name = name
        self._target = repository / name
        self._aside = aside
        self._version = version

    def forget(self) -> None:
        """Removes what was there before."""
        self._aside.remove()

    def undo(self) -> bool:
        """Puts back what was there before, if only nothing. False if somebody has changed the model since.

        Raises OSError if that can't be done; what was there before stays aside then.
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
        """Leaves it to others to end this."""
        self._aside.leave()


def unfinished(repository: Path) -> dict[str, Replaced]:
    """What was put by processes that ended before they could forget or undo it, by model. Now it is the caller's.

    Waits until no rsrv-gen works on the repository.
    """
    repository = repository.absolute()
    with locked(repository):
        return {put.name: put for put in clear_away(repository)}


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps all others out who do so."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


class SwapFolder:
    """A directory on the repository's file system that is no model's. It is locked for as long as somebody uses it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, if somebody else uses it."""
        self.path = path
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise

    @classmethod
    def new(cls, repository: Path) -> SwapFolder:
        place, prefix = _where_aside(repository)
        return cls(Path(tempfile.mkdtemp(prefix=prefix, dir=place)))

    def install(self, name: str, repository: Path) -> Replaced:
        """Exchanges the directory `name` in here, which is whole, with the model."""
        new, target = self.path / name, repository / name
        version = version_of(new)
        (self.path / _RECORD).write_text(json.dumps([name, version]))
        if target.exists():
            exchange(new, target)
        else:
            new.rename(target)
        return Replaced(repository, name, self, version)

    def remove(self) -> None:
        # First: with it, the half that a crash leaves would count as a model.
        with suppress(OSError):
            (self.path / _RECORD).unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        os.close(self._lock)


def _where_aside(repository: Path) -> tuple[Path, str]:
    """A folder, and how names in it start that belong to this repository."""
    # A mount point's parent is another file system, and a rename does not cross it. Then a hidden folder inside
    # must do, though a polling Triton complains in its log for the moment that it is there.
    # Nor can a folder be made in a parent that belongs to somebody else.
    foreign = repository.parent.stat().st_dev != repository.stat().st_dev
    inside = foreign or not os.access(repository.parent, os.W_OK)
    return repository if inside else repository.parent, f".{repository.name}.rsrv-gen-"


def clear_away(repository: Path) -> list[Replaced]:
    """Removes what a crash left aside; the repository is locked. Returns what somebody may want back."""
    found: list[Replaced] = []
    place, prefix = _where_aside(repository)
    for left in place.glob(f"{prefix}*"):
        try:
            aside = SwapFolder(left)
        except OSError:
            continue  # somebody uses it
        for spare in left.glob(".*"):
            name = spare.name.removeprefix(".")
            target = repository / name
            spare.rename(left / name if target.exists() else target)
        name, version = _recorded(left)
        if version is not None and version_of(repository / name) == version:
            found.append(Replaced(repository, name, aside, version))
        else:
            aside.remove()
    return found


def leave_open(repository: Path, puts: Iterable[Replaced]) -> list[str]:
    """Leaves it to the next server which version stays; names of the models for which that can't be."""
    lost = []
    for put in puts:
        if _where_aside(repository)[0] == repository:
            # No server would start: it would take what is kept for a model that can't be loaded.
            put.forget()
            lost.append(put.name)
        else:
            put.leave()
    return lost


def _recorded(aside: Path) -> tuple[str, tuple[int, int] | None]:
    """Which model was put in the place of what is there, and its version; of one that was not finished, None."""
    try:
        name, (inode, changed) = json.loads((aside / _RECORD).read_text())
    except (OSError, ValueError, TypeError):
        return "", None
    return name, (inode, changed)


def exchange(one: Path, other: Path) -> None:
    """Exchanges two directories, in one step where the kernel and the file system can."""
    if _rename_exchange(one, other):
        return
    # For a moment `other` does not exist; a Triton that polls just then unloads the model and loads it again. After a
    # crash in this moment the next rsrv-gen puts it back, which knows it by the dot.
    spare = one.with_name(f".{one.name}")
    other.rename(spare)
    try:
        one.rename(other)
    except OSError:
        spare.rename(other)
        raise
    spare.rename(one)


def _rename_exchange(one: Path, other: Path) -> bool:
    """False when it can't be done here in one step."""
    library = ctypes.CDLL(None, use_errno=True)
    try:
        renameat2 = library.renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))

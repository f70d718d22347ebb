"""Bringing a model repository to its planned state. All that rsrv-gen writes is written here.

Triton may be running on the repository, so a model's directory changes in one step: the new one is built aside
and then exchanged with the old one. Aside is beside the repository and not in it, because Triton takes every
folder there for a model, hidden ones too.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from rsrv_gen.config import MARK
from rsrv_gen.plan import CALLS_FOLDER, CONFIG_FILE, Content, LinkMode, ModelPlan, SourceFile, SourceFolder

#: Smaller files are always copied: a manifest that is edited in place must not change the served model under it.
LINK_BYTES = 2**20

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_ours(folder: Path) -> bool:
    """Whether rsrv-gen made this model's directory."""
    try:
        with (folder / CONFIG_FILE).open() as file:
            return not folder.is_symlink() and file.readline() == MARK + "\n"
    except (OSError, UnicodeDecodeError):
        return False


def is_foreign(folder: Path) -> bool:
    """Whether there is something that rsrv-gen did not make, and so never replaces or removes."""
    return os.path.lexists(folder) and not is_ours(folder)


def our_models(repository: Path) -> set[str]:
    """Names of the models in the repository that rsrv-gen made."""
    if not repository.is_dir():
        return set()
    return {entry.name for entry in repository.iterdir() if is_ours(entry)}


def carried(folder: Path) -> list[str]:
    """Names of the callees whose bundles a meta model's directory has."""
    calls = folder / CALLS_FOLDER
    return sorted(entry.name for entry in calls.iterdir()) if calls.is_dir() else []


def is_current(folder: Path, plan: ModelPlan, mode: LinkMode) -> bool:
    """Whether the directory holds exactly what is planned. Hard links are equal without being read."""
    if not is_ours(folder):
        return False
    present: set[PurePosixPath] = set()
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        relative = PurePosixPath(Path(parent).relative_to(folder))
        present.update(relative / name for name in (*names, *links))
    return present == set(plan) and all(_is_equal(folder / path, plan[path], mode) for path in plan)


def _is_equal(target: Path, content: Content, mode: LinkMode) -> bool:
    match content:
        case SourceFolder(source):
            return target.is_symlink() and target.readlink() == source
        case _ if target.is_symlink() or not target.is_file():
            return False
        case SourceFile(source):
            if os.path.samefile(source, target):
                return _may_link(source, mode)
            return filecmp.cmp(source, target, shallow=False)
        case bytes():
            return target.read_bytes() == content


class RepositoryWriter:
    """Changes one repository. Made by `open_repository`, which keeps all others out."""

    def __init__(self, repository: Path, mode: LinkMode, aside: Path) -> None:
        self._repository = repository
        self._mode: LinkMode = mode
        self._aside = aside

    def put(self, name: str, plan: ModelPlan) -> None:
        """Creates a model, or replaces one that rsrv-gen made."""
        target = self._own(name)
        new = self._aside / name
        for path, content in plan.items():
            self._write(new / path, content)
        if target.exists():
            exchange(new, target)
            shutil.rmtree(new)
        else:
            new.rename(target)

    def remove(self, name: str) -> None:
        """Removes a model that rsrv-gen made."""
        target = self._own(name)
        # Out of sight in one step, so that Triton never sees half of it.
        gone = self._aside / name
        target.rename(gone)
        shutil.rmtree(gone)

    def put_file(self, name: str, text: str) -> None:
        """Creates or replaces a file in the repository's root."""
        new = self._aside / name
        new.write_text(text, encoding="utf-8")
        new.replace(self._repository / name)

    def _own(self, name: str) -> Path:
        target = self._repository / name
        if is_foreign(target):
            raise ValueError(f"{target} was not made by rsrv-gen")
        return target

    def _write(self, target: Path, content: Content) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        match content:
            case bytes():
                target.write_bytes(content)
            case SourceFolder(source):
                target.symlink_to(source)
            case SourceFile(source):
                # A bundle may hold links to its own files; here they become the files.
                source = source.resolve()
                if not (_may_link(source, self._mode) and _hard_link(source, target)):
                    shutil.copy2(source, target)


@contextmanager
def open_repository(repository: Path, mode: LinkMode) -> Iterator[RepositoryWriter]:
    """Creates the repository if need be and waits until no other rsrv-gen works on it."""
    repository = repository.absolute()
    repository.mkdir(parents=True, exist_ok=True)
    handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A mount point's parent is another file system, and a rename does not cross it. Then a hidden folder inside
        # must do, though a polling Triton complains in its log for the moment that it is there.
        # Nor can a folder be made in a parent that belongs to somebody else.
        foreign = repository.parent.stat().st_dev != repository.stat().st_dev
        inside = foreign or not os.access(repository.parent, os.W_OK)
        place = repository if inside else repository.parent
        prefix = f".{repository.name}.rsrv-gen-"
        for left_by_a_crash in place.glob(f"{prefix}*"):
            shutil.rmtree(left_by_a_crash, ignore_errors=True)
        aside = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        try:
            yield RepositoryWriter(repository, mode, aside)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    finally:
        os.close(handle)


def _may_link(source: Path, mode: LinkMode) -> bool:
    """Whether the file shall be shared with the bundle rather than copied."""
    return mode == "hard" and source.stat().st_size >= LINK_BYTES


def _hard_link(source: Path, target: Path) -> bool:
    """Tries to link; False when the file systems differ or do not allow it."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True


def exchange(one: Path, other: Path) -> None:
    """Exchanges two directories, in one step where the kernel and the file system can."""
    if _rename_exchange(one, other):
        return
    # For a moment `other` does not exist; a Triton that polls just then unloads the model and loads it again.
    spare = one.with_name(f"{one.name}.old")
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

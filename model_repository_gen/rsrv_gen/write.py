"""Writer of a model repository. rsrv-gen writes files only here.

Triton may be running on the repository, so a model's directory changes in one step. The new directory is built in a swap folder,
and then exchanged with the old directory. The old directory stays in the swap folder until no rollback is possible.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from rsrv.text import naming
from rsrv_gen.config import CHOICE, MARK
from rsrv_gen.plan import (
    BUNDLE_FOLDER,
    CALLS_FOLDER,
    CONFIG_FILE,
    NATIVE_MARK,
    VERSION,
    Content,
    LinkMode,
    ModelPlan,
    SharedFile,
    SourceFile,
)
from rsrv_gen.signatures import LINK_BYTES
from rsrv_gen.staging import Replaced, SwapFolder, clear_away, leave_open, locked


def is_ours(folder: Path) -> bool:
    """Return whether rsrv-gen made this model's directory."""
    try:
        with (folder / CONFIG_FILE).open() as file:
            return not folder.is_symlink() and file.readline() == MARK + "\n"
    except (OSError, UnicodeDecodeError):
        return False


def is_foreign(folder: Path) -> bool:
    """Return whether this file or folder exists and was not made by rsrv-gen, which then never replaces or removes it."""
    return os.path.lexists(folder) and not is_ours(folder)


def refusal(folder: Path) -> str:
    """Return why a folder of a foreign model is neither replaced nor removed, and what to do."""
    return f"{folder} was not made by rsrv-gen: move it away, or rename the bundle"


def our_models(repository: Path) -> set[str]:
    """Return the names of the models in the repository that rsrv-gen made."""
    if not repository.is_dir():
        return set()
    return {entry.name for entry in repository.iterdir() if is_ours(entry)}


def front_of(folder: Path) -> str:
    """Return the front of a model's directory, with the reason if rsrv-gen chose it. Raises OSError."""
    with (folder / CONFIG_FILE).open(encoding="utf-8", errors="replace") as file:
        _, second = file.readline(), file.readline()
    if second.startswith(CHOICE):
        return second.removeprefix(CHOICE).strip()
    return "native front" if (folder / NATIVE_MARK).exists() else "Python front"


def carried(folder: Path) -> list[str]:
    """Return the names of the callees in a meta model's directory."""
    calls = folder / CALLS_FOLDER
    return sorted(entry.name for entry in calls.iterdir()) if calls.is_dir() else []


def is_alias(folder: Path) -> bool:
    """Return whether a model's directory, which rsrv-gen made, belongs to an alias."""
    return (folder / CALLS_FOLDER).is_dir() and not (folder / BUNDLE_FOLDER).exists()


_Identity = tuple[int, int, int, int]
#: Results of comparing the contents of two files. The keys have the device, inode, size and time of each file.
_compared: dict[tuple[_Identity, _Identity], bool] = {}


def is_current(folder: Path, plan: ModelPlan, mode: LinkMode) -> bool:
    """Return whether the directory holds exactly the planned files.

    A hard link to the source counts as equal without being read. But if the source was modified after the directory was
    written, it was rewritten in place, and the model must be written again.
    """
    if not is_ours(folder):
        return False
    # Drop filecmp's cached results, because filecmp considers a file with the same size and time as unchanged.
    filecmp.clear_cache()
    written = (folder / CONFIG_FILE).stat().st_mtime_ns
    present: set[PurePosixPath] = set()
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        relative = PurePosixPath(Path(parent).relative_to(folder))
        present.update(relative / name for name in (*names, *links))
    return present == set(plan) and all(_is_equal(folder / path, plan[path], mode, written) for path in plan)


def _is_same(source: Path, copy: Path) -> bool:
    """Return whether a copy has the same content as the shared file. A copy is read only once, even if many models link to it."""
    (original, copied) = (
        (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in (source.stat(), copy.stat())
    )
    if (original, copied) not in _compared:
        _compared[original, copied] = filecmp.cmp(source, copy, shallow=False)
    return _compared[original, copied]


def _is_equal(target: Path, content: Content, mode: LinkMode, written: int) -> bool:
    match content:
        case _ if target.is_symlink() or not target.is_file():
            return False
        case SourceFile(source):
            if os.path.samefile(source, target):
                return _may_link(source, mode) and source.stat().st_mtime_ns <= written
            return filecmp.cmp(source, target, shallow=False)
        case SharedFile(source):
            return _is_same(source, target)
        case bytes():
            return target.read_bytes() == content


def touch(folder: Path, later_than: int = 0) -> int:
    """Set the time of one of a model's files, so that Triton loads the unchanged model again. Return this time in nanoseconds.

    Triton loads a model again if its newest file is newer than the newest file was at the last load. So model.py, or the file
    that selects the native front, gets a time after those of all other files and after `later_than`, even if the clock is slow.
    """
    return _stamp(folder, max(later_than, newest(folder)))


def _stamp(folder: Path, later_than: int) -> int:
    stamp = max(time.time_ns(), later_than + 1)
    native = folder / NATIVE_MARK
    os.utime(native if native.exists() else folder / VERSION / "model.py", ns=(stamp, stamp))
    return stamp


def newest(folder: Path) -> int:
    """Return the time of the newest file or folder in nanoseconds, or 0 if there is none."""
    times = [0]
    for parent, _, names in os.walk(folder):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            # Another process may remove the file at this moment.
            with suppress(OSError):
                times.append(os.stat(path).st_mtime_ns)
    return max(times)


class RepositoryWriter:
    """Writer of one repository. Made by `open_repository`, which holds the lock."""

    def __init__(self, repository: Path, mode: LinkMode, aside: SwapFolder, lost: Sequence[str]) -> None:
        self._repository = repository
        self._mode: LinkMode = mode
        self._aside = aside
        #: Models that a server was loading when it ended. Their previous versions were removed.
        self.lost = lost

    def put(self, name: str, plan: ModelPlan, holds: Callable[[], bool]) -> None:
        """Create a model, or replace a model that rsrv-gen made. Raises OSError.

        `holds` is called after the files were copied. If it returns False, the plan is out of date, and OSError is raised.
        """
        try:
            self._build(self._aside, name, plan, 0)
            if not holds():
                raise OSError(
                    "its bundle changed while it was copied, so the model was not changed; try again"
                )
            self._aside.swap(name, self._repository)
        finally:
            shutil.rmtree(self._aside.path / name, ignore_errors=True)

    def put_undoably(self, name: str, plan: ModelPlan, later_than: int) -> Replaced:
        """Create or replace a model, and keep the replaced version, so that the caller can restore it.

        The model's newest file gets a time after `later_than`, as in `touch`.
        """
        swap = SwapFolder.new(self._repository)
        try:
            self._build(swap, name, plan, later_than)
            return swap.install(name, self._repository)
        except BaseException:
            swap.remove()
            raise

    def _build(self, folder: SwapFolder, name: str, plan: ModelPlan, later_than: int) -> None:
        new = folder.path / name
        files = {new / path: content for path, content in plan.items()}
        for parent in {file.parent for file in files}:
            parent.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            self._write(file, content)
        # Give config.pbtxt the time of the newest file, because linked files keep their old times. A file with a later time
        # was then changed after the model was written.
        written = newest(new)
        os.utime(new / CONFIG_FILE, ns=(written, written))
        # Check last that no foreign folder is in the model's place: one may appear during the minutes that copying takes, and
        # the exchange would remove it.
        target = self._own(name)
        _stamp(new, max(later_than, written, newest(target)))

    def remove(self, name: str) -> None:
        """Remove a model that rsrv-gen made."""
        target = self._own(name)
        # Move the directory away in one step, so that Triton never sees only a part of it.
        aside = self._aside.path / name
        target.rename(aside)
        shutil.rmtree(aside)

    def put_file(self, name: str, text: str) -> None:
        """Create or replace a file in the repository's root."""
        new = self._aside.path / name
        new.write_text(text, encoding="utf-8")
        new.replace(self._repository / name)

    def _own(self, name: str) -> Path:
        target = self._repository / name
        if is_foreign(target):
            raise OSError(refusal(target))
        return target

    def _write(self, target: Path, content: Content) -> None:
        match content:
            case bytes():
                target.write_bytes(content)
            case SourceFile(source):
                # A bundle may contain links to its own files. The repository gets the files themselves.
                if not (_may_link(source, self._mode) and _hard_link(source.resolve(), target)):
                    shutil.copy2(source, target)
            case SharedFile(source):
                if not _hard_link(self._shared(source), target):
                    shutil.copy(source, target)

    def _shared(self, source: Path) -> Path:
        """Return the repository's copy of a file. Create or renew the copy if necessary.

        All models link to this copy, so that a process loads a library only once.
        """
        copy = self._repository / source.name
        if not (copy.is_file() and _is_same(source, copy)):
            new = self._aside.path / source.name
            shutil.copy(source, new)
            new.replace(copy)
        return copy


@contextmanager
def open_repository(repository: Path, mode: LinkMode) -> Iterator[RepositoryWriter]:
    """Create the repository if it is missing, and wait until no other rsrv-gen works on it."""
    repository = repository.absolute()
    try:
        repository.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; name a folder that you can write"
        raise OSError(error.errno, reason, str(repository)) from None
    with naming(repository), locked(repository), ExitStack() as stack:
        lost = leave_open(repository, clear_away(repository))
        aside = SwapFolder.new(repository)
        stack.callback(aside.remove)
        yield RepositoryWriter(repository, mode, aside, lost)


def being_written(repository: Path) -> bool:
    """Return whether an rsrv-gen holds the repository's lock."""
    handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _may_link(source: Path, mode: LinkMode) -> bool:
    """Return whether the file is shared with the bundle rather than copied."""
    return mode == "hard" and source.stat().st_size >= LINK_BYTES


def _hard_link(source: Path, target: Path) -> bool:
    """Make a hard link. Returns False if the file systems differ or do not allow it."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise
    return True

"""Bringing a model repository to its planned state. All that rsrv-gen writes is written here.

Triton may be running on the repository, so a model's directory changes in one step: the new one is built aside
and then exchanged with the old one, which stays aside until nobody may want it back.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from rsrv_gen.config import INTERNAL, MARK
from rsrv_gen.plan import (
    CALLS_FOLDER,
    CONFIG_FILE,
    VERSION,
    Content,
    LinkMode,
    ModelPlan,
    SourceFile,
    SourceFolder,
)
from rsrv_gen.staging import Replaced, SwapFolder, clear_away, leave_open, locked

#: Smaller files are always copied: a manifest that is edited in place must not change the served model under it.
LINK_BYTES = 2**20


def is_ours(folder: Path) -> bool:
    """Whether rsrv-gen made this model's directory."""
    try:
        with (folder / CONFIG_FILE).open() as file:
            return not folder.is_symlink() and file.readline() == MARK + "\n"
    except (OSError, UnicodeDecodeError):
        return False


def is_public(folder: Path) -> bool:
    """Whether clients can address the model in this directory, which rsrv-gen made."""
    return is_ours(folder) and f'key: "{INTERNAL}"' not in (folder / CONFIG_FILE).read_text("utf-8")


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
    """Whether the directory holds exactly what is planned.

    Hard links are equal without being read, unless they are younger than the directory: then somebody has rewritten
    the file in place.
    """
    if not is_ours(folder):
        return False
    # It takes files of the same size and time for the same as before.
    filecmp.clear_cache()
    written = (folder / CONFIG_FILE).stat().st_mtime_ns
    present: set[PurePosixPath] = set()
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        relative = PurePosixPath(Path(parent).relative_to(folder))
        present.update(relative / name for name in (*names, *links))
    return present == set(plan) and all(_is_equal(folder / path, plan[path], mode, written) for path in plan)


def _is_equal(target: Path, content: Content, mode: LinkMode, written: int) -> bool:
    match content:
        case SourceFolder(source):
            return target.is_symlink() and target.readlink() == source
        case _ if target.is_symlink() or not target.is_file():
            return False
        case SourceFile(source):
            if os.path.samefile(source, target):
                return _may_link(source, mode) and source.stat().st_mtime_ns <= written
            return filecmp.cmp(source, target, shallow=False)
        case bytes():
            return target.read_bytes() == content


def touch(folder: Path, later_than: int = 0) -> int:
    """Makes Triton take an unchanged model for a changed one, so that it loads it anew.

    Triton loads a model anew if its newest file is newer than the newest one was. So model.py gets a time that is
    after all of these and after `later_than`, whatever the clock says; returned in nanoseconds.
    """
    stamp = max(time.time_ns(), later_than + 1, newest(folder) + 1)
    os.utime(folder / VERSION / "model.py", ns=(stamp, stamp))
    return stamp


def newest(folder: Path) -> int:
    """When the newest file or folder was modified, in nanoseconds; 0 if there is none."""
    times = [0]
    for parent, _, names in os.walk(folder, followlinks=True):
        for path in (parent, *(os.path.join(parent, name) for name in names)):
            # What a link leads to may be gone, or go just now.
            with suppress(OSError):
                times.append(os.stat(path).st_mtime_ns)
    return max(times)


class RepositoryWriter:
    """Changes one repository. Made by `open_repository`, which keeps all others out."""

    def __init__(self, repository: Path, mode: LinkMode, aside: Path, lost: Sequence[str]) -> None:
        self._repository = repository
        self._mode: LinkMode = mode
        self._aside = aside
        #: Models that a server was to load when it ended, and whose version before that is not kept any more.
        self.lost = lost

    def put(self, name: str, plan: ModelPlan, later_than: int = 0) -> Replaced:
        """Creates a model, or replaces one that rsrv-gen made. Its newest file is later than that, as in `touch`."""
        target = self._own(name)
        kept = SwapFolder.new(self._repository)
        try:
            new = kept.path / name
            for path, content in plan.items():
                self._write(new / path, content)
            # Linked files have times of their own. What is younger than this one was rewritten later.
            config = new / CONFIG_FILE
            written = max(config.stat().st_mtime_ns, newest(new))
            os.utime(config, ns=(written, written))
            touch(new, max(later_than, newest(target)))
            return kept.install(name, self._repository)
        except BaseException:
            kept.remove()
            raise

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
    with locked(repository), ExitStack() as stack:
        lost = leave_open(repository, clear_away(repository))
        aside = SwapFolder.new(repository)
        stack.callback(aside.remove)
        yield RepositoryWriter(repository, mode, aside.path, lost)


def being_written(repository: Path) -> bool:
    """Whether an rsrv-gen is at work on it."""
    handle = os.open(repository, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


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

"""Where a tritonserver's runtime lives: one private directory per server process and GPU."""

import fcntl
import os
import stat
from pathlib import Path

SOCKET = "runtime.sock"
LOCK = "lock"
#: of the control process: where it listens, its claim, and what operators set
CONTROL_SOCKET = "control.sock"
CONTROL_LOCK = "control.lock"
OVERRIDES = "overrides.json"
#: what the runtime was doing, and who ended the ones before
BLACKBOX = "blackbox"
DEATHS = "deaths.json"


class RuntimeDirectoryError(Exception):
    """The directory for runtimes is not safely ours."""


def base_directory() -> Path:
    """RSRV_RUNTIME_DIR, or a directory of this user under XDG_RUNTIME_DIR or /tmp."""
    chosen = os.environ.get("RSRV_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"rsrv-{os.getuid()}"


def runtime_directory(server_pid: int, gpu: str) -> Path:
    """Of the runtime that serves this GPU under this tritonserver. A pid alone may be reused; with its start time it is unique."""
    return base_directory() / f"{server_pid}-{start_time(server_pid)}-gpu{gpu}"


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def make_private(directory: Path) -> None:
    """Create with mode 0700, or check that what is there is a directory that only this user can enter."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise RuntimeDirectoryError(
                f"{directory} must be a directory of uid {os.getuid()} with mode 0700; "
                "remove it, or set RSRV_RUNTIME_DIR to another place"
            ) from None


def hold(directory: Path) -> int | None:
    """A runtime's claim to its directory, for as long as its process lives; None if another one has it.

    The kernel drops the claim with the process, so a directory that nobody holds has no runtime.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def sweep(base: Path) -> None:
    """Remove what the runtimes of dead servers left, if they were killed together with their server.

    A pid that is unknown here may live in another container that shares `base`: a held directory stays.
    """
    for directory in base.glob("*-*-gpu*"):
        pid, started, _ = directory.name.split("-", 2)
        if pid.isdigit() and started.isdigit() and start_time(int(pid)) != int(started):
            try:
                held = hold(directory)
            except OSError:
                continue  # somebody else removes it, or it is not ours to open
            if held is not None:
                remove(directory)
                os.close(held)


def remove(directory: Path) -> None:
    ours = (SOCKET, LOCK, CONTROL_SOCKET, CONTROL_LOCK, OVERRIDES, BLACKBOX, DEATHS, f"{DEATHS}.new")
    for name in ours:
        (directory / name).unlink(missing_ok=True)
    try:
        directory.rmdir()
    except OSError:
        return  # already gone, or somebody's file is in it: not ours to delete

"""Runtime directories: one private directory per tritonserver process and GPU."""

import fcntl
import json
import os
import shutil
import stat
from pathlib import Path

SOCKET = "runtime.sock"
LOCK = "lock"
#: File with the reason why the last start of the runtime failed.
FAILURE = "failure"
#: File with the reason why the runtime found no device at its last start.
NO_DEVICE = "no-device"
#: File with the models that the next runtime loads again, see `rsrv.runtime.handover`.
HANDOVER = "handover.json"
#: This file exists while the device sleeps, and holds the Unix time when the device fell asleep.
ASLEEP = "asleep"
#: The runtime's last record before the device fell asleep, in the form of STATUS_REPLY.
LAST_RECORD = "last-record"
#: Socket of the control process.
CONTROL_SOCKET = "control.sock"
#: Lock of the control process.
CONTROL_LOCK = "control.lock"
#: Settings that operators have made with commands.
OVERRIDES = "overrides.json"
#: Copy of the last valid rsrv.yaml.
SETTINGS = "settings.yaml"
#: Activity of the runtime's threads, see `rsrv.wire.blackbox`.
BLACKBOX = "blackbox"
#: Crashes of earlier runtimes.
DEATHS = "deaths.json"
#: Signatures and executables of modules that the runtimes have compiled.
MODULES = "modules.jsonl"
#: Folder with executables that cannot be kept in the compilation cache. It is in the directory of a server's device 0.
COMPILED = "compiled"
#: Error text for a directory that is not private to its user.
NOT_PRIVATE = (
    "%s must be a directory of uid %u with mode 0700; remove it, or set RSRV_RUNTIME_DIR to another place"
)
#: The resolved `runtime.devices` of a server, in the directory of its device 0.
DEVICES = "devices.json"
#: The placement table of a server, in the directory of its device 0.
PLACEMENT = "placement"


class RuntimeDirectoryError(Exception):
    """The directory for runtimes is not private to this user."""


def base_directory() -> Path:
    """Return RSRV_RUNTIME_DIR, or a directory of this user under XDG_RUNTIME_DIR or /tmp."""
    chosen = os.environ.get("RSRV_RUNTIME_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"rsrv-{os.getuid()}"


def runtime_directory(server_pid: int, gpu: str) -> Path:
    """Return the directory of a tritonserver's runtime for a device.

    Its name has the server's start time, because pids are reused.
    """
    return base_directory() / f"{server_pid}-{start_time(server_pid)}-gpu{gpu}"


def is_stale(name: str) -> bool:
    """Return whether a name in the form of `runtime_directory` belongs to a server that has ended."""
    pid, started, _ = name.split("-", 2)
    return pid.isdigit() and started.isdigit() and start_time(int(pid)) != int(started)


def read_devices(directory: Path) -> list[str]:
    """Return the devices of the server whose device 0 has this directory. Raises FileNotFoundError."""
    devices: list[str] = json.loads((directory / DEVICES).read_text())
    return devices


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file in one step: readers see the old content or the new content, never a part."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(content.encode() if isinstance(content, str) else content)
    beside.rename(path)


def runtime_command(
    python: str, directory: Path, server_pid: int, settings: Path, device: str, ready_fd: int | None = None
) -> list[str]:
    """Return the command that starts the runtime of a directory. `rsrv.runtime.__main__` explains the options."""
    return [
        # -P: files in the server's working directory must not shadow modules.
        python, "-P", "-m", "rsrv.runtime",
        "--directory", str(directory),
        "--server-pid", str(server_pid),
        "--settings", str(settings),
        "--device", device,
        *(() if ready_fd is None else ("--ready-fd", str(ready_fd))),
    ]  # fmt: skip


def asleep_since(directory: Path) -> float | None:
    """Return the Unix time when a runtime's device fell asleep, or None if the device is awake.

    This reads a file, because a connection would wake the device.
    """
    try:
        return float((directory / ASLEEP).read_text())
    except (OSError, ValueError):
        return None


def start_time(pid: int) -> int:
    """Return the clock ticks from boot to the start of a process, or 0 if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def make_private(directory: Path) -> None:
    """Create a directory with mode 0700, or check that the existing one is private to this user."""
    try:
        directory.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        status = directory.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise RuntimeDirectoryError(NOT_PRIVATE % (directory, os.getuid())) from None


def hold(directory: Path) -> int | None:
    """Lock a runtime's directory. Return the lock's descriptor, or None if another process has the lock.

    The kernel releases the lock when the process ends, so an unlocked directory has no runtime.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def sweep(base: Path, kind: str = "gpu*") -> None:
    """Remove the directories of this kind whose processes have ended without removing them.

    Locked directories stay, because a pid that is unknown here may belong to a process in another container that shares `base`.
    """
    for directory in base.glob(f"*-*-{kind}"):
        if is_stale(directory.name):
            try:
                lock = hold(directory)
            except OSError:
                continue  # Another process removes the directory, or another user owns it.
            if lock is not None:
                remove(directory)
                os.close(lock)


def remove(directory: Path) -> None:
    ours = (SOCKET, LOCK, FAILURE, CONTROL_SOCKET, CONTROL_LOCK, BLACKBOX, MODULES)
    #: Files that are written under another name and then renamed.
    replaced = (NO_DEVICE, ASLEEP, LAST_RECORD, HANDOVER, OVERRIDES, SETTINGS, DEATHS, DEVICES, PLACEMENT)
    for name in (*ours, *replaced, *(f"{name}.new" for name in replaced)):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / COMPILED, ignore_errors=True)
    try:
        directory.rmdir()
    except OSError:
        return  # The directory does not exist any more, or it holds a foreign file, which is kept.

"""Processes beside the runtime: stubs of a dead server, and the control process."""

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rsrv.wire.paths import CONTROL_LOCK

log = logging.getLogger("rsrv.runtime")

#: seconds in which a healthy stub has followed its server (0.3 s as a rule)
_PATIENCE = 0.8
#: how Triton names its shared memory, unless told otherwise
_REGION = "/dev/shm/triton_python_backend_shm_region"


def end_orphans(stubs: Mapping[int, int]) -> None:
    """Wait for the stubs (pid -> pidfd) to end; kill those that do not, and remove their shared memory."""
    regions = {pid: _regions(pid) for pid in stubs}
    poll = select.poll()
    left = {fd: pid for pid, fd in stubs.items()}
    for fd in left:
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + _PATIENCE
    while left and (remaining := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(remaining * 1e3):
            poll.unregister(fd)
            del left[fd]
    for fd, pid in left.items():
        log.error("stub %d outlives its server: killing it", pid)
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        for region in regions[pid]:
            region.unlink(missing_ok=True)


def open_stub(pid: int, server: int) -> int | None:
    """A pidfd of a process if the server is its parent; None for tools that only ask for the status."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Asked after it was opened: now the number cannot be another process's.
    if _parent(pid) == server:
        return fd
    os.close(fd)
    return None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _regions(pid: int) -> set[Path]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    names = (line.partition(_REGION)[1:] for line in lines)
    return {Path("".join(name).removesuffix(" (deleted)")) for name in names if name[0]}


log = logging.getLogger("rsrv.runtime")

#: seconds until it is started again, doubling with each time that it lived for less than the longest
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


def control_command(directory: Path, server_pid: int, settings: Path | None) -> list[str]:
    """How to start it, as this process was started."""
    chosen = [] if settings is None else ["--settings", str(settings)]
    return [
        # -P: whatever lies in the server's working directory is no module of ours.
        sys.executable, "-P", "-m", "rsrv.control",
        "--directory", str(directory),
        "--server-pid", str(server_pid),
        *chosen,
    ]  # fmt: skip


def keep_steering(command: Sequence[str], directory: Path) -> None:
    """See on a thread that there is a control process, for as long as this process lives."""
    threading.Thread(target=steer, args=(command, directory), name="steering", daemon=True).start()


def steer(
    command: Sequence[str],
    directory: Path,
    rest: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Start it whenever there is none, until the directory is gone. `rest` waits for so many seconds."""
    pause = 0.0
    while True:
        try:
            wait_until_free(directory / CONTROL_LOCK)
        except FileNotFoundError:
            return  # with the server
        except OSError as error:
            pause = next_pause(pause)
            log.error("whether there is a control process cannot be seen: %s", error)
            rest(pause)
            continue
        started = clock()
        try:
            # A session of its own: what ends this process's ends nothing else.
            status = subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
        except OSError as error:
            ended = f"cannot be started: {error}"
        else:
            ended = f"ended with status {status.returncode}"
        pause = _FIRST_PAUSE if clock() - started >= _LONGEST_PAUSE else next_pause(pause)
        log.error("the control process %s; starting it again in %.0f s", ended, pause)
        rest(pause)


def next_pause(pause: float) -> float:
    """After one of so many seconds; 0.0: there was none."""
    return min(max(_FIRST_PAUSE, 2 * pause), _LONGEST_PAUSE)


def wait_until_free(lock: Path) -> None:
    """Return when nobody holds the lock. Raises FileNotFoundError: its directory is gone."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        # Given back at once: the process that is started next takes it.
        os.close(fd)

"""Processes that the runtime handles: the stubs of a server that has ended, and the control process."""

import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rsrv.wire.paths import CONTROL_LOCK
from rsrv.wire.stub_process import StubCommand, living_stubs, remove_regions

log = logging.getLogger(__name__)

#: A healthy stub ends within this many seconds after its server (usually 0.3 s).
_STUB_EXIT_S = 0.8


@dataclass(frozen=True, slots=True)
class Stub:
    """A stub process that has connected."""

    pidfd: int
    #: Name of the stub's shared memory, or "" if it is unknown.
    region: str


def end_orphans(stubs: Mapping[int, Stub], server: int, repository: Path) -> None:
    """Wait for the stubs of a server that has ended.

    Kill stubs that do not end in time, and remove the shared memory of all stubs.

    `stubs` has the connected stubs, by pid. Stubs that have not connected yet are found by their command lines.
    """
    regions = {stub.region for stub in stubs.values()} - {""}
    left = {stub.pidfd: pid for pid, stub in stubs.items()}
    opened = []
    with suppress(OSError):  # No file descriptor is free.
        for pid, command in living_stubs(server):
            if not command.code.is_relative_to(repository):
                continue  # The model belongs to another backend.
            regions.add(command.region)
            if pid not in stubs:
                with suppress(ProcessLookupError):
                    opened.append(os.pidfd_open(pid))
                    left[opened[-1]] = pid
    poll = select.poll()
    for fd in left:
        poll.register(fd, select.POLLIN)
    until = time.monotonic() + _STUB_EXIT_S
    while left and (remaining := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(remaining * 1e3):
            poll.unregister(fd)
            del left[fd]
    for fd, pid in left.items():
        log.error("stub %d outlives its server: killing it", pid)
        with suppress(ProcessLookupError):  # The runtime of another device has killed it.
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    remove_regions(regions)
    for fd in opened:
        os.close(fd)


def open_stub(pid: int, server: int) -> Stub | None:
    """Open a stub of the server. Return None for other processes, such as tools that ask for the status."""
    if pid == server:
        # The peer is a native front. Do not look for its parent: this takes milliseconds, because the kernel adds up the
        # times of the server's thousands of threads.
        return None
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # Check the parent after opening: from then on the pid cannot be reused.
    if _parent(pid) == server:
        command = StubCommand.read(pid)
        return Stub(fd, command.region if command else "")
    os.close(fd)
    return None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


#: Shortest and longest pause before a restart of the control process, in seconds. The pause doubles each time, until the
#: process has run for at least the longest pause.
_MIN_RESTART_DELAY_S, _MAX_RESTART_DELAY_S = 1.0, 60.0


def control_command(directory: Path, server_pid: int, settings: Path) -> list[str]:
    """Return the control process's command line, with the settings of this process."""
    return [
        # -P: do not import modules from the server's working directory.
        sys.executable, "-P", "-m", "rsrv.control",
        "--directory", str(directory),
        "--server-pid", str(server_pid),
        "--settings", str(settings),
    ]  # fmt: skip


def supervise(
    command: Sequence[str],
    directory: Path,
    rest: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Start the control process whenever none runs, until the directory is removed.

    `rest` sleeps for a number of seconds.
    """
    delay = 0.0
    while True:
        try:
            wait_until_free(directory / CONTROL_LOCK)
        except FileNotFoundError:
            return  # The server has ended.
        except OSError as error:
            delay = next_delay(delay)
            log.error(
                "the control process's lock cannot be checked, so no control process is started for %.0f s: %s",
                delay,
                error,
            )
            rest(delay)
            continue
        started = clock()
        try:
            # A new session: a signal to this process's group does not end the control process.
            status = subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True, check=False)
        except OSError as error:
            ended = f"cannot be started: {error}"
        else:
            # With status 0, the server has ended, or another control process runs.
            ended = f"ended with status {status.returncode}" if status.returncode else ""
        delay = _MIN_RESTART_DELAY_S if clock() - started >= _MAX_RESTART_DELAY_S else next_delay(delay)
        if ended:
            log.error("the control process %s; starting it again in %.0f s", ended, delay)
        rest(delay)


def next_delay(delay: float) -> float:
    """Return the delay that follows `delay`, in seconds. 0.0 stands for no earlier delay."""
    return min(max(_MIN_RESTART_DELAY_S, 2 * delay), _MAX_RESTART_DELAY_S)


def wait_until_free(lock: Path) -> None:
    """Wait until no process holds the lock. Raises FileNotFoundError if its directory is removed."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    finally:
        # Release the lock at once, for the control process that is started next.
        os.close(fd)

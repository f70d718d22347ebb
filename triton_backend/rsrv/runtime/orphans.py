"""Clearing up after a server that was killed: its stubs should follow it, and one in thirty does not.

A stub of release 24.10 that returns from execute() at the moment its server dies waits for the dead server's
semaphore without a timeout, holding the interpreter's lock, so nothing inside it can help. It would stay for
ever, with its shared memory. The runtime knows the stubs, and outlives the server by a moment.
"""

import logging
import os
import select
import signal
import time
from collections.abc import Mapping
from pathlib import Path

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

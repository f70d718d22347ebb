"""The control process: there is one for each server, and it is started again when it ends.

It is not the runtime's: it outlives it, and the next runtime finds it. So who holds the lock in the directory is the
one, whoever started it; its end shows by the lock.
"""

import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rsrv.wire.paths import CONTROL_LOCK

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

"""Becomes another program, which is told to end when the process that started it does.

    python bound.py PARENT_PID PROGRAM ARGUMENTS...

A program of its own because the kernel must be asked from within the child: a hook in Popen would fork a process that may
hold the locks of other threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """SIGUSR1 is HAProxy's soft stop: it listens no more, and lets requests end."""
    parent, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent:
        sys.exit("the gateway is already gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""A program that asks the kernel to kill it when its parent ends, and then becomes another program.

    python exec_bound.py PARENT_PID PROGRAM ARGUMENTS...

Only the child itself can ask the kernel for this, before it becomes the other program. A hook in Popen would run in a forked
process that may hold the locks of other threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Ask for SIGKILL at the parent's end, then run the program in this process."""
    parent, command = int(arguments[0]), arguments[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("exec_bound: the parent process has already ended")
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"exec_bound: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Other processes that share host memory: they run single commands, and pause where a test asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rsrv

#: Commands come on stdin, one a line; each is answered with a line. `pause` makes the next call of a function of the
#: operating system announce itself and wait for `go`, before that call is made.
_PEER = """
import fcntl, hashlib, os, sys
from pathlib import Path
import numpy as np
from rsrv.runtime.host_memory import SharedMemory

def say(*words):
    print(*words, flush=True)

def pause_at(module, name):
    real = getattr(module, name)
    def paused(*arguments, **options):
        setattr(module, name, real)
        say("at", name)
        assert sys.stdin.readline() == "go\\n"
        return real(*arguments, **options)
    setattr(module, name, paused)

memory = SharedMemory(Path(sys.argv[1]))
say("ready")
while command := sys.stdin.readline().split():
    match command:
        case ["pause", "flock"]:
            pause_at(fcntl, "flock")
            say("ok")
        case ["pause", name]:
            pause_at(os, name)
            say("ok")
        case ["place", value, nbytes]:
            filled = np.full(int(nbytes), int(value), np.uint8)
            block = memory.place(hashlib.sha256(filled.data).hexdigest(), filled)
            assert (block.bytes == int(value)).all()
            say("placed")
        case ["release"]:
            block.release()
            del block
            say("released")
        case ["sweep"]:
            say("swept", memory.sweep())
"""


class Peer:
    """A process with a SharedMemory of its own."""

    def __init__(self, parent: Path) -> None:
        package = str(Path(rsrv.__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PEER, str(parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
        )
        assert self.hear() == "ready"

    def ask(self, command: str) -> str:
        """Return the next line: the command's result, or the function in which it pauses."""
        self.say(command)
        return self.hear()

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        self._process.kill()
        self._process.communicate()

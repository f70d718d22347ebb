"""Other processes that share host memory: they run single commands, and pause where a test asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import rsrv

#: The code of a peer reads commands from stdin, one per line, and answers each with a line. After `pause NAME`, the
#: peer announces its next call of this operating system function with a line, and makes the call after `go`.
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
        """Send a command, and return the next line: its result, or the name of the function in which the peer pauses."""
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
        """Kill the peer with SIGKILL, and wait until it has ended."""
        self._process.kill()
        self._process.communicate()

"""Stub processes of Triton's Python backend, and the shared memory that remains when they end abruptly."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROGRAM = b"triton_python_backend_stub"
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class StubCommand:
    """A stub's command line. The order of its words has not changed since 2021."""

    #: Absolute path of the model's code.
    code: Path
    #: Name of the shared memory in which Triton and the stub exchange requests.
    region: str
    #: Process id of the tritonserver that started the stub.
    server: int

    @classmethod
    def read(cls, pid: int | str) -> Self | None:
        """Return the command line of a process, or None if it is not a stub, has ended, or belongs to another user.

        Another user's process could have any command line, and name shared memory that is not its own.
        """
        process = Path(f"/proc/{pid}")
        try:
            if process.stat().st_uid != os.geteuid():
                return None
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            folder = (process / "cwd").readlink()
        except OSError:
            return None
        if len(words) == 3 and words[1] == b"-c":
            # Up to release 25.08 a shell starts the stub.
            words = words[2].split()
            words = words[next((at for at, word in enumerate(words) if word.endswith(_PROGRAM)), 0) :]
        if len(words) < 6 or not words[0].endswith(_PROGRAM) or not words[5].isdigit() or b"/" in words[2]:
            return None
        return cls(folder / os.fsdecode(words[1]), os.fsdecode(words[2]), int(words[5]))


def living_stubs(server: int) -> Iterator[tuple[int, StubCommand]]:
    """Yield the stubs that a server started, with their process ids.

    This also finds stubs that outlive their server and have another parent.
    """
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            command = StubCommand.read(process.name)
            if command is not None and command.server == server:
                yield int(process.name), command


def remove_regions(regions: Iterable[str]) -> None:
    """Remove the shared memory of stubs that have ended. A stub that ended normally has removed its own.

    From Triton 26.04 on, stubs leave shared memory behind whenever their server ends abruptly. Stubs of earlier releases do so
    only if this happens while a model is loading. In a pod, such memory would stay allocated until the pod ends.
    """
    for region in regions:
        with suppress(OSError):  # The file is gone, or belongs to another user.
            (_SHARED_MEMORY / region).unlink()


def regions_of(prefix: str) -> set[str]:
    """Return the names of shared memory that begin with this prefix. Some memory may belong to stubs that never started."""
    with suppress(OSError):  # The system has no /dev/shm.
        return {name for name in os.listdir(_SHARED_MEMORY) if name.startswith(prefix)}
    return set()

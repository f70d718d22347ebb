"""Child processes: started, waited for, and what they started cleared away when they have ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from rsrv.serve.logs import Prefixer
from rsrv.serve.plan import Child

_EXEC_BOUND = Path(__file__).parent / "exec_bound.py"


class Process:
    """One child, from its start on. Belongs to the running event loop, and to the thread that started it.

    It gets SIGKILL when that thread ends, in whatever way. Who writes to the pipe that it logs to is taken for one of
    its own: so a server's stubs and its runtime are known, wherever they have gone.
    """

    def __init__(
        self, child: Child, popen: subprocess.Popen[bytes], log: int, write: Callable[[bytes], None]
    ) -> None:
        self.child = child
        self._popen = popen
        self._log = log
        self._pipe = os.readlink(f"/proc/self/fd/{log}")
        self._write = write
        self._prefixer = Prefixer(child.name)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(log, self._read)
        self._over = asyncio.ensure_future(_over(popen.pid))

    @classmethod
    def start(cls, child: Child, write: Callable[[bytes], None]) -> Self:
        """Starts it; `write` gets its lines. Raises OSError."""
        cores = ",".join(map(str, child.cores))
        log, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_EXEC_BOUND), str(os.getpid()), cores, *child.argv],
                env={**os.environ, **child.environment},
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                # A Ctrl-C is for the node, which ends its children in their order.
                start_new_session=True,
            )
        except BaseException:
            os.close(log)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(log, False)
        return cls(child, popen, log, write)

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def over(self) -> None:
        """Returns when it has ended."""
        await asyncio.shield(self._over)

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has been buried: its number may be another one's then."""
        if self._popen.returncode is None:
            os.kill(self.pid, number)

    async def bury(self, patience: float) -> tuple[int, list[int]]:
        """When it has ended: its status, as subprocess has it, and the pids of those that had to be killed.

        These are what it started and left, and what has not ended after so many seconds. Then its log is complete.
        """
        left = {pid: asyncio.ensure_future(_over(pid)) for pid in _writers(self._pipe)}
        if left:
            await asyncio.wait(left.values(), timeout=patience)
        killed = [pid for pid, over in left.items() if not over.done()]
        for pid in killed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # As long as it is not reaped, its group is nobody else's.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if killed:
            await asyncio.wait(left.values(), timeout=patience)
        for pid, over in left.items():
            over.cancel()
            _reap(pid)
        self._drain()
        return self._popen.wait(), killed

    def _read(self) -> bool:
        """Passes on some of the log; False: there is no more for now."""
        try:
            data = os.read(self._log, 65536)
        except BlockingIOError:
            return False
        if not data:
            # The end, but `bury` says the last word: until then the number is kept.
            self._loop.remove_reader(self._log)
            return False
        self._pass_on(self._prefixer.feed(data))
        return True

    def _drain(self) -> None:
        while self._read():
            pass
        self._loop.remove_reader(self._log)
        os.close(self._log)
        self._pass_on(self._prefixer.end())

    def _pass_on(self, lines: bytes) -> None:
        if lines:
            self._write(lines)


async def _over(pid: int) -> None:
    """Returns when a process has ended, reaped or not."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(fd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _reap(pid: int) -> None:
    """To the first process of a container, orphans come as its children."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _writers(pipe: str) -> Iterator[int]:
    """Processes of this user whose output or errors go to a pipe."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and any(_target(entry / "fd" / number) == pipe for number in ("1", "2")):
            yield int(entry.name)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""

"""The server's process: its start, its log, its end, and the end of the processes that it started."""

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

from rsrv.serve.plan import ServerPlan
from rsrv.wire.stub_process import regions_of, remove_regions

EXEC_BOUND = Path(__file__).parent / "exec_bound.py"
#: Longest buffered line in bytes. Longer lines are cut. rsrv's own lines are shorter.
_LONGEST = 1 << 20


class Process:
    """The process of one server. Belongs to the event loop and to the thread that started it.

    When that thread ends, the kernel kills the server with SIGKILL. Every process that writes to the pipe of the server's log
    counts as a child of the server. So the server's stubs and its runtime are found in any process group.
    """

    def __init__(
        self, popen: subprocess.Popen[bytes], log: int, write: Callable[[bytes], None], regions: str
    ) -> None:
        self._popen = popen
        self._log = log
        self._pipe = os.readlink(f"/proc/self/fd/{log}")
        self._write = write
        self._regions = regions
        #: Beginning of a line whose end has not been read yet.
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(log, self._read)
        self._over = asyncio.ensure_future(_over(popen.pid))

    @classmethod
    def start(cls, server: ServerPlan, write: Callable[[bytes], None]) -> Self:
        """Start a server. `write` gets whole lines of its log. Raises OSError."""
        # Remove the shared memory of an earlier server, which may have been killed together with its supervisor.
        remove_regions(regions_of(server.regions))
        log, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(EXEC_BOUND), str(os.getpid()), *server.argv],
                env={**os.environ, **server.environment},
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                # Do not let Ctrl-C reach the server: `rsrv serve` gets it, and ends the server in order.
                start_new_session=True,
            )
        except BaseException:
            os.close(log)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(log, False)
        return cls(popen, log, write, server.regions)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> bool:
        """True if the process has ended, whether or not it was reaped."""
        return self._over.done()

    async def over(self) -> None:
        """Wait until the process has ended."""
        await asyncio.shield(self._over)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server. Do nothing after it was reaped, because another process may then have its pid."""
        if self._popen.returncode is None:
            os.kill(self.pid, number)

    async def bury(self, patience: float) -> tuple[int, list[int]]:
        """Reap the ended server. Return its status, as in subprocess, and the pids of killed processes.

        The killed processes are the server's own children that did not end within `patience` seconds. After this call, the
        server's log is complete, and the shared memory of its stubs is removed.
        """
        left = {pid: asyncio.ensure_future(_over(pid)) for pid in _writers(self._pipe)}
        if left:
            await asyncio.wait(left.values(), timeout=patience)
        killed = [pid for pid, over in left.items() if not over.done()]
        for pid in killed:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Kill the rest of the server's process group. No other group can have its number until the server is reaped.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if killed:
            await asyncio.wait(left.values(), timeout=patience)
        for pid, over in left.items():
            over.cancel()
            _reap(pid)
        remove_regions(regions_of(self._regions))
        self._drain()
        return self._popen.wait(), killed

    def _read(self) -> bool:
        """Pass on a part of the log. Return False if no more can be read now."""
        try:
            data = os.read(self._log, 65536)
        except BlockingIOError:
            return False
        if not data:
            # This is the end of the log. `bury` closes the descriptor.
            self._loop.remove_reader(self._log)
            return False
        lines, end, rest = (self._rest + data).rpartition(b"\n")
        if len(rest) > _LONGEST:
            lines, end, rest = lines + end + rest, b"\n", b""
        # Pass on whole lines only, so that a line of `rsrv serve` itself does not split one.
        self._rest = rest
        if end:
            self._write(lines + end)
        return True

    def _drain(self) -> None:
        while self._read():
            pass
        self._loop.remove_reader(self._log)
        os.close(self._log)
        if self._rest:
            self._write(self._rest + b"\n")


async def _over(pid: int) -> None:
    """Wait until a process has ended, whether or not it was reaped."""
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
    """Reap a process if it is a child of this one. In a container, this may be the first process, which inherits orphans."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


def _writers(pipe: str) -> Iterator[int]:
    """Yield this user's processes whose standard output or error output is a pipe."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and any(_target(entry / "fd" / number) == pipe for number in ("1", "2")):
            yield int(entry.name)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""

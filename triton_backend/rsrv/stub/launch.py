"""Reaching the runtime of this tritonserver and GPU; the first stub that needs it starts it."""

import fcntl
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rsrv.wire import paths
from rsrv.wire.frames import ProtocolError, check_hello, hello
from rsrv.wire.memory import read_board
from rsrv.wire.socket import Closed, Receiver, connect, send

log = logging.getLogger("rsrv.stub")

#: seconds for the runtime's process to listen; it loads jax later
_START_TIMEOUT = 60.0
#: seconds for a frame's answer that needs no work
_GREETING_TIMEOUT = 60.0


class LaunchError(Exception):
    """The runtime cannot be started; the message says why and what to set."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """A connection after its greeting."""

    sock: socket.socket
    receiver: Receiver
    board: memoryview


@dataclass(frozen=True, slots=True)
class Launcher:
    """Connects to the runtime that belongs to `server_pid` and `gpu`, starting it if nobody did."""

    server_pid: int
    gpu: str
    settings: Path
    #: the server's own: hooks may go elsewhere
    working_directory: Path
    #: likewise
    environment: Mapping[str, str]

    def open(self) -> Greeted:
        """A greeted connection. Raises LaunchError, Closed, OSError, ProtocolError."""
        directory = paths.runtime_directory(self.server_pid, self.gpu)
        if not paths.start_time(self.server_pid):
            # This process outlives its server by a moment: a runtime for it would be nobody's, its directory left.
            raise LaunchError("tritonserver is gone")
        path = directory / paths.SOCKET
        try:
            return greet(connect(path))
        except (FileNotFoundError, ConnectionError):
            pass
        paths.make_private(directory.parent)
        paths.make_private(directory)
        # Whoever holds the lock starts the runtime; the others wait here and find it listening.
        with _locked(directory / paths.LOCK):
            try:
                return greet(connect(path))
            except (FileNotFoundError, ConnectionError):
                self._start(directory)
            return greet(_connect_soon(path))

    def _start(self, directory: Path) -> None:
        python = interpreter()
        ready, child_end = os.pipe2(os.O_CLOEXEC)
        command = [
            # -P: whatever lies in the server's working directory is no module of ours.
            python, "-P", "-m", "rsrv.runtime",
            "--directory", str(directory),
            "--server-pid", str(self.server_pid),
            "--settings", str(self.settings),
            "--ready-fd", str(child_end),
        ]  # fmt: skip
        try:
            try:
                started = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(child_end,),
                    cwd=self.working_directory,
                    env=self.environment,
                )
            except OSError as error:
                raise LaunchError(
                    f"the runtime cannot be started with {python}: {error}. RSRV_RUNTIME_PYTHON must name a "
                    "Python where 'rsrv[runtime]' is installed"
                ) from None
            finally:
                os.close(child_end)
            said = _first_words(ready, _START_TIMEOUT)
            status = started.wait()  # it has forked the real one and left
        finally:
            os.close(ready)
        if not said and status <= 0:
            raise Closed("the runtime was killed while it started; the server's log may say more")
        if said != b"ready":
            reason = said.decode(errors="replace") or "it ended without a word; the server's log may say more"
            raise LaunchError(
                f"the runtime did not start with {python}: {reason}. RSRV_RUNTIME_PYTHON must name a Python "
                "where 'rsrv[runtime]' is installed"
            )


def server_pid() -> int:
    """The pid of the tritonserver that started this process. Raises LaunchError when that has ended already.

    Then this process has another parent, init or a supervisor, and a runtime for that one would never end.
    """
    parent = os.getppid()
    # Triton names its pid in the stub's command line.
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    if str(parent).encode() in arguments or _comm(parent) == "tritonserver":
        return parent
    raise LaunchError("tritonserver is gone")


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def interpreter() -> str:
    """RSRV_RUNTIME_PYTHON, or the Python that this stub runs on."""
    chosen = os.environ.get("RSRV_RUNTIME_PYTHON")
    if chosen:
        return chosen
    # Inside the stub the interpreter is embedded: sys.executable may be the stub, or nothing.
    own = Path(sys.prefix) / "bin" / "python3"
    return str(own) if own.exists() else shutil.which("python3") or "python3"


def greet(sock: socket.socket) -> Greeted:
    """Exchange the first frames on a new connection. Raises LaunchError, Closed, ProtocolError, OSError; then it is closed."""
    sock.settimeout(_GREETING_TIMEOUT)
    try:
        send(sock, hello())
        receiver = Receiver(sock)
        frame, fds = receiver.receive()
        try:
            check_hello(frame)
            if len(fds) != 1:
                raise ProtocolError("the runtime's greeting comes without its board")
            board = read_board(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
    except TimeoutError:
        sock.close()
        raise LaunchError(
            f"the runtime took no connection within {_GREETING_TIMEOUT:.0f} s: it is stopped, or there are as many as its limit "
            "of open files allows, which the server's log says; raise that (ulimit -Hn, a container's --ulimit nofile)"
        ) from None
    except BaseException:
        sock.close()
        raise
    return Greeted(sock, receiver, board)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _connect_soon(path: Path) -> socket.socket:
    """The runtime says that it listens; if it is one whose starter died, that may take another moment."""
    until = time.monotonic() + _START_TIMEOUT
    while True:
        try:
            return connect(path)
        except (FileNotFoundError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _first_words(fd: int, timeout: float) -> bytes:
    """What the starting process says: one short message, or nothing when it died."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return os.read(fd, 4096) if poll.poll(timeout * 1000) else b"it was not ready in time"

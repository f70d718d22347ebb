"""Finds the control services of this user's servers on this machine."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, start_time


class NotFound(Exception):
    """No server was found, or several; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """A control service on this machine."""

    server_pid: int
    socket: Path
    #: of the server's models, or of the gateway's settings
    folder: Path
    #: Triton's ports, gRPC first; none for a gateway
    ports: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def __str__(self) -> str:
        folder = os.path.relpath(self.folder)
        shown = str(self.folder) if folder.startswith("..") else folder
        return f"{shown} on {self.ports[0]}" if self.ports else shown

    def is_named(self, which: str) -> bool:
        """Return True if `which` is a port of it, its folder, or a folder above that."""
        if which.isdecimal() and self.ports:
            return int(which) in self.ports
        return self.folder.is_relative_to(Path(which).resolve())


def running() -> list[ControlEndpoint]:
    """Return the control services of all running servers, by pid."""
    found = []
    for pid, socket in sockets("gpu*"):
        options = Options(read_command_line(pid))
        repository = options.last("model-repository", options.last("model-store", "."))
        ports = options.last("grpc-port", "8001"), options.last("http-port", "8000")
        found.append(
            ControlEndpoint(
                pid,
                socket,
                (working_directory(pid) / repository).resolve(),
                tuple(int(port) for port in ports if port.isdecimal()),
            )
        )
    return found


def sockets(kind: str) -> Iterator[tuple[int, Path]]:
    """Yield the pid and the control service's socket of each process that runs and has a directory of this kind."""
    for socket in sorted(base_directory().glob(f"*-*-{kind}/{CONTROL_SOCKET}")):
        pid, started, _ = socket.parent.name.split("-", 2)
        if pid.isdigit() and started.isdigit() and start_time(int(pid)) == int(started):
            yield int(pid), socket


def working_directory(pid: int) -> Path:
    """Return the folder that a process's relative paths start from; ours, if it cannot be read."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path.cwd()


def address(which: str | None) -> str:
    """Return the address of the only server, or of the one that `which` or RSRV_CONTROL_ADDRESS names. Raises NotFound."""
    start = "Start one with `rsrv serve bundles/`"
    return choose(which or os.environ.get("RSRV_CONTROL_ADDRESS"), running(), "server", start)


def choose(which: str | None, running: Sequence[ControlEndpoint], kind: str, start: str) -> str:
    """Return the address of an endpoint.

    Args:
        which: a port, a folder, or an address; None: the only endpoint.
        running: the endpoints on this machine.
        kind: server or gateway.
        start: how to start one.

    Raises:
        NotFound: there is none, or there are several.
    """
    if which and ":" in which:
        return which
    if not running:
        raise NotFound(
            f"no {kind} of yours runs here (looked in {base_directory()}). {start}, or name one elsewhere with "
            "--server HOST:PORT or --server unix:PATH"
        )
    found = [one for one in running if which is None or one.is_named(which)]
    if which is not None:
        # A server in /m is chosen by /m also if there is another one in /m/b.
        exact = Path(which).resolve()
        found = [one for one in found if one.folder == exact] or found
    if len(found) == 1:
        return found[0].address
    listed = "; ".join(
        # Two servers of one folder may have no ports of their own.
        f"{one} ({one.address})" if sum(str(other) == str(one) for other in running) > 1 else str(one)
        for one in found or running
    )
    how = "the port or folder" if kind == "server" else "the folder"
    if not found:
        raise NotFound(f"no {kind} here has {how} {which!r}; running: {listed}")
    raise NotFound(f"several {kind}s run here: {listed}. Choose with --server and {how}")

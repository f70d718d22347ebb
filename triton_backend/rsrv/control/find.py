"""Finds the control services of this user's servers on this machine."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, start_time


class NotFound(Exception):
    """No server was found, or several were found. The message says what to do."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """A control service on this machine."""

    server_pid: int
    socket: Path
    #: The folder of the server's models, or of the gateway's settings.
    folder: Path
    #: The folder in which the server was started.
    started_in: Path
    #: Triton's ports, gRPC first. Empty for a gateway.
    ports: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def __str__(self) -> str:
        folder = os.path.relpath(self.folder)
        shown = str(self.folder) if folder.startswith("..") else folder
        return f"{shown} on {self.ports[0]}" if self.ports else shown

    def is_named(self, which: str) -> bool:
        """Return True if `which` is one of the endpoint's ports, its folder, or a folder above that."""
        if which.isdecimal() and self.ports:
            return int(which) in self.ports
        return self.folder.is_relative_to(Path(which).resolve())

    def is_of(self, folder: Path) -> bool:
        """Return True if the endpoint's folder is in `folder`, or if the server was started in `folder` or a folder above."""
        if self.folder.is_relative_to(folder):
            return True
        # If the server was started in the root folder, ignore this, because the root folder is above every folder.
        return folder.is_relative_to(self.started_in) and self.started_in != Path("/")


def running() -> list[ControlEndpoint]:
    """Return the control services of all running servers, by pid."""
    servers = []
    for pid, socket in sockets("gpu*"):
        options = Options(read_command_line(pid))
        repository = options.last("model-repository", options.last("model-store", "."))
        ports = options.last("grpc-port", "8001"), options.last("http-port", "8000")
        started_in = working_directory(pid)
        servers.append(
            ControlEndpoint(
                pid,
                socket,
                (started_in / repository).resolve(),
                started_in,
                tuple(int(port) for port in ports if port.isdecimal()),
            )
        )
    return servers


def sockets(kind: str) -> Iterator[tuple[int, Path]]:
    """Yield the pid and the control socket of each running process that has a runtime directory of this kind.

    `kind` is the end of the directory's name, and may be a pattern.
    """
    for socket in sorted(base_directory().glob(f"*-*-{kind}/{CONTROL_SOCKET}")):
        pid, started, _ = socket.parent.name.split("-", 2)
        if pid.isdigit() and started.isdigit() and start_time(int(pid)) == int(started):
            yield int(pid), socket


def working_directory(pid: int) -> Path:
    """Return the working directory of a process. If it cannot be read, return this process's own."""
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return Path.cwd()


def address(which: str | None) -> str:
    """Return the address of the server that `which` or RSRV_CONTROL_ADDRESS names.

    If both are missing, `choose` decides. Raises NotFound.
    """
    start = "Start one with `rsrv serve bundles/`"
    return choose(which or os.environ.get("RSRV_CONTROL_ADDRESS"), running(), "server", start)


def choose(which: str | None, running: Sequence[ControlEndpoint], kind: str, start: str) -> str:
    """Return the address of an endpoint.

    Args:
        which: A port, a folder, or an address. None: the only endpoint of the working directory, or the only endpoint at all.
        running: The endpoints on this machine.
        kind: "server" or "gateway", for the error.
        start: A sentence for the error that says how to start one.

    Raises:
        NotFound: There is no such endpoint, or there are several.
    """
    if which and ":" in which:
        return which
    if not running:
        raise NotFound(
            f"no {kind} of this user runs on this machine (looked in {base_directory()}). {start}, or name another {kind} with "
            "--server HOST:PORT or --server unix:PATH"
        )
    matching = [endpoint for endpoint in running if which is None or endpoint.is_named(which)]
    if which is None:
        here = [endpoint for endpoint in matching if endpoint.is_of(Path.cwd())]
        matching = here if len(here) == 1 else matching
    else:
        # An exact match takes precedence: /m names the server in /m, even if there is another one in /m/b.
        exact = Path(which).resolve()
        matching = [endpoint for endpoint in matching if endpoint.folder == exact] or matching
    if len(matching) == 1:
        return matching[0].address
    listed = "; ".join(
        # Add the address if servers look the same, such as two servers of one folder with the same ports.
        f"{endpoint} ({endpoint.address})"
        if sum(str(server) == str(endpoint) for server in running) > 1
        else str(endpoint)
        for endpoint in matching or running
    )
    how = "the port or folder" if kind == "server" else "the folder"
    if not matching:
        raise NotFound(f"no {kind} on this machine has {how} {which!r}; running: {listed}")
    raise NotFound(f"several {kind}s run on this machine: {listed}. Choose one with --server and {how}")

"""Finds the control services of this user's servers on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from rsrv.wire.paths import CONTROL_SOCKET, base_directory, start_time


class NotFound(Exception):
    """No server was found, or several; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """The control service of one runtime."""

    server_pid: int
    gpu: str
    socket: Path

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"


def running() -> list[ControlEndpoint]:
    """Return the control services of all running servers, by pid and GPU."""
    found = []
    for socket in base_directory().glob(f"*-*-gpu*/{CONTROL_SOCKET}"):
        pid, started, gpu = socket.parent.name.split("-", 2)
        if pid.isdigit() and started.isdigit() and start_time(int(pid)) == int(started):
            found.append(ControlEndpoint(int(pid), gpu.removeprefix("gpu"), socket))
    return sorted(found, key=lambda one: (one.server_pid, one.gpu))


def address(pid: int | None) -> str:
    """Return RSRV_CONTROL_ADDRESS, or the address of the only server, or of the one with this pid. Raises NotFound."""
    chosen = os.environ.get("RSRV_CONTROL_ADDRESS")
    if chosen and pid is None:
        return chosen
    found = [one for one in running() if pid in (None, one.server_pid)]
    if not found:
        missing = "no server of yours" if pid is None else f"no tritonserver {pid} of yours"
        raise NotFound(
            f"{missing} with rsrv runs here (looked in {base_directory()}; name another place by --address or RSRV_RUNTIME_DIR)"
        )
    if len(found) > 1:
        several = ", ".join(
            f"--pid {one.server_pid} (GPU {one.gpu}, --address {one.address})" for one in found
        )
        raise NotFound(f"several servers run here, choose one: {several}")
    return found[0].address

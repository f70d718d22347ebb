"""Where the control services of this user's servers listen on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path

from rsrv.wire.paths import CONTROL_SOCKET, base_directory, start_time


class NotFound(Exception):
    """There is no server, or there is a choice; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """One runtime's control service."""

    server_pid: int
    gpu: str
    socket: Path

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"


def running() -> list[ControlEndpoint]:
    """Of all servers that run, by pid and GPU."""
    found = []
    for socket in base_directory().glob(f"*-*-gpu*/{CONTROL_SOCKET}"):
        pid, started, gpu = socket.parent.name.split("-", 2)
        if pid.isdigit() and started.isdigit() and start_time(int(pid)) == int(started):
            found.append(ControlEndpoint(int(pid), gpu.removeprefix("gpu"), socket))
    return sorted(found, key=lambda one: (one.server_pid, one.gpu))


def address(pid: int | None) -> str:
    """RSRV_CONTROL_ADDRESS, or where the one server listens: of this pid, if one is given. Raises NotFound."""
    chosen = os.environ.get("RSRV_CONTROL_ADDRESS")
    if chosen and pid is None:
        return chosen
    found = [one for one in running() if pid in (None, one.server_pid)]
    if not found:
        who = "no server of yours" if pid is None else f"no tritonserver {pid} of yours"
        raise NotFound(
            f"{who} with rsrv runs here (looked in {base_directory()}; --address and RSRV_RUNTIME_DIR say where else)"
        )
    if len(found) > 1:
        several = ", ".join(
            f"--pid {one.server_pid} (GPU {one.gpu}, --address {one.address})" for one in found
        )
        raise NotFound(f"several servers run here, choose one: {several}")
    return found[0].address

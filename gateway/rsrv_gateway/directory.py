"""The private directory of a running gateway. It contains the socket of the gateway's control service."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rsrv.control.find import ControlEndpoint, choose, sockets, working_directory
from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.paths import base_directory, hold, make_private, remove, start_time, sweep

#: Last part of the name of a gateway's directory. The name of a runtime's directory ends with the device instead.
_KIND = "gateway"


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory of this process with mode 0700, and remove it at the end. First, remove directories of dead gateways.

    Raises RuntimeDirectoryError, OSError.
    """
    base = base_directory()
    make_private(base)
    sweep(base, _KIND)
    path = base / f"{os.getpid()}-{start_time(os.getpid())}-{_KIND}"
    make_private(path)
    # Hold a lock on the directory. Processes in other PID namespaces cannot use our pid, and remove a directory
    # that nobody has locked.
    lock = hold(path)
    try:
        yield path
    finally:
        remove(path)
        if lock is not None:
            os.close(lock)


def address(which: str | None) -> str:
    """Return the address of the gateway that `which` or RSRV_GATEWAY_ADDRESS names.

    Without a name, return the address of this user's only gateway, or of the only one in the working directory.
    `rsrv.control.find.choose` describes `which`. If it is a folder, it is the folder of the gateway's rsrv.yaml. Raises NotFound.
    """
    running = [
        ControlEndpoint(pid, socket, _settings_folder(pid), working_directory(pid))
        for pid, socket in sockets(_KIND)
    ]
    start = "Start one with `rsrv-gateway --workers HOST:PORT,...`"
    return choose(which or os.environ.get("RSRV_GATEWAY_ADDRESS"), running, "gateway", start)


def _settings_folder(pid: int) -> Path:
    config = Options(read_command_line(pid)).last("config", "rsrv.yaml")
    return (working_directory(pid) / config).resolve().parent

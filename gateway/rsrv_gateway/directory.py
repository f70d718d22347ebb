"""Private directory of a running gateway, with the socket of its control service."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rsrv.control.find import ControlEndpoint, choose, working_directory
from rsrv.triton_command_line import Options, read_command_line
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, hold, make_private, start_time


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory of this process, with mode 0700, which exists until the end; remove those of dead gateways.

    Raises RuntimeDirectoryError, OSError.
    """
    base = base_directory()
    make_private(base)
    _sweep(base)
    path = base / f"gateway-{os.getpid()}-{start_time(os.getpid())}"
    make_private(path)
    # In another PID namespace our pid means nothing: a directory that no process holds counts as dead there.
    held = hold(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)


def address(which: str | None) -> str:
    """Return the address of this user's only gateway, or of the one that `which` or RSRV_GATEWAY_ADDRESS names.

    `which` is as in `rsrv.control.find.choose`; a gateway's folder is that of its settings. Raises NotFound.
    """
    running = [
        ControlEndpoint(pid, path, _settings_folder(pid))
        for path in sorted(base_directory().glob(f"gateway-*-*/{CONTROL_SOCKET}"))
        if (pid := _alive(path.parent))
    ]
    start = "Start one with `rsrv-gateway --workers HOST:PORT,...`"
    return choose(which or os.environ.get("RSRV_GATEWAY_ADDRESS"), running, "gateway", start)


def _settings_folder(pid: int) -> Path:
    config = Options(read_command_line(pid)).last("config", "rsrv.yaml")
    return (working_directory(pid) / config).resolve().parent


def _alive(path: Path) -> int:
    """Return the pid of the directory's gateway; 0: it has ended."""
    _, pid, started = path.name.split("-")
    lives = pid.isdigit() and started.isdigit() and start_time(int(pid)) == int(started)
    return int(pid) if lives else 0


def _sweep(base: Path) -> None:
    for path in base.glob("gateway-*-*"):
        if _alive(path):
            continue
        try:
            held = hold(path)
        except OSError:
            continue  # another process removes it
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)

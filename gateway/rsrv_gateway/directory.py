"""Private directory of a running gateway, with the socket of its control service."""

import os
import shutil
from pathlib import Path

from rsrv.control.find import NotFound
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, hold, make_private, start_time


class Directory:
    """Directory of this process, with mode 0700, which exists until `close`."""

    def __init__(self) -> None:
        """Remove the directories of dead gateways, and create one. Raises RuntimeDirectoryError, OSError."""
        base = base_directory()
        make_private(base)
        _sweep(base)
        self.path = base / f"gateway-{os.getpid()}-{start_time(os.getpid())}"
        make_private(self.path)
        #: in another PID namespace our pid means nothing: a directory that no process holds counts as dead
        #: there
        self._held = hold(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)


def address(pid: int | None) -> str:
    """Return RSRV_GATEWAY_ADDRESS, or the address of this user's only gateway, or of the one with this pid. Raises NotFound."""
    chosen = os.environ.get("RSRV_GATEWAY_ADDRESS")
    if chosen and pid is None:
        return chosen
    base = base_directory()
    running = {
        one: path for path in base.glob(f"gateway-*-*/{CONTROL_SOCKET}") if (one := _alive(path.parent))
    }
    found = {one: path for one, path in running.items() if pid in (None, one)}
    if not found:
        missing = "no gateway of yours" if pid is None else f"no gateway {pid} of yours"
        raise NotFound(
            f"{missing} runs here (looked in {base}; --address and RSRV_RUNTIME_DIR say where else)"
        )
    if len(found) > 1:
        raise NotFound(
            f"several gateways run here, choose one: {', '.join(f'--pid {one}' for one in sorted(found))}"
        )
    return f"unix:{next(iter(found.values()))}"


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

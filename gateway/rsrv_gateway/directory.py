"""The private directory of a running gateway, which has the socket of its control service."""

import os
import shutil
from pathlib import Path

from rsrv.control.find import NotFound
from rsrv.wire.paths import CONTROL_SOCKET, base_directory, hold, make_private, start_time


class Directory:
    """Of this process, empty, with mode 0700, until it is closed."""

    def __init__(self) -> None:
        """Removes what dead gateways left. Raises RuntimeDirectoryError, OSError."""
        base = base_directory()
        make_private(base)
        _sweep(base)
        self.path = base / f"gateway-{os.getpid()}-{start_time(os.getpid())}"
        make_private(self.path)
        #: others that share `base` do not know our pid, and take a directory that nobody holds for one of the dead
        self._held = hold(self.path)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held is not None:
            os.close(self._held)


def address(pid: int | None) -> str:
    """RSRV_GATEWAY_ADDRESS, or where the one gateway of this user listens: of this pid, if one is given. Raises NotFound."""
    chosen = os.environ.get("RSRV_GATEWAY_ADDRESS")
    if chosen and pid is None:
        return chosen
    base = base_directory()
    running = {
        one: path for path in base.glob(f"gateway-*-*/{CONTROL_SOCKET}") if (one := _alive(path.parent))
    }
    found = {one: path for one, path in running.items() if pid in (None, one)}
    if not found:
        who = "no gateway of yours" if pid is None else f"no gateway {pid} of yours"
        raise NotFound(f"{who} runs here (looked in {base}; --address and RSRV_RUNTIME_DIR say where else)")
    if len(found) > 1:
        raise NotFound(
            f"several gateways run here, choose one: {', '.join(f'--pid {one}' for one in sorted(found))}"
        )
    return f"unix:{next(iter(found.values()))}"


def _alive(path: Path) -> int:
    """The pid of the gateway whose directory it is; 0: it is gone."""
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
            continue  # somebody else removes it
        if held is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(held)

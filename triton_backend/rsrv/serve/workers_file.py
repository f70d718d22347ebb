"""The file with the list of workers for gateways, updated as workers start and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from rsrv.serve.plan import ChildSpec, NodePlan, workers_file
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory

log = logging.getLogger("rsrv.node")

#: a stub's name for the device of its runtime: each worker has only one
_GPU = "0"
#: seconds for gateways to read the list
_NOTICE = 1.0


class WorkersFile:
    """A crashed worker stays in the list, as it is restarted; a worker that is stopped leaves it before.

    Args:
        plan: the node's plan.
        file: path of the list.
        controls: the workers have control services.
        elsewhere: gateways of other owners use the list, and need time to read it.
    """

    def __init__(self, plan: NodePlan, file: Path, controls: bool, elsewhere: bool) -> None:
        self.names: Collection[str] = {worker.child.name for worker in plan.workers}
        self._plan = plan
        self._file = file
        self._has_controls = controls
        self._notice = _NOTICE if elsewhere else 0.0
        self._controls: dict[str, str] = {}
        self._gone: set[str] = set()
        self._write()

    def started(self, child: ChildSpec, pid: int) -> None:
        """Update the address of its control service."""
        log.info("%s is process %d", child.name, pid)
        if child.name in self.names:
            if self._has_controls:
                self._controls[child.name] = f"unix:{runtime_directory(pid, _GPU) / CONTROL_SOCKET}"
            self._gone.discard(child.name)
            self._write()

    async def leaves(self, child: ChildSpec) -> None:
        """Return when gateways have read that it is gone: a server that ends reports its models as missing."""
        if child.name in self.names:
            self._gone.add(child.name)
            self._write()
            await asyncio.sleep(self._notice)

    def _write(self) -> None:
        write(self._file, workers_file(self._plan, self._controls, self._gone))


def write(file: Path, text: str) -> None:
    """Replace the file in one step, so that no reader sees a part."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)

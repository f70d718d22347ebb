"""The list of workers, for gateways, kept as workers start and end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from pathlib import Path

from rsrv.serve.plan import Child, Plan, workers_file
from rsrv.wire.paths import CONTROL_SOCKET, runtime_directory

log = logging.getLogger("rsrv.node")

#: how a stub names the device of its runtime: each worker has but one
_GPU = "0"
#: seconds for gateways to read the list
_NOTICE = 1.0


class Roll:
    """Who has died stays on the list, as it comes back; who is told to end leaves it before.

    Args:
        file: where it is written.
        controls: whether workers have a control service.
        elsewhere: whether gateways that the node does not end itself go by it, and are given the time to read it.
    """

    def __init__(self, plan: Plan, file: Path, controls: bool, elsewhere: bool) -> None:
        self.names: Collection[str] = {worker.child.name for worker in plan.workers}
        self._plan = plan
        self._file = file
        self._has_controls = controls
        self._notice = _NOTICE if elsewhere else 0.0
        self._controls: dict[str, str] = {}
        self._gone: set[str] = set()
        self._write()

    def started(self, child: Child, pid: int) -> None:
        """Its control service is another one now."""
        log.info("%s is process %d", child.name, pid)
        if child.name in self.names:
            if self._has_controls:
                self._controls[child.name] = f"unix:{runtime_directory(pid, _GPU) / CONTROL_SOCKET}"
            self._gone.discard(child.name)
            self._write()

    async def leaves(self, child: Child) -> None:
        """Returns when gateways have read that it is gone: while it ends it says of its models that they are not there."""
        if child.name in self.names:
            self._gone.add(child.name)
            self._write()
            await asyncio.sleep(self._notice)

    def _write(self) -> None:
        write(self._file, workers_file(self._plan, self._controls, self._gone))


def write(file: Path, text: str) -> None:
    """In one step: who watches it never sees a part."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)

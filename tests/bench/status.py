"""What the runtime says about itself."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from rsrv.wire import paths
from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header
from rsrv.wire.socket import Receiver, connect, send


@dataclass(frozen=True)
class ModelStatus:
    """Counters of one model since the runtime's start."""

    dispatches: int
    rows: int
    device_seconds: float
    #: compiled size -> executions; the models here have one input shape
    sizes: dict[int, int]

    def since(self, earlier: ModelStatus) -> ModelStatus:
        """What was counted between two readings."""
        sizes = {size: count - earlier.sizes.get(size, 0) for size, count in self.sizes.items()}
        return ModelStatus(
            self.dispatches - earlier.dispatches,
            self.rows - earlier.rows,
            self.device_seconds - earlier.device_seconds,
            {size: count for size, count in sizes.items() if count},
        )


def fetch(server_pid: int) -> dict[str, Any]:
    """The status of the runtime of this tritonserver, over a connection of its own."""
    with connect(paths.runtime_directory(server_pid, "0") / paths.SOCKET) as sock:
        sock.settimeout(10)
        receiver = Receiver(sock)
        send(sock, hello())
        frame, fds = receiver.receive()
        _close(fds)
        check_hello(frame)
        send(sock, pack_json(Kind.STATUS, {}))
        frame, fds = receiver.receive()
        try:
            if read_header(frame)[0] is not Kind.STATUS_REPLY or len(fds) != 1:
                raise ProtocolError("no status where one was expected")
            text = os.pread(fds[0], os.fstat(fds[0]).st_size, 0)
        finally:
            _close(fds)
    status: dict[str, Any] = json.loads(text)
    return status


def model_status(status: dict[str, Any], model: str) -> ModelStatus:
    """One model's counters."""
    found = status["models"][model]
    sizes = {int(key.partition("/")[2]): count for key, count in found["sizes"].items()}
    return ModelStatus(found["dispatches"], found["useful_rows"], found["device_seconds"], sizes)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

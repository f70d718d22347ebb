"""Commands to a runtime, through its socket: tests of the runtime need no control process for them."""

from typing import Any

from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.socket import ask


class Refused(Exception):
    """The runtime does not do that, or not with these values; the message says why and what to do."""

    def __init__(self, text: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(text)
        #: name of a gRPC status
        self.code = code


def configure(
    server_pid: int, changes: dict[str, Any], gpu: str = "0", timeout: float = 10.0
) -> dict[str, Any]:
    """Change keys of the scheduler's section while it runs; the whole section as it holds now. {} only asks.

    Raises Refused, then nothing has changed; and what `read_status` raises.
    """
    section = ask(server_pid, gpu, timeout, pack_json(Kind.CONFIGURE, changes), Kind.CONFIGURED)
    if "error" in section:
        raise Refused(section["error"])
    return section


def set_residency(server_pid: int, model: str, residency: str, gpu: str = "0", timeout: float = 10.0) -> None:
    """Where a model's weights are for sure from now on: unpinned, system or device. Returns before they are there.

    Raises Refused, then nothing has changed; and what `read_status` raises.
    """
    command(server_pid, {"command": "residency", "model": model, "residency": residency}, gpu, timeout)


def compact(server_pid: int, gpu: str = "0", timeout: float = 10.0) -> None:
    """Have all weights that are not pinned freed at once and loaded again. Returns before that is done.

    Raises what `read_status` raises.
    """
    command(server_pid, {"command": "compact"}, gpu, timeout)


def command(server_pid: int, wanted: dict[str, Any], gpu: str = "0", timeout: float = 10.0) -> dict[str, Any]:
    """Have a command of docs/protocol.md done; what comes of it.

    Raises Refused, then nothing has changed; and what `read_status` raises.
    """
    answer = ask(server_pid, gpu, timeout, pack_json(Kind.COMMAND, wanted), Kind.COMMANDED)
    if "error" in answer:
        raise Refused(answer["error"], answer["code"])
    return answer

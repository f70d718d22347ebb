"""Commands to a runtime through its socket, for tests without a control process."""

import json
from typing import Any

from rsrv.wire.frames import Kind, pack_json
from rsrv.wire.socket import ask
from tests.waiting import PATIENCE_S


class Refused(Exception):
    """The runtime refuses the command; the message says why and what to do."""

    def __init__(self, text: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(text)
        #: The name of a gRPC status.
        self.code = code


def compact(server_pid: int, gpu: str = "0", timeout: float = PATIENCE_S) -> None:
    """Let the runtime free all weights except pinned ones, and load them again. Return before this is done.

    Raises the errors of `rsrv.wire.socket.ask`, and Refused.
    """
    command(server_pid, {"command": "compact"}, gpu, timeout)


def command(
    server_pid: int, request: dict[str, Any], gpu: str = "0", timeout: float = PATIENCE_S
) -> dict[str, Any]:
    """Send a command of `rsrv.runtime.commands`, and return its answer.

    Raises Refused if the runtime refuses the command; nothing has changed then. Also raises the errors of `rsrv.wire.socket.ask`.
    """
    answer: dict[str, Any] = json.loads(
        ask(server_pid, gpu, timeout, pack_json(Kind.COMMAND, request), Kind.COMMANDED)
    )
    if "error" in answer:
        raise Refused(answer["error"], answer["code"])
    return answer

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
    """Free all weights that are not pinned at once, and load them again. Returns before that is done.

    Raises what `read_record` raises.
    """
    command(server_pid, {"command": "compact"}, gpu, timeout)


def command(
    server_pid: int, wanted: dict[str, Any], gpu: str = "0", timeout: float = PATIENCE_S
) -> dict[str, Any]:
    """Send a command of `rsrv.runtime.commands`, and return its answer.

    Raises Refused, then nothing has changed; and what `read_record` raises.
    """
    answer: dict[str, Any] = json.loads(
        ask(server_pid, gpu, timeout, pack_json(Kind.COMMAND, wanted), Kind.COMMANDED)
    )
    if "error" in answer:
        raise Refused(answer["error"], answer["code"])
    return answer

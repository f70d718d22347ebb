"""Questions to a runtime, from any process of the same user."""

import os
from typing import Any

from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.paths import SOCKET, runtime_directory
from rsrv.wire.socket import Receiver, connect, send


def read_status(server_pid: int, gpu: str = "0", timeout: float = 10.0) -> dict[str, Any]:
    """What the runtime of this tritonserver and GPU says of itself and its models; keys as in docs/protocol.md.

    Reads RSRV_RUNTIME_DIR, which must be what it is for the server. Raises OSError when there is no runtime or it
    is silent for `timeout` seconds, Closed when it ends meanwhile, ProtocolError when it is not ours.
    """
    return ask(server_pid, gpu, timeout, pack_json(Kind.STATUS, {}), Kind.STATUS_REPLY)


def ask(server_pid: int, gpu: str, timeout: float, question: bytes, answer: Kind) -> dict[str, Any]:
    """Send one frame; return the JSON object of the answer, which is in a descriptor or in the frame. Raises as `read_status`."""
    with connect(runtime_directory(server_pid, gpu) / SOCKET) as sock:
        sock.settimeout(timeout)
        receiver = Receiver(sock)
        send(sock, hello())
        frame, fds = receiver.receive()
        _close(fds)
        check_hello(frame)
        send(sock, question)
        frame, fds = receiver.receive()
        try:
            if read_header(frame)[0] is not answer:
                raise ProtocolError(f"the runtime does not answer with {answer.name}")
            return read_document(fds[0]) if fds else unpack_json(frame)
        finally:
            _close(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

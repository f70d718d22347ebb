"""Asking a runtime how it is, and telling it how to decide: for tools and tests, from any process of the same user."""

import os
from typing import Any

from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.paths import SOCKET, runtime_directory
from rsrv.wire.socket import Receiver, connect, send


class Refused(Exception):
    """The runtime does not do that, or not with these values; the message says why and what to do."""

    def __init__(self, text: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(text)
        #: name of a gRPC status
        self.code = code


def read_status(server_pid: int, gpu: str = "0", timeout: float = 10.0) -> dict[str, Any]:
    """What the runtime of this tritonserver and GPU says of itself and its models; keys as in docs/protocol.md.

    Reads RSRV_RUNTIME_DIR, which must be what it is for the server. Raises OSError when there is no runtime or it
    is silent for `timeout` seconds, Closed when it ends meanwhile, ProtocolError when it is not ours.
    """
    return _ask(server_pid, gpu, timeout, pack_json(Kind.STATUS, {}), Kind.STATUS_REPLY)


def configure(
    server_pid: int, changes: dict[str, Any], gpu: str = "0", timeout: float = 10.0
) -> dict[str, Any]:
    """Change keys of the scheduler's section while it runs; the whole section as it holds now. {} only asks.

    Raises Refused, then nothing has changed; and what `read_status` raises.
    """
    section = _ask(server_pid, gpu, timeout, pack_json(Kind.CONFIGURE, changes), Kind.CONFIGURED)
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
    answer = _ask(server_pid, gpu, timeout, pack_json(Kind.COMMAND, wanted), Kind.COMMANDED)
    if "error" in answer:
        raise Refused(answer["error"], answer["code"])
    return answer


def _ask(server_pid: int, gpu: str, timeout: float, question: bytes, answer: Kind) -> dict[str, Any]:
    """The JSON object of the answer: in a descriptor if there is one, else in the frame."""
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

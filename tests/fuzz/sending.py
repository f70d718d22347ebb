"""Send bad requests: any bytes over HTTP and to the gRPC port, and any bytes as the message of a gRPC call."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from http.client import HTTPException, HTTPResponse
from typing import Any, NamedTuple, Self

import grpc

from local_triton import LOOPBACK
from tests.fuzz.requests import Attack

#: Name of the service whose calls are sent, as a path.
_SERVICE = "/inference.GRPCInferenceService/"
#: Seconds within which any request must be answered or its connection closed.
PATIENCE = 15.0
#: Internals of the server that no client may see: paths, source positions, tracebacks and addresses.
_INSIDE = re.compile(
    r"""Traceback|File ["']|\.py\b|\.cc:\d|/(?:work|usr|tmp|home|opt|proc|dev/shm|root)\b|\bline \d+|0x[0-9a-f]{6,}"""
)
#: Errors about JSON and unreadable messages that Triton's front ends report as internal.
_TRITONS = re.compile(
    r"(500|INTERNAL) .*(nable to (parse|set)|failed to parse|failed to get request params|was not found in the JSON)",
    re.DOTALL,
)


class Ports(NamedTuple):
    http: int
    grpc: int


class Answer(NamedTuple):
    #: "answered", "refused", "closed", or a value of `watched.BAD`.
    outcome: str
    #: Code and text of an error, as the client gets them.
    said: str = ""


class Sender:
    """Sends bad requests. Several threads may use it. It is a context manager."""

    def __init__(self, server: Ports, gateway: Ports) -> None:
        self._ports = {False: server, True: gateway}
        self._stack = ExitStack()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_metadata_size", 1 << 16)]
        self._channels = {
            where: self._stack.enter_context(grpc.insecure_channel(f"{LOOPBACK}:{ports.grpc}", options))
            for where, ports in self._ports.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, attack: Attack) -> Answer:
        """Send a bad request, and return the outcome. No error is raised."""
        ports = self._ports[attack.gateway]
        match attack.protocol:
            case "http":
                answer = over_http(ports.http, attack.data, attack.cut)
            case "h2":
                answer = _h2(ports.grpc, attack)
            case _:
                answer = _call(self._channels[attack.gateway], attack)
        return judged(answer)


def judged(answer: Answer) -> Answer:
    """Return the answer. If its text shows internals or an internal error, return an answer that reports this."""
    if (match := _INSIDE.search(answer.said)) is not None:
        return Answer("leak", f"{match[0]!r} in: {answer.said}")
    if answer.said.startswith(("500", "INTERNAL", "UNKNOWN")) and not _TRITONS.match(answer.said):
        return Answer("fault", answer.said)
    return answer


def _connect(port: int, data: bytes, cut: bool) -> socket.socket:
    sock = socket.create_connection((LOOPBACK, port), PATIENCE)
    try:
        sock.sendall(data)
        if cut:
            sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # The server closed the connection. It may have answered before.
    return sock


def over_http(port: int, data: bytes, cut: bool) -> Answer:
    """Send bytes to an HTTP port, and return the outcome. `cut`: the client closes its side after sending."""
    try:
        with _connect(port, data, cut) as sock:
            response = HTTPResponse(sock, method="HEAD" if data[:5] == b"HEAD " else "POST")
            response.begin()
            text = response.read().decode(errors="replace")
    except TimeoutError:
        return Answer("hang", f"no answer within {PATIENCE:g} s")
    except (OSError, HTTPException):
        # A complete HTTP request must be answered.
        return Answer("closed" if cut else "unanswered")
    if response.status < 400:
        # If a stream fails after its beginning, its status is still that of a success.
        return Answer("answered", text if '"error"' in text else "")
    return Answer("refused", f"{response.status} {text}")


def _h2(port: int, attack: Attack) -> Answer:
    try:
        with _connect(port, attack.data, attack.cut) as sock:
            while sock.recv(65536):
                pass
    except TimeoutError:
        return Answer("hang", f"still open after {PATIENCE:g} s")
    except OSError:
        pass
    return Answer("closed")


def _call(channel: grpc.Channel, attack: Attack) -> Answer:
    options: Mapping[str, Any] = {"timeout": PATIENCE, "metadata": attack.metadata}
    try:
        if attack.call == "ModelStreamInfer":
            stream = channel.stream_stream(_SERVICE + attack.call)(iter([attack.data]), **options)
            for _ in stream:
                if attack.cut:
                    stream.cancel()
                    return Answer("closed")
        else:
            channel.unary_unary(_SERVICE + attack.call)(attack.data, **options)
    except grpc.RpcError as error:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and details.startswith("Deadline"):
            return Answer("hang", f"no answer within {PATIENCE:g} s")
        if code is grpc.StatusCode.UNAVAILABLE and ("onnect" in details or "Socket closed" in details):
            return Answer("unanswered", details)
        return Answer("refused", f"{code.name} {details}")
    return Answer("answered")

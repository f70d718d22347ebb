"""A command's connection to the service of a server or a gateway, and its exit status."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rsrv.cli.output import print_json
from rsrv.control import find
from rsrv.progress import steps
from rsrv.text import one_line

#: Seconds to wait for an answer, and for the answer to a call that loads or compiles first.
TIMEOUT_S = 10.0
LONG_TIMEOUT_S = 600.0


class CommandLineError(Exception):
    """The command line is wrong; the message says why."""


def carry_out(
    options: argparse.Namespace,
    command: "Callable[[Server], int]",
    stub: Callable[[Any], Any],
    find_address: Callable[[int | None], str],
) -> int:
    """Connect, carry out a command, and return its exit status.

    `stub` makes a stub of the service on a channel, and `find_address` finds the service of a pid.
    """
    address = ""
    try:
        address = getattr(options, "address", None) or find_address(getattr(options, "pid", None))
        with _connected(address, options, stub) as server:
            return command(server)
    except CommandLineError as error:
        return _fail(str(error), 2)
    except (find.NotFound, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader has closed the pipe. Python would log an error when it closes the output.
            sys.stdout = None
            return 0
        return _fail(str(error), 1)
    except grpc.RpcError as error:
        return _fail(_explain(error, address), 1)


def _fail(text: str, status: int) -> int:
    print(f"rsrv: {one_line(text)}", file=sys.stderr)
    return status


def _explain(error: Any, address: str) -> str:
    code, text = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in text:
        return f"cannot connect to {address}. Check that the server runs, and that both sides or neither use TLS."
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time; --timeout sets how long to wait"
    return text or code.name


class Server:
    """A connection to a control service, with the options of the command."""

    def __init__(
        self, channel: Any, stub: Callable[[Any], Any], options: argparse.Namespace, token: str | None
    ) -> None:
        self.options = options
        self.json: bool = getattr(options, "json", False)
        self._control = stub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def ask(self, call: str, request: Message, seconds: float = TIMEOUT_S) -> Any:
        """Call the service, and return its answer. Raises grpc.RpcError."""
        timeout = getattr(self.options, "timeout", seconds)
        return getattr(self._control, call)(request, timeout=timeout, metadata=self._metadata)

    def wait(self, call: str, request: Message, what: str, seconds: float = LONG_TIMEOUT_S) -> Any:
        """Call the service and wait for its work, which a terminal shows as `what`. Raises grpc.RpcError."""
        with steps(what):
            return self.ask(call, request, seconds)

    def stream(self, call: str, request: Message) -> Any:
        timeout = getattr(self.options, "timeout", None)
        return getattr(self._control, call)(request, timeout=timeout, metadata=self._metadata)

    def health(self, service: str) -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        timeout = getattr(self.options, "timeout", TIMEOUT_S)
        return self._health.Check(request, timeout=timeout, metadata=self._metadata)

    def done(self, answer: Message, text: str) -> int:
        """Print the text, or the answer as JSON; return the exit status."""
        if self.json:
            print_json(answer)
        else:
            print(text)
        return 0

    def show(self, answer: Any, page: Callable[[Any], None]) -> int:
        if self.json:
            print_json(answer)
        else:
            page(answer)
        return 0


@contextmanager
def _connected(address: str, options: argparse.Namespace, stub: Callable[[Any], Any]) -> Iterator[Server]:
    ca, certificate, key = (getattr(options, f"tls_{name}", None) for name in ("ca", "cert", "key"))
    token_file = getattr(options, "token_file", None)
    token = None if token_file is None else token_file.read_text().strip()
    limits = [("grpc.max_receive_message_length", -1)]
    if ca or certificate or key or getattr(options, "tls", False):
        if (certificate is None) != (key is None):
            raise CommandLineError("--tls-cert needs --tls-key, and --tls-key needs --tls-cert")
        pems = (None if path is None else path.read_bytes() for path in (ca, key, certificate))
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*pems), limits)
    else:
        channel = grpc.insecure_channel(address, limits)
    with channel:
        yield Server(channel, stub, options, token)

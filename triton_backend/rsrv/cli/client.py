"""A command's connection to the service of a server or a gateway, and its exit status."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

import rsrv
from rsrv.address import parse_address
from rsrv.cli.output import print_json
from rsrv.command import CommandParser
from rsrv.control import find
from rsrv.progress import steps
from rsrv.text import nearest, one_line, os_error
from rsrv.tokens import TokenError, parse_token

#: Seconds to wait for an answer.
TIMEOUT_S = 10.0
#: Seconds to wait for the answer to a call that loads or compiles first.
LONG_TIMEOUT_S = 600.0


class CommandLineError(Exception):
    """The command line is wrong. The message says why."""


def carry_out(
    options: argparse.Namespace,
    command: "Callable[[Server], int]",
    messages: Any,
    stub: Callable[[Any], Any],
    find_address: Callable[[str | None], str],
) -> int:
    """Connect, carry out a command, and return its exit status.

    `messages` is the service's module of messages. `stub` makes a stub of the service on a channel. `find_address` returns the
    address of the service that --server names.
    """
    try:
        address = find_address(getattr(options, "server", None))
        with _connected(address, options) as channel:
            server = Server(channel, messages, stub, options)
            try:
                return command(server)
            except grpc.RpcError as error:
                return _fail(options, _explain(error, address, server))
    except CommandLineError as error:
        parser: CommandParser = options.parser
        print(parser.explain(str(error)), end="", file=sys.stderr)
        return 2
    except (find.NotFound, TokenError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        return _fail(options, os_error(error) if isinstance(error, OSError) else str(error))


def _fail(options: argparse.Namespace, text: str) -> int:
    print(f"{options.parser.prog}: {one_line(text)}", file=sys.stderr)
    return 1


#: Causes and remedies of failed connections. The key is a part of gRPC's error text.
_CAUSES = {
    "WRONG_VERSION_NUMBER": "the server does not use TLS; leave out --tls and the other TLS options",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate was not issued by a trusted authority; name its authority's file with --tls-ca",
    "Hostname Verification": "the server's certificate is for another host name; use that name in --server",
    "Socket closed": "the server closed the connection; it may require TLS (--tls-ca) or a client certificate (--tls-cert), or may not serve gRPC",
    "HTTP/2": "this port does not serve gRPC; use the port of control.listen",
    "Connection refused": "no process listens at this address; check that the server runs, and check its control.listen",
    "No such file": "this socket does not exist; check that the server runs",
    "errors resolving": "the address is not HOST:PORT, or its host is unknown",
}


def _explain(error: Any, address: str, server: "Server") -> str:
    """Return the cause of an error of gRPC, and what to do."""
    code = error.code()
    text: str = error.details() or code.name
    match code:
        case grpc.StatusCode.UNAVAILABLE if "failed to connect" in text or "errors resolving" in text:
            cause = next((cause for part, cause in _CAUSES.items() if part in text), text)
            return f"cannot connect to {address}: {cause}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return "no answer in time; --timeout sets how long to wait"
        case grpc.StatusCode.UNAUTHENTICATED:
            return f"{text}; name the file that holds the token with --token-file"
        case grpc.StatusCode.UNIMPLEMENTED:
            return (
                f"{address} does not know this command: it is not a control service, or its version of rsrv is not "
                f"{rsrv.__version__}"
            )
        # Explain this error only if the command names a single model. For several models or patterns, the service itself names
        # the most similar model.
        case grpc.StatusCode.NOT_FOUND if (
            isinstance(model := getattr(server.options, "model", ""), str) and model
        ):
            if targets := server.targets(model):
                return f"{text}; the name is an alias of {', '.join(targets)}: name one of these"
            return server.failure(model) or f"{text}{nearest(model, server.models())}"
    return text


class Server:
    """A connection to a control service, with the options of the command."""

    def __init__(
        self, channel: Any, messages: Any, stub: Callable[[Any], Any], options: argparse.Namespace
    ) -> None:
        content = _read(options, "token_file")
        # Check the token here, because no server has a token of another form, and gRPC's metadata must be ASCII.
        token = None if content is None else parse_token(content, options.token_file, "--token-file")
        self._messages = messages
        self.options = options
        self.json: bool = getattr(options, "json", False)
        self._control = stub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._metadata = () if token is None else (("authorization", f"Bearer {token.decode()}"),)

    def ask(self, call: str, request: Message, seconds: float = TIMEOUT_S) -> Any:
        """Call the service, and return its answer. Raises grpc.RpcError."""
        timeout = getattr(self.options, "timeout", seconds)
        return getattr(self._control, call)(request, timeout=timeout, metadata=self._metadata)

    def wait(self, call: str, request: Message, task: str, seconds: float = LONG_TIMEOUT_S) -> Any:
        """Call the service and wait for its work, which a terminal shows as `task`. Raises grpc.RpcError."""
        with steps(task):
            return self.ask(call, request, seconds)

    def stream(self, call: str, request: Message) -> Any:
        timeout = getattr(self.options, "timeout", None)
        return getattr(self._control, call)(request, timeout=timeout, metadata=self._metadata)

    def health(self, reason: Callable[[Any], str]) -> int:
        """Print whether the service, or the model of the command, serves. Return the exit status. Raises grpc.RpcError.

        If it does not serve, `reason` gets the answer to GetStatus, and returns the reason.
        """
        model: str = self.options.model
        request = health_pb2.HealthCheckRequest(service=model)
        timeout = getattr(self.options, "timeout", TIMEOUT_S)
        answer = self._health.Check(request, timeout=timeout, metadata=self._metadata)
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return self.done(answer, "serving")
        why = ""
        # The JSON output has no reasons, so GetStatus is not called for it. A service that does not serve may also fail to answer
        # GetStatus.
        if not self.json:
            try:
                why = reason(self.ask("GetStatus", self._messages.GetStatusRequest(model=model)))
            except grpc.RpcError as error:
                why = one_line(error.details() or error.code().name)
        self.done(answer, f"not serving: {why}")
        return 1

    def models(self) -> list[str]:
        """Return the names of the models. Empty if the server does not answer."""
        with suppress(grpc.RpcError):
            request = self._messages.GetStatusRequest()
            status = self.ask("GetStatus", request)
            return [model.name for model in (*status.models, *getattr(status, "metas", ()))]
        return []

    def failure(self, model: str) -> str:
        """Return the error text of a failed model. It is empty if the model has not failed or the server does not answer."""
        with suppress(grpc.RpcError, AttributeError):  # A gateway does not know failures.
            status = self.ask("GetStatus", self._messages.GetStatusRequest(model=model))
            return "".join(
                f"{failure.name} has failed: {one_line(failure.text)}" for failure in status.failures
            )
        return ""

    def targets(self, alias: str) -> list[str]:
        """Return the models behind an alias. Empty if there is no such alias."""
        with suppress(grpc.RpcError, AttributeError):  # A gateway has no aliases.
            answer = self.ask("SetAlias", self._messages.SetAliasRequest())
            return [
                target.model
                for shown_alias in answer.aliases
                if shown_alias.name == alias
                for target in shown_alias.targets
            ]
        return []

    def done(self, answer: Message, text: str) -> int:
        """Print the text, or the answer as JSON. Return the exit status."""
        return self.show(answer, lambda _: print(text))

    def show(self, answer: Any, page: Callable[[Any], None]) -> int:
        """Print the answer with `page`, or as JSON. Return the exit status."""
        if self.json:
            print_json(answer)
        else:
            page(answer)
        return 0


@contextmanager
def _connected(address: str, options: argparse.Namespace) -> Iterator[Any]:
    if hasattr(options, "tls_cert") != hasattr(options, "tls_key"):
        raise CommandLineError("--tls-cert needs --tls-key, and --tls-key needs --tls-cert")
    ca, certificate, key = (_read(options, f"tls_{name}") for name in ("ca", "cert", "key"))
    limits = [("grpc.max_receive_message_length", -1)]
    if _is_here(address):
        # Do not use the proxy in the environment, because it cannot reach this machine's loopback addresses.
        limits.append(("grpc.enable_http_proxy", 0))
    if ca or certificate or getattr(options, "tls", False):
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        channel = grpc.secure_channel(address, credentials, limits)
    else:
        channel = grpc.insecure_channel(address, limits)
    with channel:
        yield channel


def _is_here(address: str) -> bool:
    """Return True if HOST:PORT is an address of this machine."""
    with suppress(ValueError):
        return parse_address(address).is_loopback
    return False


def _read(options: argparse.Namespace, name: str) -> bytes | None:
    """Return the content of the file that an option names, or None without the option. Raises OSError that names the option."""
    path = getattr(options, name, None)
    try:
        return None if path is None else bytes(path.read_bytes())
    except OSError as error:
        raise OSError(f"--{name.replace('_', '-')}: {os_error(error)}") from None

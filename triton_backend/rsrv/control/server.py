"""Where the services listen: on a Unix socket of this user, and on a TCP port for who has a certificate or a token."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rsrv.control.grpc_server import KEEPALIVE, GrpcServer, ListenError
from rsrv.control.tokens import bears, read_token
from rsrv.control.v1 import control_pb2, control_pb2_grpc
from rsrv.settings import ControlSection

log = logging.getLogger("rsrv.control")

_OPTIONS: Sequence[tuple[str, int]] = (
    # Requests are small, whoever sends them.
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 64),
    # Two processes on one port would each answer some.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE,
)
#: calls at a time on one listener, watchers among them
_CALLS = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """Of a service: how it is added to a server, and where it is described; and what its settings are called."""

    add: Callable[[Any, Any], None]
    file: Any
    section: str
    listen: str


CONTROL = Kind(
    control_pb2_grpc.add_ControlServicer_to_server, control_pb2.DESCRIPTOR, "control", "control.listen"
)


async def listen_locally(path: Path, service: Any, health: Any, kind: Kind = CONTROL) -> GrpcServer:
    """A started server on a Unix socket in a private directory, which only this user can reach. Raises ListenError."""
    path.unlink(missing_ok=True)
    server = GrpcServer(partial(_server, service, health, kind), kind.section)
    await server.start(f"unix:{path}")
    return server


async def listen(
    settings: ControlSection, service: Any, health: Any, kind: Kind = CONTROL
) -> tuple[GrpcServer, int]:
    """A started server on `settings.listen`, and its port. Raises ListenError."""
    address = settings.listen
    assert address is not None
    credentials, token = _credentials(settings, kind), _token(settings, kind)
    if settings.tls_client_ca is None and token is None:
        raise ListenError(
            f"{kind.listen} needs tls_client_ca (with tls_certificate and tls_key) or token_file: whoever reaches the "
            "port could steer the server"
        )
    server = GrpcServer(partial(_server, service, health, kind, token), kind.listen)
    bound = await server.start(address, credentials)
    secured = [*(["TLS"] if credentials else []), *(["a token"] if token else [])]
    log.info("%s: listens on %s, with %s", kind.listen, address, " and ".join(secured))
    return server, bound


def _server(service: Any, health: Any, kind: Kind, token: bytes | None = None) -> Any:
    """One of grpc.aio that listens nowhere yet. `token`: that callers must send, if any."""
    interceptors = [] if token is None else [_TokenCheck(token)]
    server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS, maximum_concurrent_rpcs=_CALLS)
    kind.add(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    described = (kind.file, health_pb2.DESCRIPTOR)
    names = [one.full_name for file in described for one in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    return server


def _credentials(settings: ControlSection, kind: Kind) -> Any:
    """None without TLS. Raises ListenError."""
    certificate, key, authorities = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None and key is None and authorities is None:
        return None
    if certificate is None or key is None:
        raise ListenError(f"{kind.listen} with TLS needs both tls_certificate and tls_key")
    pair = (_read(kind, "tls_key", key), _read(kind, "tls_certificate", certificate))
    clients = None if authorities is None else _read(kind, "tls_client_ca", authorities)
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


def _token(settings: ControlSection, kind: Kind) -> bytes | None:
    """None without one. Raises ListenError."""
    path = settings.token_file
    if path is None:
        return None
    try:
        return read_token(path, f"{kind.section}.token_file")
    except ValueError as error:
        raise ListenError(str(error)) from None


def _read(kind: Kind, key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ListenError(f"{kind.section}.{key}: {error}") from None


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in who sends `authorization: Bearer TOKEN`."""

    def __init__(self, token: bytes) -> None:
        self._token = token

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing, or wrong")

        # Of streams, whatever was called: any other would wait for a request first.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        sent = next((value for key, value in call.invocation_metadata if key == "authorization"), "")
        if bears(sent, self._token):
            return await continuation(call)
        return self._refuse

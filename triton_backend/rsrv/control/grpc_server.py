"""The gRPC server of the control services and of the gateway: listeners, TLS, tokens, and recovery from its own death."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rsrv.address import parse_address
from rsrv.control.v1 import control_pb2, control_pb2_grpc
from rsrv.renewal import Renewals, Renewed
from rsrv.settings import ControlSection
from rsrv.tokens import bears, read_token

log = logging.getLogger(__name__)

#: Triton's keepalive options. So a client can use the same keepalive settings for a tritonserver and for rsrv's servers.
KEEPALIVE: Final[Sequence[tuple[str, int]]] = (
    ("grpc.keepalive_time_ms", 7_200_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 2),
    ("grpc.http2.min_ping_interval_without_data_ms", 300_000),
    ("grpc.http2.max_ping_strikes", 2),
)
#: Seconds between two checks that the server still runs, and between two attempts to listen again.
_CHECK_S = 0.1


class ListenError(Exception):
    """Listening on a port failed; the message names the setting and says what to do."""


class GrpcServer:
    """A server of grpc.aio that is replaced when it dies.

    The server of grpc.aio dies when a client calls a method whose name is not UTF-8. Another one then replaces it. The dead one
    finishes its calls in flight.
    """

    def __init__(self, make: Callable[[], Any], setting: str) -> None:
        """`make` makes a server of grpc.aio with its services. `setting` is the name of the setting with the address."""
        self._make = make
        self._setting = setting
        self._server: Any = None
        #: Replaces the server when it dies.
        self._keeper: asyncio.Task[None] | None = None
        #: Dead servers with calls in flight, and the task of each that waits for the end of these calls.
        self._dead: dict[Any, asyncio.Task[None]] = {}

    async def start(self, address: str, credentials: Any = None) -> int:
        """Listen, and return the port. Raises ListenError.

        `address` is HOST:PORT, or unix:PATH. Only this user can reach such a path. `credentials` is None without TLS.
        """
        port = await self._listen(address, credentials)
        if not address.startswith("unix:"):
            address = f"{address.rpartition(':')[0]}:{port}"
        self._keeper = asyncio.create_task(self._keep(address, credentials))
        return port

    async def stop(self, seconds: float | None) -> None:
        """Refuse new calls, and wait for calls in flight for at most `seconds`. A second call of `stop` may shorten this time."""
        if self._keeper is not None:
            self._keeper.cancel()
        # Replace 0 by None. With 0, grpc waits briefly, and crashes the process if another stop ends in the meantime.
        seconds = seconds or None
        dead = [asyncio.ensure_future(server.stop(seconds)) for server in self._dead]
        if self._server is not None:
            # Stop the current server first, and await only this stop, so that the server refuses all calls from the event loop's
            # next iteration on.
            await self._server.stop(seconds)
        await asyncio.gather(*dead, *self._dead.values())

    async def _listen(self, address: str, credentials: Any) -> int:
        server = self._make()
        port = self._bind(server, address, credentials)
        self._server = server
        await server.start()
        return port

    def _bind(self, server: Any, address: str, credentials: Any) -> int:
        socket = _path(address)
        if socket is None:
            try:
                parse_address(address, any_host=True, any_port=True)  # gRPC would choose another port
            except ValueError as error:
                raise ListenError(f"{self._setting}: {error}") from None
        try:
            bound: int = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError:
            # gRPC writes the reason only to its own log.
            raise ListenError(
                f"{self._setting}: cannot listen on {address}: the port is in use, or the address is not one of this machine"
            ) from None
        if socket is not None:
            socket.chmod(0o600)
        return bound

    async def _keep(self, address: str, credentials: Any) -> None:
        socket = _path(address)
        while True:
            try:
                while await self._server.wait_for_termination(_CHECK_S):
                    pass
            except Exception as error:  # noqa: BLE001  any cause of death
                log.error("%s: the gRPC server failed and is replaced: %s", self._setting, error)
            dead, self._server = self._server, None
            self._dead[dead] = asyncio.create_task(self._bury(dead))
            # The dead server removes the socket's file, even if the file now belongs to its successor.
            while socket is not None and socket.exists():
                await asyncio.sleep(_CHECK_S)
            while True:
                try:
                    await self._listen(address, credentials)
                    break
                except ListenError:  # the dead server may still have the port
                    await asyncio.sleep(_CHECK_S)

    async def _bury(self, server: Any) -> None:
        """Drop a dead server when its last call has ended. Nothing may cancel this task, because `stop` waits for it."""
        try:
            await server.wait_for_termination()
        except Exception:  # noqa: BLE001  its cause of death was logged
            await server.stop(None)
        del self._dead[server]


def _path(address: str) -> Path | None:
    """Return the path of a Unix socket, or None for any other address."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


_OPTIONS: Sequence[tuple[str, int]] = (
    # Limit the size of requests, which are small.
    ("grpc.max_receive_message_length", 1 << 20),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 64),
    # Do not share a port with another process: each of the two would answer some of the calls.
    ("grpc.so_reuseport", 0),
    *KEEPALIVE,
)
#: Maximum number of calls at a time on one listener, including watchers.
_MAX_CALLS = 256


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """A service: the function that adds it to a server, its description, and the names of its settings."""

    add: Callable[[Any, Any], None]
    file: Any
    section: str
    listen: str


CONTROL = ServiceKind(
    control_pb2_grpc.add_ControlServicer_to_server, control_pb2.DESCRIPTOR, "control", "control.listen"
)


async def listen_locally(path: Path, service: Any, health: Any, kind: ServiceKind = CONTROL) -> GrpcServer:
    """Start a server on a Unix socket in a private directory, which only this user can reach. Raises ListenError."""
    path.unlink(missing_ok=True)
    server = GrpcServer(partial(_server, service, health, kind), kind.section)
    await server.start(f"unix:{path}")
    return server


async def listen(
    settings: ControlSection,
    service: Any,
    health: Any,
    kind: ServiceKind = CONTROL,
    renewals: Renewals | None = None,
) -> tuple[GrpcServer, int]:
    """Start a server on `settings.listen`. Return the server and its port. Raises ListenError.

    `renewals` reads the files with the certificate and the token again when they change.
    """
    address = settings.listen
    assert address is not None
    renewals = Renewals() if renewals is None else renewals
    credentials, token = _credentials(settings, kind, renewals), _token(settings, kind, renewals)
    if settings.tls_client_ca is None and token is None:
        raise ListenError(
            f"{kind.listen} needs tls_client_ca (with tls_certificate and tls_key) or token_file: any process that "
            "reaches the port could control the server"
        )
    server = GrpcServer(partial(_server, service, health, kind, token), kind.listen)
    bound = await server.start(address, credentials)
    secured = [*(["TLS"] if credentials else []), *(["a token"] if token else [])]
    log.info("%s: listens on %s, with %s", kind.listen, address, " and ".join(secured))
    return server, bound


def _server(service: Any, health: Any, kind: ServiceKind, token: Renewed[bytes] | None = None) -> Any:
    """Make a server of grpc.aio that does not listen yet. If there is a `token`, callers must send it."""
    interceptors = [] if token is None else [_TokenCheck(token)]
    server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    kind.add(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    described = (kind.file, health_pb2.DESCRIPTOR)
    names = [service.full_name for file in described for service in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
    return server


def _credentials(settings: ControlSection, kind: ServiceKind, renewals: Renewals) -> Any:
    """Return the credentials of TLS, or None without TLS. Raises ListenError."""
    certificate, key, authorities = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None and key is None and authorities is None:
        return None
    if certificate is None or key is None:
        raise ListenError(f"{kind.listen} with TLS needs both tls_certificate and tls_key")

    def read() -> Any:
        pair = (_read(kind, "tls_key", key), _read(kind, "tls_certificate", certificate))
        clients = None if authorities is None else _read(kind, "tls_client_ca", authorities)
        _check_tls(kind, certificate, key, authorities)
        return grpc.ssl_server_certificate_configuration([pair], clients)

    files = [path for path in (certificate, key, authorities) if path is not None]
    renewed = renewals.of(f"{kind.listen}'s tls_certificate", files, read, certificate)
    # gRPC asks for the configuration at each new connection.
    return grpc.dynamic_ssl_server_credentials(
        renewed.value, lambda: renewed.value, require_client_authentication=authorities is not None
    )


def _check_tls(kind: ServiceKind, certificate: Path, key: Path, authorities: Path | None) -> None:
    """Raise ListenError with the reason if the files cannot be used. gRPC itself reports no reason."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate.expanduser(), key.expanduser())
        if authorities is not None:
            context.load_verify_locations(authorities.expanduser())
    except OSError as error:
        raise ListenError(f"{kind.section}.tls_certificate, tls_key, tls_client_ca: {error}") from None


def _token(settings: ControlSection, kind: ServiceKind, renewals: Renewals) -> Renewed[bytes] | None:
    """Return the token that callers must send, or None. Raises ListenError."""
    path = settings.token_file
    if path is None:
        return None
    try:
        setting = f"{kind.section}.token_file"
        return renewals.of(setting, [path], lambda: read_token(path, setting))
    except ValueError as error:
        raise ListenError(str(error)) from None


def _read(kind: ServiceKind, key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ListenError(f"{kind.section}.{key}: {error}") from None


class _TokenCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without the metadata `authorization: Bearer TOKEN`."""

    def __init__(self, token: Renewed[bytes]) -> None:
        self._token = token

        async def refuse(_: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing, or wrong")

        # Refuse every method with a handler of streams, because any other handler would wait for a request first.
        self._refuse = grpc.stream_stream_rpc_method_handler(refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        sent = next((value for key, value in call.invocation_metadata if key == "authorization"), "")
        if bears(sent, self._token.value):
            return await continuation(call)
        return self._refuse

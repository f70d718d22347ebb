"""Connections to workers over gRPC, and the credentials of workers and clients."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import Message

from rsrv import listening
from rsrv.address import parse_address
from rsrv.control.grpc_server import KEEPALIVE, ListenError
from rsrv.control.v1 import control_pb2_grpc
from rsrv.renewal import Renewals, Renewed, RenewedTls
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import bears, parse_token, read_token
from rsrv.triton_command_line import restriction
from rsrv_gateway.outcomes import Metadata, Refusal

_OPTIONS: Sequence[tuple[str, int]] = (
    # Ignore environment variables such as http_proxy, because such a proxy is for connections to other networks.
    ("grpc.enable_http_proxy", 0),
    # Reconnect soon to a worker that has returned.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # By default, channels to one address share a connection. If that connection hangs, a new channel would use it again.
    ("grpc.use_local_subchannel_pool", 1),
)


#: Seconds between two probes of a worker.
PROBE_S: Final = 0.5
#: A worker counts as dead if it does not answer a probe within this many seconds.
PROBE_TIMEOUT_S: Final = 2 * PROBE_S


class CredentialsError(Exception):
    """A file for TLS or with a token cannot be used. The message names the setting that refers to the file."""


@dataclass(frozen=True, slots=True)
class ControlClient:
    """A worker's control service on a separate channel. Every call has the same metadata."""

    channel: Any
    metadata: tuple[tuple[str, str], ...]
    stub: Any

    def call(self, name: str, request: Message, timeout: float) -> Any:
        """Start a call that may take `timeout` seconds, and return it. Awaiting the call returns the answer or raises RpcError."""
        return getattr(self.stub, name)(request, timeout=timeout, metadata=self.metadata)


class ChannelFactory:
    """Opens channels with the latest credentials. Raises CredentialsError, TokenError."""

    def __init__(self, section: GatewaySection, renewals: Renewals | None = None) -> None:
        renewals = Renewals() if renewals is None else renewals
        self._tls = _worker_files(section, renewals)
        file, key = section.worker_token_file, "gateway.worker_token_file"
        self._token = (
            None
            if file is None
            else renewals.of(
                key, [file], lambda: parse_token(_read("worker_token_file", file), file, key).decode()
            )
        )
        self._repository_key, self._repository_value = section.worker_repository_key, None
        value = section.worker_repository_value_file
        if value is not None:
            key = "gateway.worker_repository_value_file"
            self._repository_value = renewals.of(key, [value], lambda: read_token(value, key).decode())
        self._options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", section.max_message_bytes),
            ("grpc.max_send_message_length", section.max_message_bytes),
        ]

    @property
    def credentials(self) -> Any:
        """Credentials of new channels, or None without TLS. After a renewal, this is a new object."""
        return None if self._tls is None else self._tls.value.credentials

    @property
    def control_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of calls to control services."""
        return () if self._token is None else (("authorization", f"Bearer {self._token.value}"),)

    @property
    def repository_metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of the gateway's own calls to restricted repositories. Clients' calls do not get it."""
        key, value = self._repository_key, self._repository_value
        return () if key is None or value is None else (restriction(key, value.value),)

    def open(self, address: str, *options: tuple[str, int]) -> Any:
        """Open a channel of grpc.aio with additional options. A Unix socket is local and needs no TLS."""
        all_options = [*self._options, *options]
        credentials = self.credentials
        if credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, all_options)
        return grpc.aio.secure_channel(address, credentials, all_options)

    def open_control(self, address: str) -> ControlClient:
        """Open a channel to a control service."""
        channel = self.open(address)
        return ControlClient(channel, self.control_metadata, control_pb2_grpc.ControlStub(channel))


@dataclass(frozen=True, slots=True)
class _WorkerTls:
    """TLS to workers, for HTTP and for gRPC."""

    context: ssl.SSLContext
    credentials: Any


def _worker_files(section: GatewaySection, renewals: Renewals) -> Renewed[_WorkerTls] | None:
    """Return the files for TLS to workers, or None without TLS. Raises CredentialsError."""
    ca, certificate, key = section.worker_ca, section.worker_certificate, section.worker_key
    if ca is None:
        return None

    def read() -> _WorkerTls:
        # gRPC expects the key before the certificate.
        files = (("worker_ca", ca), ("worker_key", key), ("worker_certificate", certificate))
        contents = [None if path is None else _read(name, path) for name, path in files]
        try:
            # gRPC does not report unusable files. If a file has no authorities, gRPC uses the public authorities.
            context = ssl.create_default_context(cafile=ca.expanduser())
            if certificate is not None and key is not None:
                context.load_cert_chain(certificate.expanduser(), key.expanduser())
        except OSError as error:
            raise CredentialsError(f"gateway.worker_ca, worker_certificate, worker_key: {error}") from None
        return _WorkerTls(context, grpc.ssl_channel_credentials(*contents))

    setting = "gateway.worker_ca" if certificate is None else "gateway.worker_certificate"
    files = [path for path in (ca, certificate, key) if path is not None]
    return renewals.of(setting, files, read, certificate)


def worker_tls(section: GatewaySection, renewals: Renewals) -> ssl.SSLContext | None:
    """Return the TLS context for HTTP to workers, or None without TLS. Raises CredentialsError."""
    files = _worker_files(section, renewals)
    return None if files is None else RenewedTls.of(lambda: files.value.context)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise CredentialsError(f"gateway.{key}: {error}") from None


SERVICE = "/inference.GRPCInferenceService/"

#: Pings to a worker while its answers are outstanding. tritonserver by default disconnects a client after two pings within 300 s.
#: If the peer does not acknowledge a ping within the timeout, the connection is closed.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # Ignore TXT records, because the settings name the workers.
    ("grpc.service_config_disable_resolution", 1),
)

#: After a timeout has replaced a connection to a worker, further timeouts replace none for this many seconds.
RENEW_MIN_S = 5.0


class WorkerConnection:
    """One connection to a worker."""

    __slots__ = ("answers", "channel", "infer", "stream")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: Number of calls that the worker has ended, plus messages of its streams.
        self.answers = 0
        self.infer = channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = channel.stream_stream(SERVICE + "ModelStreamInfer")


class WorkerChannels:
    """The connections to one worker, made on first use. One event loop owns them.

    Several connections are used, so that one connection's flow control does not hold back all requests. Each channel of a
    `ChannelFactory` has a separate connection. So a new channel helps when the old connection is half open: the worker's
    machine has failed without closing it.
    """

    def __init__(self, address: str, contacts: ChannelFactory, number: int) -> None:
        """Open `number` channels."""
        self._address = address
        self._contacts = contacts
        self._credentials = contacts.credentials
        self._links = [self._open() for _ in range(number)]
        self._turns = count()
        self._renewed_at = -inf
        self._retiring: dict[asyncio.Task[None], WorkerConnection] = {}

    def link(self) -> WorkerConnection:
        """Return the next connection. Successive calls rotate over all connections."""
        if self._credentials is not self._contacts.credentials:
            self._credentials = self._contacts.credentials
            self.retire()
            self._links = [self._open() for _ in self._links]
        links = self._links
        return links[next(self._turns) % len(links)]

    def unanswered(self, link: WorkerConnection, answers: int, now: float) -> bool:
        """Handle a call that timed out. Return True if this replaces the connection of the call.

        `answers` is the connection's count when the call began, and `now` is in seconds of a monotonic clock. If no call was
        answered since then, the connection may be half open. The next calls then use a new connection, and calls in flight
        continue.
        """
        recently = now - self._renewed_at < RENEW_MIN_S
        if recently or link.answers != answers or link not in self._links:
            return False
        self._renewed_at = now
        self._links[self._links.index(link)] = self._open()
        self._retire(link)
        return True

    def retire(self) -> None:
        """Accept no new calls.

        Calls in flight continue without a limit, because the worker may be absent for only one probe.
        """
        for link in self._links:
            self._retire(link)

    async def close(self) -> None:
        """Cancel all calls."""
        retiring = dict(self._retiring)
        await cancel(retiring)
        for link in (*self._links, *retiring.values()):
            await link.channel.close()

    def _open(self) -> WorkerConnection:
        return WorkerConnection(self._contacts.open(self._address, *_KEEPALIVE))

    def _retire(self, link: WorkerConnection) -> None:
        """Close a connection after its calls have ended. A call ends at its deadline, or when pings show that the peer is gone."""
        task = asyncio.get_running_loop().create_task(link.channel.close(inf))
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)


#: Maximum deadline in seconds that gRPC can transmit. Some clients send a longer deadline because they want none.
_DEADLINE_MAX_S = 27_000 * 3600.0

#: gRPC's messages for a connection that broke during a call, in this version and in earlier versions. If a connection cannot be made,
#: gRPC has other messages.
_LOST = re.compile(
    "Stream removed|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:|keepalive |ping "
)
#: gRPC's message if a stream ends while a message is sent on it. It replaces the worker's message.
_ENDED = "Internal error from Core"
#: Maximum number of seconds to wait for the worker's status after the message `_ENDED`.
_STATUS_S = 1.0


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    code, message = error.code(), error.details() or ""
    if message == _ENDED:
        return Refusal(grpc.StatusCode.UNAVAILABLE, "the stream to the worker broke", lost=True)
    lost = code is grpc.StatusCode.UNAVAILABLE and _LOST.match(message) is not None
    return Refusal(code, message, sendable(error.trailing_metadata() or ()), lost)


class StreamEnd:
    """The end of a stream to a worker.

    If the stream ends while a message is sent on it, grpc.aio sets the status `_ENDED` itself, just before or after it sets the
    worker's status. It calls done callbacks only for the first of the two.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        #: The first status, or None if it is OK.
        self._first: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        with suppress(StopIteration, asyncio.CancelledError):
            try:
                call.read().send(None)  # The call has ended, so this only raises its status.
            except grpc.aio.AioRpcError as error:
                self._first = error

    async def refusal_of(self, error: grpc.aio.AioRpcError) -> Refusal | None:
        """Return the worker's refusal, or None if the worker ended the stream with OK.

        `error` is the error that reading the answers raised.
        """
        if error.details() == _ENDED:
            if self._first is None:
                return None
            error = self._first
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_S):
                while error.details() == _ENDED:
                    await asyncio.sleep(0.001)
                    try:
                        await self._call.read()
                    except grpc.aio.AioRpcError as latest:
                        error = latest
                    else:
                        return None
        return refusal_of(error)


def sendable(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """Return the metadata without texts that gRPC cannot send. gRPC can receive some of these texts."""
    return tuple(
        [
            pair
            for pair in metadata
            if isinstance(pair[1], bytes) or (pair[1].isascii() and pair[1].isprintable())
        ]
    )


def time_left(context: Any) -> float | None:
    """Return the seconds until the client's deadline, or None without a deadline."""
    left: float | None = context.time_remaining()
    return None if left is None else min(left, _DEADLINE_MAX_S)


def gone(worker: str) -> Refusal:
    """Return the refusal for a worker whose connections the gateway has closed."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker} was removed")


def is_cancelled() -> bool:
    """Return True if this task was cancelled. Otherwise, a CancelledError means that the worker's channel was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks, and return when they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def answer_of(call: Awaitable[bytes], worker: str) -> bytes | Refusal:
    """Return a worker's answer to a call, or the refusal that explains why there is none."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        refusal = refusal_of(error)
    except asyncio.CancelledError:
        refusal = gone(worker)
    if is_cancelled():  # If this task was cancelled, the call may have ended with the worker's error instead.
        raise asyncio.CancelledError
    return refusal


async def refuse(context: Any, refusal: Refusal) -> NoReturn:
    """End a client's call with the refusal."""
    await context.abort(refusal.for_client(), refusal.message, tuple(refusal.trailing))
    raise AssertionError("abort returned")


#: Maximum number of connections that wait to be accepted.
_BACKLOG = 1024


def server_options(settings: GatewaySection) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),
        *KEEPALIVE,
    )


def open_ports(settings: GatewaySection, picker: str | None = None) -> list[str]:
    """Return the settings of the ports that other machines reach without a token or a client certificate.

    `picker` is the address of the picker. If it is given, the gateway opens no other port for requests. Raises ListenError.
    """
    if settings.token_file is not None or settings.tls_client_ca is not None:
        return []
    ports = {"gateway.grpc": settings.grpc, "gateway.http": settings.http}
    open_to_all = []
    for name, text in (ports if picker is None else {"--picker": picker}).items():
        try:
            if text is not None and not parse_address(text, any_host=True, any_port=True).is_loopback:
                open_to_all.append(name)
        except ValueError as error:
            raise ListenError(f"{name}: {error}") from None
    return open_to_all


@dataclass(frozen=True, slots=True)
class _ServerTls:
    """TLS for clients, over HTTP and over gRPC."""

    context: ssl.SSLContext
    configuration: Any


def _server_files(settings: GatewaySection, renewals: Renewals, protocol: str) -> Renewed[_ServerTls] | None:
    """Return the files for TLS of clients, or None without TLS. `protocol` is the ALPN name. Raises CredentialsError."""
    certificate, key, authorities = settings.tls_certificate, settings.tls_key, settings.tls_client_ca
    if certificate is None or key is None:
        return None

    def read() -> _ServerTls:
        chain = _read("tls_certificate", certificate)
        pair = _read("tls_key", key), chain
        clients = None if authorities is None else _read("tls_client_ca", authorities)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols([protocol])
        try:
            # Check the files here, because gRPC only reports that it cannot listen, and accepts a CA file without certificates.
            context.load_cert_chain(certificate.expanduser(), key.expanduser())
            if authorities is not None:
                context.load_verify_locations(authorities.expanduser())
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:
            raise CredentialsError(f"gateway.tls_certificate, tls_key, tls_client_ca: {error}") from None
        return _ServerTls(context, grpc.ssl_server_certificate_configuration([pair], clients))

    files = [path for path in (certificate, key, authorities) if path is not None]
    return renewals.of("gateway.tls_certificate", files, read, certificate)


def server_credentials(settings: GatewaySection, renewals: Renewals) -> Any:
    """Return grpc.ServerCredentials, or None without TLS. Raises CredentialsError."""
    files = _server_files(settings, renewals, "http/1.1")
    if files is None:
        return None
    # gRPC asks for the configuration at each new connection.
    return grpc.dynamic_ssl_server_credentials(
        files.value.configuration,
        lambda: files.value.configuration,
        require_client_authentication=settings.tls_client_ca is not None,
    )


def server_tls(
    settings: GatewaySection, renewals: Renewals, protocol: str = "http/1.1"
) -> ssl.SSLContext | None:
    """Return the TLS context for clients that speak this protocol, or None without TLS. Raises CredentialsError."""
    files = _server_files(settings, renewals, protocol)
    return None if files is None else RenewedTls.of(lambda: files.value.context)


async def listen(
    factory: Callable[[], asyncio.Protocol], address: str, setting: str, tls: ssl.SSLContext | None
) -> tuple[asyncio.Server, int]:
    """Listen on HOST:PORT for clients. Return the server and its port. Raises ListenError, which names the setting."""
    try:
        where = parse_address(address, any_host=True, any_port=True)
        server = await listening.listen(factory, where, tls, _BACKLOG)
    except (OSError, ValueError) as error:
        raise ListenError(f"{setting}: cannot listen on {address}: {error}") from None
    return server, server.sockets[0].getsockname()[1]


class Token:
    """The secret that clients must send, if one is configured."""

    def __init__(self, settings: GatewaySection, renewals: Renewals) -> None:
        """Read the file of `gateway.token_file`, if it is set. Raises TokenError."""
        file, key = settings.token_file, "gateway.token_file"
        self._token = None if file is None else renewals.of(key, [file], lambda: read_token(file, key))

    @property
    def needed(self) -> bool:
        return self._token is not None

    def lets_in(self, headers: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return True if a request with these headers may pass. The names of the headers are in lower case."""
        if self._token is None:
            return True
        return bears(
            next((value for name, value in headers if name == "authorization"), ""), self._token.value
        )

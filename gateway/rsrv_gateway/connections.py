"""Connections to workers over gRPC, and the credentials of workers and clients."""

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import Message

from rsrv.address import parse_address
from rsrv.control.grpc_server import KEEPALIVE, ListenError
from rsrv.control.triton import restriction
from rsrv.control.v1 import control_pb2_grpc
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import bears, parse_token, read_token
from rsrv_gateway.outcomes import Metadata, Refusal

_OPTIONS: Sequence[tuple[str, int]] = (
    # Proxies are for connections to other networks.
    ("grpc.enable_http_proxy", 0),
    # A worker that returns must be found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Otherwise channels to one address share a connection, and closing one that hangs would return the same one.
    ("grpc.use_local_subchannel_pool", 1),
)


#: pause between two probes of a worker, and the time without an answer after which it counts as dead
PROBE_S: Final = 0.5
PROBE_TIMEOUT_S: Final = 2 * PROBE_S


class CredentialsError(Exception):
    """A file that the settings name for TLS or a token cannot be used; the message says which setting."""


@dataclass(frozen=True, slots=True)
class ControlClient:
    """A worker's control service on a channel of its own; every call has the same metadata."""

    channel: Any
    metadata: tuple[tuple[str, str], ...]
    stub: Any

    def call(self, name: str, request: Message, timeout: float) -> Any:
        """Start a call, which may take `timeout` seconds; await its answer. It raises RpcError."""
        return getattr(self.stub, name)(request, timeout=timeout, metadata=self.metadata)


class ChannelFactory:
    """Opens channels; the credentials are read once. Raises CredentialsError, TokenError."""

    def __init__(self, section: GatewaySection) -> None:
        ca, certificate, key = (
            None if path is None else _read(name, path)
            for name, path in (
                ("worker_ca", section.worker_ca),
                ("worker_certificate", section.worker_certificate),
                ("worker_key", section.worker_key),
            )
        )
        # gRPC reports no unusable files, and uses public authorities if a file contains none.
        worker_tls(section)
        # gRPC expects the pair in this order.
        self._credentials = None if ca is None else grpc.ssl_channel_credentials(ca, key, certificate)
        token = section.worker_token_file
        #: metadata of calls to control services
        self._metadata: tuple[tuple[str, str], ...] = ()
        if token is not None:
            secret = parse_token(_read("worker_token_file", token), token, "gateway.worker_token_file")
            self._metadata = (("authorization", f"Bearer {secret.decode()}"),)
        #: metadata of the gateway's own calls to restricted repositories; clients' calls go without
        self.repository_metadata: tuple[tuple[str, str], ...] = ()
        if section.worker_repository_key is not None and section.worker_repository_value_file is not None:
            value = read_token(section.worker_repository_value_file, "gateway.worker_repository_value_file")
            self.repository_metadata = (restriction(section.worker_repository_key, value.decode()),)
        self._options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", section.max_message_bytes),
            ("grpc.max_send_message_length", section.max_message_bytes),
        ]

    def open(self, address: str, *options: tuple[str, int]) -> Any:
        """Open a channel of grpc.aio with additional options. A Unix socket is local and needs no TLS."""
        all_options = [*self._options, *options]
        if self._credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, all_options)
        return grpc.aio.secure_channel(address, self._credentials, all_options)

    def open_control(self, address: str) -> ControlClient:
        """Open a channel to a control service."""
        channel = self.open(address)
        return ControlClient(channel, self._metadata, control_pb2_grpc.ControlStub(channel))


def worker_tls(section: GatewaySection) -> ssl.SSLContext | None:
    """Return the TLS context for HTTP to workers; None: without TLS. Raises CredentialsError."""
    if section.worker_ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=section.worker_ca.expanduser())
        if section.worker_certificate is not None and section.worker_key is not None:
            context.load_cert_chain(section.worker_certificate.expanduser(), section.worker_key.expanduser())
    except OSError as error:
        raise CredentialsError(f"gateway.worker_ca, worker_certificate, worker_key: {error}") from None
    return context


def _read(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise CredentialsError(f"gateway.{key}: {error}") from None


SERVICE = "/inference.GRPCInferenceService/"

#: Pings to a worker that owes answers. tritonserver's default counts pings sooner than every 300 s, and hangs
#: up after two of them. A silent peer that acknowledges nothing loses its connection after the timeout.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # The settings name the workers; TXT records are ignored.
    ("grpc.service_config_disable_resolution", 1),
)

#: seconds for which renewed connections are not suspected again
RENEW_MIN_S = 5.0


class WorkerConnection:
    """One connection to a worker."""

    __slots__ = ("answers", "channel", "infer", "stream")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: calls that the worker has ended, and messages of its streams
        self.answers = 0
        self.infer = channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = channel.stream_stream(SERVICE + "ModelStreamInfer")


class WorkerChannels:
    """The connections to one worker, made on first use. One event loop owns them.

    Several connections are used, so that one connection's flow control does not hold back all requests. Each
    channel is a connection of its own (`ChannelFactory` opens them so), and a new channel is a new
    connection: that helps when the old one is half open, because the worker's machine has failed without
    closing it.
    """

    def __init__(self, address: str, contacts: ChannelFactory, number: int) -> None:
        """Open `number` channels."""
        self._address = address
        self._contacts = contacts
        self._links = [self._open() for _ in range(number)]
        self._turns = count()
        self._renewed_at = -inf
        self._retiring: dict[asyncio.Task[None], WorkerConnection] = {}

    def link(self) -> WorkerConnection:
        """Return the connections in turn."""
        links = self._links
        return links[next(self._turns) % len(links)]

    def unanswered(self, link: WorkerConnection, answers: int, now: float) -> bool:
        """Report a call that timed out. Return true if its connection is replaced now.

        `answers` is the connection's count when the call began, `now` is in seconds of a monotonic clock. If
        no call was answered since, the connection may be half open: the next calls use a new one, and calls
        in flight continue.
        """
        recently = now - self._renewed_at < RENEW_MIN_S
        if recently or link.answers != answers or link not in self._links:
            return False
        self._renewed_at = now
        self._links[self._links.index(link)] = self._open()
        self._retire(link)
        return True

    def retire(self) -> None:
        """Accept no new calls. Calls in flight continue, however long: a worker may be away for one probe only."""
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
        """Close a connection after its calls. Their deadlines end them, or keepalive if the peer is gone."""
        task = asyncio.get_running_loop().create_task(link.channel.close(inf))
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)


#: Seconds. gRPC transmits no longer deadlines; some clients send longer ones for no deadline.
_DEADLINE_MAX_S = 27_000 * 3600.0

#: gRPC's messages for a connection that broke during a call, in this version and in earlier ones; connections
#: that could not be made have others.
_LOST = re.compile(
    "Stream removed|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:|keepalive |ping "
)
#: gRPC's message, instead of the worker's, where a stream ends while a message is sent on it
_ENDED = "Internal error from Core"


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    code, message = error.code(), error.details() or ""
    if message == _ENDED:
        return Refusal(grpc.StatusCode.UNAVAILABLE, "the stream broke", lost=True)
    lost = code is grpc.StatusCode.UNAVAILABLE and _LOST.match(message) is not None
    return Refusal(code, message, sendable(error.trailing_metadata() or ()), lost)


def sendable(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """Return the metadata that gRPC can send: it receives bytes in texts that it refuses to send."""
    return tuple(
        [
            pair
            for pair in metadata
            if isinstance(pair[1], bytes) or (pair[1].isascii() and pair[1].isprintable())
        ]
    )


def time_left(context: Any) -> float | None:
    """Return the seconds until the client's deadline; None: no deadline."""
    left: float | None = context.time_remaining()
    return None if left is None else min(left, _DEADLINE_MAX_S)


def gone(worker: str) -> Refusal:
    """Return the refusal for a worker whose connections were closed by the gateway."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker} has gone")


def is_cancelled() -> bool:
    """Return true if this task was cancelled; else a CancelledError says that the worker's channel was closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel these tasks, and return when they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def answer_of(call: Awaitable[bytes], worker: str) -> bytes | Refusal:
    """Return a worker's answer to a call, or why there is none."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        refusal = refusal_of(error)
    except asyncio.CancelledError:
        refusal = gone(worker)
    if is_cancelled():  # a cancelled wait may end with the worker's error, too
        raise asyncio.CancelledError
    return refusal


async def refuse(context: Any, refusal: Refusal) -> NoReturn:
    """End a client's call with the refusal."""
    await context.abort(refusal.for_client(), refusal.message, tuple(refusal.trailing))
    raise AssertionError("abort returned")


#: connections that wait to be accepted
_BACKLOG = 1024


def server_options(settings: GatewaySection) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),
        *KEEPALIVE,
    )


def open_ports(settings: GatewaySection, picker: str | None = None) -> list[str]:
    """Return the settings of ports that other machines reach without a token or a client certificate.

    `picker`: the picker's address, whose port is then the only one. Raises ListenError.
    """
    if settings.token_file is not None or settings.tls_client_ca is not None:
        return []
    ports = {"gateway.grpc": settings.grpc, "gateway.http": settings.http}
    found = []
    for name, text in (ports if picker is None else {"--picker": picker}).items():
        try:
            if text is not None and not parse_address(text, any_host=True, any_port=True).is_loopback:
                found.append(name)
        except ValueError as error:
            raise ListenError(f"{name}: {error}") from None
    return found


def server_credentials(settings: GatewaySection) -> Any:
    """Return grpc.ServerCredentials; None: without TLS. Raises CredentialsError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    pair = _read("tls_key", settings.tls_key), _read("tls_certificate", settings.tls_certificate)
    clients = None if settings.tls_client_ca is None else _read("tls_client_ca", settings.tls_client_ca)
    # gRPC's own error says only that it cannot listen, and a CA file without certificates is no error to it.
    server_tls(settings)
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


def server_tls(settings: GatewaySection) -> ssl.SSLContext | None:
    """Return the TLS context for HTTP clients; None: without TLS. Raises CredentialsError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(settings.tls_certificate.expanduser(), settings.tls_key.expanduser())
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca.expanduser())
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise CredentialsError(f"gateway.tls_certificate, tls_key, tls_client_ca: {error}") from None
    return context


async def listen(
    factory: Callable[[], asyncio.Protocol], address: str, setting: str, tls: ssl.SSLContext | None
) -> tuple[asyncio.Server, int]:
    """Listen on HOST:PORT for clients; return the server and its port. Raises ListenError that names the setting."""
    try:
        where = parse_address(address, any_host=True, any_port=True)
        server = await asyncio.get_running_loop().create_server(
            factory, where.host or None, where.port, ssl=tls, backlog=_BACKLOG, reuse_address=True
        )
    except (OSError, ValueError) as error:
        raise ListenError(f"{setting}: cannot listen on {address}: {error}") from None
    return server, server.sockets[0].getsockname()[1]


class Token:
    """The secret that clients must send, if one is configured."""

    def __init__(self, settings: GatewaySection) -> None:
        """Read the file. Raises TokenError."""
        file = settings.token_file
        self._token = None if file is None else read_token(file, "gateway.token_file")

    @property
    def needed(self) -> bool:
        return self._token is not None

    def lets_in(self, headers: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return true if a request with these headers (names in lower case) is admitted."""
        if self._token is None:
            return True
        return bears(next((value for name, value in headers if name == "authorization"), ""), self._token)

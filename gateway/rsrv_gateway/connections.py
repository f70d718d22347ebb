"""Connections of the gateway: to workers over gRPC, and what clients must show to get in."""

import asyncio
import re
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NoReturn

import grpc

from rsrv.address import parse_address
from rsrv.control.grpc_server import KEEPALIVE, ListenError
from rsrv.control.triton import restriction
from rsrv.settings_fleet import GatewaySection
from rsrv.tokens import bears, read_token
from rsrv_gateway.outcomes import Metadata, Refusal

_OPTIONS: Sequence[tuple[str, int]] = (
    # A proxy is for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A worker that comes back is to be found soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Else channels to one address share a connection, and closing one that hangs would bring back the same.
    ("grpc.use_local_subchannel_pool", 1),
)


class CredentialsError(Exception):
    """A file that the settings name cannot be used; the message says which."""


@dataclass(frozen=True, slots=True)
class ControlClient:
    """A worker's control service, and what every call of it takes along."""

    stub: Any
    metadata: tuple[tuple[str, str], ...]


class ChannelFactory:
    """Opens channels; the files are read once. Raises CredentialsError."""

    def __init__(self, section: GatewaySection) -> None:
        ca, certificate, key = (
            None if path is None else _read_worker_file(name, path)
            for name, path in (
                ("worker_ca", section.worker_ca),
                ("worker_certificate", section.worker_certificate),
                ("worker_key", section.worker_key),
            )
        )
        # gRPC would say nothing of files that it cannot use, and take public authorities where there are none in one.
        worker_tls(section)
        # It wants the pair in this order.
        self._credentials = None if ca is None else grpc.ssl_channel_credentials(ca, key, certificate)
        token = section.worker_token_file
        #: of calls to control services
        self.metadata: tuple[tuple[str, str], ...] = ()
        if token is not None:
            secret = _read_worker_file("worker_token_file", token).decode("utf-8", "replace").strip()
            if not (secret and secret.isascii() and secret.isprintable()):
                raise CredentialsError(
                    f"gateway.worker_token_file: {token} holds no token: one line of ASCII"
                )
            self.metadata = (("authorization", f"Bearer {secret}"),)
        #: of what only operators may ask of the workers' Tritons; a client's calls go without
        self.repository_metadata: tuple[tuple[str, str], ...] = ()
        if section.worker_repository_key is not None and section.worker_repository_value_file is not None:
            try:
                value = read_token(
                    section.worker_repository_value_file, "gateway.worker_repository_value_file"
                ).decode()
            except ValueError as error:
                raise CredentialsError(str(error)) from None
            self.repository_metadata = (restriction(section.worker_repository_key, value),)
        self._options = [
            *_OPTIONS,
            ("grpc.max_receive_message_length", section.max_message_bytes),
            ("grpc.max_send_message_length", section.max_message_bytes),
        ]

    def open(self, address: str, *options: tuple[str, int]) -> Any:
        """A channel of grpc.aio, with more of gRPC's options. A Unix socket is of this machine and needs no TLS."""
        all_options = [*self._options, *options]
        if self._credentials is None or address.startswith("unix:"):
            return grpc.aio.insecure_channel(address, all_options)
        return grpc.aio.secure_channel(address, self._credentials, all_options)


def worker_tls(section: GatewaySection) -> ssl.SSLContext | None:
    """For HTTP; None: without TLS. Raises CredentialsError."""
    if section.worker_ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=section.worker_ca.expanduser())
        if section.worker_certificate is not None and section.worker_key is not None:
            context.load_cert_chain(section.worker_certificate.expanduser(), section.worker_key.expanduser())
    except OSError as error:
        raise CredentialsError(f"gateway.worker_ca, worker_certificate, worker_key: {error}") from None
    return context


def _read_worker_file(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise CredentialsError(f"gateway.{key}: {error}") from None


SERVICE = "/inference.GRPCInferenceService/"

#: Pings of a worker that owes answers. A server counts those that come sooner than every 300 s (tritonserver's default),
#: and after two of them it hangs up. What a silent peer does not acknowledge ends its connection much sooner, after the
#: timeout.
_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 0),
    # The settings say where workers are: no TXT record has a say.
    ("grpc.service_config_disable_resolution", 1),
)

#: seconds for which a connection that was suspected once is believed in
_RENEWAL_S = 5.0


class WorkerConnection:
    """One connection."""

    __slots__ = ("answers", "channel", "infer", "stream")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: calls that the worker itself has ended, and messages of its streams
        self.answers = 0
        self.infer = channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = channel.stream_stream(SERVICE + "ModelStreamInfer")


class WorkerChannels:
    """The connections to one worker, which are made when they are first used. One event loop owns them."""

    def __init__(self, address: str, contacts: ChannelFactory, number: int) -> None:
        """Of `number` connections."""
        self._address = address
        self._contacts = contacts
        self._links = [self._open() for _ in range(number)]
        self._turns = count()
        self._renewed_at: float | None = None
        self._retiring: dict[asyncio.Task[None], WorkerConnection] = {}

    def link(self) -> WorkerConnection:
        """Each in turn."""
        links = self._links
        return links[next(self._turns) % len(links)]

    def unanswered(self, link: WorkerConnection, answers: int, now: float) -> bool:
        """A call has waited in vain; `answers` is what the link had when it began, `now` seconds of any one clock.

        If none was answered meanwhile, the connection may be half open: the next calls get another one, those under way
        go on. Whether that is done now.
        """
        if link.answers != answers or link not in self._links:
            return False
        if self._renewed_at is not None and now - self._renewed_at < _RENEWAL_S:
            return False
        self._renewed_at = now
        self._links[self._links.index(link)] = self._open()
        self._retire(link)
        return True

    def retire(self) -> None:
        """No new calls come. Those under way go on, however long: a worker may be away for one probe only."""
        for link in self._links:
            self._retire(link)

    async def close(self) -> None:
        """Cancels what is under way."""
        retiring = dict(self._retiring)
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for link in (*self._links, *retiring.values()):
            await link.channel.close()

    def _open(self) -> WorkerConnection:
        return WorkerConnection(self._contacts.open(self._address, *_KEEPALIVE))

    def _retire(self, link: WorkerConnection) -> None:
        """It is closed when its calls have ended. Their deadlines end them, or keepalive does where the peer is gone."""
        task = asyncio.get_running_loop().create_task(link.channel.close(inf))
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)


#: seconds; gRPC tells a server of no more, and takes a lot more, which some clients send for no deadline, for none at all
_LONGEST = 27_000 * 3600.0

#: What gRPC says of a connection that broke under a call, in this version and in earlier ones; one that could not be made
#: is something else.
_LOST = re.compile(
    "Stream removed|Socket closed|Connection reset|Broken pipe|recvmsg:|sendmsg:|keepalive |ping "
)


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    code, message = error.code(), error.details() or ""
    lost = code is grpc.StatusCode.UNAVAILABLE and _LOST.match(message) is not None
    return Refusal(code, message, sendable(error.trailing_metadata() or ()), lost)


def sendable(metadata: Iterable[tuple[str, str | bytes]]) -> Metadata:
    """What may be passed on: gRPC receives bytes in texts that it does not send."""
    return tuple(
        [
            pair
            for pair in metadata
            if isinstance(pair[1], bytes) or (pair[1].isascii() and pair[1].isprintable())
        ]
    )


def time_left(context: Any) -> float | None:
    """Seconds until the client's deadline; None: it has set none."""
    left: float | None = context.time_remaining()
    return None if left is None else min(left, _LONGEST)


def gone(worker: str) -> Refusal:
    """The gateway itself has given up the worker's connections."""
    return Refusal(grpc.StatusCode.UNAVAILABLE, f"worker {worker} has gone")


def is_cancelled() -> bool:
    """After a CancelledError: whether this task was cancelled, as when the client has gone, and not the worker's channel closed."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def refuse(context: Any, refusal: Refusal) -> NoReturn:
    """Ends a client's call."""
    await context.abort(refusal.for_client(), refusal.message, tuple(refusal.trailing))
    raise AssertionError("abort returned")


def server_options(settings: GatewaySection) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", 0),
        *KEEPALIVE,
    )


def open_ports(settings: GatewaySection) -> list[str]:
    """Return the settings of client ports that other machines reach without a token or a client certificate.

    Raises ListenError.
    """
    if settings.token_file is not None or settings.tls_client_ca is not None:
        return []
    found = []
    for key, text in (("gateway.grpc", settings.grpc), ("gateway.http", settings.http)):
        try:
            if text is not None and not parse_address(text, any_host=True, any_port=True).is_loopback:
                found.append(key)
        except ValueError as error:
            raise ListenError(f"{key}: {error}") from None
    return found


def server_credentials(settings: GatewaySection) -> Any:
    """grpc.ServerCredentials, or None without TLS. Raises ListenError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    pair = (
        _read_server_file("tls_key", settings.tls_key),
        _read_server_file("tls_certificate", settings.tls_certificate),
    )
    clients = (
        None if settings.tls_client_ca is None else _read_server_file("tls_client_ca", settings.tls_client_ca)
    )
    # gRPC only says that it cannot listen, and not even that where a file has no authorities.
    server_tls(settings)
    return grpc.ssl_server_credentials([pair], clients, require_client_auth=clients is not None)


def server_tls(settings: GatewaySection) -> ssl.SSLContext | None:
    """For HTTP; None: without TLS. Raises ListenError."""
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
        raise ListenError(f"gateway.tls_certificate, tls_key, tls_client_ca: {error}") from None
    return context


class Token:
    """The secret that clients must send, if there is one."""

    def __init__(self, settings: GatewaySection) -> None:
        """Raises ListenError."""
        self._token: bytes | None = None
        if settings.token_file is None:
            return
        try:
            self._token = read_token(settings.token_file, "gateway.token_file")
        except ValueError as error:
            raise ListenError(str(error)) from None

    @property
    def needed(self) -> bool:
        return self._token is not None

    def lets_in(self, headers: Iterable[tuple[str, str | bytes]]) -> bool:
        """`headers` are a request's, with names in lower case."""
        if self._token is None:
            return True
        return bears(next((value for name, value in headers if name == "authorization"), ""), self._token)


def _read_server_file(key: str, path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ListenError(f"gateway.{key}: {error}") from None

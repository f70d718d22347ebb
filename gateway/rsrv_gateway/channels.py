"""Connections to one worker.

Several, so that one connection's flow control does not hold back all requests: gRPC shares a connection among channels
that look alike unless each has a pool of its own. That also makes a new channel a new connection, which is what helps when
the old one is half open: the worker's machine is gone, and nobody says so.
"""

import asyncio
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import grpc

from rsrv.settings_fleet import GatewaySection

SERVICE = "/inference.GRPCInferenceService/"

#: Seconds between two pings of a worker that owes answers. A server counts those that come sooner than every 300 s
#: (tritonserver's default), and after two of them it hangs up. What a silent peer does not confirm ends its connection
#: much sooner, by the timeout.
KEEPALIVE_S = 310
KEEPALIVE_TIMEOUT_S = 10

#: Seconds for which a connection that was suspected once is believed in.
_RENEWAL_S = 5.0


class CredentialsError(Exception):
    """A file of the settings cannot be read; the message names the setting."""


def channel_options(most_bytes: int) -> Sequence[tuple[str, int]]:
    """Of every channel to a worker; `most_bytes` is the longest message."""
    return (
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_S * 1000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 0),
        # A worker that starts again is there again at once; one that is away is not waited for.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # Workers are named by the settings: neither a proxy of the environment nor a TXT record has a say.
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
    )


def worker_credentials(settings: GatewaySection) -> Any:
    """grpc.ChannelCredentials, or None without TLS. Raises CredentialsError."""
    if settings.worker_ca is None:
        return None
    return grpc.ssl_channel_credentials(
        read_setting("worker_ca", settings.worker_ca),
        None if settings.worker_key is None else read_setting("worker_key", settings.worker_key),
        None
        if settings.worker_certificate is None
        else read_setting("worker_certificate", settings.worker_certificate),
    )


def read_setting(key: str, path: Path) -> bytes:
    """The file that gateway.`key` names. Raises CredentialsError."""
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise CredentialsError(f"gateway.{key}: {error}") from None


class Link:
    """One connection."""

    __slots__ = ("answers", "channel", "infer", "stream")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: calls that the worker itself has ended
        self.answers = 0
        self.infer = channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = channel.stream_stream(SERVICE + "ModelStreamInfer")


class Channels:
    """The connections to one worker, which are made when they are first used. One event loop owns them."""

    def __init__(self, address: str, settings: GatewaySection, credentials: Any) -> None:
        self._address = address
        self._options = channel_options(settings.max_message_bytes)
        self._credentials = credentials
        self._links = [self._open() for _ in range(settings.channels)]
        self._turns = count()
        self._renewed_at: float | None = None
        self._grace = settings.request_timeout_s
        self._retiring: dict[asyncio.Task[None], Link] = {}

    def link(self) -> Link:
        """Each in turn."""
        links = self._links
        return links[next(self._turns) % len(links)]

    def unanswered(self, link: Link, answers: int, now: float) -> bool:
        """A call has waited in vain; `answers` is what the link had when it began, `now` seconds of any one clock.

        If none was answered meanwhile, the connection may be half open: the next calls get another one, those under way
        may end. Whether that is done now.
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
        """No new calls come; those under way may end."""
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

    def _open(self) -> Link:
        if self._credentials is None:
            return Link(grpc.aio.insecure_channel(self._address, options=self._options))
        return Link(grpc.aio.secure_channel(self._address, self._credentials, options=self._options))

    def _retire(self, link: Link) -> None:
        task = asyncio.get_running_loop().create_task(link.channel.close(self._grace))
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)

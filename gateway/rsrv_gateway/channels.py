"""Connections to one worker.

Several, so that one connection's flow control does not hold back all requests. Each channel is a connection of its own
(`Contacts` opens them so), and a new channel is a new connection: that helps when the old one is half open, because the
worker's machine is gone and nobody says so.
"""

import asyncio
from itertools import count
from math import inf
from typing import Any

from rsrv_gateway.contacts import Contacts

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


class Link:
    """One connection."""

    __slots__ = ("answers", "channel", "infer", "stream")

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        #: calls that the worker itself has ended, and messages of its streams
        self.answers = 0
        self.infer = channel.unary_unary(SERVICE + "ModelInfer")
        self.stream = channel.stream_stream(SERVICE + "ModelStreamInfer")


class Channels:
    """The connections to one worker, which are made when they are first used. One event loop owns them."""

    def __init__(self, address: str, contacts: Contacts, number: int) -> None:
        """Of `number` connections."""
        self._address = address
        self._contacts = contacts
        self._links = [self._open() for _ in range(number)]
        self._turns = count()
        self._renewed_at: float | None = None
        self._retiring: dict[asyncio.Task[None], Link] = {}

    def link(self) -> Link:
        """Each in turn."""
        links = self._links
        return links[next(self._turns) % len(links)]

    def unanswered(self, link: Link, answers: int, now: float) -> bool:
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

    def _open(self) -> Link:
        return Link(self._contacts.open(self._address, *_KEEPALIVE))

    def _retire(self, link: Link) -> None:
        """It is closed when its calls have ended. Their deadlines end them, or keepalive does where the peer is gone."""
        task = asyncio.get_running_loop().create_task(link.channel.close(inf))
        self._retiring[task] = link
        task.add_done_callback(self._retiring.pop)

"""Carries requests between clients and workers: the fronts that clients speak to, and where their requests go."""

import asyncio
from collections.abc import Mapping

from rsrv.placement.contract import Brain, Table, TrafficCounts, Worker
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contacts import Contacts
from rsrv_gateway.grpc_plane import GrpcFront
from rsrv_gateway.http_plane import HttpFront
from rsrv_gateway.traffic import Traffic


class Plane:
    """The brain tells it where requests go, and it tells the brain what it meets."""

    def __init__(self, settings: GatewaySection, brain: Brain) -> None:
        """Raises ListenError, ContactError."""
        self._traffic = Traffic(settings.mode, brain)
        self.grpc = GrpcFront(settings, Contacts(settings), self._traffic)
        self.http = HttpFront(settings, self._traffic)

    async def start(self) -> None:
        """Listens from now on. Raises ListenError where it cannot: the message says which setting is wrong."""
        await self.grpc.start()
        await self.http.start()

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        """What holds from now on, whole: it replaces what held before. May be called before `start`.

        `workers` are those that answer, by name, and all that `table` names are among them. Nothing new goes to one that
        is not there any more; its requests under way may end. A model with empty `ready` is known, and nobody serves it
        at the moment: UNAVAILABLE. One that is not in the table is not known: `Brain.refresh`, then NOT_FOUND.
        """
        self.grpc.apply(workers)
        self.http.apply(workers)
        self._traffic.apply(workers, table)

    def counts(self) -> TrafficCounts:
        return self._traffic.counts()

    async def drain(self, seconds: float) -> None:
        """Refuses new requests with UNAVAILABLE, and returns when those under way have ended, or after `seconds`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.http.drain(seconds))
            await self.grpc.drain(seconds)

    async def stop(self) -> None:
        """Ends what is still under way, and frees all. Without effect the second time."""
        await asyncio.gather(self.grpc.stop(), self.http.stop())

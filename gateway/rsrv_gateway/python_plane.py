"""The data plane in Python: the fronts that clients speak to, in this process and on its event loop."""

import asyncio
from collections.abc import Mapping

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.contacts import Contacts
from rsrv_gateway.contract import Table, Worker
from rsrv_gateway.grpc_plane import GrpcFront
from rsrv_gateway.http_plane import HttpFront
from rsrv_gateway.plane import Brain, Counts
from rsrv_gateway.traffic import Traffic


class PythonPlane:
    """A Plane."""

    def __init__(self, settings: GatewaySection, brain: Brain) -> None:
        """Raises ListenError, ContactError."""
        self._traffic = Traffic(settings.mode, brain)
        self.grpc = GrpcFront(settings, Contacts(settings), self._traffic)
        self.http = HttpFront(settings, self._traffic)

    @property
    def listens(self) -> bool:
        """It is this process that does, so whoever asks."""
        return True

    async def start(self) -> None:
        await self.grpc.start()
        await self.http.start()

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self.grpc.apply(workers)
        self.http.apply(workers)
        self._traffic.apply(workers, table)

    def counts(self) -> Counts:
        return self._traffic.counts()

    async def drain(self, seconds: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.http.drain(seconds))
            await self.grpc.drain(seconds)

    async def stop(self) -> None:
        await asyncio.gather(self.grpc.stop(), self.http.stop())

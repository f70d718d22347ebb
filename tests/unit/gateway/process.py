"""A process of a plane that does what a test tells it over its port: a line with a verb and a value, and a line back."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping

from rsrv.control.grpc_server import ListenError
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway import child
from rsrv_gateway.contract import Table, Worker
from rsrv_gateway.plane import DURATION_BOUNDS, Brain, Counts, Durations


class TalkingPlane:
    def __init__(self, section: GatewaySection, brain: Brain) -> None:
        assert section.grpc is not None
        self._address = section.grpc
        self._refuses = section.request_timeout_s == 666
        self._brain = brain
        self._served = 0
        self._draining = False
        self.listens = True
        self._table: Table = {}
        self._workers: Mapping[str, Worker] = {}

    async def start(self) -> None:
        if self._refuses:
            raise ListenError("gateway.tls_key: cannot be used")
        host, _, port = self._address.rpartition(":")
        await asyncio.start_server(self._talk, host, int(port), reuse_port=True)

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        self._workers, self._table = workers, table

    def counts(self) -> Counts:
        times = Durations((self._served, *([0] * len(DURATION_BOUNDS))), self._served * 0.25)
        return Counts(
            {("m", "w", "OK"): self._served},
            {"m": 2 * self._served},
            {"w": 0.5},
            {("m", "w"): 1},
            {"w": 3},
            {"m": times},
        )

    async def drain(self, seconds: float) -> None:
        self._draining = True

    async def stop(self) -> None:
        assert self._draining or self._table == {}

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        verb, _, value = (await reader.readline()).decode().strip().partition(" ")
        self._served += 1
        match verb:
            case "die":
                os._exit(3)
            case "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "failed":
                self._brain.failed(value)
            case "refresh":
                await self._brain.refresh()
        table = {model: [routes.ready, routes.charge] for model, routes in self._table.items()}
        writer.write(json.dumps([os.getpid(), sorted(self._workers), table]).encode() + b"\n")
        writer.close()


if __name__ == "__main__":
    sys.exit(child.main(int(sys.argv[1]), TalkingPlane))

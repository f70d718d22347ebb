"""The plane itself: keeps an HAProxy running, and tells it where requests go."""

import asyncio
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rsrv.settings_fleet import GatewaySection
from rsrv.wire.paths import make_private
from rsrv_gateway.contract import Table, Worker
from rsrv_gateway.haproxy.admin import Admin, AdminError, ServerCounts
from rsrv_gateway.haproxy.config import Target, configuration
from rsrv_gateway.haproxy.files import Files
from rsrv_gateway.haproxy.maps import Slots, maps_of
from rsrv_gateway.haproxy.process import Process, check_version
from rsrv_gateway.haproxy.state import State, tell, write_maps
from rsrv_gateway.haproxy.told import Told
from rsrv_gateway.plane import Brain, Counts, ListenError, Plane

log = logging.getLogger("rsrv.gateway")

#: servers in the configuration, at least; workers beyond them are served by the plane behind
_SLOTS = 64
#: seconds before HAProxy is started again: at first, and at most
_AGAIN = (0.1, 5.0)


def behind(section: GatewaySection, directory: Path) -> GatewaySection:
    """The settings of the plane behind HAProxy: it listens in `directory`, and TLS with clients is HAProxy's."""
    files = Files(directory)
    return section.model_copy(
        update={
            "grpc": None if section.grpc is None else f"unix:{files.rest_grpc}",
            "http": None if section.http is None else f"unix:{files.rest_http}",
            "tls_certificate": None,
            "tls_key": None,
            "tls_client_ca": None,
        }
    )


class HAProxyPlane:
    """A Plane. `rest` is the one behind it, made with the settings that `behind` gives for the same `directory`, which is
    for this plane alone."""

    def __init__(self, section: GatewaySection, brain: Brain, rest: Plane, directory: Path) -> None:
        self._section = section
        self._brain = brain
        self._rest = rest
        self._files = Files(directory)
        self._admin = Admin(self._files.admin)
        self._slots = Slots(max(_SLOTS, 2 * len(section.workers)))
        self._told = Told(self._slots.worker)
        self._process: Process | None = None
        self._listener: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False
        # Of what is below, one holds the lock who changes it.
        self._lock = asyncio.Lock()
        self._workers: Mapping[str, Worker] = {}
        self._table: Table = {}
        #: what HAProxy knows; None: it does not run, or nobody knows
        self._known: State | None = None
        #: addresses of names, as they were found last
        self._addresses: dict[str, str] = {}
        #: HAProxy's counters as they were seen last, by backend and slot
        self._seen: dict[tuple[str, str], ServerCounts] = {}
        self._failovers: Counter[str] = Counter()

    async def start(self) -> None:
        version = await check_version(self._section.haproxy)
        make_private(self._files.directory)
        _write_pair(self._section.tls_certificate, self._section.tls_key, self._files.certificate, "tls")
        _write_pair(
            self._section.worker_certificate, self._section.worker_key, self._files.worker_certificate, "worker"
        )
        try:
            await self._rest.start()
            self._listener = await asyncio.start_unix_server(self._listen, self._files.told)
            async with self._lock:
                await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._watch())]
        log.info("HAProxy %s carries requests", version)

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        # Whoever HAProxy sends the rest to must know at least as much.
        await self._rest.apply(workers, table)
        async with self._lock:
            self._workers, self._table = workers, table
            await self._push()

    def counts(self) -> Counts:
        """Of HAProxy's own requests the load is their number, and only the workers' is known."""
        rest = self._rest.counts()
        load = Counter(rest.load)
        for (_, slot), seen in self._seen.items():
            load[self._slots.worker(slot)] += seen.current
        return Counts(
            requests=Counter(rest.requests) + Counter(self._told.requests()),
            items=rest.items,
            load=load,
            outstanding=rest.outstanding,
            failovers=Counter(rest.failovers) + self._failovers,
            durations={**self._told.durations(), **...},
        )

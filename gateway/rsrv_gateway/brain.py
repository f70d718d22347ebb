"""The gateway's loop: it turns probes into a routing table for the proxy, and into actions on the workers' weights."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from rsrv.placement.contract import Table, Worker
from rsrv.placement.devices import ServerDevice, ServerDevices, devices_of, placements, routes_to_servers
from rsrv.placement.planner import Planner
from rsrv.placement.status import PlannerStatus
from rsrv.renewal import Renewals
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import PROBE_S, ChannelFactory, cancel
from rsrv_gateway.grpc_proxy import GrpcProxy
from rsrv_gateway.http_proxy import HttpProxy
from rsrv_gateway.members import Members
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.picker import Picker
from rsrv_gateway.probes import ActionQueue, PlacementSender, Probes
from rsrv_gateway.traffic import Brain, Traffic, TrafficCounts


class Proxy:
    """Forwards requests between clients and workers, over gRPC and HTTP, by the table of the gateway's loop."""

    def __init__(self, settings: GatewaySection, brain: Brain, renewals: Renewals | None = None) -> None:
        """Prepare both protocols. Raises CredentialsError, TokenError."""
        self.renewals = renewals = Renewals() if renewals is None else renewals
        self._traffic = Traffic(settings.mode, brain)
        self.grpc = GrpcProxy(settings, ChannelFactory(settings, renewals), self._traffic, renewals)
        self.http = HttpProxy(settings, self._traffic, renewals)

    async def start(self) -> None:
        """Listen from now on. Raises ListenError, CredentialsError, whose messages name the setting."""
        await self.grpc.start()
        await self.http.start()

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        """Replace the workers and the table. May be called before `start`.

        `workers` are the workers that answer, by name. They include all workers in `table`. Other workers get no new requests,
        but their requests in flight may end. A model with an empty `ready` is known but not served: requests for it fail with
        UNAVAILABLE. If a model is not in the table, the proxy calls `Brain.refresh`, and then fails the request with NOT_FOUND.
        """
        self.grpc.apply(workers)
        self.http.apply(workers)
        self._traffic.apply(workers, table)

    def counts(self) -> TrafficCounts:
        return self._traffic.counts()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests with UNAVAILABLE. Return when the requests in flight have ended, or after `seconds`."""
        await asyncio.gather(self.http.drain(seconds), self.grpc.drain(seconds))

    async def stop(self) -> None:
        """End all requests in flight, and free all resources. A second call has no effect."""
        await asyncio.gather(self.grpc.stop(), self.http.stop())


log = logging.getLogger(__name__)

T = TypeVar("T")

#: Minimum number of seconds between two refreshes for unknown models.
_REFRESH_MIN_S = 1.0


class GatewayLoop:
    """Owner of the gateway's state. All methods run on one event loop. Only the planner runs in other threads."""

    def __init__(
        self,
        members: Members,
        probes: Callable[[Callable[[], None]], Probes],
        planner: Planner,
        make_proxy: Callable[["GatewayLoop"], Proxy | Picker],
        *,
        drain: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the parts without starting them.

        `probes` creates the probes; its argument is the callback for new views. When the gateway ends, requests in flight have
        `drain` seconds to finish.
        """
        self._stirred = asyncio.Event()
        self.members = members
        self.probes = probes(self._stirred.set)
        self.planner = planner
        self.proxy = make_proxy(self)
        self._errands = ActionQueue(self.probes.act)
        self._placements = PlacementSender(self.probes.place)
        #: Devices of the servers in the last round.
        self.devices: ServerDevices = {}
        #: The planner's table in the last round.
        self._planned: Table | None = None
        #: The same table with servers in place of devices.
        self._routes: Table = {}
        self._drain = drain
        self.clock = clock
        self._rounded = asyncio.Event()
        self._round_lock = asyncio.Lock()
        self._rounding: set[asyncio.Task[None]] = set()
        self._applied: tuple[Mapping[str, Worker], Table] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed = -_REFRESH_MIN_S
        self._serving = False

    @property
    def ready(self) -> bool:
        """True while the gateway accepts requests and at least one worker responds."""
        return not self.unready

    @property
    def unready(self) -> str:
        """Reason why the gateway is not ready, or an empty text if it is ready."""
        if not self._serving:
            return "the gateway is starting or stopping"
        if not any(view.alive for view in self.probes.summaries().values()):
            return "no worker answers"
        return ""

    @property
    def table(self) -> Table:
        """The table that the proxy uses."""
        return {} if self._applied is None else self._applied[1]

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, and end gracefully. Raises ListenError and other errors of the proxy."""
        try:
            await _first(stop.wait(), self._start())
            if stop.is_set():
                return
            self._serving = True
            await _first(stop.wait(), self._rounds(), self.members.run(self._members_changed))
            self._serving = False
            log.info("stopping; requests in flight have %g s to finish", self._drain)
            await self.proxy.drain(self._drain)
        finally:
            self._serving = False
            await asyncio.gather(*self._rounding)
            await self.proxy.stop()
            await self._errands.close()
            await self._placements.close()
            await self.probes.close()

    async def _start(self) -> None:
        await self.members.refresh()
        self.probes.watch(self.members.workers())
        await self.probes.probe()
        await self.round()
        await self.proxy.start()

    async def round(self) -> None:
        """Plan with the current views, and apply the plan. If the caller is cancelled, the round continues."""
        task = asyncio.create_task(self._round())
        self._rounding.add(task)
        task.add_done_callback(self._rounding.discard)
        await asyncio.shield(task)

    async def steer(self, change: Callable[[Planner], T]) -> T:
        """Change the planner's settings between two plans, and plan again. Raises the errors of `change`."""
        async with self._round_lock:
            answer = change(self.planner)
        await self.round()
        return answer

    async def _round(self) -> None:
        async with self._round_lock:
            servers, workers = self.probes.views(), self.probes.workers()
            named = devices_of(servers)
            views = dict(zip(named, (view for server in servers.values() for view in server), strict=True))
            try:
                # Plan on another thread. For a large fleet, planning would delay requests for too long.
                plan = await asyncio.to_thread(self.planner.plan, views, self.clock())
                if plan.table is not self._planned or named != self.devices:
                    self._routes = routes_to_servers(plan.table, named)
                    self._planned, self.devices = plan.table, named
                table = self._routes
                alive = {
                    name: worker for name, worker in workers.items() if any(v.alive for v in servers[name])
                }
                if self._applied != (alive, table):
                    await self.proxy.apply(alive, table)
                    self._applied = alive, table
            except Exception:
                # The last table remains in use, and the next round tries again.
                log.exception("the placement table was not updated; the last one stays in use")
                return
            for step in plan.steps:
                device = named.get(step.worker, ServerDevice(step.worker, None))
                self._errands.send(step.act, device, step.model)
            if self.planner.options.mode == "lpt_packing":
                sent = placements(plan.table, named)
                self._placements.update({server: sent[server] for server in sent.keys() & alive.keys()})
            self._rounded.set()
            self._rounded = asyncio.Event()

    async def status(self) -> PlannerStatus | None:
        """Return the planner's state after its last plan, or None before its first plan."""
        async with self._round_lock:
            return await asyncio.to_thread(self.planner.status)

    async def next_round(self) -> None:
        """Return after the next complete round."""
        await self._rounded.wait()

    def failed(self, worker: str) -> None:
        self.probes.failed(worker)

    async def has_died(self, worker: str, model: str) -> bool:
        return await self.probes.has_died(worker, model)

    async def string_outputs(self, worker: str, model: str, version: str) -> frozenset[str] | Refusal:
        return await self.probes.string_outputs(worker, model, version)

    async def refresh(self, sure: bool = False) -> None:
        if sure and self._refreshing is not None:
            await asyncio.shield(self._refreshing)
        if self._refreshing is None:
            if not sure and self.clock() - self._refreshed < _REFRESH_MIN_S:
                return
            self._refreshing = asyncio.create_task(self._refresh())
        # A cancelled client must not end the refresh for other clients.
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            await self.probes.probe()
            await self.round()
        finally:
            self._refreshed = self.clock()
            self._refreshing = None

    async def _rounds(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(PROBE_S):
                    await self._stirred.wait()
            self._stirred.clear()
            await self.round()

    def _members_changed(self) -> None:
        before, now = self.probes.workers(), self.members.workers()
        for name in before.keys() - now.keys():
            log.info("worker %s was removed", name)
        for name in now.keys() - before.keys():
            log.info("worker %s was added: %s", name, now[name].grpc)
        self.probes.watch(now)
        self._stirred.set()


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these coroutines has ended, and cancel the others. Raises the error of the ended one."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel(tasks)

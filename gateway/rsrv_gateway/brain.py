"""BRAIN"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from rsrv.placement.contract import Brain, Table, TrafficCounts, Worker
from rsrv.placement.planner import Planner
from rsrv.placement.status import PlannerStatus
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.connections import ChannelFactory
from rsrv_gateway.grpc_proxy import GrpcProxy
from rsrv_gateway.http_proxy import HttpProxy
from rsrv_gateway.members import Members
from rsrv_gateway.probes import ActionQueue, Probes
from rsrv_gateway.traffic import Traffic


class Proxy:
    """The brain tells it where requests go, and it tells the brain what it meets."""

    def __init__(self, settings: GatewaySection, brain: Brain) -> None:
        """Raises ListenError, CredentialsError."""
        self._traffic = Traffic(settings.mode, brain)
        self.grpc = GrpcProxy(settings, ChannelFactory(settings), self._traffic)
        self.http = HttpProxy(settings, self._traffic)

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


log = logging.getLogger("rsrv.gateway")

T = TypeVar("T")

#: seconds between two refreshes that requests for unknown models ask for
_LEAST_PAUSE = 1.0


class GatewayLoop:
    """All on one event loop, but for the planner's looks. What a plane may ask for is in `contract.Brain`."""

    def __init__(
        self,
        members: Members,
        probes: Callable[[Callable[[], None]], Probes],
        planner: Planner,
        make_plane: Callable[["GatewayLoop"], Proxy],
        *,
        pause: float,
        drain: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probes` gets what they are to call when they see something new. `pause`: seconds between two rounds at most;
        `drain`: seconds that requests under way have when it ends."""
        self._stirred = asyncio.Event()
        self.members = members
        self.probes = probes(self._stirred.set)
        self.planner = planner
        self.plane = make_plane(self)
        self._errands = ActionQueue(self.probes.act)
        self._pause = pause
        self._drain = drain
        self.clock = clock
        self._rounded = asyncio.Event()
        self._round_lock = asyncio.Lock()
        self._rounding: set[asyncio.Task[None]] = set()
        self._applied: tuple[Mapping[str, Worker], Table] | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._refreshed = -_LEAST_PAUSE
        self._serving = False

    @property
    def ready(self) -> bool:
        """Whether requests are taken, and some worker answers them."""
        return not self.unready

    @property
    def unready(self) -> str:
        """Why it is not ready; empty: it is."""
        if not self._serving:
            return "the gateway starts or ends"
        if not any(view.alive for view in self.probes.views().values()):
            return "no worker answers"
        return ""

    @property
    def table(self) -> Table:
        """As the plane has it."""
        return {} if self._applied is None else self._applied[1]

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, and ends gracefully. Raises ListenError, and whatever else ends the plane."""
        try:
            await self.members.look()
            self.probes.watch(self.members.workers())
            await self.probes.look()
            await self.round()
            await self.plane.start()
            self._serving = True
            await self._serve(stop)
            self._serving = False
            log.info("ending; requests under way have %g s", self._drain)
            await self.plane.drain(self._drain)
        finally:
            self._serving = False
            await asyncio.gather(*self._rounding)
            await self.plane.stop()
            await self._errands.close()
            await self.probes.close()

    async def round(self) -> None:
        """Plan by what is seen now, and have it carried out. A caller that gives up does not end it in the middle."""
        task = asyncio.create_task(self._round())
        self._rounding.add(task)
        task.add_done_callback(self._rounding.discard)
        await asyncio.shield(task)

    async def steer(self, change: Callable[[Planner], T]) -> T:
        """Change the planner's settings between two of its looks, and plan anew. Raises what `change` raises."""
        async with self._round_lock:
            answer = change(self.planner)
        await self.round()
        return answer

    async def _round(self) -> None:
        async with self._round_lock:
            views, workers = self.probes.views(), self.probes.workers()
            try:
                # Of a large fleet it takes longer than requests should wait.
                plan = await asyncio.to_thread(self.planner.look, views, self.clock())
                alive = {name: worker for name, worker in workers.items() if views[name].alive}
                if self._applied != (alive, plan.table):
                    await self.plane.apply(alive, plan.table)
                    self._applied = alive, plan.table
            except Exception:
                # What held before is better than nothing, and the next round tries again.
                log.exception("the table could not be changed")
                return
            for step in plan.steps:
                self._errands.send(step.act, step.worker, step.model)
            self._rounded.set()
            self._rounded = asyncio.Event()

    async def status(self) -> PlannerStatus | None:
        """Describe the planner after its last look; None before the first one."""
        async with self._round_lock:
            return await asyncio.to_thread(self.planner.status)

    async def next_round(self) -> None:
        """Returns after the next one that was carried out."""
        await self._rounded.wait()

    def failed(self, worker: str) -> None:
        self.probes.failed(worker)

    async def refresh(self, sure: bool = False) -> None:
        if sure and self._refreshing is not None:
            await asyncio.shield(self._refreshing)
        if self._refreshing is None:
            if not sure and self.clock() - self._refreshed < _LEAST_PAUSE:
                return
            self._refreshing = asyncio.create_task(self._refresh())
        # A client that gives up does not end what the others wait for.
        await asyncio.shield(self._refreshing)

    async def _refresh(self) -> None:
        try:
            await self.probes.look()
            await self.round()
        finally:
            self._refreshed = self.clock()
            self._refreshing = None

    async def _serve(self, stop: asyncio.Event) -> None:
        tasks = [
            asyncio.create_task(work)
            for work in (stop.wait(), self._rounds(), self.members.run(self._members_changed))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _rounds(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._pause):
                    await self._stirred.wait()
            except TimeoutError:
                pass
            self._stirred.clear()
            await self.round()

    def _members_changed(self) -> None:
        before, now = self.probes.workers(), self.members.workers()
        for name in before.keys() - now.keys():
            log.info("worker %s has left", name)
        for name in now.keys() - before.keys():
            log.info("worker %s has joined: %s", name, now[name].grpc)
        self.probes.watch(now)
        self._stirred.set()

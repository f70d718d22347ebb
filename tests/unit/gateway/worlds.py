"""A gateway whose workers and proxy belong to the test."""

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from rsrv.control.grpc_server import ListenError
from rsrv.placement.contract import Act, Table, WeightAction, Worker, WorkerView
from rsrv.placement.devices import ModelDevices
from rsrv.placement.options import PlannerOptions
from rsrv.placement.planner import Plan, Planner
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.brain import GatewayLoop, Proxy
from rsrv_gateway.connections import PROBE_S, ControlClient
from rsrv_gateway.members import Members
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.probes import DEAD, Probes
from rsrv_gateway.traffic import TrafficCounts
from tests.waiting import PATIENCE_S


class FakePlanner(Planner):
    """A planner that adds `steps` to its next plan, or fails if `broken` is set.

    A plan waits until `gate` is set. A call during another call fails.
    """

    def __init__(self, section: PlannerOptions) -> None:
        super().__init__(section)
        self.steps: tuple[WeightAction, ...] = ()
        self.broken = False
        self.plans = 0
        self.gate = threading.Event()
        self.gate.set()
        self._planning = threading.Lock()

    @property
    def planning(self) -> bool:
        return self._planning.locked()

    def plan(self, views: Mapping[str, WorkerView], now: float) -> Plan:
        self.plans += 1
        if self.broken or self.planning:
            raise RuntimeError("no plan")
        with self._planning:
            assert self.gate.wait(PATIENCE_S), "the gate was not opened"
            steps, self.steps = self.steps, ()
            return replace(super().plan(views, now), steps=steps)


class FakePlane(Proxy):
    """Records the calls. `refuses` is the name of the call that fails, "start" or "apply", or empty."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.applied: list[tuple[list[str], dict[str, tuple[str, ...]]]] = []
        self.refuses = ""
        self.counted = TrafficCounts()

    async def start(self) -> None:
        self.log.append("start")
        if self.refuses == "start":
            raise ListenError("gateway.grpc: taken")

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        if self.refuses == "apply":
            raise OSError("no socket")
        self.log.append("apply")
        self.applied.append((list(workers), {name: routes.ready for name, routes in table.items()}))

    def counts(self) -> TrafficCounts:
        return self.counted

    async def drain(self, seconds: float) -> None:
        self.log.append(f"drain {seconds:g}")
        await asyncio.sleep(0)

    async def stop(self) -> None:
        self.log.append("stop")


class WorldProber:
    def __init__(self, world: "World", worker: Worker) -> None:
        self._world = world
        self._name = worker.name

    async def probe(self) -> tuple[WorkerView, ...]:
        self._world.probed.append(self._name)
        await asyncio.sleep(self._world.seconds)
        ready = self._world.ready.get(self._name.removesuffix(":8001"))
        if ready is None:
            return DEAD
        if isinstance(ready, str):
            ready = WorkerView(True, frozenset(ready.split()))
        return ready if isinstance(ready, tuple) else (ready,)

    async def act(self, act: Act, model: str, device: int | None) -> None:
        where = self._name if device is None else f"{self._name}/{device}"
        self._world.acts.append(f"{where} {act.value} {model}")

    async def place(self, models: ModelDevices) -> None:
        self._world.placements.append((self._name, models))

    async def metrics(self) -> str | None:
        return self._world.pages.get(self._name)

    def control(self) -> ControlClient | None:
        return self._world.controls.get(self._name)

    def has_died(self, model: str) -> bool:
        return False

    async def string_outputs(self, model: str, version: str) -> frozenset[str] | Refusal:
        return frozenset()

    async def close(self) -> None:
        self._world.closed += 1


class World:
    """A gateway. `ready` has each worker's ready models, its view, or the views of its devices.

    A worker that is not in `ready` is dead.
    """

    def __init__(
        self, settings: Mapping[str, Any] | None = None, **ready: str | WorkerView | tuple[WorkerView, ...]
    ) -> None:
        self.ready = ready
        self.addresses = sorted(ready)
        self.probed: list[str] = []
        self.acts: list[str] = []
        self.placements: list[tuple[str, ModelDevices]] = []
        #: Metrics of the workers' control services, by address.
        self.pages: dict[str, str] = {}
        #: Clients of the workers' control services, by address.
        self.controls: dict[str, ControlClient] = {}
        self.closed = 0
        self.seconds = 0.001
        options = {
            "workers_dns": "workers",
            "mode": "least_outstanding",
            "replicas": 1,
            **(settings or {}),
        }
        section = GatewaySection(**{k: v for k, v in options.items() if k in GatewaySection.model_fields})
        policy = {k: v for k, v in options.items() if k in PlannerOptions.model_fields}
        self.section = PlannerOptions.model_validate(policy)
        self.planner = FakePlanner(self.section)
        self.proxy = FakePlane()

        async def resolve(_: str) -> list[str]:
            return self.addresses

        self.gateway = GatewayLoop(
            Members(section, resolve),
            lambda seen: Probes(lambda worker: WorldProber(self, worker), PROBE_S, seen),
            self.planner,
            lambda brain: self.proxy,
            drain=7,
            clock=lambda: asyncio.get_running_loop().time(),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        task = asyncio.create_task(self.gateway.run(stop))
        while not self.gateway.ready and not task.done():
            await asyncio.sleep(0.01)
        yield
        stop.set()
        await task

    def knows(self) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        """Return the workers and the routes of the last applied table."""
        return self.proxy.applied[-1]

    async def until(self, workers: list[str], table: dict[str, tuple[str, ...]], *, within: float) -> None:
        async with asyncio.timeout(within):
            while self.knows() != (workers, table):
                await asyncio.sleep(0.01)

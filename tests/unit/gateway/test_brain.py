"""From what is seen of the workers to what the plane goes by."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.brain import Gateway
from rsrv_gateway.contract import Act, Routes, Step, Table, Worker, WorkerView
from rsrv_gateway.members import Members
from rsrv_gateway.plane import Counts, ListenError
from rsrv_gateway.probes import DEAD, Probes
from tests.unit.control.virtual import run


@dataclass(frozen=True)
class FakePlan:
    table: Table
    steps: tuple[Step, ...] = ()


class FakePlanner:
    """Each model goes where it is ready. `steps` come with the next plan; `broken`: it fails."""

    def __init__(self) -> None:
        self.steps: tuple[Step, ...] = ()
        self.broken = False
        self.looks = 0

    def look(self, views: Mapping[str, WorkerView], now: float) -> FakePlan:
        self.looks += 1
        if self.broken:
            raise RuntimeError("no plan")
        steps, self.steps = self.steps, ()
        names = {name for view in views.values() if view.alive for name in view.ready}
        return FakePlan(
            {
                name: Routes(
                    tuple(sorted(who for who, view in views.items() if view.alive and name in view.ready))
                )
                for name in names
            },
            steps,
        )


class FakePlane:
    """Notes what it is told. `refuses`: it cannot listen, or cannot apply."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.applied: list[tuple[list[str], dict[str, tuple[str, ...]]]] = []
        self.refuses = ""

    async def start(self) -> None:
        self.log.append("start")
        if self.refuses == "start":
            raise ListenError("gateway.grpc: taken")

    async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
        if self.refuses == "apply":
            raise OSError("no socket")
        self.log.append("apply")
        self.applied.append((list(workers), {name: routes.ready for name, routes in table.items()}))

    def counts(self) -> Counts:
        return Counts()

    async def drain(self, seconds: float) -> None:
        self.log.append(f"drain {seconds:g}")
        await asyncio.sleep(1)

    async def stop(self) -> None:
        self.log.append("stop")


class FakeProber:
    def __init__(self, world: "World", worker: Worker) -> None:
        self._world = world
        self._name = worker.name

    async def look(self) -> WorkerView:
        self._world.looks.append(self._name)
        await asyncio.sleep(self._world.seconds)
        ready = self._world.ready.get(self._name.partition(":")[0])
        return DEAD if ready is None else WorkerView(True, frozenset(ready.split()))

    async def act(self, act: Act, model: str) -> None:
        self._world.acts.append(f"{self._name} {act.value} {model}")

    async def close(self) -> None:
        self._world.closed += 1


class World:
    """`ready`: what workers serve, by name; who is not in it is dead."""

    def __init__(self, **ready: str) -> None:
        self.ready = ready
        self.addresses = sorted(ready)
        self.looks: list[str] = []
        self.acts: list[str] = []
        self.closed = 0
        self.seconds = 0.001
        self.planner = FakePlanner()
        self.plane = FakePlane()
        section = GatewaySection(workers_dns="workers", resolve_s=5, probe_s=0.5)

        async def resolve(_: str) -> list[str]:
            return self.addresses

        self.gateway = Gateway(
            Members(section, resolve),
            lambda seen: Probes(lambda worker: FakeProber(self, worker), section.probe_s, seen),
            self.planner,
            lambda brain: self.plane,
            pause=section.probe_s,
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
        """Workers, and where each model goes, as the plane was told last."""
        return self.plane.applied[-1]

    async def until(self, workers: list[str], table: dict[str, tuple[str, ...]], *, within: float) -> None:
        async with asyncio.timeout(within):
            while self.knows() != (workers, table):
                await asyncio.sleep(0.01)


def test_it_serves_when_it_knows_where_and_ends_in_order() -> None:
    """The table is there before the first request can come; the end waits for those under way, and closes all."""

    async def main() -> None:
        world = World(a="m n", b="m")
        async with world.running():
            assert world.plane.log == ["apply", "start"]
            assert world.knows() == (["a:8001", "b:8001"], {"m": ("a:8001", "b:8001"), "n": ("a:8001",)})
        assert world.plane.log == ["apply", "start", "drain 7", "stop"]
        assert (world.gateway.ready, world.closed) == (False, 2)

    run(main())


def test_workers_that_join_leave_and_die_change_the_table() -> None:
    """Without a restart: those of the DNS with its next answer, a death within two seconds."""

    async def main() -> None:
        world = World(a="m", b="m")
        async with world.running():
            world.addresses.append("c")
            world.ready["c"] = "m n"
            await world.until(
                ["a:8001", "b:8001", "c:8001"],
                {"m": ("a:8001", "b:8001", "c:8001"), "n": ("c:8001",)},
                within=6,
            )
            del world.ready["b"]
            await world.until(["a:8001", "c:8001"], {"m": ("a:8001", "c:8001"), "n": ("c:8001",)}, within=2)
            world.addresses.remove("a")
            await world.until(["c:8001"], {"m": ("c:8001",), "n": ("c:8001",)}, within=6)
            world.ready["b"] = "m"
            await world.until(["b:8001", "c:8001"], {"m": ("b:8001", "c:8001"), "n": ("c:8001",)}, within=2)

    run(main())


def test_what_does_not_change_is_not_told_again() -> None:
    """The planner looks all the time; the plane hears of what is new."""

    async def main() -> None:
        world = World(a="m")
        async with world.running():
            await asyncio.sleep(60)
            assert world.plane.log == ["apply", "start"]
            assert world.planner.looks > 100

    run(main())


def test_traffic_that_fails_changes_the_table_at_once() -> None:
    """Much sooner than the next probe would."""

    async def main() -> None:
        world = World(a="m", b="m")
        async with world.running():
            await asyncio.sleep(0.2)
            del world.ready["a"]
            world.gateway.failed("a:8001")
            await world.until(["b:8001"], {"m": ("b:8001",)}, within=0.1)

    run(main())


def test_a_request_for_an_unknown_model_has_all_workers_looked_at_once() -> None:
    """However many there are, and once a second at most; when it is over the plane knows the model."""

    async def main() -> None:
        world = World(a="m", b="m")
        async with world.running():
            await asyncio.sleep(3.25)
            world.ready["b"] = "m new"
            looks = len(world.looks)
            await asyncio.gather(*(world.gateway.refresh() for _ in range(1000)))
            assert world.knows()[1]["new"] == ("b:8001",)
            assert len(world.looks) <= looks + 4
            looks = len(world.looks)
            await asyncio.gather(*(world.gateway.refresh() for _ in range(1000)))
            assert len(world.looks) == looks

    run(main())


def test_a_request_that_gives_up_leaves_the_others_their_refresh() -> None:
    """Its cancellation is its own."""

    async def main() -> None:
        world = World(a="m")
        async with world.running():
            await asyncio.sleep(2)
            world.seconds = 0.5
            first = asyncio.create_task(world.gateway.refresh())
            second = asyncio.create_task(world.gateway.refresh())
            await asyncio.sleep(0.1)
            first.cancel()
            await second
            assert first.cancelled()

    run(main())


def test_steps_are_done_once_and_a_plan_that_cannot_be_made_changes_nothing() -> None:
    """The next round tries again, and so it is when the plane does not take the table."""

    async def main() -> None:
        world = World(a="m")
        async with world.running():
            world.planner.steps = (Step(Act.PREFETCH, "a:8001", "m"), Step(Act.EVICT, "gone", "m"))
            await asyncio.sleep(2)
            assert world.acts == ["a:8001 prefetch m"]
            for trouble in ("planner", "plane"):
                world.planner.broken = trouble == "planner"
                world.plane.refuses = "apply" if trouble == "plane" else ""
                world.ready["a"] = f"m {trouble}"
                await asyncio.sleep(2)
                assert trouble not in world.knows()[1]
                world.planner.broken, world.plane.refuses = False, ""
                await world.until(["a:8001"], {"m": ("a:8001",), trouble: ("a:8001",)}, within=1)

    run(main())


def test_a_port_that_is_taken_ends_the_gateway() -> None:
    """With the reason; all is closed."""

    async def main() -> None:
        world = World(a="m")
        world.plane.refuses = "start"
        with pytest.raises(ListenError, match="taken"):
            await world.gateway.run(asyncio.Event())
        assert world.plane.log[-1] == "stop"
        assert world.closed == 1

    run(main())


def test_without_any_worker_it_serves_and_is_not_ready() -> None:
    """They may come; who asks meanwhile is told that nobody is there."""

    async def main() -> None:
        world = World(a="m")
        del world.ready["a"]
        stop = asyncio.Event()
        running = asyncio.create_task(world.gateway.run(stop))
        await asyncio.sleep(3)
        assert (world.plane.log, world.gateway.ready) == (["apply", "start"], False)
        world.ready["a"] = "m"
        await asyncio.sleep(1)
        assert world.gateway.ready
        stop.set()
        await running

    run(main())

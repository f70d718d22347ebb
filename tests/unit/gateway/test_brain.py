"""The gateway's loop, which turns the views of the workers into the proxy's routing table."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace

import grpc
import pytest

from rsrv.control.grpc_server import ListenError
from rsrv.placement.contract import Act, Table, WeightAction, Worker
from rsrv.placement.planner import Planner
from rsrv.settings_fleet import GatewaySection
from rsrv_gateway.brain import Proxy
from tests.unit.control.virtual import run
from tests.unit.gateway.proxies import FakeBrain, FakeWorker, House
from tests.unit.gateway.worlds import World
from tests.waiting import looped


def test_it_serves_when_it_knows_where_and_ends_in_order() -> None:
    """The table is applied before the proxy starts. At the end, the proxy drains, and all is closed."""

    async def main() -> None:
        world = World(a="m n", b="m")
        async with world.running():
            assert world.proxy.log == ["apply", "start"]
            assert world.knows() == (["a:8001", "b:8001"], {"m": ("a:8001", "b:8001"), "n": ("a:8001",)})
        assert world.proxy.log == ["apply", "start", "drain 7", "stop"]
        assert (world.gateway.ready, world.closed) == (False, 2)

    run(main())


def test_workers_that_join_leave_and_die_change_the_table() -> None:
    """Workers that join, leave or die change the table without a restart."""

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


def test_an_unchanged_table_is_not_applied_again() -> None:
    """While nothing changes, the planner continues to plan, but the proxy gets no new table."""

    async def main() -> None:
        world = World(a="m")
        async with world.running():
            await asyncio.sleep(60)
            assert world.proxy.log == ["apply", "start"]
            assert world.planner.plans > 100

    run(main())


def test_traffic_that_fails_changes_the_table_at_once() -> None:
    """A failed request changes the table at once, before the next probe."""

    async def main() -> None:
        world = World(a="m", b="m")
        async with world.running():
            await asyncio.sleep(0.2)
            del world.ready["a"]
            world.gateway.failed("a:8001")
            await world.until(["b:8001"], {"m": ("b:8001",)}, within=0.1)

    run(main())


def test_a_request_for_an_unknown_model_probes_all_workers_at_once() -> None:
    """A request for an unknown model starts a probe of all workers, at most once a second."""

    async def main() -> None:
        world = World(a="m", b="m")
        async with world.running():
            await asyncio.sleep(3.25)
            world.ready["b"] = "m new"
            probed = len(world.probed)
            await asyncio.gather(*(world.gateway.refresh() for _ in range(1000)))
            assert world.knows()[1]["new"] == ("b:8001",)
            assert len(world.probed) <= probed + 4
            probed = len(world.probed)
            await asyncio.gather(*(world.gateway.refresh() for _ in range(1000)))
            assert len(world.probed) == probed

    run(main())


def test_a_request_that_gives_up_leaves_the_others_their_refresh() -> None:
    """If one of several waiting requests is cancelled, the refresh continues for the others."""

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
    """The steps of a plan are done once. A failed plan or a refused table changes nothing, and is retried."""

    async def main() -> None:
        world = World(a="m")
        async with world.running():
            world.planner.steps = (
                WeightAction(Act.PREFETCH, "a:8001", "m"),
                WeightAction(Act.EVICT, "gone", "m"),
            )
            await asyncio.sleep(2)
            assert world.acts == ["a:8001 prefetch m"]
            for trouble in ("planner", "proxy"):
                world.planner.broken = trouble == "planner"
                world.proxy.refuses = "apply" if trouble == "proxy" else ""
                world.ready["a"] = f"m {trouble}"
                await asyncio.sleep(2)
                assert trouble not in world.knows()[1]
                world.planner.broken, world.proxy.refuses = False, ""
                await world.until(["a:8001"], {"m": ("a:8001",), trouble: ("a:8001",)}, within=1)

    run(main())


def test_a_port_that_is_taken_ends_the_gateway() -> None:
    """If a port is taken, the gateway ends with the reason and closes all."""

    async def main() -> None:
        world = World(a="m")
        world.proxy.refuses = "start"
        with pytest.raises(ListenError, match="taken"):
            await world.gateway.run(asyncio.Event())
        assert world.proxy.log[-1] == "stop"
        assert world.closed == 1

    run(main())


def test_it_ends_at_once_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that is stopped while it reads its list of workers does not wait for the list."""

    async def main() -> None:
        world = World(a="m")
        monkeypatch.setattr(world.gateway.members, "refresh", asyncio.Event().wait)
        stop = asyncio.Event()
        running = asyncio.create_task(world.gateway.run(stop))
        await turns()
        stop.set()
        async with asyncio.timeout(1):
            await running
        assert world.proxy.log == ["stop"]

    run(main())


def test_without_any_worker_it_serves_and_is_not_ready() -> None:
    """A gateway without workers serves and is not ready until the first worker answers its probe."""

    async def main() -> None:
        world = World(a="m")
        del world.ready["a"]
        stop = asyncio.Event()
        running = asyncio.create_task(world.gateway.run(stop))
        await asyncio.sleep(3)
        assert (world.proxy.log, world.gateway.ready) == (["apply", "start"], False)
        world.ready["a"] = "m"
        await asyncio.sleep(1)
        assert world.gateway.ready
        stop.set()
        await running

    run(main())


@looped
async def test_requests_are_answered_while_the_planner_plans() -> None:
    """While the planner takes long, requests are answered. Its plan is applied afterwards."""
    worker = FakeWorker("a")

    class Moved(Proxy):
        """A proxy that sends all requests to this one worker."""

        async def apply(self, workers: Mapping[str, Worker], table: Table) -> None:
            here = {name: replace(original, grpc=worker.worker.grpc) for name, original in workers.items()}
            await super().apply(here, table)

    async with AsyncExitStack() as ends:
        await worker.start()
        ends.push_async_callback(worker.kill)
        world = World(a="m")
        world.gateway.proxy = proxy = Moved(GatewaySection(grpc="127.0.0.1:0", http=None), world.gateway)
        await ends.enter_async_context(world.running())
        client = await ends.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{proxy.grpc.port}"))
        house = House(proxy, FakeBrain(), [worker], client)
        planning = await start_planning(world)

        for _ in range(3):
            assert (await house.infer()).model_version == "a"
        assert not planning.done()
        world.ready["a"] = "m n"
        world.planner.gate.set()
        assert (await house.infer("n")).model_version == "a"


@looped
async def test_plans_are_made_one_after_the_other() -> None:
    """Only one plan is made at a time, even if the caller of the first one is cancelled."""
    world = World(a="m")
    async with world.running():
        given_up = await start_planning(world)
        given_up.cancel()
        await asyncio.wait([given_up])
        plans = world.planner.plans
        world.ready["a"] = "m new"
        await world.gateway.probes.probe()
        later = asyncio.create_task(world.gateway.round())
        await turns()
        assert world.planner.plans == plans
        assert not later.done()

        world.planner.gate.set()
        await later
        assert world.planner.plans >= plans + 1
        assert world.knows() == (["a:8001"], {"m": ("a:8001",), "new": ("a:8001",)})


@looped
async def test_a_refresh_after_a_change_does_not_rely_on_an_earlier_one() -> None:
    """After a change, a refresh does not rely on a refresh in progress, which may have asked the workers before the change."""
    world = World(a="m")
    async with world.running():
        world.planner.gate.clear()
        probed = len(world.probed)
        earlier = asyncio.create_task(world.gateway.refresh())
        while len(world.probed) == probed or not world.planner.planning:
            await asyncio.sleep(0)
        world.ready["a"] = "m new"
        sure = asyncio.create_task(world.gateway.refresh(sure=True))
        await turns()
        world.planner.gate.set()
        await asyncio.gather(earlier, sure)

        assert world.knows()[1].keys() == {"m", "new"}


@looped
async def test_settings_change_between_two_plans() -> None:
    """Settings that change while a plan is made are used from the next plan on."""
    world = World(a="m")
    async with world.running():
        planning = await start_planning(world)
        steered = asyncio.create_task(world.gateway.steer(lambda _: world.planner.planning))
        repacked = asyncio.create_task(world.gateway.steer(Planner.repack))
        await turns()
        world.planner.gate.set()
        await planning

        assert (await steered, await repacked) == (False, 1)


@looped
async def test_it_ends_in_the_middle_of_a_plan() -> None:
    """A gateway that ends while a plan is made still closes all."""
    world = World(a="m")
    async with world.running():
        await start_planning(world)
        asyncio.get_running_loop().call_later(0.05, world.planner.gate.set)
    assert (world.proxy.log[-1], world.closed) == ("stop", 1)


async def turns() -> None:
    """Let all ready callbacks run."""
    for _ in range(20):
        await asyncio.sleep(0)


async def start_planning(world: World) -> asyncio.Task[None]:
    """Start a round. Its plan is made only after the test has set the planner's `gate`."""
    world.planner.gate.clear()
    plans = world.planner.plans
    task = asyncio.create_task(world.gateway.round())
    while world.planner.plans == plans:
        await asyncio.sleep(0)
    return task

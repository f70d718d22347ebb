"""The times of probes, and the notifications of the gateway's loop."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from rsrv.placement.contract import Act, Worker, WorkerView
from rsrv.placement.devices import ModelDevices, ServerDevice
from rsrv_gateway.outcomes import Refusal
from rsrv_gateway.probes import DEAD, ActError, ActionQueue, PlacementSender, Probes
from tests.unit.control.virtual import run

ALIVE = WorkerView(alive=True, ready=frozenset({"m"}))


class FakeProber:
    """Returns `view` after `seconds`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.views: tuple[WorkerView, ...] = (ALIVE,)
        self.seconds = 0.001
        #: Error that the gateway's own code raises in a probe, or None.
        self.error: Exception | None = None
        self.probed_at: list[float] = []
        self.closed = False
        self.acts: list[tuple[Act, str, int | None]] = []

    async def probe(self) -> tuple[WorkerView, ...]:
        assert not self.closed
        self.probed_at.append(asyncio.get_running_loop().time())
        views = self.views
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        return views

    async def act(self, act: Act, model: str, device: int | None) -> None:
        self.acts.append((act, model, device))

    async def place(self, models: ModelDevices) -> None:
        pass

    async def metrics(self) -> str | None:
        return None

    def control(self) -> None:
        return None

    def has_died(self, model: str) -> bool:
        return False

    async def string_outputs(self, model: str, version: str) -> frozenset[str] | Refusal:
        return frozenset()

    async def close(self) -> None:
        self.closed = True


class World:
    """Probes of the workers a and b every half second."""

    def __init__(self) -> None:
        self.probers: dict[str, FakeProber] = {}
        self.seen = 0
        self.some = asyncio.Event()
        self.probes = Probes(self._make, 0.5, self._see)

    def watch(self, *names: str, port: int = 1) -> None:
        self.probes.watch({name: Worker(name, f"{name}:{port}") for name in names})

    def _make(self, worker: Worker) -> FakeProber:
        return self.probers.setdefault(f"{worker.grpc}", FakeProber(worker))

    def _see(self) -> None:
        self.seen += 1
        self.some.set()

    async def sees(self) -> float:
        """Wait for the next notification, and return its time."""
        self.some.clear()
        await self.some.wait()
        return asyncio.get_running_loop().time()


def in_world(test: Callable[[World], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Make a test of a coroutine, which gets its own world."""

    async def main() -> None:
        world = World()
        await test(world)
        await world.probes.close()
        assert all(prober.closed for prober in world.probers.values())

    def run_it() -> None:
        run(main())

    run_it.__doc__ = test.__doc__
    return run_it


def now() -> float:
    return asyncio.get_running_loop().time()


@in_world
async def test_each_worker_is_probed_again_and_again(world: World) -> None:
    """Each worker is probed every half second, independently of the others. A worker is dead before its first probe."""
    world.watch("a", "b")
    assert world.probes.views() == {"a": DEAD, "b": DEAD}
    world.probers["b:1"].seconds = 1.0
    await asyncio.sleep(10)
    assert world.probes.views() == {"a": (ALIVE,), "b": (ALIVE,)}
    assert len(world.probers["a:1"].probed_at) == pytest.approx(20, abs=1)
    assert len(world.probers["b:1"].probed_at) == pytest.approx(7, abs=1)
    assert world.seen == 2


@in_world
async def test_a_death_is_seen_with_the_next_probe(world: World) -> None:
    """A death is noticed within one pause and one timeout. Each change causes one notification."""
    world.watch("a")
    await world.sees()
    prober = world.probers["a:1"]
    prober.views, prober.seconds = DEAD, 1.0
    died = now()
    assert await world.sees() - died < 2
    assert world.probes.views() == {"a": DEAD}
    prober.views, prober.seconds = (ALIVE,), 0.001
    assert await world.sees() - died < 4
    assert world.seen == 3


@in_world
async def test_traffic_that_fails_probes_the_worker_at_once(world: World) -> None:
    """A failed request starts a probe at once. A thousand failed requests start one or two probes."""
    world.watch("a")
    prober = world.probers["a:1"]
    await world.sees()
    prober.views = DEAD
    failed = now()
    for _ in range(1000):
        world.probes.failed("a")
    assert await world.sees() - failed < 0.1

    prober.views, prober.seconds = (ALIVE,), 0.2
    await world.sees()
    probes = len(prober.probed_at)
    while len(prober.probed_at) == probes:  # Wait until the next probe begins.
        await asyncio.sleep(0.01)
    prober.views, prober.seconds = DEAD, 0.001
    failed = now()
    world.probes.failed("a")
    assert await world.sees() - failed < 0.3
    assert len(prober.probed_at) == probes + 2
    world.probes.failed("nobody")


@in_world
async def test_a_refresh_waits_for_new_probes(world: World) -> None:
    """A refresh waits for probes that begin after it. It does not wait for a worker that leaves."""
    world.watch("a", "b")
    await world.sees()
    prober = world.probers["a:1"]
    world.probers["b:1"].seconds = 1e9
    prober.views = (WorkerView(alive=True, ready=frozenset({"m", "new"})),)
    refresh = asyncio.create_task(world.probes.probe())
    await world.probes.probe(["a"])
    assert "new" in world.probes.summaries()["a"].ready
    await asyncio.sleep(1)
    assert not refresh.done()
    world.watch("a")
    await refresh


def test_a_probe_that_fails_unexpectedly_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """If the gateway's own code fails on a worker's answers, the worker is dead until a probe works. This is logged once."""

    @in_world
    async def main(world: World) -> None:
        world.watch("a")
        await world.sees()
        prober = world.probers["a:1"]
        for _ in range(2):
            prober.error = KeyError("device")
            async with asyncio.timeout(5):
                await world.probes.probe()
                assert world.probes.views() == {"a": DEAD}
                await world.probes.probe()
                prober.error = None
                await world.probes.probe()
            assert world.probes.views() == {"a": (ALIVE,)}

    main()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == ["worker a cannot be probed, so it gets no requests"] * 2


@in_world
async def test_a_worker_that_leaves_is_not_probed_any_more(world: World) -> None:
    """A removed worker is not probed. A worker with a new address is a new worker."""
    world.watch("a", "b")
    await asyncio.sleep(1)
    world.watch("a")
    assert list(world.probes.views()) == ["a"]
    assert world.probes.views()["a"] == (ALIVE,)
    await asyncio.sleep(0.1)
    assert world.probers["b:1"].closed
    world.watch("a", port=2)
    assert world.probes.views() == {"a": DEAD}
    await asyncio.sleep(1)
    assert (world.probers["a:1"].closed, world.probes.views()["a"]) == (True, (ALIVE,))
    with pytest.raises(ActError):
        await world.probes.act(Act.EVICT, ServerDevice("b", None), "m")


@in_world
async def test_a_server_keeps_its_devices_while_it_does_not_name_them(world: World) -> None:
    """While a server is dead or has no control service, its devices stay known, so that their placement is not forgotten."""
    figures = [WorkerView(True, frozenset({"m"}), "i", device=number) for number in (0, 1)]
    world.watch("a")
    await world.sees()
    prober = world.probers["a:1"]
    prober.views = tuple(figures)
    await world.probes.probe()
    for alone, alive in ((DEAD, False), ((ALIVE,), True)):
        prober.views = alone
        await world.probes.probe()
        views = world.probes.views()["a"]
        assert [(view.device, view.alive, view.instance) for view in views] == [
            (0, alive, None),
            (1, alive, None),
        ]
        assert world.probes.summaries()["a"].alive is alive


def test_steps_of_one_device_run_in_order_and_once() -> None:
    """Steps of a device run once and in order, and do not delay steps of another device. Failures are logged."""
    done: list[str] = []

    async def do(act: Act, place: ServerDevice, model: str) -> None:
        await asyncio.sleep(10 if place.server == "slow" else 1)
        if model == "bad":
            raise ActError("it does not want to")
        done.append(f"{place.server} {model}")

    async def main() -> None:
        errands = ActionQueue(do)
        for _ in range(3):
            for model in ("x", "bad", "y"):
                errands.send(Act.PREFETCH, ServerDevice("slow", 0), model)
                errands.send(Act.PREFETCH, ServerDevice("fast", 0), model)
        await asyncio.sleep(5)
        assert done == ["fast x", "fast y"]
        await asyncio.sleep(26)
        assert done[2:] == ["slow x", "slow y"]
        errands.send(Act.PREFETCH, ServerDevice("fast", 0), "x")
        errands.send(Act.PREFETCH, ServerDevice("fast", 0), "y")
        await asyncio.sleep(1.5)
        await errands.close()
        assert done[4:] == ["fast x"]

    run(main())


def test_servers_are_told_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    """A server gets its placement when the placement changes, and again after the server was absent from an update.

    If a server cannot be reached, the placement is sent again later.
    """
    sent: list[tuple[str, ModelDevices]] = []
    fails = True

    async def place(server: str, models: ModelDevices) -> None:
        if server == "away" and fails:
            raise ActError("no answer")
        sent.append((server, models))

    async def main() -> None:
        nonlocal fails
        sender = PlacementSender(place)
        first: ModelDevices = {"m": (0,)}
        second: ModelDevices = {"m": (0, 1)}
        for placement in (
            {"a": first, "away": first},
            {"a": second, "away": first},
            {"away": first},
            {"a": second, "away": first},
        ):
            sender.update(placement)
            await asyncio.sleep(0.1)
        fails = False
        sender.update({"away": first})
        await asyncio.sleep(0.1)
        await sender.close()
        assert [models for server, models in sent if server == "a"] == [first, second, second]
        assert [models for server, models in sent if server == "away"] == [first]

    run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "worker away did not get the devices of its models: no answer",
    ]

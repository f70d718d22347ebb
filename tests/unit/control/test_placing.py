"""The placement of models on a server's devices. It reads loads, and makes a table for the stubs and steps for the runtimes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.cli import main as cli
from rsrv.control.grpc_service import StatusError
from rsrv.control.placing import Placing
from rsrv.control.runtimes import Runtimes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.device_choice import PINNED
from rsrv.settings import SettingsError, load_settings
from rsrv.wire.placement_table import PlacementReader, PlacementWriter
from tests.unit.control.peers import FakeRuntime, entry, linked, served, until
from tests.waiting import looped


def new(name: str) -> pb.ModelRecord:
    """Return the record of a model without requests."""
    return pb.ModelRecord(name=name, weights=pb.WEIGHTS_ABSENT, device_bytes=10, cost_s=0.01, max_rows=1)


class Weights:
    """Answers of a runtime that loads and evicts models at once."""

    def __init__(self, instance: str, names: str, budget: int | None) -> None:
        self.instance = instance
        self.loads = {name: new(name) for name in names}
        self.calls: dict[str, list[str]] = {}
        self.budget = budget
        #: For each answer, the number of the earlier answer to which it has the changes. 0 means that it has all models.
        self.known: list[int] = []
        #: Records of all answers so far.
        self._said: list[dict[str, bytes]] = []
        #: Models of the last answer.
        self.changed: set[str] = set()

    def record(self, since: int) -> pb.DeviceRecord:
        now = {name: load.SerializeToString() for name, load in self.loads.items()}
        before = self._said[since - 1] if since else {}
        if before.keys() != now.keys():
            since, before = 0, {}
        self.changed = {name for name, data in now.items() if before.get(name) != data}
        self.known.append(since)
        self._said.append(now)
        record = pb.DeviceRecord(instance=self.instance, since=since, next=len(self._said))
        if self.budget is not None:
            record.memory.budget_bytes = self.budget
        record.memory.physical_bytes = sum(self.loads[name].device_bytes for name in self.resident)
        record.models.extend(self.loads[name] for name in self.changed)
        for name, models in self.calls.items():
            record.models.add(name=name, meta=True, calls_models=models)
        return record

    def __call__(self, command: dict[str, Any]) -> dict[str, Any]:
        match command:
            case {"command": "prefetch" | "evict" as act, "model": name}:
                self.loads[name].weights = pb.WEIGHTS_RESIDENT if act == "prefetch" else pb.WEIGHTS_ABSENT
        return {}

    @property
    def resident(self) -> set[str]:
        return {name for name, load in self.loads.items() if load.weights == pb.WEIGHTS_RESIDENT}


class Device(FakeRuntime):
    """A runtime that has models."""

    def __init__(self, path: Path, number: int, names: str, budget: int | None) -> None:
        super().__init__(path, instance=f"{number}{number}" * 8)
        self.entries = {f"{name}@1": entry(name) for name in names}
        self.weights = self.answers = Weights(self.instance, names, budget)

    def status(self, since: int = 0) -> pb.DeviceRecord:
        return self.weights.record(since)


class World:
    """Two devices with a placement. The test sets their time."""

    def __init__(self, devices: list[Device], runtimes: Runtimes, path: Path, settings: str) -> None:
        self.devices = devices
        self.runtimes = runtimes
        self.path = path
        self.now = 0.0
        self.settings = load_settings(settings)
        self.placing = Placing(runtimes, self.settings, path, lambda: self.now)

    def masks(self) -> dict[str, int]:
        names = {name for device in self.devices for name in device.weights.loads}
        return {name: PlacementReader(self.path, name).mask(0.0) for name in sorted(names)}

    async def rounds(self, times: int = 1, **device_s: float) -> None:
        """Run a round each second. `device_s` has the seconds that a model executes in each round, on each of its devices."""
        for _ in range(times):
            await self.placing.round()
            self.now += 1.0
            for name, seconds in device_s.items():
                mask = self.masks()[name]
                for number, device in enumerate(self.devices):
                    if mask >> number & 1:
                        device.weights.loads[name].device_seconds += seconds


@asynccontextmanager
async def placed(
    tmp_path: Path, names: str = "ab", settings: str = "", budget: int | None = None
) -> AsyncIterator[World]:
    folders = [tmp_path / name for name in ("0", "1")]
    devices = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        devices.append(Device(folder / "runtime.sock", number, names, budget))
    try:
        async with linked(*folders) as runtimes:
            await until(runtimes, lambda: len(runtimes.live) == len(folders))
            yield World(devices, runtimes, tmp_path / "placement", settings)
    finally:
        for device in devices:
            device.die()


@looped
async def test_models_are_spread_over_the_devices(tmp_path: Path) -> None:
    """Each model gets one device, where its weights are loaded. Stubs and prefetches use this device."""
    async with placed(tmp_path, "abcd") as world:
        await world.rounds(2)

        assert sorted(world.masks().values()) == [1, 1, 2, 2]
        for number, device in enumerate(world.devices):
            assert device.weights.resident == {
                name for name, mask in world.masks().items() if mask == 1 << number
            }
        assert {len(devices) for devices in world.runtimes.placement.values()} == {1}


@looped
async def test_only_what_changes_is_asked_for(tmp_path: Path) -> None:
    """After the first round, runtimes report only changed loads. The placement remembers the other loads."""
    async with placed(tmp_path, "abcd") as world:
        await world.rounds(4)
        assert all(device.weights.known[0] == 0 and all(device.weights.known[1:]) for device in world.devices)
        await world.rounds(2, a=0.5)
        assert [{*device.weights.changed} for device in world.devices if device.weights.changed] == [{"a"}]
        weights = world.devices[0].weights
        weights.loads["new"] = new("new")
        await world.rounds()
        assert (weights.known[-1], weights.changed) == (0, {*weights.loads})

        world.now += 10.0
        await world.rounds()
        status = (await world.placing.trial([], [], [])).status
        assert {model.name: model.bytes for model in status.models} == dict.fromkeys([*"abcd", "new"], 10)


@looped
async def test_a_device_that_has_become_idle_leaves_room_for_a_hot_model(tmp_path: Path) -> None:
    """If one device becomes idle, the hot model of the other is placed on both. Unchanged counters of a device are also a measurement."""
    async with placed(tmp_path) as world:
        await world.rounds(3)
        await world.rounds(4, b=0.9)
        await world.rounds(20, a=1.0)

        assert world.masks()["a"] == 3


@looped
async def test_the_other_device_takes_the_models_of_a_dead_one(tmp_path: Path) -> None:
    """In the next round, the living device gets all models of the dead one. When the dead device is back, they return to it."""
    async with placed(tmp_path, "abcd") as world:
        await world.rounds(2)
        before = world.masks()
        world.devices[1].die()
        await until(world.runtimes, lambda: len(world.runtimes.live) == 1)
        await world.rounds()
        assert set(world.masks().values()) == {1}
        assert world.devices[0].weights.resident == set("abcd")

        path = world.devices[1]._path
        world.devices[1] = Device(path, 3, "abcd", None)
        await until(world.runtimes, lambda: len(world.runtimes.live) == 2)
        await world.rounds(4)
        assert world.masks() == before
        commands = [command["command"] for command in world.devices[1].commands]
        assert commands.count("prefetch") == 2
        assert not world.runtimes.desired.overrides.models


@looped
async def test_a_restarted_control_process_goes_on(tmp_path: Path) -> None:
    """A new control process keeps the places of the table that the earlier process wrote, wherever weights are."""
    async with placed(tmp_path, "abc") as world:
        PlacementWriter(world.path).write({"a": 2, "b": 2, "c": 3})
        for device in world.devices:
            for model in device.weights.loads.values():
                model.weights = pb.WEIGHTS_RESIDENT
        running = asyncio.create_task(world.placing.run())
        while not world.runtimes.placement:
            await asyncio.sleep(0)
        running.cancel()

        assert world.masks() == {"a": 2, "b": 2, "c": 3}


@looped
async def test_a_meta_model_is_with_the_models_that_it_calls(tmp_path: Path) -> None:
    """A meta model and its callees have a device in common, and the meta model is placed there."""
    async with placed(tmp_path, "abcd") as world:
        for device in world.devices:
            device.weights.calls = {"m": ["a", "d"]}
            device.change("m@1", {**entry("m"), "kind": "meta", "weights": None})
        await until(world.runtimes, lambda: all("m@1" in link.state.entries for link in world.runtimes.links))
        await world.rounds(2)

        table = world.runtimes.placement
        assert table["m"] == table["a"] == table["d"]
        assert len(table["m"]) == 1


@looped
@pytest.mark.parametrize("settings", ["", "runtime: {idle: {executable: 10m}}"])
async def test_models_that_arrive_on_one_device_first_are_spread(tmp_path: Path, settings: str) -> None:
    """New models are placed when all devices have them, or after a while. So the device that is first does not get them all."""
    async with placed(tmp_path, "abcd", settings) as world:
        second = world.runtimes.links[1]
        for name in "abcd":
            world.devices[1].change(f"{name}@1", entry(name, state="loading", weights="absent"))
        await until(
            world.runtimes,
            lambda: all(version["state"] == "loading" for version in second.state.entries.values()),
        )
        await world.rounds(2)
        assert set(world.masks().values()) == {0}

        for name in "abc":
            world.devices[1].change(f"{name}@1", entry(name))
        await until(world.runtimes, lambda: second.state.entries["c@1"]["state"] == "ready")
        await world.rounds(2)
        masks = world.masks()
        assert masks["d"] == 0
        assert {masks[name] for name in "abc"} == {1, 2}
        await world.rounds(5)
        assert world.masks()["d"] == 1


@looped
async def test_a_card_without_memory_gets_no_models(tmp_path: Path) -> None:
    """A device without memory for weights gets no models if there is another device.

    As the only device, it gets all models, and a warning says that there is no memory for them.
    """
    async with placed(tmp_path, "abc") as world:
        first, second = (device.weights for device in world.devices)
        first.budget, second.budget = 0, 100
        await world.rounds(4)
        assert {*world.masks().values()} == {2}
        assert first.resident == set()

        trial = await world.placing.trial([1], [], [])
        assert {model.name: model.placed for model in trial.status.models} == dict.fromkeys("abc", ("0",))
        assert any(
            text.startswith("a needs 10 B of one device, but no device has more than 0 B for weights")
            for text in trial.status.warnings
        )


@looped
async def test_a_server_that_starts_without_a_device_places_its_models_soon(tmp_path: Path) -> None:
    """If a device is missing from the start and there is no load, the table exists as soon as the models have settled."""
    async with placed(tmp_path) as world:
        world.devices[1].die()
        await until(world.runtimes, lambda: len(world.runtimes.live) == 1)
        await world.rounds(5)
        assert {*world.masks().values()} == {1}


@looped
async def test_a_trial_changes_nothing(tmp_path: Path) -> None:
    """A dry run reports where models would be without a device, without a model, or with an additional model.

    It changes nothing.
    """
    async with placed(tmp_path, "abc", budget=100) as world:
        await world.rounds(2)
        before, generation = world.masks(), world.placing.generation

        trial = await world.placing.trial([1], [], [])
        assert {model.name: model.placed for model in trial.status.models} == dict.fromkeys("abc", ("0",))
        assert {worker.name: worker.alive for worker in trial.status.workers} == {"0": True, "1": False}
        added = pb.AddedModel(name="big", bytes=90, device_seconds_per_s=0.5)
        trial = await world.placing.trial([], ["a"], [added])
        places = {model.name: model.placed for model in trial.status.models}
        assert places.keys() == {"b", "c", "big"}
        assert places["big"]
        with pytest.raises(StatusError, match="there is no device 2"):
            await world.placing.trial([2], [], [])
        with pytest.raises(StatusError, match="no model 'x'"):
            await world.placing.trial([], ["x"], [])

        await world.rounds(2)
        assert (world.masks(), world.placing.generation) == (before, generation)


@looped
async def test_pins_hold(tmp_path: Path) -> None:
    """A pinned model is on its device. A model with a number of replicas is on that many devices."""
    text = "models: {a: {devices: [1]}, b: {replicas: all}}"
    async with placed(tmp_path, settings=text) as world:
        await world.rounds(3)

        assert world.masks() == {"a": 2 | PINNED, "b": 3}


@looped
@pytest.mark.parametrize(
    ("start", "second", "mask"),
    [("lazy", "", 3), ("lazy", "failed", 1), ("eager", "", 1)],
)
async def test_a_model_that_starts_with_a_request_gets_further_devices(
    tmp_path: Path, start: str, second: str, mask: int
) -> None:
    """A lazy model that is still cold on a device can be placed there. A model that failed there, or is not lazy, cannot."""
    text = f"{{runtime: {{start: {start}}}, placement: {{replicas: all}}}}"
    async with placed(tmp_path, "a", settings=text) as world:
        device, link = world.devices[1], world.runtimes.links[1]
        device.weights.loads.clear()
        device.change("a@1", None)
        await until(world.runtimes, lambda: not link.state.entries)
        if second:
            device.change("a@1", entry("a", state=second, weights="absent"))
            await until(world.runtimes, lambda: "a@1" in link.state.entries)
        await world.rounds(8)

        assert world.masks() == {"a": mask}


@looped
@pytest.mark.parametrize("starts", [True, False])
async def test_busy_models_that_started_on_one_device_are_divided(tmp_path: Path, starts: bool) -> None:
    """If two busy models started on the first device, one of them moves. Until it has started on the second, the first one answers.

    If the model does not start there within a minute, it stays on the first device.
    """
    async with placed(tmp_path, "ab", settings="runtime: {start: lazy}") as world:
        device, link = world.devices[1], world.runtimes.links[1]
        device.weights.loads.clear()
        for name in "ab":
            device.change(f"{name}@1", None)
        await until(world.runtimes, lambda: not link.state.entries)
        await world.rounds(7)
        assert world.masks() == {"a": 1, "b": 1}
        while world.now < 120 and 3 not in world.masks().values():
            for model in world.devices[0].weights.loads.values():
                model.device_seconds += 0.3
            await world.rounds()
        await world.rounds(3)

        assert world.masks() == {"a": 3, "b": 1}
        assert world.devices[0].weights.resident == {"a", "b"}

        if starts:
            device.weights.loads["a"] = new("a")
            device.change("a@1", entry("a"))
            await until(world.runtimes, lambda: "a@1" in link.state.entries)
        await world.rounds(80)
        assert world.masks() == ({"a": 2, "b": 1} if starts else {"a": 1, "b": 1})
        assert device.weights.resident == ({"a"} if starts else set())
        assert world.devices[0].weights.resident == ({"b"} if starts else {"a", "b"})


@looped
async def test_a_model_that_becomes_cold_on_a_device_starts_there_again_after_some_minutes(
    tmp_path: Path,
) -> None:
    """After an idle model becomes cold on a device, the table does not name this device for some minutes.

    Otherwise the model would start and become cold again and again.
    """
    text = "{runtime: {idle: {executable: 1m}}, placement: {replicas: all}}"
    async with placed(tmp_path, "a", settings=text) as world:
        await world.rounds(3)
        assert world.masks() == {"a": 3}
        world.devices[1].weights.loads.clear()
        world.devices[1].change("a@1", None)
        await until(world.runtimes, lambda: not world.runtimes.links[1].state.entries)
        await world.rounds(100)
        assert world.masks() == {"a": 1}
        world.now += 600
        await world.rounds(8)
        assert world.masks() == {"a": 3}


@looped
async def test_an_external_placement_comes_by_the_service(tmp_path: Path) -> None:
    """With `external`, SetPlacement sets the table. Unknown devices are refused."""
    async with served(tmp_path, models="ab", settings="placement: {mode: external}", devices=2) as server:
        placement = [pb.ModelPlacement(model="a", devices=[1]), pb.ModelPlacement(model="b", devices=[0, 1])]
        for _ in range(2):
            answer = await server.control.SetPlacement(pb.SetPlacementRequest(models=placement))
            assert answer.generation == 1, "the same table is not written again"
        assert server.runtimes.placement == {"a": (1,), "b": (0, 1)}
        placement[0] = pb.ModelPlacement(model="a", devices=[0, 0])
        await server.control.SetPlacement(pb.SetPlacementRequest(models=placement))
        assert server.runtimes.placement == {"a": (0,), "b": (0, 1)}
        response = await server.control.GetPlacement(pb.GetPlacementRequest())
        assert (response.mode, [list(model.devices) for model in response.models]) == (
            "external",
            [[0], [0, 1]],
        )

        wrong = pb.SetPlacementRequest(models=[pb.ModelPlacement(model="a", devices=[2])])
        with pytest.raises(grpc.aio.AioRpcError, match="a: there is no device 2: the server's devices"):
            await server.control.SetPlacement(wrong)


@looped
async def test_the_command_shows_places_and_a_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rsrv placement` prints devices and models with reasons; a dry run says what a lost device or a new model moves."""

    async def rsrv(*words: str, status: int = 0) -> str:
        arguments = ["placement", *words, "--server", f"unix:{tmp_path}/control.sock"]
        assert await asyncio.to_thread(cli.main, arguments) == status
        captured = capsys.readouterr()
        return captured.out + captured.err

    async with served(tmp_path, models="ab", devices=2) as server:
        for number, runtime in enumerate(server.all):
            runtime.answers = Weights(str(number), "ab", 1000)
        for _ in range(2):
            await server.placing.round()
        page = await rsrv()
        assert "placement lpt_packing, table 1" in page
        assert page.count("least busy device with room") == 2
        assert "would move" not in page

        page = await rsrv("--dry-run", "--without-device", "1", "--add", "big:500:0.2")
        assert "dry run: nothing is changed" in page
        assert [line.split()[:2] for line in page.splitlines() if line.startswith(("a ", "b ", "big "))][
            :3
        ] == [
            ["a", "0"],
            ["b", "0"],
            ["big", "0"],
        ]
        assert "dead" in page
        assert json.loads(await rsrv("--json"))["mode"] == "lpt_packing"
        assert "need --dry-run" in await rsrv("--without-model", "a", status=2)
        assert "write NAME:BYTES:UTIL" in await rsrv("--dry-run", "--add", "big", status=2)
        assert "there is no model 'x'" in await rsrv("--dry-run", "--without-model", "x", status=1)


@looped
async def test_a_server_that_places_models_itself_takes_no_table(tmp_path: Path) -> None:
    """Without `external`, SetPlacement is refused, and the error names the mode. If a server places no models, a dry run is refused."""
    async with served(tmp_path, models="a") as server:
        with pytest.raises(grpc.aio.AioRpcError, match="mode is lpt_packing") as refused:
            await server.control.SetPlacement(pb.SetPlacementRequest())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError, match="this server does not place models"):
            await server.control.GetPlacement(pb.GetPlacementRequest(without_devices=[0]))


def test_a_pin_to_a_device_that_is_not_listed_is_refused() -> None:
    """If the settings list the devices, a pin to another device is refused by name."""
    with pytest.raises(SettingsError, match=r"models\.a\.devices names device 2, but runtime\.devices has 2"):
        load_settings("{runtime: {devices: [cpu, cpu]}, models: {a: {devices: [2]}}}")

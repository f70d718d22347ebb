"""The control service of a server with two devices."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.cli.history import history_page
from rsrv.cli.server_pages import model_page, print_update, status_page
from rsrv.control.card_memory import CardMemory, Cards, NoFigures
from rsrv.control.grpc_service import StatusError
from rsrv.control.v1 import control_pb2 as pb
from rsrv.wire.paths import NO_DEVICE
from tests.unit.control.peers import FakeRuntime, entry, model_record, served, until
from tests.waiting import looped

READY = {"records": [{"at": 1.0, "what": "model ready", "why": "warmed up"}], "waits_for": ""}


@looped
async def test_the_status_adds_up_and_names_the_devices(tmp_path: Path) -> None:
    """The status of a model has the sums of its counters and its best state over all devices.

    It also has the counters and the state on each device, or the error of a device on which the model failed.
    """
    async with served(tmp_path, models=["a"], devices=2) as server:
        first, second = server.all
        first.change("a@1", entry("a", weights="absent"))
        first.models["a"] = model_record(
            weights=pb.WEIGHTS_ABSENT,
            weights_state="queued",
            executables=[{"size": size, "count": 4 * (size == 8), "cost_s": 0.004} for size in (1, 8, 16)],
        )
        second.change("b@1", entry("b", state="failed", error="no room", weights="absent"))
        await until(server.runtimes, lambda: "b@1" in server.runtimes.entries)

        status = await server.control.GetStatus(pb.GetStatusRequest())

        assert [(device.number, device.record.instance) for device in status.devices] == [
            (0, "11" * 8),
            (1, "22" * 8),
        ]
        a, b = status.models
        record = a.record
        assert (record.queued, record.executing, record.outcomes["answered"]) == (2, 4, 14)
        assert (record.loads, record.device_seconds) == (4, 0.5)
        assert (record.generated["answers"], record.generated["token_s"]) == (4, 0.312)
        assert (record.weights, record.weights_state) == (pb.WEIGHTS_RESIDENT, "evicting")
        assert record.device_bytes == 1000
        assert [
            (executable.size, executable.count, executable.cost_s) for executable in record.executables
        ] == [
            (1, 0, 0.004),
            (8, 8, 0.004),
            (16, 0, 0.004),
        ]
        assert [(device.number, device.record.weights, device.record.queued) for device in a.devices] == [
            (0, pb.WEIGHTS_ABSENT, 1),
            (1, pb.WEIGHTS_RESIDENT, 1),
        ]
        assert [(device.number, device.record.state, device.error) for device in b.devices] == [
            (1, pb.STATE_FAILED, "no room")
        ]


@looped
async def test_a_dead_runtime_of_two_leaves_the_server_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If one of two runtimes dies, the server stays ready. The status names the device that is down, and since when."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        server.all[0].die()
        await until(server.runtimes, lambda: not server.link.up)

        status = await server.control.GetStatus(pb.GetStatusRequest())

        assert server.health.serving("") is True
        assert server.health.serving("a") is True
        down, up = status.devices
        assert down.HasField("down_since_unix_s")
        assert down.down_since_unix_s <= 0  # The service's clock shows 0.
        assert not down.HasField("record")
        assert up.record.instance == "22" * 8
        status_page(status)
        lines = capsys.readouterr().out.splitlines()
        assert lines[1].startswith("device 0   its runtime has not answered since ")
        assert lines[2] == "device 1   cpu"

        server.all[1].die()
        await until(server.runtimes, lambda: not server.runtimes.up)
        assert server.health.serving("") is False


@looped
async def test_a_device_that_is_not_found_has_its_reason_in_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If no runtime finds a device, the status shows the reason until a runtime has found the device."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        note = tmp_path / "device1" / NO_DEVICE
        note.write_text("the card is full")
        status = await server.control.GetStatus(pb.GetStatusRequest())
        assert [device.error for device in status.devices] == ["", "the card is full"]
        status_page(status)
        assert "device 1   none: the card is full\n" in capsys.readouterr().out

        server.all[1].die()
        await until(server.runtimes, lambda: len(server.runtimes.live) == 1)
        status_page(await server.control.GetStatus(pb.GetStatusRequest()))
        assert "; the card is full\n" in capsys.readouterr().out
        server.all[0].die()
        await until(server.runtimes, lambda: not server.runtimes.up)
        with pytest.raises(
            StatusError, match="No model can serve until a runtime answers again; the card is full"
        ):
            await server.runtimes.records()

        note.unlink()
        with pytest.raises(StatusError, match="see the server's log"):
            await server.runtimes.records()


@looped
async def test_pages_name_devices_where_there_are_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several devices, a page has a line for each, the devices of each model's weights, and one history over all devices."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        server.all[1].change("a@1", entry("a", weights="absent"))
        await until(server.runtimes, lambda: server.runtimes.links[1].state.revision == 6)
        for runtime in server.all:
            runtime.answers = lambda command: {"unix_s": 1e9, "histories": {"a@1": READY}}

        status = await server.control.GetStatus(pb.GetStatusRequest())
        status_page(status)
        row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("a "))
        assert row.split()[:5] == ["a", "resident", "0", "1", "kB"]
        model_page(status)
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["weights", "1", "kB", "on", "device", "0"] in rows
        assert ["1", "resident", "1", "2", "4", "250", "ms", "3", "2"] in rows
        history_page(await server.control.GetHistory(pb.GetHistoryRequest(model="a")))
        lines = [line.split(" ", 2)[2] for line in capsys.readouterr().out.splitlines()]
        assert lines == ["device 0, a@1: ready", "device 1, a@1: ready"]


@looped
async def test_a_prefetch_reaches_the_devices_that_placement_has(tmp_path: Path) -> None:
    """A prefetch is for the named devices, or else for those of the placement, or else for all devices.

    An eviction is for the named devices, or else for all.
    """
    async with served(tmp_path, models=["a"], devices=2) as server:
        for runtime in server.all:
            runtime.answers = lambda command: {"models": ["a"]} if command["command"] == "evict" else {}

        async def after(call: Any, request: Any) -> tuple[list[int], list[int]]:
            """Return the devices that should have the weights, and the devices that were told to evict them."""
            for device in server.all:
                device.commands.clear()
            await call(request)
            numbered = list(enumerate(server.all))
            prefetched = [number for number, fake in numbered if fake.wants("a").get("prefetched")]
            return prefetched, [
                number for number, fake in numbered if {"command": "evict", "model": "a"} in fake.commands
            ]

        control, target = server.control, pb.Target(model="a")
        assert await after(control.Prefetch, pb.PrefetchRequest(model="a")) == ([0, 1], [])
        assert await after(control.Evict, pb.EvictRequest(target=target)) == ([], [0, 1])
        server.runtimes.placement = {"a": [1]}
        assert await after(control.Prefetch, pb.PrefetchRequest(model="a")) == ([1], [])
        assert await after(control.Prefetch, pb.PrefetchRequest(model="a", devices=[0])) == ([0, 1], [])
        assert await after(control.Evict, pb.EvictRequest(target=target, devices=[1])) == ([0], [1])
        with pytest.raises(
            grpc.aio.AioRpcError, match="there is no device 2: the server's devices are 0 to 1"
        ):
            await control.Prefetch(pb.PrefetchRequest(model="a", devices=[2]))


@looped
async def test_a_pin_waits_for_all_devices_that_serve_the_model(tmp_path: Path) -> None:
    """A pin that waits returns when the weights are on every live device on which the model has not failed."""
    async with served(tmp_path, models=["a"], devices=3) as server:
        first, second, third = server.all
        for runtime in (first, second):
            runtime.change("a@1", entry("a", weights="absent"))
        third.change("a@1", entry("a", state="failed", error="no room", weights="absent"))
        await until(server.runtimes, lambda: all(link.state.revision == 6 for link in server.runtimes.links))
        request = pb.SetResidencyRequest(model="a", residency=pb.RESIDENCY_DEVICE, wait=True)
        call = asyncio.ensure_future(server.control.SetResidency(request))
        await second.came(lambda: bool(second.commands))
        first.change("a@1", entry("a"))
        await until(server.runtimes, lambda: server.link.state.revision == 7)
        await server.link.record()
        assert not call.done()
        second.change("a@1", entry("a"))
        await call


@looped
async def test_a_reload_waits_for_all_devices_that_serve_the_model(tmp_path: Path) -> None:
    """ReloadWeights returns when no device is still loading the model, even if the load has failed on one."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        first, second = server.all
        for runtime in (first, second):
            runtime.change("a@2", entry("a", state="loading", weights="absent"))
        await until(server.runtimes, lambda: all(link.state.revision == 6 for link in server.runtimes.links))
        call = asyncio.ensure_future(server.control.ReloadWeights(pb.ReloadWeightsRequest(model="a")))
        await server.lifecycle.asked.wait()
        first.change("a@2", entry("a"))
        await until(server.runtimes, lambda: server.link.state.revision == 7)
        await server.link.record()
        assert not call.done()
        second.change("a@2", entry("a", state="failed", error="no room", weights="absent"))

        assert [(version.key, version.state) for version in (await call).versions] == [
            ("a@1", pb.STATE_READY),
            ("a@2", pb.STATE_READY),
        ]


@looped
async def test_a_model_that_one_device_cannot_have_is_ready_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that failed on one of two devices serves, and the server has no failure. The page names the device without the model."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        server.all[1].change("a@1", entry("a", state="failed", error="no\nroom", weights="absent", stubs=[]))
        await until(server.runtimes, lambda: server.runtimes.links[1].state.revision == 6)

        assert server.health.serving("") is True
        status_page(await server.control.GetStatus(pb.GetStatusRequest()))
        assert capsys.readouterr().out.splitlines()[-1] == "a does not run on device 1: no room"


@looped
async def test_a_timeline_has_the_spans_of_each_device(tmp_path: Path) -> None:
    """Spans of each device are read from the device's own position on, and spans of a new runtime from its start."""

    def told(runtime: FakeRuntime, seconds: float) -> Any:
        span = ["execute", "a@1", 1.5, seconds, 3, 4, 2, False]

        def answer(command: dict[str, Any]) -> dict[str, Any]:
            since = command["since"]
            return {
                "instance": runtime.instance,
                "first": since,
                "next": since + 1,
                "end": 9,
                "spans": [span],
            }

        return answer

    async with served(tmp_path, models=["a"], devices=2) as server:
        for runtime, seconds in zip(server.all, (1.0, 2.0), strict=True):
            runtime.answers = told(runtime, seconds)
        first = await server.control.GetTimeline(pb.GetTimelineRequest())
        assert [(span.device, span.seconds) for span in first.spans] == [(0, 1.0), (1, 2.0)]
        assert first.spans[1] == pb.Span(
            kind=pb.SPAN_KIND_EXECUTE,
            model="a",
            key="a@1",
            start_unix_s=-1.5,
            seconds=2.0,
            rows=3,
            size=4,
            requests=2,
            device=1,
        )
        first.positions[1].instance = "the one before"
        second = await server.control.GetTimeline(pb.GetTimelineRequest(positions=first.positions))
        instances = [runtime.instance for runtime in server.all]
        assert list(second.positions) == [
            pb.TimelinePosition(device=0, instance=instances[0], first=1, next=2, end=9),
            pb.TimelinePosition(device=1, instance=instances[1], first=0, next=1, end=9),
        ]


@looped
async def test_a_profile_of_two_devices_has_a_folder_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StartProfile starts a profile on all live devices, each with its own folder. StopProfile ends all of them."""
    monkeypatch.setattr("rsrv.control.service.PROFILES", tmp_path / "profiles")
    async with served(tmp_path, devices=2) as server:
        started = await server.control.StartProfile(pb.StartProfileRequest())
        for number, device in enumerate(server.all):
            folder = Path(started.directory) / str(number)
            assert device.commands == [{"command": "profile", "directory": str(folder)}]
            folder.mkdir(parents=True)
        assert (await server.control.StopProfile(pb.StopProfileRequest())).directory == started.directory
        assert [len(runtime.commands) for runtime in server.all] == [2, 2]


@looped
async def test_a_watcher_sees_the_states_of_each_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """WatchState sends a snapshot and the changes of each device, and reports a device that is down."""
    async with served(tmp_path, devices=2) as server:
        updates = server.control.WatchState(pb.WatchStateRequest())
        snapshots = [(await updates.read()).snapshot for _ in range(2)]
        assert [(snapshot.device, snapshot.instance) for snapshot in snapshots] == [
            (0, "11" * 8),
            (1, "22" * 8),
        ]
        server.all[1].change("a@1", entry("a"))
        change = await updates.read()
        server.all[1].die()
        down = await updates.read()

        for update in (change, down):
            print_update(update)
        assert capsys.readouterr().out.splitlines() == [
            "6 of device 1 a@1 resident, residency system, 1 stub",
            "the runtime of device 1 does not answer",
        ]


@looped
async def test_the_drivers_figures_are_read_once_a_second(tmp_path: Path) -> None:
    """The driver is asked once a second, only about GPUs and by their names. Without a driver, there are no figures."""
    calls = []

    def read(devices: Any) -> dict[int, CardMemory]:
        calls.append(dict(devices))
        return {1: CardMemory(3, 8)}

    cards = Cards(["cpu", "GPU-1"], read)
    assert [await cards.memory() for _ in range(3)] == [{1: CardMemory(3, 8)}] * 3
    assert calls == [{1: "GPU-1"}]

    def fail(devices: Any) -> dict[int, CardMemory]:
        raise NoFigures("NVML says no driver")

    without = Cards(["GPU-1"], fail)
    assert await without.memory() == {}

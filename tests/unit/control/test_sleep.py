"""Devices that sleep, as the control service and the commands show them.

A status does not wake a sleeping device, and still shows all models.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.control.grpc_service import StatusError
from rsrv.control.presence import StubPoll
from rsrv.control.runtimes import Runtimes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.settings import load_settings
from rsrv.wire.paths import ASLEEP, LAST_RECORD
from tests.unit.control.peers import FakeRuntime, Served, served, until
from tests.unit.control.test_cli import shell
from tests.unit.control.test_service import refusal
from tests.waiting import looped

SLEEP = {"command": "sleep", "drain_s": 30.0, "force": False}


def drowsy(
    server: Served, answer: dict[str, Any] | None = None, gate: asyncio.Event | None = None
) -> list[FakeRuntime]:
    """Make each runtime end at `sleep` with a note that it sleeps. Return the list of runtimes that start after that.

    `answer` is the reply of these runtimes to every command. If `gate` is given, a runtime ends only when it is set.
    """
    since: list[FakeRuntime] = []
    for runtime in server.all:
        runtime.pid = 0  # the id of no process

        def obey(command: dict[str, Any], runtime: FakeRuntime = runtime) -> dict[str, Any]:
            if command["command"] == "sleep":
                (runtime._path.parent / LAST_RECORD).write_bytes(runtime.status().SerializeToString())
                (runtime._path.parent / ASLEEP).write_text("1000.5")
                if gate is None:
                    runtime._loop.call_later(0.01, end, runtime)
                else:
                    asyncio.ensure_future(gate.wait()).add_done_callback(lambda _: end(runtime))
            return {}

        runtime.answers = obey

    def end(runtime: FakeRuntime) -> None:
        runtime.die()
        # The spare goes on listening. With the first connection, it becomes the runtime.
        spare = FakeRuntime(runtime._path, instance="99" * 8)
        spare.answers = lambda command: answer or {}
        accept = spare._accept

        def rise() -> None:
            (runtime._path.parent / ASLEEP).unlink(missing_ok=True)
            since.append(spare)
            accept()

        spare._loop.add_reader(spare._listener, rise)
        server.all.append(spare)

    return since


@asynccontextmanager
async def asleep(tmp_path: Path) -> AsyncIterator[tuple[Served, list[FakeRuntime]]]:
    """Yield a server with the model `a` on a sleeping device, and the list of runtimes that start after that."""
    async with served(tmp_path, models=["a"]) as server:
        woken = drowsy(server)
        await server.control.Sleep(pb.SleepRequest(drain_s=30))
        yield server, woken


@looped
async def test_a_device_that_sleeps_serves_and_is_not_woken_by_a_status(tmp_path: Path) -> None:
    """Status, metrics, health and the state of each model are available without a runtime. No connection reaches the spare runtime."""
    async with served(tmp_path, models=["a"]) as server:
        woken = drowsy(server)
        answer = await server.control.Sleep(pb.SleepRequest(drain_s=30))
        assert list(answer.devices) == [0]
        assert server.runtime.commands == [SLEEP]

        status = await server.control.GetStatus(pb.GetStatusRequest())
        assert status.devices[0].asleep_since_unix_s == 1000.5
        assert not status.devices[0].HasField("down_since_unix_s")
        assert [model.name for model in status.models] == ["a"]
        assert status.models[0].record.weights == pb.WEIGHTS_ABSENT
        counted = status.models[0].record
        assert (counted.outcomes["answered"], counted.device_bytes, counted.loads) == (7, 1000, 2)
        assert (counted.queued, counted.executing, counted.weights_state) == (0, 0, "absent")
        text = (await server.control.GetMetrics(pb.GetMetricsRequest())).text
        assert 'rsrv_runtime_up{device="0"} 1' in text
        assert '\nrsrv_models{state="asleep"} 1\n' in text
        assert server.health.serving("")
        assert server.health.serving("a")
        assert server.runtimes.presence.attached == {"a"}
        assert not woken


@looped
async def test_a_control_process_that_starts_while_the_device_sleeps_knows_the_cold_models(
    tmp_path: Path,
) -> None:
    """If a control process starts while the device sleeps, the models that Triton has loaded count as cold.

    So these models serve, and no runtime is woken.
    """
    async with asleep(tmp_path) as (_, woken):
        second = Runtimes([tmp_path], load_settings())
        running = asyncio.create_task(second.run())
        await until(second, lambda: second.asleep)

        second.see_stubs(StubPoll({"a"}))

        assert second.cold == {"a"}
        assert not woken
        running.cancel()


@pytest.mark.parametrize("text", [None, "", "[]", '{"models": 3}'])
@looped
async def test_without_a_last_record_the_models_are_shown(tmp_path: Path, text: str | None) -> None:
    """If the last record is missing or unreadable, the status shows the models without counts.

    For example, the record may be of another version.
    """
    async with asleep(tmp_path) as (server, _):
        note = tmp_path / LAST_RECORD
        note.unlink()
        if text is not None:
            note.write_text(text)

        status = await server.control.GetStatus(pb.GetStatusRequest())

        assert [(model.name, model.record.loads) for model in status.models] == [("a", 0)]


@looped
async def test_wake_starts_the_runtime_and_counts_no_restart(tmp_path: Path) -> None:
    """The answer to Wake has the seconds that each device took, which are 0 if it was awake. No restart is counted."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        woken = drowsy(server)
        await server.control.Sleep(pb.SleepRequest(devices=[1], drain_s=30))

        answer = await server.control.Wake(pb.WakeRequest())

        assert [device.number for device in answer.devices] == [0, 1]
        assert answer.devices[0].seconds == 0 < answer.devices[1].seconds
        assert len(woken) == 1
        assert [link.state.lives for link in server.runtimes.links] == [1, 1]
        # The stub connects to the new runtime only with the next request.
        assert server.runtimes.links[1].presence.dismissed == {"a"}


@looped
async def test_wake_starts_a_runtime_if_the_spare_has_been_killed(tmp_path: Path) -> None:
    """If the spare is dead, Wake starts a runtime. If none can be started, the refusal has the reason."""
    async with asleep(tmp_path) as (server, _):
        server.all[-1].die()
        loop, problem = asyncio.get_running_loop(), "the disk is full"

        def launch(number: int) -> None:
            if problem:
                raise StatusError("UNAVAILABLE", problem)
            (tmp_path / ASLEEP).unlink()
            loop.call_soon_threadsafe(lambda: server.all.append(FakeRuntime(server.runtime._path)))

        server.runtimes._launch = launch
        assert await refusal(server.control.Wake(pb.WakeRequest())) == (grpc.StatusCode.UNAVAILABLE, problem)

        problem = ""
        answer = await server.control.Wake(pb.WakeRequest())

        assert [device.number for device in answer.devices] == [0]
        assert server.link.up


@looped
async def test_models_serve_on_after_a_long_sleep(tmp_path: Path) -> None:
    """After a long sleep, a poll may see a stub without a connection before the stub's next request. The model stays cold and serves."""
    async with asleep(tmp_path) as (server, _):
        server.link.presence._dismissed["a"] -= 3600
        await server.control.Wake(pb.WakeRequest())

        server.runtimes.see_stubs(StubPoll({"a"}))

        assert server.runtimes.cold == {"a"}
        assert server.health.serving("a")


@looped
async def test_a_request_that_wakes_a_device_is_noticed(tmp_path: Path) -> None:
    """If a request wakes the device, the note about the sleep is gone, and the control process connects again."""
    async with asleep(tmp_path) as (server, _):
        assert server.runtimes.asleep
        (tmp_path / ASLEEP).unlink()
        await until(server.runtimes, lambda: server.link.up)
        assert not server.runtimes.asleep


@looped
async def test_what_cannot_sleep_is_refused(tmp_path: Path) -> None:
    """Sleep is refused for a sleeping or unknown device, and with a negative drain time.

    The restart of a sleeping device is also refused.
    """
    async with asleep(tmp_path) as (server, _):
        precondition, wrong = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT
        assert await refusal(server.control.Sleep(pb.SleepRequest(drain_s=30))) == (
            precondition,
            "device 0 is already asleep",
        )
        assert await refusal(server.control.Sleep(pb.SleepRequest(devices=[1]))) == (
            wrong,
            "there is no device 1: the server's devices are 0 to 0",
        )
        assert await refusal(server.control.Sleep(pb.SleepRequest(drain_s=-1))) == (
            wrong,
            "drain_s must be a number of seconds, at least 0",
        )
        assert await refusal(server.control.Restart(pb.RestartRequest(drain_s=30))) == (
            precondition,
            "device 0 sleeps, so nothing was restarted: rsrv.yaml is read again when the device wakes",
        )


@looped
async def test_commands_do_not_wake_a_device_and_say_so(tmp_path: Path) -> None:
    """Commands such as a prefetch do not wake a device. Their refusal names the command that wakes it."""
    async with asleep(tmp_path) as (server, woken):
        refused = grpc.StatusCode.UNAVAILABLE, "the device sleeps: wake it first, with `rsrv wake`"
        assert await refusal(server.control.Prefetch(pb.PrefetchRequest(model="a"))) == refused
        assert await refusal(server.control.GetHistory(pb.GetHistoryRequest(model="a"))) == refused
        assert not woken


@looped
async def test_a_wake_during_a_sleep_comes_after_it(tmp_path: Path) -> None:
    """If Wake is called during Sleep, the device is awake in the end. A restart in that time is refused."""
    async with served(tmp_path, models=["a"]) as server:
        gate = asyncio.Event()
        woken = drowsy(server, gate=gate)
        sleeping = server.control.Sleep(pb.SleepRequest(drain_s=30))
        await server.runtime.came(lambda: bool(server.runtime.commands))
        waking = server.control.Wake(pb.WakeRequest())
        code, text = await refusal(server.control.Restart(pb.RestartRequest(drain_s=30)))
        assert (code, text) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "another restart, sleep or wake is in progress; wait until it has ended",
        )
        gate.set()
        await sleeping
        assert (await waking).devices[0].seconds > 0
        assert len(woken) == 1


@looped
async def test_a_runtime_that_is_killed_while_it_goes_to_sleep_is_awaited(tmp_path: Path) -> None:
    """If the runtime dies during Sleep, the caller gets UNAVAILABLE, and the link finds the next runtime."""
    async with served(tmp_path, models=["a"]) as server:
        server.runtime.pid = 0
        server.runtime.answers = lambda command: server.runtime.die()
        code, _ = await refusal(server.control.Sleep(pb.SleepRequest(drain_s=30)))
        assert code is grpc.StatusCode.UNAVAILABLE
        again = FakeRuntime(server.runtime._path, instance="99" * 8)
        server.all.append(again)
        await until(server.runtimes, lambda: server.link.up)


@looped
async def test_the_commands_print_the_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv sleep`, `rsrv status` and `rsrv wake` print the state of the device."""
    async with shell(tmp_path, capsys) as rsrv:
        drowsy(rsrv.server)
        done = await rsrv("sleep", "--drain", "7")
        assert (done.status, done.out) == (0, "device 0: asleep\n")
        result = await rsrv("status")
        clock = time.strftime("%H:%M:%S", time.localtime(1000.5))
        assert f"device  asleep since {clock}; the next request or `rsrv wake` wakes it" in result.out
        assert re.match(r"device 0: awake after \d+\.\d", (await rsrv("wake")).out)
        assert (await rsrv("wake")).out == "device 0: awake already\n"
        assert (await rsrv("sleep", "--device", "-1")).status == 2

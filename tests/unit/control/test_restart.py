"""Restarts of runtimes by the control service and the command: one device after another, and the errors that stop a restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.control.v1 import control_pb2 as pb
from tests.unit.control.peers import FakeRuntime, Served, entry, served
from tests.unit.control.test_cli import shell
from tests.unit.control.test_service import refusal
from tests.waiting import looped

RESTART = {"command": "restart", "drain_s": 30.0, "force": False}


def replaceable(server: Served, **next_entries: Any) -> list[tuple[int, dict[str, Any]]]:
    """Make each runtime end at `restart`, and start another one with these entries in its place. Return the received commands."""
    commands: list[tuple[int, dict[str, Any]]] = []

    def answer(number: int, runtime: FakeRuntime, command: dict[str, Any]) -> dict[str, Any]:
        commands.append((number, command))
        if command["command"] == "restart":
            runtime._loop.call_later(0.01, replace, number, runtime)
        return {}

    def replace(number: int, runtime: FakeRuntime) -> None:
        runtime.die()
        again = FakeRuntime(runtime._path, instance=f"9{number}" * 8)
        again.entries = next_entries or runtime.entries
        again.answers = lambda command: answer(number, again, command)
        server.all[number] = again

    for number, runtime in enumerate(server.all):
        runtime.answers = lambda command, number=number, runtime=runtime: answer(number, runtime, command)  # type: ignore[misc]
    return commands


def end(server: Served) -> None:
    for runtime in server.all:
        runtime.die()


@looped
async def test_devices_are_restarted_one_after_another(tmp_path: Path) -> None:
    """The second device restarts when the models of the first are back. The answer has each device's time without models."""
    async with served(tmp_path, models=["a", "b"], devices=2) as server:
        commands = replaceable(server)

        answer = await server.control.Restart(pb.RestartRequest(drain_s=30))

        assert commands == [(0, RESTART), (1, RESTART)]
        assert [device.number for device in answer.devices] == [0, 1]
        assert all(0 < device.first_s <= device.all_s for device in answer.devices)
        assert [link.state.instance for link in server.runtimes.links] == ["90" * 8, "91" * 8]
        end(server)


@looped
async def test_one_device_is_named(tmp_path: Path) -> None:
    """If the request names one device, the runtimes of other devices get no command."""
    async with served(tmp_path, models=["a"], devices=2) as server:
        commands = replaceable(server)
        await server.control.Restart(pb.RestartRequest(devices=[1], drain_s=5, force=True))
        assert commands == [(1, {"command": "restart", "drain_s": 5.0, "force": True})]
        end(server)


@looped
async def test_wrong_settings_change_nothing(tmp_path: Path) -> None:
    """An invalid rsrv.yaml is refused with its problem, and no runtime gets a command. After a valid one, the status has its values."""
    async with served(tmp_path, models=["a"]) as server:
        commands = replaceable(server)
        file = server.repository / "rsrv.yaml"
        file.write_text("models: {a: {weight: heavy}}")

        code, text = await refusal(server.control.Restart(pb.RestartRequest(drain_s=30)))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert text.startswith(f"nothing was restarted: {file}: models.a.weight: ")
        assert not commands

        file.write_text("models: {a: {weight: 3}}")
        await server.control.Restart(pb.RestartRequest(drain_s=30))
        status = await server.control.GetStatus(pb.GetStatusRequest())
        assert status.models[0].policy.weight == 3
        end(server)


@looped
async def test_a_model_that_does_not_return_stops_the_others(tmp_path: Path) -> None:
    """If a model fails in the next runtime, the error names it, and the second device is not restarted."""
    async with served(tmp_path, models=["a", "b"], devices=2) as server:
        failed = entry("b", state="failed", error="no room", weights="absent")
        commands = replaceable(server, **{"a@1": entry("a"), "b@1": failed})

        code, text = await refusal(server.control.Restart(pb.RestartRequest(drain_s=30)))

        assert code is grpc.StatusCode.ABORTED
        assert text.startswith("device 0 was restarted, but b did not return")
        assert commands == [(0, RESTART)]
        end(server)


@looped
async def test_the_command_prints_the_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a line for each device. A device below 0 is a wrong command line."""
    async with shell(tmp_path, capsys) as rsrv:
        commands = replaceable(rsrv.server)
        done = await rsrv("restart", "--device", "0", "--drain", "7")
        assert done.status == 0, done.err
        assert re.match(r"device 0: the first model was back after \d+\.\d\d s, all after", done.out)
        assert commands == [(0, {**RESTART, "drain_s": 7.0})]
        assert (await rsrv("restart", "--device", "-1")).status == 2
        end(rsrv.server)

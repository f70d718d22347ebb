"""Starts of cold models by command and by schedule: the models, their devices, and the results."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from rsrv.control.prewarming import Prewarming
from rsrv.control.runtime_link import RuntimeDown
from rsrv.control.v1 import control_pb2 as pb
from rsrv.placement.device_choice import by_preference
from tests.unit.control.peers import FakeRuntime, Served, add_model, entry, served, until
from tests.unit.control.test_cli import shell
from tests.unit.control.test_service import refusal
from tests.unit.control.test_sleep import drowsy
from tests.waiting import looped


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count each folder of the repository as a model that rsrv-gen has written."""
    monkeypatch.setattr(
        "rsrv.control.prewarming.our_models",
        lambda repository: {folder.name for folder in repository.iterdir() if folder.is_dir()},
    )


def answer(server: Served, failed: dict[str, str] | None = None) -> None:
    for runtime in server.all:
        runtime.answers = lambda command: {"failed": failed or {}} if command["command"] == "start" else {}


def started(server: Served, device: int = 0) -> list[str]:
    commands = [command for command in server.all[device].commands if command["command"] == "start"]
    return [name for command in commands if not command.get("poll") for name in command["models"]]


@asynccontextmanager
async def cold(tmp_path: Path, settings: str = "", **options: Any) -> AsyncIterator[Served]:
    """Serve the warm model `warm`, and the cold models `team-a`, `team-b` and `other`."""
    async with served(tmp_path, models=["warm"], settings=settings, **options) as server:
        for name in ("team-a", "team-b", "other"):
            add_model(server.repository, name)
        answer(server)
        yield server


@looped
async def test_models_start_by_patterns(tmp_path: Path) -> None:
    """A pattern starts cold models: the runtime gets their bundles. A warm model is not started again."""
    async with cold(tmp_path) as server:
        response = await server.control.Start(pb.StartRequest(models=["team-*", "warm"]))

        assert [(model.name, model.state) for model in response.models] == [
            ("team-a", "cold"),
            ("team-b", "cold"),
            ("warm", "warm"),
        ]
        (sent, _) = [command for command in server.runtime.commands if command["command"] == "start"]
        bundle = server.repository / "team-a" / "1" / "bundle"
        assert sent["models"] == {"team-a": str(bundle), "team-b": str(bundle.parents[2] / "team-b/1/bundle")}


@looped
async def test_a_start_wakes_a_device_that_sleeps(tmp_path: Path) -> None:
    """A start wakes a sleeping device. Its runtime also starts a named model that was warm before the sleep."""
    async with cold(tmp_path) as server:
        woken = drowsy(server, answer={"failed": {}})
        await server.control.Sleep(pb.SleepRequest(drain_s=30))
        assert server.runtimes.asleep

        await server.control.Start(pb.StartRequest(models=["warm", "other"]))

        assert len(woken) == 1
        assert sorted(started(server, device=-1)) == ["other", "warm"]


async def next_runtime(server: Served, **entries: Any) -> FakeRuntime:
    """End the runtime, and return the next one, which has these entries."""
    server.runtime.die()
    after = FakeRuntime(server.runtime._path, instance="99" * 8)
    after.entries |= entries
    after.answers = server.runtime.answers
    server.all[0] = after
    await until(server.runtimes, lambda: server.link.up and server.link.state.instance == after.instance)
    return after


@looped
async def test_a_poll_starts_what_a_runtimes_end_has_lost(tmp_path: Path) -> None:
    """A poll reports a failed start with its reason, and starts nothing twice. After a runtime's end, it starts the model again."""
    async with cold(tmp_path) as server:
        await server.control.Start(pb.StartRequest(models=["other"]))
        answer(server, {"other": "no such file"})

        response = await server.control.Start(pb.StartRequest(models=["other"], poll=True))

        assert [(model.state, model.error) for model in response.models] == [("failed", "no such file")]
        assert started(server) == ["other"]
        await next_runtime(server)
        await server.control.Start(pb.StartRequest(models=["other"], poll=True))
        assert started(server) == ["other"]


@looped
async def test_a_model_goes_when_its_bundle_is_gone(tmp_path: Path) -> None:
    """If the bundle of a started model is removed, the runtime gets one command to end the model. Other models stay."""
    async with cold(tmp_path) as server:
        prewarming = server.service._server.prewarming
        await server.control.Start(pb.StartRequest(models=["team-*"]))
        before = len(server.runtime.commands)
        shutil.rmtree(server.repository / "team-a")

        await prewarming.keep()
        await prewarming.keep()

        assert server.runtime.commands[before:] == [{"command": "start", "models": {"team-a": None}}]


@looped
async def test_a_model_that_a_runtimes_end_has_lost_starts_again(tmp_path: Path) -> None:
    """The next runtime starts a model that the runtime's end has lost, unless a stub has registered it already."""
    async with cold(tmp_path) as server:
        prewarming = server.service._server.prewarming
        await server.control.Start(pb.StartRequest(models=["team-*"]))
        server.runtime.change("team-b@1", entry("team-b", stubs=[]))
        server.runtime.change("team-a@1", entry("team-a"))
        await until(server.runtimes, lambda: "team-a" in server.link.presence.ready)
        await prewarming.keep()
        await next_runtime(server)

        await prewarming.keep()

        assert started(server) == ["team-b"]


@looped
async def test_an_idle_model_that_fell_back_to_cold_stays_cold_after_a_runtimes_end(tmp_path: Path) -> None:
    """A started model that fell to cold because it was idle is not started again after the runtime's end."""
    async with cold(tmp_path) as server:
        prewarming = server.service._server.prewarming
        await server.control.Start(pb.StartRequest(models=["other"]))
        server.runtime.change("other@1", entry("other", stubs=[]))
        server.runtime.change("other@1", entry("other", stubs=[], state="leaving"))
        server.runtime.change("other@1", None)
        server.runtime.change("team-a@1", entry("team-a"))
        await until(server.runtimes, lambda: "team-a" in server.link.presence.ready)
        await prewarming.keep()
        await next_runtime(server)

        await prewarming.keep()

        assert started(server) == []


@looped
async def test_a_model_that_came_back_by_itself_is_not_started_when_it_falls_idle(tmp_path: Path) -> None:
    """If a stub registers a prefetched model after a runtime's end, the model is not started again when it later falls to cold."""
    async with cold(tmp_path) as server:
        prewarming = server.service._server.prewarming
        await server.control.Start(pb.StartRequest(models=["other"]))
        server.runtime.change("other@1", entry("other", stubs=[]))
        after = await next_runtime(server, **{"other@1": entry("other", state="loading", stubs=[])})
        await prewarming.keep()
        after.change("other@1", None)
        await until(server.runtimes, lambda: "other@1" not in server.link.state.entries)

        await prewarming.keep()

        assert started(server) == []


@looped
async def test_a_model_starts_at_its_home(tmp_path: Path) -> None:
    """Of several devices, a model starts on one: the device that the table names, or else its home."""
    async with cold(tmp_path, devices=2) as server:
        home = by_preference("team-a", 2)[0]
        server.runtimes.placement = {"other": [1 - by_preference("other", 2)[0]]}

        await server.control.Start(pb.StartRequest(models=["team-a", "other"]))

        assert "team-a" in started(server, home)
        assert "team-a" not in started(server, 1 - home)
        assert "other" in started(server, 1 - by_preference("other", 2)[0])


@looped
async def test_a_meta_model_stands_for_those_that_it_calls(tmp_path: Path) -> None:
    """A start of a meta model starts the bundles that it contains."""
    async with cold(tmp_path) as server:
        (server.repository / "chain" / "1" / "calls" / "first").mkdir(parents=True)

        response = await server.control.Start(pb.StartRequest(models=["chain"]))

        assert [model.name for model in response.models] == ["first"]
        assert started(server) == ["first"]


@looped
async def test_a_pattern_without_a_model_is_refused(tmp_path: Path) -> None:
    """If a pattern matches no model, the error names the nearest model, and nothing starts."""
    async with cold(tmp_path) as server:
        code, text = await refusal(server.control.Start(pb.StartRequest(models=["team-a", "otter"])))

        assert (code, text) == (
            grpc.StatusCode.NOT_FOUND,
            "there is no model 'otter'; did you mean 'other'?",
        )
        assert started(server) == []


@looped
async def test_models_start_at_their_times(tmp_path: Path) -> None:
    """Each scheduled time starts the model once."""
    settings = "models: {team-a: {warm_at: 08:55}, other: {warm_at: [08:50, 09:05]}}"
    async with cold(tmp_path, settings) as server:
        now = datetime(2025, 6, 2, 8, 56).timestamp()
        file = server.service._server.file
        prewarming = Prewarming(file, server.runtimes, lambda: now)

        await prewarming.follow_schedule()
        assert sorted(started(server)) == ["other", "team-a"]
        await prewarming.follow_schedule()
        now += 600
        await prewarming.follow_schedule()

        assert sorted(started(server)) == ["other", "other", "team-a"]


@looped
async def test_a_time_that_comes_while_no_runtime_answers_counts_later(tmp_path: Path) -> None:
    """If no runtime answers at a scheduled time, the model starts as soon as one answers."""
    async with cold(tmp_path, "models: {other: {warm_at: 08:50}}") as server:
        now = datetime(2025, 6, 2, 8, 56).timestamp()
        prewarming = Prewarming(server.service._server.file, server.runtimes, lambda: now)
        server.runtime.die()
        await until(server.runtimes, lambda: not server.runtimes.up)
        with pytest.raises(RuntimeDown):
            await prewarming.follow_schedule()

        await next_runtime(server)
        await prewarming.follow_schedule()

        assert started(server) == ["other"]


@looped
async def test_the_command_shows_what_became_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rsrv prefetch --warm` returns when all models have started or failed, and fails if one has failed."""
    async with shell(tmp_path, capsys) as rsrv:
        server = rsrv.server
        for name in ("one", "two"):
            add_model(server.repository, name)
        runtime = server.runtime

        def start(command: dict[str, Any]) -> dict[str, Any]:
            if command["command"] == "start" and not command.get("poll"):
                runtime.change("one@1", entry("one"))
            return {"failed": {"two": "no manifest"}} if command["command"] == "start" else {}

        runtime.answers = start
        result = await rsrv("prefetch", "--warm", "one", "two")
        assert (result.status, result.err.splitlines()[-1]) == (1, "two: no manifest")
        assert result.out == "1 of 2 models are warm\n"
        wrong = await rsrv("prefetch", "--warm")
        assert (wrong.status, "neither --wait" in wrong.err) == (2, True)

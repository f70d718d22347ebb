"""The runtimes of a server with several devices: their merged state, and commands for all of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rsrv.control import runtime_link
from rsrv.control.grpc_service import StatusError
from rsrv.control.runtime_link import RuntimeDown, StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes, device_directories, merge, server_devices
from rsrv.wire import paths
from tests.unit.control.peers import FakeRuntime, entry, linked, until
from tests.waiting import looped

PIN = {"command": "residency", "model": "a", "residency": "device"}


@asynccontextmanager
async def two(tmp_path: Path, *, silence: float = 10.0) -> AsyncIterator[tuple[Runtimes, list[FakeRuntime]]]:
    """Yield two runtimes that are up and have the ready model `a`, and the links to them."""
    folders = [tmp_path / name for name in ("0", "1")]
    found = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        found.append(FakeRuntime(folder / "runtime.sock", instance=f"{number}{number}" * 8))
        found[-1].entries = {"a@1": entry("a", stubs=[100 + number])}
    async with linked(*folders, silence=silence) as runtimes:
        await until(runtimes, lambda: len(runtimes.live) == 2)
        yield runtimes, found
    for one in found:
        one.die()


def reborn(old: FakeRuntime, **entries: Any) -> FakeRuntime:
    """Return the next runtime of the same device."""
    again = FakeRuntime(old._path, instance="99" * 8)
    again.entries = entries
    return again


@looped
async def test_a_version_has_the_best_of_its_states(tmp_path: Path) -> None:
    """A version that failed on one device and is ready on the other is ready; its stubs are those of the ready one."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.change("a@1", entry("a", state="failed", error="no room", weights="absent", stubs=[7]))
        first.change("b@1", entry("b", state="loading", weights="absent", stubs=[1]))
        second.change("b@1", entry("b", state="loading", weights="loading", stubs=[2]))
        second.change("c@1", entry("c"))
        await until(runtimes, lambda: runtimes.entries.keys() == {"a@1", "b@1", "c@1"})

        assert runtimes.entries["a@1"] == entry("a", stubs=[101])
        assert runtimes.entries["b@1"] == entry("b", state="loading", weights="loading", stubs=[1, 2])
        assert runtimes.served() == {"a", "b", "c"}


@looped
async def test_the_merged_state_follows_each_change(tmp_path: Path) -> None:
    """After each change of one device, the merged state is that of a fresh merge; a version that is gone everywhere is gone."""
    async with two(tmp_path) as (runtimes, (first, second)):
        changes = [
            (first, "a@1", entry("a", weights="absent")),
            (second, "a@1", entry("a", weights="loading")),
            (second, "b@1", entry("b")),
            (first, "a@1", None),
            (second, "a@1", entry("a", state="leaving")),
            (second, "a@1", None),
        ]
        for runtime, key, changed in changes:
            runtime.change(key, changed)
            link = runtimes.links[runtime is second]
            await until(
                runtimes, partial(lambda link, runtime: link.revision == runtime.revision, link, runtime)
            )
            assert runtimes.entries == merge([one.entries for one in runtimes.links])
        assert runtimes.entries.keys() == {"b@1"}


@looped
async def test_a_dead_runtime_costs_only_its_device(tmp_path: Path) -> None:
    """While one of two runtimes is dead, the state is that of the other, and commands reach it."""
    async with two(tmp_path) as (runtimes, (first, second)):
        since = runtimes.links[1].since
        first.change("b@1", entry("b"))
        await until(runtimes, lambda: "b@1" in runtimes.entries)
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)

        assert runtimes.up
        assert runtimes.since == since
        assert runtimes.entries == {"a@1": entry("a", stubs=[101])}
        assert await runtimes.command(PIN) == {1: {}}

        second.die()
        await until(runtimes, lambda: not runtimes.up)
        assert not runtimes.served()
        with pytest.raises(RuntimeDown):
            await runtimes.command(PIN)
        with pytest.raises(RuntimeDown):
            await runtimes.query({"command": "load"})


@looped
async def test_stubs_that_only_a_dead_runtime_knew_have_time_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub of a dead runtime counts while others answer, until it had the time to find the next one; then no more."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.change("b@1", entry("b", stubs=[7]))
        await until(runtimes, lambda: "b" in runtimes.served())
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        assert runtimes.served() == {"a", "b"}

        again = reborn(first)
        await until(runtimes, lambda: len(runtimes.live) == 2)
        assert runtimes.served() == {"a", "b"}
        monkeypatch.setattr(runtime_link, "CONNECT_S", 0.0)
        assert runtimes.served() == {"a"}

        again.die()
        second.die()
        await until(runtimes, lambda: not runtimes.up)
        assert runtimes.served() == set()


@looped
async def test_a_runtime_that_was_dead_gets_what_the_other_got(tmp_path: Path) -> None:
    """A new runtime gets the settings that were made while it was dead, and prefetches of its own device only."""
    async with two(tmp_path) as (runtimes, (first, second)):
        await runtimes.command({"command": "prefetch", "model": "a"}, devices=[1])
        second.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        await runtimes.command(PIN)
        await runtimes.configure({"depth": 3})
        again = reborn(second, **{"a@1": entry("a")})
        await again.came(lambda: len(again.commands) == 2)

        assert first.commands == [PIN]
        assert again.commands == [PIN, {"command": "prefetch", "model": "a"}]
        assert again.configured == [{"depth": 3}]
        again.die()


@looped
async def test_weights_are_prefetched_and_evicted_as_if_the_runtime_had_been_there(tmp_path: Path) -> None:
    """A new runtime prefetches what was prefetched while its device had none, and not what was evicted."""
    async with two(tmp_path) as (runtimes, (_, second)):
        await runtimes.command({"command": "prefetch", "model": "a"})
        second.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        await runtimes.command({"command": "evict", "model": "a"})
        await runtimes.command({"command": "prefetch", "model": "b"})
        again = reborn(second, **{"a@1": entry("a"), "b@1": entry("b")})
        await again.came(lambda: len(again.commands) == 1)

        assert again.commands == [{"command": "prefetch", "model": "b"}]
        again.die()


@looped
async def test_a_runtime_that_was_silent_gets_what_it_missed(tmp_path: Path) -> None:
    """A runtime that was stopped gets the commands of that time in their order, the latest of equal ones only."""
    async with two(tmp_path, silence=0.05) as (runtimes, (_, second)):
        second.stop()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        hold = {"command": "pause", "model": None, "mode": "hold"}
        go_on = {"command": "continue", "model": None}
        for command in (hold, PIN, go_on, hold, go_on, {"command": "compact"}):
            await runtimes.command(command)
        await runtimes.configure({"depth": 3})
        second.go_on()
        await second.came(lambda: len(second.commands) == 3)

        assert second.commands == [PIN, hold, go_on]
        assert second.configured == [{"depth": 3}]


@looped
async def test_a_model_that_one_device_does_not_know_yet(tmp_path: Path) -> None:
    """A setting that one device takes succeeds, and reaches the other when that knows the model."""
    async with two(tmp_path) as (runtimes, (first, second)):
        second.answers = lambda command: {"error": "there is no model 'a'", "code": "NOT_FOUND"}
        assert await runtimes.command(PIN) == {0: {}}
        assert first.commands == second.commands == [PIN]

        second.answers = lambda command: {}
        second.change("a@1", entry("a"))
        await second.came(lambda: len(second.commands) == 2)
        assert second.commands[1] == PIN


@looped
async def test_a_command_that_all_refuse_fails(tmp_path: Path) -> None:
    """The refusal of a live runtime says more than that another one is down."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        second.answers = lambda command: {"error": "there is no model 'x'", "code": "NOT_FOUND"}

        with pytest.raises(StatusError, match="no model 'x'"):
            await runtimes.command({**PIN, "model": "x"})
        with pytest.raises(StatusError, match=r"no device 2: the server's devices are 0 to 1"):
            await runtimes.command(PIN, devices=[2])


@looped
async def test_a_command_for_a_cold_model_holds_from_its_start(tmp_path: Path) -> None:
    """All runtimes refuse a model that they do not have yet: it is pinned when it starts, and a policy is refused."""
    async with two(tmp_path) as (runtimes, (first, second)):
        for one in (first, second):
            one.answers = lambda command: {"error": "there is no model 'b'", "code": "NOT_FOUND"}
        runtimes.show_cold(["b"])
        pin = {**PIN, "model": "b"}
        assert await runtimes.command(pin) == {}
        with pytest.raises(StatusError, match="b is cold: start it first, with `rsrv prefetch --warm b`"):
            await runtimes.command({"command": "policy", "model": "b", "weight": 2.0})

        second.answers = lambda command: {}
        second.change("b@1", entry("b"))
        await second.came(lambda: len(second.commands) == 3)
        assert second.commands[-1] == pin


@looped
async def test_changes_come_with_their_device(tmp_path: Path) -> None:
    """A feed has a snapshot and the changes of each device, and none waits for the other."""
    async with two(tmp_path) as (runtimes, (first, second)):
        feed = runtimes.subscribe()
        snapshots = [await feed.next(), await feed.next()]
        assert [(number, type(update)) for number, update in snapshots] == [
            (0, StateSnapshot),
            (1, StateSnapshot),
        ]
        for number in range(3):
            first.change(f"m@{number}", entry("m"))
        second.change("a@1", None)
        found = [await feed.next() for _ in range(4)]
        assert [number for number, _ in found].count(1) == 1
        keys = [one.key for _, one in found if isinstance(one, StateChange)]
        assert sorted(keys) == ["a@1", "m@0", "m@1", "m@2"]
        second.die()
        assert await feed.next() == (1, None)
        feed.close()


def test_the_directories_are_those_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first directory is the given one, the others are named for their device."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path))
    assert server_devices(tmp_path) == ["cpu"]
    (tmp_path / paths.DEVICES).write_text('["GPU-1", "cpu"]')
    assert server_devices(tmp_path) == ["GPU-1", "cpu"]
    first, second = device_directories(1, tmp_path, 2)
    assert first == tmp_path
    assert second.name.endswith("-gpu1")

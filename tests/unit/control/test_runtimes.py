"""The runtimes of a server with several devices: their merged state, and commands for all runtimes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.grpc_service import StatusError
from rsrv.control.presence import StubPoll
from rsrv.control.runtime_link import RuntimeDown
from rsrv.control.runtime_state import StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes, device_directories, merge, server_devices
from rsrv.wire import paths
from tests.unit.control.peers import FakeRuntime, entry, impatient, linked, until
from tests.waiting import looped

FETCH = {"command": "prefetch", "model": "a"}


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[tuple[Runtimes, list[FakeRuntime]]]:
    """Yield the `Runtimes` of a server with two devices, and their fake runtimes, which are up and have the ready model `a`."""
    folders = [tmp_path / name for name in ("0", "1")]
    fakes = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        fakes.append(FakeRuntime(folder / "runtime.sock", instance=f"{number}{number}" * 8))
        fakes[-1].entries = {"a@1": entry("a", stubs=[100 + number])}
    async with linked(*folders) as runtimes:
        await until(runtimes, lambda: len(runtimes.live) == 2)
        yield runtimes, fakes
    for fake in fakes:
        fake.die()


def reborn(old: FakeRuntime, **entries: Any) -> FakeRuntime:
    """Start the next runtime of the same device, with these entries."""
    again = FakeRuntime(old._path, instance="99" * 8)
    again.entries = entries
    return again


@looped
async def test_a_version_has_the_best_of_its_states(tmp_path: Path) -> None:
    """A version that failed on one device and is ready on the other is ready, with the stubs of the device where it is ready."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.change("a@1", entry("a", state="failed", error="no room", weights="absent", stubs=[7]))
        first.change("b@1", entry("b", state="loading", weights="absent", stubs=[1]))
        second.change("b@1", entry("b", state="loading", weights="loading", stubs=[2]))
        second.change("c@1", entry("c"))
        await until(runtimes, lambda: runtimes.entries.keys() == {"a@1", "b@1", "c@1"})

        assert runtimes.entries["a@1"] == entry("a", stubs=[101])
        assert runtimes.entries["b@1"] == entry("b", state="loading", weights="loading", stubs=[1, 2])
        assert runtimes.presence.attached == {"a", "b", "c"}


@looped
async def test_the_merged_state_follows_each_change(tmp_path: Path) -> None:
    """After each change of one device, the merged state equals a new merge. A version that no device has is gone."""
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
                runtimes,
                partial(lambda link, runtime: link.state.revision == runtime.revision, link, runtime),
            )
            assert runtimes.entries == merge([source.state.entries for source in runtimes.links])
        assert runtimes.entries.keys() == {"b@1"}


@looped
async def test_a_dead_runtime_costs_only_its_device(tmp_path: Path) -> None:
    """While one of two runtimes is dead, the other one's state is shown, and commands reach the living one."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.change("b@1", entry("b"))
        await until(runtimes, lambda: "b@1" in runtimes.entries)
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)

        assert runtimes.up
        assert runtimes.entries == {"a@1": entry("a", stubs=[101])}
        assert await runtimes.command(FETCH) == {1: {}}

        second.die()
        await until(runtimes, lambda: not runtimes.up)
        assert not runtimes.presence.attached
        with pytest.raises(RuntimeDown):
            await runtimes.command(FETCH)
        with pytest.raises(RuntimeDown):
            await runtimes.read_records({})


@looped
async def test_stubs_that_only_a_dead_runtime_knew_return_however_long_that_takes(tmp_path: Path) -> None:
    """While a stub of a dead runtime is expected to return, its model neither serves nor is cold. This ends when the stub is gone."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.change("b@1", entry("b", stubs=[7]))
        await until(runtimes, lambda: "b" in runtimes.presence.attached)
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        assert (runtimes.presence.attached, runtimes.presence.returning) == ({"a"}, {"a", "b"})

        again = reborn(first)
        await until(runtimes, lambda: len(runtimes.live) == 2)
        runtimes.see_stubs(StubPoll({"b"}))
        assert (runtimes.presence.attached, runtimes.presence.returning, runtimes.cold) == (
            {"a"},
            {"a", "b"},
            set(),
        )
        runtimes.see_stubs(StubPoll(gone={"b"}))
        assert runtimes.presence.returning == {"a"}
        runtimes.see_stubs(StubPoll({"b"}))
        assert runtimes.cold == {"b"}

        again.die()
        second.die()
        await until(runtimes, lambda: not runtimes.up)
        assert runtimes.presence.attached == set()


@looped
async def test_a_runtime_that_was_dead_follows_what_the_other_follows(tmp_path: Path) -> None:
    """A new runtime gets the settings that were made while its device had no runtime, and the prefetches of its own device only."""
    async with two(tmp_path) as (runtimes, (first, second)):
        desired = runtimes.desired
        assert await runtimes.change(lambda: desired.prefetch(["a"], [1]), [1]) == [1]
        second.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        assert await runtimes.change(lambda: desired.set_residency(["a"], "device")) == [0]
        assert await runtimes.change(lambda: desired.configure({"depth": 3})) == [0]
        again = reborn(second, **{"a@1": entry("a")})
        await until(runtimes, lambda: len(runtimes.live) == 2)

        assert "prefetched" not in first.wants("a")
        assert again.wants("a") == {**first.wants("a"), "prefetched": True}
        assert again.document["scheduler"] == first.document["scheduler"]
        again.die()


@looped
async def test_a_runtime_that_was_silent_misses_nothing(tmp_path: Path) -> None:
    """When a stopped runtime continues, it follows all changes that it has missed."""
    async with two(tmp_path) as (runtimes, (first, second)):
        desired = runtimes.desired
        second.stop()
        with impatient(runtimes.links[1]):
            await until(runtimes, lambda: len(runtimes.live) == 1)
        for change in (
            lambda: desired.pause(None, "hold"),
            lambda: desired.set_residency(["a"], "device"),
            lambda: desired.pause(None, None),
            lambda: desired.configure({"depth": 3}),
        ):
            assert await runtimes.change(change) == [0]
        second.go_on()
        await second.came(lambda: second.follows == first.follows)

        assert second.document == first.document


@looped
async def test_without_a_runtime_nothing_changes(tmp_path: Path) -> None:
    """While no runtime answers, a change is refused. Wrong values and unknown devices are refused as well."""
    async with two(tmp_path) as (runtimes, (first, second)):
        desired, before = runtimes.desired, runtimes.desired.revision
        with pytest.raises(StatusError, match=r"models\.a\.weight"):
            await runtimes.change(lambda: desired.set_models(["a"], {"weight": 0}))
        with pytest.raises(StatusError, match=r"no device 2: the server's devices are 0 to 1"):
            await runtimes.change(lambda: desired.pause(None, "hold"), [2])
        for runtime in (first, second):
            runtime.die()
        await until(runtimes, lambda: not runtimes.live)
        with pytest.raises(RuntimeDown):
            await runtimes.change(lambda: desired.pause(None, "hold"))
        assert desired.revision == before


@looped
async def test_the_name_of_a_meta_model_means_all_that_it_calls(tmp_path: Path) -> None:
    """A meta model's name stands for its callees. They are read from its entry, or from its folder while it is cold."""
    folders = {"cold": ["c", "d"]}
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    meta = entry("meta", kind="meta", weights=None, models=["a@1", "b@1"])
    broken = entry("x", state="failed", error="why")
    runtime.entries = {"a@1": entry("a"), "meta@1": meta, "x@1": broken}
    async with linked(tmp_path, callees=lambda name: folders.get(name, [])) as runtimes:
        await until(runtimes, lambda: runtimes.up)
        runtimes.see_stubs(StubPoll(["cold", "e"]))

        assert await runtimes.named("a") == ["a"]
        assert await runtimes.named("meta") == ["a", "b"]
        assert await runtimes.named("cold") == ["c", "d"]
        assert await runtimes.named("e") == ["e"]
        for unknown in ("x", "nobody"):
            with pytest.raises(StatusError, match=f"there is no model '{unknown}'"):
                await runtimes.named(unknown)
    runtime.die()


@looped
async def test_a_command_that_all_refuse_fails(tmp_path: Path) -> None:
    """If the living runtime refuses a command and another runtime is down, the error is the refusal."""
    async with two(tmp_path) as (runtimes, (first, second)):
        first.die()
        await until(runtimes, lambda: len(runtimes.live) == 1)
        second.answers = lambda command: {"error": "there is no model 'x'", "code": "NOT_FOUND"}

        with pytest.raises(StatusError, match="no model 'x'"):
            await runtimes.command({**FETCH, "model": "x"})
        with pytest.raises(StatusError, match=r"no device 2: the server's devices are 0 to 1"):
            await runtimes.command(FETCH, devices=[2])


@looped
async def test_changes_come_with_their_device(tmp_path: Path) -> None:
    """A feed has a snapshot and the changes of each device. Changes of one device do not wait for the other device."""
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
        updates = [await feed.next() for _ in range(4)]
        assert [number for number, _ in updates].count(1) == 1
        keys = [update.key for _, update in updates if isinstance(update, StateChange)]
        assert sorted(keys) == ["a@1", "m@0", "m@1", "m@2"]
        second.die()
        assert await feed.next() == (1, None)
        feed.close()


def test_the_directories_are_those_of_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device has the given directory. The directories of the others are named after their device."""
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path))
    assert server_devices(tmp_path) == ["cpu"]
    (tmp_path / paths.DEVICES).write_text('["GPU-1", "cpu"]')
    assert server_devices(tmp_path) == ["GPU-1", "cpu"]
    first, second = device_directories(1, tmp_path, 2)
    assert first == tmp_path
    assert second.name.endswith("-gpu1")

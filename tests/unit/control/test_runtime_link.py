"""The link to the runtime: its view, and its reaction when a runtime dies, is silent or is replaced."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from rsrv.control.grpc_service import StatusError
from rsrv.control.runtime_link import RuntimeDown, RuntimeLink
from rsrv.control.runtime_state import StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes
from rsrv.wire.frames import Kind
from tests.unit.control.peers import FakeRuntime, entry, impatient, linked, until
from tests.waiting import looped


@asynccontextmanager
async def up(
    tmp_path: Path, *models: str, settings: str = ""
) -> AsyncIterator[tuple[FakeRuntime, Runtimes, RuntimeLink]]:
    """Yield a runtime with these models, the runtimes of its server, and the link to it. The link is up."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {f"{name}@1": entry(name) for name in models}
    try:
        async with linked(tmp_path, settings=settings) as runtimes:
            await until(runtimes, lambda: runtimes.up)
            yield runtime, runtimes, runtimes.links[0]
    finally:
        runtime.die()


@looped
async def test_the_snapshot_and_every_change_are_shown(tmp_path: Path) -> None:
    """The view shows the snapshot and every later change."""
    async with up(tmp_path, "a") as (runtime, runtimes, link):
        assert set(link.state.entries) == {"a@1"}

        runtime.change("b@1", entry("b", state="loading", stubs=[7]))
        runtime.change("a@1", None)
        await until(runtimes, lambda: link.state.revision == 7)

        assert set(link.state.entries) == {"b@1"}
        assert link.presence.attached == {"b"}


@looped
async def test_a_runtime_that_dies_is_down_at_once_and_the_next_one_is_found(tmp_path: Path) -> None:
    """When a runtime dies, the link is down at once. It finds the next runtime at the same path."""
    async with up(tmp_path, "a") as (first, runtimes, link):
        since = link.since

        first.die()
        await until(runtimes, lambda: not link.up)
        assert not link.presence.attached
        with pytest.raises(RuntimeDown):
            await link.record()

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await until(runtimes, lambda: link.up)

        assert (link.state.instance, dict(link.state.entries)) == ("22" * 8, {})
        assert link.since > since
        second.die()


@looped
async def test_a_silent_runtime_is_down_until_it_answers(tmp_path: Path) -> None:
    """A stopped runtime is down until it answers again. Commands fail, including a command that was sent before."""
    async with up(tmp_path) as (runtime, runtimes, link):
        runtime.stop()
        with impatient(link), pytest.raises(RuntimeDown):
            await link.command({"command": "compact"})
        assert not link.up
        assert link.silent_pid == os.getpid()

        runtime.change("a@1", entry("a"))
        runtime.go_on()
        await until(runtimes, lambda: link.up)

        assert set(link.state.entries) == {"a@1"}
        assert await link.command({"command": "compact"}) == {}
        assert link.silent_pid == 0


@looped
async def test_a_wait_that_begins_after_the_change_returns(tmp_path: Path) -> None:
    """A wait for changes after a known revision returns at once if a change came before the wait."""
    async with up(tmp_path) as (runtime, runtimes, link):
        seen = runtimes.changes
        runtime.change("a@1", entry("a"))
        await until(runtimes, lambda: link.state.revision == 6)

        await runtimes.wait_change(seen)


@looped
async def test_a_subscriber_sees_every_change_in_order(tmp_path: Path) -> None:
    """A subscriber sees all changes in order, across a start, a death and a replacement of the runtime."""
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        subscription = link.state.subscribe()
        assert await subscription.next() is None

        runtime = FakeRuntime(tmp_path / "runtime.sock")
        first = await subscription.next()
        assert isinstance(first, StateSnapshot)
        assert first.revision == 5
        for number in range(50):
            runtime.change(f"m@{number}", entry("m"))
        for number in range(50):
            change = await subscription.next()
            assert isinstance(change, StateChange)
            assert (change.revision, change.key) == (6 + number, f"m@{number}")

        runtime.die()
        assert await subscription.next() is None
        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        last = await subscription.next()
        assert isinstance(last, StateSnapshot)
        assert last.instance == "22" * 8
        second.die()


@looped
async def test_a_subscriber_that_does_not_read_gets_a_snapshot_instead(tmp_path: Path) -> None:
    """A subscriber that reads too slowly gets a snapshot in place of the missed changes."""
    async with up(tmp_path) as (runtime, runtimes, link):
        subscription = link.state.subscribe()
        await subscription.next()
        for _ in range(50):
            for _ in range(100):
                runtime.change("m@1", entry("m"))
            await until(runtimes, lambda: link.state.revision == runtime.revision)

        update = await subscription.next()

        assert isinstance(update, StateSnapshot)
        assert update.revision == runtime.revision
        runtime.change("m@1", None)
        assert await subscription.next() == StateChange(
            link.state.instance, update.revision + 1, "m@1", None, update.entries["m@1"]
        )


@looped
async def test_a_gap_in_the_revisions_is_noticed(tmp_path: Path) -> None:
    """If the revisions have a gap, the link takes a new snapshot."""
    async with up(tmp_path) as (runtime, runtimes, link):
        runtime.entries["a@1"] = entry("a")
        runtime.revision = 9
        runtime.say(Kind.STATE, {"revision": 9, "key": "a@1", "entry": entry("a")})

        await until(runtimes, lambda: link.up and link.state.revision == 9)

        assert set(link.state.entries) == {"a@1"}


@looped
async def test_a_new_runtime_follows_what_operators_want(tmp_path: Path) -> None:
    """A runtime that follows changes and the next runtime, which gets the whole document, end up with the same document."""
    async with up(tmp_path, settings="models: {a: {weight: 3}}") as (first, runtimes, link):
        desired = runtimes.desired
        assert first.wants("a") == {"settings": {"weight": 3}}
        await runtimes.change(lambda: desired.pause(None, "hold"))
        await runtimes.change(lambda: desired.set_residency(["a"], "device"))
        await runtimes.change(lambda: desired.configure({"depth": 3}))
        assert [sorted(command) for command in first.commands] == [
            ["command", "paused"],
            ["command", "models"],
            ["command", "scheduler"],
        ]
        assert first.follows == (desired.instance, desired.revision)
        first.die()
        await until(runtimes, lambda: not link.up)

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await until(runtimes, lambda: link.up)

        assert second.document == first.document == desired.document(0)
        assert second.follows == (desired.instance, desired.revision)
        second.die()


@looped
async def test_the_next_control_process_wants_what_the_last_one_wanted(tmp_path: Path) -> None:
    """A new control process sends the whole document with its own instance, to the same runtime or to a new one."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as runtimes:
        await until(runtimes, lambda: runtimes.up)
        await runtimes.change(partial(runtimes.desired.set_residency, ["a"], "device"))
        before, follows = runtime.document, runtime.follows

    async with linked(tmp_path) as runtimes:
        await until(runtimes, lambda: runtimes.up)

        assert runtime.document == before
        assert runtime.follows == (runtimes.desired.instance, runtimes.desired.revision) != follows
    runtime.die()


@looped
async def test_a_change_holds_although_its_client_has_gone(tmp_path: Path) -> None:
    """A silent runtime follows a change when it answers again, even if the client of the change has left."""
    async with up(tmp_path) as (runtime, runtimes, _):
        runtime.stop()
        asking = asyncio.create_task(runtimes.change(lambda: runtimes.desired.pause(["a"], "hold")))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        runtime.go_on()

        await runtime.came(lambda: runtime.wants("a") == {"paused": "hold"})


@looped
async def test_a_document_that_is_larger_than_a_frame_arrives(tmp_path: Path) -> None:
    """A document for thousands of models, which is larger than a frame, arrives. It is sent in a memfd."""
    names = [f"model{number}" for number in range(5000)]
    async with up(tmp_path) as (runtime, runtimes, _):
        await runtimes.change(lambda: runtimes.desired.set_models(names, {"weight": 2.0}))

        assert len(runtime.document["models"]) == 5000


@looped
async def test_a_runtime_that_refused_a_change_gets_the_whole_document(tmp_path: Path) -> None:
    """The caller of a refused change gets the error. The next change is sent with the whole document, even if it is the same change."""
    async with up(tmp_path) as (runtime, runtimes, _):
        runtime.refuses_next = {"error": "odd", "code": "INVALID_ARGUMENT"}
        with pytest.raises(StatusError, match="odd"):
            await runtimes.change(lambda: runtimes.desired.pause(["a"], "hold"))

        assert await runtimes.change(lambda: runtimes.desired.pause(["a"], "hold")) == [0]
        assert runtime.wants("a") == {"paused": "hold"}


@looped
async def test_a_change_right_behind_a_refused_one_is_answered_when_it_holds(tmp_path: Path) -> None:
    """A change right behind a refused one is answered when the runtime follows it, for which it gets the whole document."""
    async with up(tmp_path) as (runtime, runtimes, _):
        runtime.refuses_next = {"error": "odd", "code": "INVALID_ARGUMENT"}

        refused, followed = await asyncio.gather(
            runtimes.change(lambda: runtimes.desired.pause(["a"], "hold")),
            runtimes.change(lambda: runtimes.desired.pause(["b"], "hold")),
            return_exceptions=True,
        )
        assert isinstance(refused, StatusError)
        assert followed == [0]
        assert runtime.wants("a") == runtime.wants("b") == {"paused": "hold"}

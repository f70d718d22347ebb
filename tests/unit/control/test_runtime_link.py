"""The link to the runtime: its view, and the death, silence or replacement of the runtime."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.grpc_service import StatusError
from rsrv.control.overrides import Overrides
from rsrv.control.runtime_link import RuntimeDown, StateChange, StateSnapshot
from rsrv.wire.frames import Kind
from tests.unit.control.peers import FakeRuntime, entry, linked, until
from tests.waiting import looped


@looped
async def test_the_snapshot_and_every_change_are_shown(tmp_path: Path) -> None:
    """The view has the snapshot and every change."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {"a@1": entry("a")}
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        assert set(link.entries) == {"a@1"}

        runtime.change("b@1", entry("b", state="loading", stubs=[7]))
        runtime.change("a@1", None)
        await until(runtimes, lambda: link.revision == 7)

        assert set(link.entries) == {"b@1"}
        assert link.served() == {"b"}
    runtime.die()


@looped
async def test_a_model_that_falls_back_as_the_link_begins_is_leaving_and_cold(tmp_path: Path) -> None:
    """A snapshot may have a version that its stubs were asked to leave, as a change may."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {"a@1": entry("a", state="cold", stubs=[])}
    async with linked(tmp_path) as runtimes:
        await until(runtimes, lambda: runtimes.up)

        assert [one["state"] for one in runtimes.entries.values()] == ["leaving"]
        assert runtimes.cold == {"a"}
    runtime.die()


@looped
async def test_the_stub_of_any_version_counts(tmp_path: Path) -> None:
    """A model with a stub of one of its versions is served; one that failed without a stub is not."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {
        "a@1": entry("a", stubs=[1], state="leaving"),
        "a@2": entry("a", stubs=[2]),
        "b@1": entry("b", stubs=[], state="failed", error="why"),
    }
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)

        assert link.served() == {"a"}
    runtime.die()


@looped
async def test_a_runtime_that_dies_is_down_at_once_and_the_next_one_is_found(tmp_path: Path) -> None:
    """When a runtime dies the link is down at once, and it finds the next one at the same path."""
    first = FakeRuntime(tmp_path / "runtime.sock")
    first.entries = {"a@1": entry("a")}
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        since = link.since

        first.die()
        await until(runtimes, lambda: not link.up)
        assert not link.served()
        with pytest.raises(RuntimeDown):
            await link.status()

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await until(runtimes, lambda: link.up)

        assert (link.instance, dict(link.entries)) == ("22" * 8, {})
        assert link.since > since
        second.die()


@looped
async def test_a_silent_runtime_is_down_until_it_answers(tmp_path: Path) -> None:
    """A stopped runtime is down until it answers again, and commands fail, also one that has been sent."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path, silence=0.05) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)

        runtime.stop()
        with pytest.raises(RuntimeDown):
            await link.command({"command": "compact"})
        assert not link.up
        assert link.silent_pid == os.getpid()

        runtime.change("a@1", entry("a"))
        runtime.go_on()
        await until(runtimes, lambda: link.up)

        assert set(link.entries) == {"a@1"}
        assert await link.command({"command": "compact"}) == {}
        assert link.silent_pid == 0
    runtime.die()


@looped
async def test_a_wait_that_begins_after_the_change_returns(tmp_path: Path) -> None:
    """A wait for changes after a known revision returns if the change came before the wait."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        seen = runtimes.changes
        runtime.change("a@1", entry("a"))
        await until(runtimes, lambda: link.revision == 6)

        await runtimes.wait_change(seen)
    runtime.die()


@looped
async def test_a_subscriber_sees_every_change_in_order(tmp_path: Path) -> None:
    """A subscriber sees all changes in order, across a start, a death and a replacement of the runtime."""
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        subscription = link.subscribe()
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
async def test_a_subscriber_that_does_not_look_gets_a_snapshot_instead(tmp_path: Path) -> None:
    """A subscriber that reads too slowly gets a snapshot in place of the changes."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        subscription = link.subscribe()
        await subscription.next()
        for _ in range(50):
            for _ in range(100):
                runtime.change("m@1", entry("m"))
            await until(runtimes, lambda: link.revision == runtime.revision)

        update = await subscription.next()

        assert isinstance(update, StateSnapshot)
        assert update.revision == runtime.revision
        runtime.change("m@1", None)
        assert await subscription.next() == StateChange(link.instance, update.revision + 1, "m@1", None)
    runtime.die()


@looped
async def test_a_gap_in_the_revisions_is_noticed(tmp_path: Path) -> None:
    """If the revisions have a gap, the link takes a new snapshot."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        runtime.entries["a@1"] = entry("a")
        runtime.revision = 9
        runtime.say(Kind.STATE, {"revision": 9, "key": "a@1", "entry": entry("a")})

        await until(runtimes, lambda: link.up and link.revision == 9)

        assert set(link.entries) == {"a@1"}
    runtime.die()


@looped
async def test_a_refusal_has_the_runtimes_code(tmp_path: Path) -> None:
    """A refusal by the runtime keeps its code, and sets no override."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.answers = lambda command: {"error": "there is no model 'x'", "code": "NOT_FOUND"}
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)

        with pytest.raises(StatusError, match="no model 'x'") as refused:
            await link.command({"command": "prefetch", "model": "x"})

        assert refused.value.code == "NOT_FOUND"
        assert not runtimes.overrides.models
    runtime.die()


@looped
async def test_a_new_runtime_is_told_what_operators_set(tmp_path: Path) -> None:
    """A new runtime gets the settings of the operators: pauses, pins, policies and the scheduler's."""
    first = FakeRuntime(tmp_path / "runtime.sock")
    first.entries = {"a@1": entry("a"), "b@1": entry("b")}
    pin = {"command": "residency", "model": "a", "residency": "device"}
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        await link.command({"command": "pause", "model": None, "mode": "hold"})
        await link.command({"command": "continue", "model": "a"})
        await link.command(pin)
        await link.command({"command": "policy", "model": "a", "weight": 2.0})
        await link.command({"command": "policy", "model": "a", "max_delay_us": 5})
        await link.configure({"depth": 3})
        first.die()

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await second.came(lambda: bool(second.configured and second.commands))
        assert second.configured == [{"depth": 3}]
        assert second.commands == [{"command": "pause", "model": None, "mode": "hold"}]

        second.change("b@1", entry("b", state="loading"))
        second.change("a@1", entry("a", state="loading"))
        await second.came(lambda: len(second.commands) == 4)
        assert second.commands[1:] == [
            pin,
            {"command": "policy", "model": "a", "weight": 2.0, "max_delay_us": 5},
            {"command": "continue", "model": "a"},
        ]
        second.die()


@looped
async def test_the_next_control_process_knows_what_operators_set(tmp_path: Path) -> None:
    """The next control process knows the settings of the operators, and passes them to a new runtime."""
    pin = {"command": "residency", "model": "a", "residency": "device"}
    first = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        await link.command(pin)
    first.die()

    second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
    second.entries = {"a@1": entry("a")}
    async with linked(tmp_path):
        await second.came(lambda: second.commands == [pin])
    second.die()


@looped
async def test_a_setting_counts_although_its_client_has_gone(tmp_path: Path) -> None:
    """A setting that the runtime accepts is kept although its client has hung up; a refused one is not."""
    pin = {"command": "residency", "model": "a", "residency": "device"}
    refused = {"command": "residency", "model": "x", "residency": "device"}
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.answers = lambda command: {"error": "no such model"} if command == refused else {}
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        runtime.stop()
        asking = [
            asyncio.create_task(asked)
            for asked in (link.command(pin), link.command(refused), link.configure({"depth": 3}))
        ]
        await asyncio.sleep(0)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert not runtimes.overrides.models
        runtime.go_on()
        await until(runtimes, lambda: link.up)
        await link.status()  # Answered after the others.

        assert (runtimes.overrides.models, runtimes.overrides.scheduler) == ({"a"}, {"depth": 3})
        assert all(task.cancelled() for task in asking)
    runtime.die()


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        ({"command": "residency", "model": "a", "residency": "device"}, "NOT_FOUND"),
        ({"command": "prefetch", "model": "a"}, "FAILED_PRECONDITION"),
    ],
)
@looped
async def test_what_a_runtime_does_not_know_yet_is_told_with_its_next_change(
    tmp_path: Path, command: dict[str, Any], refusal: str
) -> None:
    """A setting that a runtime refuses as unknown is sent again when the model changes."""
    overrides = Overrides(tmp_path / "overrides.json")
    overrides.commanded(command, 0)
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    answers = iter([{"error": "not yet", "code": refusal}, {}])
    runtime.answers = lambda command: next(answers)
    async with linked(tmp_path) as runtimes:
        link = runtimes.links[0]
        await until(runtimes, lambda: link.up)
        runtime.change("a@1", entry("a", state="loading"))
        await runtime.came(lambda: len(runtime.commands) == 1)
        await link.status()  # The refusal has arrived before this.
        runtime.change("a@1", entry("a"))

        await runtime.came(lambda: runtime.commands == [command, command])
    runtime.die()

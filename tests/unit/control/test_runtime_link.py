"""The link to the runtime: what it shows, when the runtime dies, stops, or is another one."""

import asyncio
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
    """A runtime with one model gets another one, and loses the first."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {"a@1": entry("a")}
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        assert set(link.entries) == {"a@1"}

        runtime.change("b@1", entry("b", state="loading", stubs=[7]))
        runtime.change("a@1", None)
        await until(link, lambda: link.revision == 7)

        assert set(link.entries) == {"b@1"}
        assert link.stubs() == {"b": frozenset({7})}
    runtime.die()


@looped
async def test_stubs_of_all_versions_count(tmp_path: Path) -> None:
    """A model is served in two versions, each by a stub of its own, and a failed one has none."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries = {
        "a@1": entry("a", stubs=[1], state="leaving"),
        "a@2": entry("a", stubs=[2]),
        "b@1": entry("b", stubs=[], state="failed", error="why"),
    }
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)

        assert link.stubs() == {"a": frozenset({1, 2}), "b": frozenset()}
    runtime.die()


@looped
async def test_a_runtime_that_dies_is_down_at_once_and_the_next_one_is_found(tmp_path: Path) -> None:
    """The runtime ends, and another one listens at the same place a little later."""
    first = FakeRuntime(tmp_path / "runtime.sock")
    first.entries = {"a@1": entry("a")}
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        since = link.since

        first.die()
        await until(link, lambda: not link.up)
        assert not link.stubs()
        with pytest.raises(RuntimeDown):
            await link.status()

        second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
        await until(link, lambda: link.up)

        assert (link.instance, dict(link.entries)) == ("22" * 8, {})
        assert link.since > since
        second.die()


@looped
async def test_a_silent_runtime_is_down_until_it_answers(tmp_path: Path) -> None:
    """The runtime's process is stopped and goes on; commands fail meanwhile, the one under way included."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path, silence=0.05) as link:
        await until(link, lambda: link.up)

        runtime.stop()
        with pytest.raises(RuntimeDown):
            await link.command({"command": "compact"})
        assert not link.up

        runtime.change("a@1", entry("a"))
        runtime.go_on()
        await until(link, lambda: link.up)

        assert set(link.entries) == {"a@1"}
        assert await link.command({"command": "compact"}) == {}
    runtime.die()


@looped
async def test_a_wait_that_begins_after_the_change_returns(tmp_path: Path) -> None:
    """Somebody looks, does something else for a while, and waits for what follows on what he saw."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        seen = link.changes
        runtime.change("a@1", entry("a"))
        await until(link, lambda: link.revision == 6)

        await link.wait_change(seen)
    runtime.die()


@looped
async def test_a_subscriber_sees_every_change_in_order(tmp_path: Path) -> None:
    """He subscribes before there is a runtime, which then changes faster than he looks, dies, and is replaced."""
    async with linked(tmp_path) as link:
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
    """More changes come than are kept for anybody."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        subscription = link.subscribe()
        await subscription.next()
        for _ in range(50):
            for _ in range(100):
                runtime.change("m@1", entry("m"))
            await until(link, lambda: link.revision == runtime.revision)

        update = await subscription.next()

        assert isinstance(update, StateSnapshot)
        assert update.revision == runtime.revision
        runtime.change("m@1", None)
        assert await subscription.next() == StateChange(link.instance, update.revision + 1, "m@1", None)
    runtime.die()


@looped
async def test_a_gap_in_the_revisions_is_noticed(tmp_path: Path) -> None:
    """The runtime skips a change: the link takes a new snapshot."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        runtime.entries["a@1"] = entry("a")
        runtime.revision = 9
        runtime.say(Kind.STATE, {"revision": 9, "key": "a@1", "entry": entry("a")})

        await until(link, lambda: link.up and link.revision == 9)

        assert set(link.entries) == {"a@1"}
    runtime.die()


@looped
async def test_a_refusal_has_the_runtimes_code(tmp_path: Path) -> None:
    """An unknown model."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.answers = lambda command: {"error": "there is no model 'x'", "code": "NOT_FOUND"}
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)

        with pytest.raises(StatusError, match="no model 'x'") as refused:
            await link.command({"command": "prefetch", "model": "x"})

        assert refused.value.code == "NOT_FOUND"
        assert not link.overrides.models
    runtime.die()


@looped
async def test_a_new_runtime_is_told_what_operators_set(tmp_path: Path) -> None:
    """All are paused but one, one is pinned and has a policy, the scheduler is changed; then the runtime dies."""
    first = FakeRuntime(tmp_path / "runtime.sock")
    first.entries = {"a@1": entry("a"), "b@1": entry("b")}
    pin = {"command": "residency", "model": "a", "residency": "device"}
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
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
    """It was pinned by a control process that is no more, and the runtime has ended since."""
    pin = {"command": "residency", "model": "a", "residency": "device"}
    first = FakeRuntime(tmp_path / "runtime.sock")
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        await link.command(pin)
    first.die()

    second = FakeRuntime(tmp_path / "runtime.sock", instance="22" * 8)
    second.entries = {"a@1": entry("a")}
    async with linked(tmp_path):
        await second.came(lambda: second.commands == [pin])
    second.die()


@looped
async def test_what_was_set_counts_though_whoever_asked_has_gone(tmp_path: Path) -> None:
    """The runtime does what it was told, and refuses some of it, after its clients have hung up."""
    pin = {"command": "residency", "model": "a", "residency": "device"}
    refused = {"command": "residency", "model": "x", "residency": "device"}
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.answers = lambda command: {"error": "no such model"} if command == refused else {}
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        runtime.stop()
        asking = [
            asyncio.create_task(asked)
            for asked in (link.command(pin), link.command(refused), link.configure({"depth": 3}))
        ]
        await asyncio.sleep(0)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert not link.overrides.models
        runtime.go_on()
        await until(link, lambda: link.up)
        await link.status()  # answered after the others

        assert (link.overrides.models, link.overrides.scheduler) == ({"a"}, {"depth": 3})
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
    """The model is announced before commands for it are taken, or before it is built."""
    overrides = Overrides(tmp_path / "overrides.json")
    overrides.commanded(command)
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    answers = iter([{"error": "not yet", "code": refusal}, {}])
    runtime.answers = lambda command: next(answers)
    async with linked(tmp_path) as link:
        await until(link, lambda: link.up)
        runtime.change("a@1", entry("a", state="loading"))
        await runtime.came(lambda: len(runtime.commands) == 1)
        await link.status()  # the refusal has come before this
        runtime.change("a@1", entry("a"))

        await runtime.came(lambda: runtime.commands == [command, command])
    runtime.die()

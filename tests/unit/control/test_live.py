"""The live page's events. They are sent to its watchers. Without watchers, the runtime is seldom asked."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rsrv.control import live as module
from rsrv.control.bundle_states import BundleFailure
from rsrv.control.card_memory import Cards
from rsrv.control.live import Event, Live, OneServer
from rsrv.control.presence import StubPoll
from rsrv.control.runtimes import Runtimes
from rsrv.control.v1 import control_pb2 as pb
from rsrv.live.source import PageError
from rsrv.wire.paths import ASLEEP
from rsrv_gen.config import CHOICE, MARK
from tests.unit.control.peers import FakeLifecycle, FakeRuntime, entry, linked, served, slow_request, until
from tests.unit.control.test_overview import DEVICE, histogram, model
from tests.waiting import looped


@dataclass
class Watched:
    runtime: FakeRuntime
    runtimes: Runtimes
    live: Live
    #: The Unix time in seconds, as the only item. A test may change it.
    now: list[float]
    lifecycle: FakeLifecycle

    @property
    def updates(self) -> int:
        return len(self.runtime.asked)


class Spans:
    """Answers of a runtime to the commands of an update. `spans` has all spans so far."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.spans: list[tuple[Any, ...]] = []

    def answer(self, command: dict[str, Any]) -> dict[str, Any] | None:
        match command["command"]:
            case "timeline":
                since = command["since"]
                some = self.spans[since : since + 2]
                end = len(self.spans)
                numbers = {"first": since, "next": since + len(some), "end": end}
                return {"instance": self.instance, **numbers, "spans": some}
            case "evict":
                return {"models": ["a"]}
            case "history" if command["model"] == "a":
                records = [{"at": 1.0, "what": "model ready", "why": "warmed up"}]
                waits_for = "queued (demand): waits for the load of b"
                two = {
                    "a@1": {"records": records, "waits_for": ""},
                    "a@2": {"records": [], "waits_for": waits_for},
                }
                return {"unix_s": 1e9, "histories": two}
            case "history":
                return REFUSED
        return {}


REFUSED = {"error": "there is no model 'x'", "code": "NOT_FOUND"}


@asynccontextmanager
async def watched(tmp_path: Path, every: float = 0.01) -> AsyncIterator[Watched]:
    """Serve a runtime with one model, at the Unix time 1000."""
    runtime = FakeRuntime(tmp_path / "runtime.sock")
    runtime.entries["a@1"] = entry("a")
    runtime.models = {name: model(histogram(0.002), name, device_bytes=930, state_bytes=30) for name in "ab"}
    runtime.record = pb.DeviceRecord(**DEVICE)
    runtime.record.shared.add(bytes=200, models=["a", "b"], on_device=True)
    runtime.answers = Spans(runtime.instance).answer
    async with linked(tmp_path) as runtimes:
        await until(runtimes, lambda: runtimes.up)
        now = [1000.0]
        facts = {"name": "here"}
        lifecycle: Any = FakeLifecycle()
        diagnosis: Any = SimpleNamespace(findings=[])
        live = Live(runtimes, Cards(["cpu"]), facts, lifecycle, diagnosis, lambda: now[0], every)
        running = asyncio.create_task(live.run())
        try:
            yield Watched(runtime, runtimes, live, now, lifecycle)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            runtime.die()


async def find(events: AsyncGenerator[Event, None], name: str, text: str = "") -> Any:
    """Return the data of the next event with this name whose data contain this text."""
    async for event in events:
        if event.name == name and text in event.json:
            return json.loads(event.json)
    raise AssertionError("the stream has ended")


@looped
async def test_a_watcher_gets_what_there_is_and_then_what_happens(tmp_path: Path) -> None:
    """A new watcher gets the log, the state and the timeline once, and then each change."""
    async with watched(tmp_path) as server:
        spans = Spans(server.runtime.instance)
        spans.spans = [("execute", f"a@{n}", 5.0 - n, 0.5, 3, 4, 2, False) for n in range(5)]
        spans.spans.insert(0, ("load", "a@1", 99.0, 0.5, 0, 0, 0, False))
        server.runtime.answers = spans.answer
        async with aclosing(server.live.watch()) as events:
            assert (await anext(events)).name == "begin"
            state = await find(events, "state")
            assert (state["t"], state["up"], state["instance"]) == (1000.0, True, server.runtime.instance)
            assert [row["name"] for row in state["models"]] == ["a"]
            # An answer has two spans. Spans older than the page's range are left out.
            assert (await find(events, "spans"))["spans"] == [["execute", "a", 995.0, 0.5, 3, 4, 2, False, 0]]
            assert len((await find(events, "spans"))["spans"]) == 2
            assert len((await find(events, "spans"))["spans"]) == 2
            server.runtime.change("a@1", entry("a", weights="absent"))
            assert (await find(events, "log", "warm")) == {"t": 1000.0, "text": "a: warm", "moves": True}


@looped
async def test_an_update_has_only_models_that_changed(tmp_path: Path) -> None:
    """After the whole state, updates have only changes. A later watcher gets the whole state, the memory and the charts."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        server.runtime.change("b@1", entry("b"))
        assert (await find(events, "server")) == {"name": "here"}
        await find(events, "state", '"name": "b"')
        memory = await find(events, "memory")
        assert memory == {"0": {"scratch": 7, "models": {"a": 730, "b": 730}, "groups": [[200, ["a", "b"]]]}}
        server.now[0] += 1
        assert (await find(events, "state", '"models": []'))["gone"] == []
        server.runtime.change("b@1", None)
        assert (await find(events, "state", '"gone": ["b"]'))["models"] == []
        async with aclosing(server.live.watch()) as later:
            whole = await find(later, "state")
            assert [row["name"] for row in whole["models"]] == ["a"]
            assert "gone" not in whole
            assert (await find(later, "memory")) == memory
            assert (await find(later, "charts"))["5 min"] == []  # a point takes five seconds


@looped
async def test_busy_models_are_told_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a state with many changed models, updates have only the timeline for a while. The state names the time of the next state."""
    monkeypatch.setattr(module, "_CHANGES_AN_UPDATE", 1)
    async with watched(tmp_path) as server:
        for name in "bc":
            server.runtime.change(f"{name}@1", entry(name))
        spans, updates = Spans(server.runtime.instance), count(1)

        def status(since: int) -> pb.DeviceRecord:
            busy = histogram(*[0.002] * next(updates))
            return pb.DeviceRecord(
                instance=server.runtime.instance, models=[model(busy, name) for name in "abc"]
            )

        monkeypatch.setattr(server.runtime, "status", status)
        server.runtime.answers = spans.answer
        async with aclosing(server.live.watch()) as events:
            assert (await find(events, "state", '"name": "c"'))["next_s"] == 0.01  # rates need a second state
            assert (await find(events, "state"))["next_s"] == pytest.approx(0.03)
            server.runtime.commands.clear()
            await find(events, "state")
            commands = [command["command"] for command in server.runtime.commands]
            assert commands.count("timeline") == 3


@looped
async def test_charts_have_what_was_served(tmp_path: Path) -> None:
    """Five seconds of updates make a point of the shortest range, which watchers get."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        await find(events, "state")
        server.now[0] += 5
        name, (t, rate, *_) = await find(events, "point")
        assert (name, t, rate) == ("5 min", 1005.0, 0)
        async with aclosing(server.live.watch()) as later:
            assert [point[0] for point in (await find(later, "charts"))["5 min"]] == [1005.0]


@looped
async def test_of_weights_that_move_often_some_are_told(tmp_path: Path) -> None:
    """Five weight changes a second are logged, with the number of the others. Other events are always logged."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        await find(events, "log", server.runtime.instance)
        for number in range(12):
            server.runtime.change("a@1", entry("a", weights=("absent", "resident")[number % 2]))
        server.runtime.change("a@1", entry("a", paused="hold"))
        lines = [(await find(events, "log"))["text"] for _ in range(6)]
        assert lines[:5] == ["a: warm", "a: resident"] * 2 + ["a: warm"]
        assert lines[5] == "a: paused (hold)"
        server.now[0] += 1
        server.runtime.change("a@1", entry("a", paused="hold", weights="absent"))
        lines = [(await find(events, "log"))["text"] for _ in range(2)]
        assert lines == ["7 more loads and evictions of weights", "a: warm"]


@looped
async def test_after_an_update_the_newest_event_says_what_serves(tmp_path: Path) -> None:
    """After an update, or a fall to cold, the last line of the log says that the model still serves."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        await find(events, "log", server.runtime.instance)
        for state in ("loading", "ready"):
            server.runtime.change("a@2", entry("a", digest="new", state=state))
        server.runtime.change("a@1", entry("a", digest="old", state="leaving"))
        server.runtime.change("a@1", None)
        lines = [(await find(events, "log"))["text"] for _ in range(4)]
        assert lines == [
            "a: version new is starting",
            "a: version new is resident",
            "a: version old is leaving; version new serves",
            "a: version old was removed; version new serves",
        ]
        server.runtime.change("a@2", entry("a", digest="new", state="cold"))
        assert (await find(events, "log"))["text"] == "a: version new is leaving; the model is cold"


@looped
async def test_failures_are_events(tmp_path: Path) -> None:
    """The failure of a model that cannot be loaded, and its end, are lines of the log, although no version changes."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        broken, failures = BundleFailure("no manifest", since=0.0), server.lifecycle.failures
        failures["b"] = broken
        assert (await find(events, "log", "b "))["text"] == "b has failed: no manifest"
        assert "b" in [row["name"] for row in (await find(events, "state", '"failed"'))["models"]]
        del failures["b"]
        assert (await find(events, "log", "b "))["text"] == "b has no error any more"
        await find(events, "state", '"gone": ["b"]')
        failures["a"] = broken
        assert (await find(events, "log", "a is"))["text"] == "a is served in an older version: no manifest"
        failures["aliases.ab"] = BundleFailure("no model", since=0.0)
        assert (await find(events, "log", "ab"))["text"] == "the alias ab has failed: no model"


@looped
async def test_aliases_are_told_with_their_shares_and_counts(tmp_path: Path) -> None:
    """A state has all aliases if any of their counts has changed. A later watcher also gets them."""
    async with watched(tmp_path) as server:
        server.lifecycle.aliases = {"ab": {"a": 80.0, "b": 20.0, "c": "shadow"}}
        a, c = (server.runtime.models.setdefault(name, pb.ModelRecord(name=name)) for name in "ac")
        a.aliases["ab"].counts.update({"ok": 8, "cancelled": 1, "internal": 2})
        async with aclosing(server.live.watch()) as events:
            (alias,) = (await find(events, "state", '"aliases"'))["aliases"]
            assert (alias["name"], alias["failure"]) == ("ab", "")
            targets = [tuple(target.values()) for target in alias["targets"]]
            assert targets == [("a", "80%", 8, 2, ""), ("b", "20%", 0, 0, ""), ("c", "shadow", 0, 0, "")]
            assert "aliases" not in await find(events, "state")
            c.shadows["ab"].counts.update({"same": 7, "different": 1, "failed": 0})
            (alias,) = (await find(events, "state", '"aliases"'))["aliases"]
            assert alias["targets"][2]["copies"] == "1 different, 7 same"
            async with aclosing(server.live.watch()) as later:
                assert (await find(later, "state"))["aliases"] == [alias]


@looped
async def test_a_device_that_sleeps_is_well(tmp_path: Path) -> None:
    """The page shows sleeping models and the start of the sleep. The device is not shown as one that fails to answer."""
    async with watched(tmp_path) as server:
        (tmp_path / ASLEEP).write_text("990.5")
        server.runtime.die()
        await until(server.runtimes, lambda: server.runtimes.asleep)
        async with aclosing(server.live.watch()) as events:
            state = await find(events, "state")
            assert (state["up"], state["asleep"], state["cold"]) == (True, True, 0)
            assert state["devices"] == [{"number": 0, "card": None, "asleep_since": 990.5}]
            assert [(row["name"], row["weights"]) for row in state["models"]] == [("a", "asleep")]


@looped
async def test_moves_of_weights_push_no_other_event_out_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full log drops its oldest line about a move of weights. If there is none, it drops its oldest line."""
    monkeypatch.setattr(module, "_LOG_LINES", 4)
    async with watched(tmp_path) as server:

        async def lines() -> list[str]:
            async with aclosing(server.live.watch()) as events:
                past = [await anext(events) for _ in range(6)]
            return [json.loads(event.json)["text"] for event in past if event.name == "log"]

        async with aclosing(server.live.watch()) as events:
            await find(events, "log", server.runtime.instance)
        for number, moves in enumerate((True, False, True, True, False, True, True)):
            server.live.note(f"line {number}", moves=moves)
        assert (await lines())[1:] == ["line 1", "line 4", "line 6"]
        for number in range(7, 10):
            server.live.note(f"line {number}")
        assert await lines() == ["line 4", "line 7", "line 8", "line 9"]


@looped
async def test_the_runtime_is_seldom_asked_without_watchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without watchers, the runtime is asked for figures only after long pauses. The log continues."""
    monkeypatch.setattr(module, "_REST_S", 3600.0)
    async with watched(tmp_path) as server:
        for _ in range(20):
            await server.runtimes.command({"command": "compact"})
        assert server.updates == 0
        for _ in range(2):
            async with aclosing(server.live.watch()) as events:
                await find(events, "log", server.runtime.instance)
                await find(events, "state")
            # An update may be in progress, and may still end.
            before = server.updates
            for _ in range(20):
                await server.runtimes.command({"command": "compact"})
            assert server.updates <= before + 1


@looped
async def test_the_charts_go_on_without_watchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is opened later shows the requests of the time before."""
    monkeypatch.setattr(module, "_REST_S", 0.005)
    async with watched(tmp_path) as server:
        for _ in range(2):
            before = server.updates
            while server.updates < before + 2:  # one update began before this point, and one after it
                await server.runtimes.command({"command": "compact"})
            server.now[0] += 5
        async with aclosing(server.live.watch()) as events:
            assert [point[0] for point in (await find(events, "charts"))["5 min"]] == [1005.0]


@looped
async def test_a_clock_that_is_set_back_keeps_no_old_timeline(tmp_path: Path) -> None:
    """A new watcher gets spans that were read for earlier watchers. If the clock was set back, it gets only spans from after that."""
    async with watched(tmp_path) as server:
        spans = Spans(server.runtime.instance)
        spans.spans = [("execute", "a@1", 1.0, 0.5, 3, 4, 2, False)]
        server.runtime.answers = spans.answer
        async with aclosing(server.live.watch()) as first:
            await find(first, "spans")
            server.now[0] -= 3600
            spans.spans.append(("load", "b@1", 1.0, 0.5, 0, 0, 0, False))
            await find(first, "spans", "load")
            async with aclosing(server.live.watch()) as second:
                assert (await find(second, "spans"))["spans"][0][:2] == ["load", "b"]


@looped
async def test_a_runtime_that_dies_shows_and_the_next_one_too(tmp_path: Path) -> None:
    """The death of a runtime and the start of the next one are logged. The new timeline is read from its start."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        await find(events, "state", '"up": true')
        server.runtime.die()
        await find(events, "log", "does not answer")
        assert "does not answer" in (await find(events, "state", '"up": false'))["why"]
        successor = FakeRuntime(tmp_path / "runtime.sock", "22" * 8)
        spans = Spans(successor.instance)
        spans.spans = [("load", "b@1", 1.0, 0.5, 0, 0, 0, True)]
        successor.answers = spans.answer
        await find(events, "log", successor.instance)
        assert (await find(events, "spans"))["spans"] == [["load", "b", 999.0, 0.5, 0, 0, 0, True, 0]]
        successor.die()


@looped
async def test_a_watcher_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a watcher that does not read ends, and the other streams continue."""
    monkeypatch.setattr(module, "_MAX_PENDING_EVENTS", 4)
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as slow:
        await anext(slow)
        async with aclosing(server.live.watch()) as events:
            for _ in range(20):
                await find(events, "state")
            assert len([event async for event in slow]) <= 6
            await find(events, "state")


@looped
async def test_figures_that_cannot_be_read_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If figures cannot be read, the log reports it, and the next update tries again."""
    async with watched(tmp_path) as server, aclosing(server.live.watch()) as events:
        await anext(events)
        sound = server.runtime.answers
        server.runtime.answers = lambda command: {"models": 3}
        while "an update of the live page failed" not in caplog.text:
            await server.runtimes.command({"command": "compact"})
        server.runtime.answers = sound
        await find(events, "state", '"up": true')


@looped
async def test_the_page_of_one_server_shows_panels_and_steers(tmp_path: Path) -> None:
    """The page of one server shows all facts about a model, and sends commands. A refusal becomes an HTTP status."""

    async def tensors(model: str) -> dict[str, Any]:
        return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}], "outputs": []}

    async def infer(model: str, inputs: Any) -> tuple[int, str]:
        return 200, f"{model} {inputs}"

    async with served(tmp_path, models=["a"]) as server:
        spans = Spans(server.runtime.instance)
        spans.spans = [("execute", "a@1", 1.0, 0.5, 3, 4, 2, False)] * 3
        answers = {
            "slowest": {"unix_s": 1e9, "requests": [slow_request(1.0, 0.5)]},
            "timeline": None,
        }
        server.runtime.answers = lambda command: answers.get(command["command"]) or spans.answer(command)
        source = OneServer(server.live, server.service, tensors, infer)
        async with aclosing(source.events()) as events:
            assert (await anext(events)) == ("server", "begin", "null")
        (server.repository / "a/config.pbtxt").write_text(f"{MARK}\n{CHOICE}Python front: it has hooks\n")
        panel = await source.panel("", "a")
        assert ("front", "Python front: it has hooks") in panel["facts"]
        ready, waits = panel["history"]
        assert ready.endswith(" a@1: ready")
        assert waits.endswith(" a@2: its weights are queued (demand): waits for the load of b")
        assert "request 3.17 of 3 rows for a waited" in panel["slowest"][-1]
        assert ("requests", "1 queued, 2 executing; 7 answered, 1 refused") in panel["facts"]
        assert [value for name, value in panel["facts"] if name == "version"] == ["a@1 resident"]
        means = "2; on average 11 tokens in, 40 tokens out, 3 ms to the first, 2 ms to each next"
        assert ("answers", means) in panel["facts"]
        assert ("0", "8", "4", "2 ms") in panel["executables"]
        assert panel["inputs"][0]["name"] == "x"
        assert await source.infer("", "a", []) == (200, "a []")
        for unknown in ("x", ""):
            with pytest.raises(PageError, match="no model"):
                await source.infer("", unknown, [])
        with pytest.raises(PageError, match="no model 'x'") as wrong:
            await source.panel("", "x")
        assert wrong.value.status == 404
        server.runtimes.see_stubs(StubPoll({"cold"}))
        server.lifecycle.failures["bad"] = BundleFailure("no manifest", since=0.0)
        for name, text in (("cold", "cold is cold: a request"), ("bad", "bad has failed: no manifest")):
            (line,) = (await source.panel("", name))["history"]
            assert line.startswith(text)
        events_of_trace = json.loads(await source.trace(""))["traceEvents"]
        assert [event["name"] for event in events_of_trace if event["ph"] == "X"] == ["a"] * 3
        server.runtime.commands.clear()
        for what in ("pin", "unpin", "prefetch", "evict"):
            await source.steer("", "a", what)
        steered = [
            command for command in server.runtime.commands if command["command"] in ("follow", "evict")
        ]
        system = {"settings": {"residency": "system"}}
        assert steered == [
            {"command": "follow", "models": {"a": {"settings": {"residency": "device"}, "asked": 1}}},
            {"command": "follow", "models": {"a": {**system, "asked": 2}}},
            {"command": "follow", "models": {"a": {**system, "asked": 3, "prefetched": True}}},
            {"command": "evict", "model": "a"},
            {"command": "follow", "models": {"a": {**system, "asked": 3}}},
        ]
        server.runtime.die()
        await until(server.runtimes, lambda: not server.link.up)
        with pytest.raises(PageError) as wrong:
            await source.steer("", "a", "pin")
        assert wrong.value.status == 503

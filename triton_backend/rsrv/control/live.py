"""The events of the live page. All watchers of the page get the events of all devices of one server."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from google.protobuf.message import Message

from rsrv.control import messages, page_calls
from rsrv.control.aliases import alias_messages, alias_picture
from rsrv.control.card_memory import Cards
from rsrv.control.charts import RANGES, Charts
from rsrv.control.diagnosis import Diagnosis
from rsrv.control.grpc_service import StatusError
from rsrv.control.overview import Overview, describe, device_picture, memory_picture, served
from rsrv.control.reconciler import Reconciler
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtime_state import ModelVersion, StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes
from rsrv.control.sentences import failed_how
from rsrv.control.v1 import control_pb2 as pb
from rsrv.control.v1 import control_pb2_grpc
from rsrv.live.source import PageError

log = logging.getLogger(__name__)

#: Seconds between two updates from the runtimes while somebody watches.
_UPDATE_S = 1.0
#: Seconds between two updates while nobody watches. The charts need updates even then.
_REST_S = RANGES[0].seconds
#: After a state with n changed models, the next state is sent n / _CHANGES_AN_UPDATE updates later, and at most _MAX_UPDATES
#: later. A state with a thousand changed models takes 35 ms, so the page takes 1 % of a core.
_CHANGES_AN_UPDATE, _MAX_UPDATES = 250, 4
#: Minimum seconds between two reads of the models' bytes. A runtime takes longer to compute the bytes than other figures.
_MEMORY_S = 5.0
#: Number of lines in the event log, all of which a new watcher gets.
_LOG_LINES = 200
#: Seconds of the timeline that a new watcher gets.
_TIMELINE_S = 30.0
#: Maximum number of lines about loads and evictions in a second.
_MAX_MOVES_A_SECOND = 5
#: Maximum number of answers about the timeline that are read in one update. The next update reads further answers.
_MAX_ANSWERS = 5
#: Maximum number of events that wait for a slow watcher. If there are more, its stream ends.
_MAX_PENDING_EVENTS = 1024


class Event(NamedTuple):
    """An event of the page's stream. `json` has its data."""

    name: str
    json: str


#: The stream starts again: drop the earlier events.
_BEGIN = Event("begin", "null")


class Live:
    """Reads the runtimes for the page's watchers. Updates the event log and the charts even while nobody watches."""

    def __init__(
        self,
        runtimes: Runtimes,
        cards: Cards,
        facts: Mapping[str, Any],
        lifecycle: Reconciler,
        diagnosis: Diagnosis,
        clock: Callable[[], float] = time.time,
        every: float = _UPDATE_S,
    ) -> None:
        """Create the live page's state.

        Args:
            runtimes: Runtimes of the server.
            cards: GPUs of the server.
            facts: Facts about the server that the page shows, as JSON.
            lifecycle: Has the failures of models, and the aliases.
            diagnosis: Has the findings.
            clock: Returns the Unix time.
            every: Seconds between two updates.
        """
        self._runtimes, self._cards = runtimes, cards
        self._facts, self._lifecycle, self._diagnosis = (
            Event("server", json.dumps(facts)),
            lifecycle,
            diagnosis,
        )
        self._clock, self._every = clock, every
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._watched = asyncio.Event()
        #: Lines of the event log.
        self._log: deque[Event] = deque()
        #: Lines of the event log that are moves of weights, the oldest first.
        self._moved: deque[Event] = deque()
        self._spans: deque[tuple[float, Event]] = deque()
        self._overview, self._charts = Overview(), Charts()
        #: The latest state that was sent to the watchers.
        self._state: dict[str, Any] = {}
        #: The models in the latest state, by name.
        self._models: dict[str, dict[str, Any]] = {}
        #: The latest event with the bytes of models, and the latest one with the cold models.
        self._memory, self._cold = Event("memory", "{}"), Event("cold", "[]")
        #: The runtimes' count of changes, and the Unix time, at the last read of the models' bytes.
        self._memory_of, self._memory_at = -1, 0.0
        #: Number of updates from the runtimes until the next state is sent.
        self._updates_left = 0
        #: The instance of each device's runtime, and the number of the runtime's next span, by device.
        self._positions: dict[int, tuple[str, int]] = {}
        #: The second of the latest load or eviction, and the number of loads and evictions in it.
        self._second, self._moves = 0, 0
        #: The failures that the event log already has, by name.
        self._failures: Mapping[str, str] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_log())
            group.create_task(self._update())

    async def watch(self) -> AsyncGenerator[Event, None]:
        """Yield the current state, then each event. If the watcher is too slow, the stream ends, and must be started again."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        whole = {**self._state, "models": list(self._models.values())}
        states = [Event("state", json.dumps(whole)), self._memory, self._cold] if self._state else []
        charts = Event("charts", json.dumps(self._charts.all()))
        spans = (event for _, event in self._spans)
        for past in (_BEGIN, self._facts, *self._log, *states, charts, *spans):
            events.put_nowait(past)
        self._watchers.add(events)
        self._watched.set()
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            self._watchers.discard(events)

    def latency(self, model: str) -> list[tuple[float | None, int]]:
        """Return the histogram of a model's request durations over all runtimes: pairs of upper bound and count."""
        return self._overview.latency(model)

    def _tell(self, event: Event) -> None:
        for events in list(self._watchers):
            if events.qsize() < _MAX_PENDING_EVENTS:
                events.put_nowait(event)
            else:
                self._watchers.discard(events)
                events.put_nowait(None)

    # --- the event log ------------------------------------------------------------------------------------

    async def _keep_log(self) -> None:
        runtimes = self._runtimes
        known: set[int] = set()
        feed = runtimes.subscribe()
        try:
            while True:
                device, update = await feed.next()
                where = f" of device {device}" if len(runtimes.links) > 1 else ""
                match update:
                    case None:
                        if device in known:  # A runtime that is not in `known` has not started yet.
                            known.discard(device)
                            self.note(f"the runtime{where} does not answer")
                    case StateSnapshot(instance, _, found):
                        known.add(device)
                        count = f"{len(found)} version{'' if len(found) == 1 else 's'} of models"
                        self.note(f"runtime {instance}{where}: {count}")
                    case StateChange(entry=entry, before=before, moves=moves):
                        leaves = entry is None or entry["state"] == "leaving"
                        serving = self._serving(device, before or entry) if leaves else ""
                        text = describe(before, entry, serving)
                        if text is not None and (not moves or self._has_room()):
                            self.note(f"device {device}: {text}" if where else text, moves=moves)
        finally:
            feed.close()

    def _serving(self, device: int, changed: ModelVersion | None) -> str:
        """Return a text that says which version of a model serves on a device after the version `changed` has changed."""
        if changed is None or changed["state"] == "loading":
            return ""
        name, presence = changed["name"], self._runtimes.presence
        version = served(presence.devices[device].versions(name)).get(name)
        if version is not None and version["state"] == "ready":
            return f"version {version['digest'][:12]} serves"
        return "the model is cold" if presence.waits(name) else "no other version serves"

    def _note_failures(self, failures: Mapping[str, str]) -> None:
        """Add a line to the event log for each model that has failed or recovered since the last call."""
        before, self._failures = self._failures, dict(failures)
        entries = self._runtimes.entries.values() if failures != before else ()
        serving = self._runtimes.cold | {entry["name"] for entry in entries if entry["state"] == "ready"}
        for name, text in failures.items():
            if before.get(name) != text:
                how = failed_how(serves=name in serving)
                self.note(f"{self._shown(name)} {how}: {text}")
        for name in before.keys() - failures.keys():
            self.note(f"{self._shown(name)} has no error any more")

    def _shown(self, name: str) -> str:
        """Return the name of a failed model or alias for the event log."""
        alias = name.removeprefix("aliases.")
        return f"the alias {alias}" if alias != name or name in self._lifecycle.aliases else name

    def _has_room(self) -> bool:
        """Count a load or eviction. Return True if it gets a line in the event log: hundreds a second would hide other lines."""
        second = int(self._clock())
        if second != self._second:
            skipped = self._moves - _MAX_MOVES_A_SECOND
            self._second, self._moves = second, 0
            if skipped > 0:
                self.note(f"{skipped} more loads and evictions of weights", moves=True)
        self._moves += 1
        return self._moves <= _MAX_MOVES_A_SECOND

    def note(self, text: str, *, moves: bool = False) -> None:
        """Add a line to the event log. A full log drops its oldest line about a load or eviction, or else its oldest line.

        `moves` is True if the line is about a load or eviction.
        """
        line = {"t": round(self._clock(), 3), "text": text, **({"moves": True} if moves else {})}
        event = Event("log", json.dumps(line))
        self._log.append(event)
        if moves:
            self._moved.append(event)
        if len(self._log) > _LOG_LINES:
            self._log.remove(self._moved.popleft() if self._moved else self._log[0])
        self._tell(event)

    # --- the state --------------------------------------------------------------------------------------

    async def _update(self) -> None:
        while True:
            watched = bool(self._watchers)
            if not watched:
                self._watched.clear()
                self._spans.clear()
                # Without watchers, forget what was sent, so that the next watcher gets everything.
                self._state, self._models, self._memory_of, self._updates_left = {}, {}, -1, 0
                with suppress(TimeoutError):
                    async with asyncio.timeout(_REST_S):
                        await self._watched.wait()
            try:
                if self._updates_left == 0:
                    await self._tell_state()
                self._updates_left = max(0, self._updates_left - 1)
                if self._watchers:
                    with suppress(StatusError):
                        await self._tell_memory()
                        await self._read_timeline()
            except Exception:
                # A fault of the page must not end the control process.
                log.exception("an update of the live page failed")
            if self._watchers:
                await asyncio.sleep(self._every)

    async def _tell_state(self) -> None:
        """Update the event log and the charts, and send the state to the watchers.

        The first state has all models and aliases. Later states have only changed models and aliases, and the names of removed
        models.
        """
        runtimes, now = self._runtimes, self._clock()
        # The page needs to know when any runtime is replaced, because the sums of counters then fall.
        instance = " ".join(link.state.instance for link in runtimes.live.values())
        failures, aliases = self._lifecycle.reasons, self._lifecycle.aliases
        self._note_failures(failures)
        state = {
            "t": now,
            "up": True,
            "instance": instance,
            "findings": [asdict(finding) for finding in self._diagnosis.findings],
        }
        models, first, cold = self._models, not self._state, runtimes.cold
        records: dict[int, RuntimeRecords] = {}
        try:
            records = await runtimes.records()
        except StatusError as error:
            state |= {"up": False, "why": str(error)}
        else:
            asleep = not records
            models = self._overview.take(
                *(records, runtimes.entries, failures, self._on(), now),
                cold=cold,
                aliases=aliases.keys(),
                asleep=asleep,
            )
            ended = self._charts.add(now, self._overview.work, len(records)) if records else {}
            for name, point in ended.items():
                self._tell(Event("point", json.dumps([name, point])))
            # Leave out cold models that are still in `models`: their last version is leaving, or they were ready before a sleep.
            cold -= models.keys()
            state |= {"devices": await self._devices(records, now), "cold": len(cold), "asleep": asleep}
        if not self._watchers:
            return
        # Send only changed models, because a state with thousands of models would be a megabyte every second.
        changed = [model for name, model in models.items() if model is not self._models.get(name)]
        removed = {} if first else {"gone": [name for name in self._models if name not in models]}
        # Send the second state soon, because the page needs two states to show rates.
        self._updates_left = 0 if first else min(_MAX_UPDATES, -(-len(changed) // _CHANGES_AN_UPDATE))
        state["next_s"] = max(1, self._updates_left) * self._every
        state["aliases"] = [
            alias_picture(alias) for alias in alias_messages(aliases, failures, records.values())
        ]
        same = ("aliases",) if state["aliases"] == self._state.get("aliases") else ()
        self._state, self._models = state, models
        names = Event("cold", json.dumps(sorted(cold)))
        if first or names != self._cold:
            self._cold = names
            self._tell(names)
        fields = {key: value for key, value in state.items() if key not in same}
        self._tell(Event("state", json.dumps({**fields, "models": changed, **removed})))

    def _on(self) -> dict[str, list[int]]:
        """Return the devices that hold the weights of each model."""
        on: dict[str, list[int]] = {}
        for number, link in self._runtimes.live.items():
            for entry in link.state.entries.values():
                if entry["weights"] == "resident":
                    there = on.setdefault(entry["name"], [])
                    if number not in there:
                        there.append(number)
        return on

    async def _devices(self, records: Mapping[int, RuntimeRecords], now: float) -> list[dict[str, Any]]:
        cards = await self._cards.memory()
        return [
            {
                "number": number,
                "card": cards[number]._asdict() if number in cards else None,
                **(
                    device_picture(records[number])
                    if number in records
                    else {"down_since": now - link.down_s}
                    if link.asleep_since is None
                    else {"asleep_since": link.asleep_since}
                ),
            }
            for number, link in enumerate(self._runtimes.links)
        ]

    async def _tell_memory(self) -> None:
        """Send the bytes of each model and of shared tensors, if models were added or removed."""
        runtimes, now = self._runtimes, self._clock()
        recent = self._memory_of >= 0 and abs(now - self._memory_at) < _MEMORY_S
        if recent or runtimes.other_changes == self._memory_of:
            return
        self._memory_of, self._memory_at = runtimes.other_changes, now
        whole = await runtimes.records(whole=True)
        uses = {number: messages.memory_use(number, record) for number, record in whole.items()}
        self._memory = Event("memory", json.dumps({n: memory_picture(use) for n, use in uses.items()}))
        self._tell(self._memory)

    async def _read_timeline(self) -> None:
        for _ in range(_MAX_ANSWERS):
            answers = await self._runtimes.read_on("timeline", self._positions)
            now = self._clock()
            self._positions |= {
                number: (answer["instance"], answer["next"]) for number, answer in answers.items()
            }
            spans = [
                (kind, key.rpartition("@")[0], round(now - ago, 6), seconds, *counts, number)
                for number, answer in answers.items()
                for kind, key, ago, seconds, *counts in answer["spans"]
                if ago - seconds < _TIMELINE_S
            ]
            if spans:
                event = Event("spans", json.dumps({"spans": spans}))
                self._spans.append((now, event))
                self._tell(event)
            # Use the absolute difference, because the clock may have been set back.
            while self._spans and abs(now - self._spans[0][0]) > _TIMELINE_S:
                self._spans.popleft()
            if all(answer["next"] >= answer["end"] for answer in answers.values()):
                return


class OneServer:
    """The page's source in the control process of one server."""

    def __init__(
        self,
        live: Live,
        service: control_pb2_grpc.ControlServicer,
        tensors: Callable[[str], Awaitable[dict[str, Any]]],
        infer: Callable[[str, Any], Awaitable[tuple[int, str]]],
    ) -> None:
        """`tensors` requests a model's inputs and outputs from Triton. `infer` sends a request with inputs to a model."""
        self._live, self._service, self._tensors, self._infer = live, service, tensors, infer

    async def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        async with aclosing(self._live.watch()) as events:
            async for event in events:
                yield "server", event.name, event.json

    async def panel(self, server: str, model: str) -> dict[str, Any]:
        page = await page_calls.panel(self._ask, model, time.time())
        return {**page, **await self._tensors(model), "latency": self._live.latency(model)}

    async def trace(self, server: str) -> str:
        return await page_calls.trace(self._ask)

    async def steer(self, server: str, model: str, action: str) -> None:
        await page_calls.steer(self._ask, model, action)

    async def infer(self, server: str, model: str, inputs: Any) -> tuple[int, str]:
        # Check first that the model is rsrv's, because Triton may have other models. An empty name would mean all models, so
        # replace an empty name by a name that no model has.
        await self._ask("GetStatus", pb.GetStatusRequest(model=model or "?"))
        return await self._infer(model, inputs)

    async def _ask(self, call: str, request: Message) -> Any:
        """Call the service without gRPC. Raises PageError."""
        try:
            return await getattr(type(self._service), call).__wrapped__(self._service, request)
        except StatusError as refused:
            raise PageError.of(refused.code, str(refused)) from None

"""The live page's events of one server, all of its devices, for all of its watchers."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any, NamedTuple

from rsrv.control import messages
from rsrv.control.card_memory import Cards
from rsrv.control.findings import ServerFinding
from rsrv.control.grpc_service import StatusError
from rsrv.control.overview import Overview, describe, device_picture
from rsrv.control.protocols import ModelVersion, moves_only
from rsrv.control.runtime_link import StateChange, StateSnapshot
from rsrv.control.runtimes import Runtimes
from rsrv.control.sentences import history_lines
from rsrv.live.source import RESIDENCIES, PageError

log = logging.getLogger("rsrv.control")

#: Seconds between two looks while the page has watchers.
_LOOK_S = 1.0
#: Lines of the event log that a new watcher gets.
_LOG_LINES = 200
#: Seconds of the timeline that a new watcher gets.
_TIMELINE_S = 30.0
#: Lines about loads and evictions in a second.
_MAX_MOVES_A_SECOND = 5
#: Answers of the timeline that are read at a look; the next look reads the rest.
_MAX_ANSWERS = 5
#: Events that wait for a slow watcher; beyond, its stream ends.
_MAX_PENDING_EVENTS = 1024


class Event(NamedTuple):
    """An event of the page's stream; `json`: its data."""

    name: str
    json: str


#: The stream starts again: drop the earlier events.
_BEGIN = Event("begin", "null")


class Live:
    """Looks at the runtimes while the page has watchers, and always keeps the event log. `run` drives it."""

    def __init__(
        self,
        runtimes: Runtimes,
        cards: Cards,
        failures: Callable[[], Mapping[str, str]],
        findings: Callable[[], Sequence[ServerFinding]],
        clock: Callable[[], float] = time.time,
        every: float = _LOOK_S,
    ) -> None:
        """`failures`: the reasons why models are not as their bundles say, by name; `clock`: Unix time."""
        self._runtimes, self._cards = runtimes, cards
        self._failures, self._findings = failures, findings
        self._clock, self._every = clock, every
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._watched = asyncio.Event()
        self._log: deque[Event] = deque(maxlen=_LOG_LINES)
        self._spans: deque[tuple[float, Event]] = deque()
        self._overview = Overview()
        #: By device, the runtime's instance and the number of its next span.
        self._positions: dict[int, tuple[str, int]] = {}
        #: The second of the last load or eviction, and their number in it.
        self._second, self._moves = 0, 0

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_log())
            group.create_task(self._look())

    async def watch(self) -> AsyncGenerator[Event, None]:
        """Yield the current state, then each event. The stream of a slow watcher ends; it may watch again."""
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        for past in (_BEGIN, *self._log, *(event for _, event in self._spans)):
            events.put_nowait(past)
        self._watchers.add(events)
        self._watched.set()
        try:
            while (event := await events.get()) is not None:
                yield event
        finally:
            self._watchers.discard(events)

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
        entries: dict[int, dict[str, ModelVersion]] = {}
        feed = runtimes.subscribe()
        try:
            while True:
                device, update = await feed.next()
                where = f" of device {device}" if len(runtimes.links) > 1 else ""
                match update:
                    case None:
                        if entries.pop(device, None) is not None:  # else it has not started yet
                            self.note(f"the runtime{where} does not answer")
                    case StateSnapshot(instance, _, found):
                        entries[device] = dict(found)
                        self.note(f"runtime {instance}{where}: {len(found)} versions of models")
                    case StateChange(_, _, key, entry):
                        before = entries[device].pop(key, None)
                        if entry is not None:
                            entries[device][key] = entry
                        text = describe(before, entry)
                        if text is not None and (not moves_only(before, entry) or self._has_room()):
                            self.note(f"device {device}: {text}" if where else text)
        finally:
            feed.close()

    def _has_room(self) -> bool:
        """Return True if one more line about weights fits: hundreds in a second would hide all others."""
        second = int(self._clock())
        if second != self._second:
            skipped = self._moves - _MAX_MOVES_A_SECOND
            self._second, self._moves = second, 0
            if skipped > 0:
                self.note(f"weights moved {skipped} times more")
        self._moves += 1
        return self._moves <= _MAX_MOVES_A_SECOND

    def note(self, text: str) -> None:
        """Add a line to the event log."""
        event = Event("log", json.dumps({"t": round(self._clock(), 3), "text": text}))
        self._log.append(event)
        self._tell(event)

    # --- the state --------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            if not self._watchers:
                self._watched.clear()
                self._spans.clear()
                await self._watched.wait()
            try:
                self._tell(Event("state", json.dumps(await self._state())))
                with suppress(StatusError):
                    await self._read_timeline()
            except Exception:
                # A fault of the page must not end the control process.
                log.exception("a look for the live page failed")
            await asyncio.sleep(self._every)

    async def _state(self) -> dict[str, Any]:
        runtimes, now = self._runtimes, self._clock()
        # Counters begin again if any runtime does.
        instance = " ".join(link.instance for link in runtimes.live.values())
        findings = [asdict(one) for one in self._findings()]
        state = {"t": now, "up": True, "instance": instance, "findings": findings}
        try:
            figures = await runtimes.query({"command": "overview"})
        except StatusError as error:
            return {**state, "up": False, "why": str(error)}
        cards = await self._cards.memory()
        devices = []
        for number, link in enumerate(runtimes.links):
            card = cards[number]._asdict() if number in cards else None
            picture = (
                device_picture(figures[number]) if number in figures else {"down_since": now - link.down_s}
            )
            devices.append({"number": number, "card": card, **picture})
        on: dict[str, list[int]] = {}
        for number, link in runtimes.live.items():
            for entry in link.entries.values():
                if entry["weights"] == "resident" and number not in on.setdefault(entry["name"], []):
                    on[entry["name"]].append(number)
        overview = self._overview.take(figures, runtimes.entries, self._failures(), now)
        models = [{**model, "on": on.get(model["name"], [])} for model in overview["models"]]
        # Thousands of rows that never change would be a megabyte a second.
        return {**state, "devices": devices, "models": models, "cold": len(runtimes.cold)}

    async def _read_timeline(self) -> None:
        for _ in range(_MAX_ANSWERS):
            said = await self._runtimes.read_on("timeline", self._positions)
            now = self._clock()
            self._positions |= {number: (one["instance"], one["next"]) for number, one in said.items()}
            spans = [
                (
                    kind,
                    key.rpartition("@")[0],
                    round(now - ago, 6),
                    seconds,
                    rows,
                    size,
                    requests,
                    failed,
                    number,
                )
                for number, one in said.items()
                for kind, key, ago, seconds, rows, size, requests, failed in one["spans"]
                if ago - seconds < _TIMELINE_S
            ]
            if spans:
                event = Event("spans", json.dumps({"spans": spans}))
                self._spans.append((now, event))
                self._tell(event)
            while self._spans and now - self._spans[0][0] > _TIMELINE_S:
                self._spans.popleft()
            if all(one["next"] >= one["end"] for one in said.values()):
                return


class OneServer:
    """The page's source in the control process of one server."""

    def __init__(self, live: Live, runtimes: Runtimes) -> None:
        self._live, self._runtimes = live, runtimes

    async def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        async with aclosing(self._live.watch()) as events:
            async for event in events:
                yield "server", event.name, event.json

    async def history(self, server: str, model: str) -> list[str]:
        try:
            said = await self._runtimes.query({"command": "history", "model": model})
        except StatusError as refused:
            raise PageError.of(refused.code, str(refused)) from None
        return history_lines(messages.history(said), time.time())

    async def steer(self, server: str, model: str, what: str) -> None:
        devices = None
        command = {"command": what, "model": model}
        if what in RESIDENCIES:
            command = {"command": "residency", "model": model, "residency": RESIDENCIES[what]}
        elif what == "prefetch":
            devices = self._runtimes.placement.get(model)
        try:
            await self._runtimes.command(command, devices)
        except StatusError as refused:
            raise PageError.of(refused.code, str(refused)) from None

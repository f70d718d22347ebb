"""The live page's events of one server, for as many as watch."""

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

from rsrv.control.grpc_service import StatusError
from rsrv.control.overview import Overview, describe, moves_only
from rsrv.control.protocols import ModelVersion
from rsrv.control.runtime_link import RuntimeLink, StateChange, StateSnapshot
from rsrv.live.routes import RESIDENCIES, PageError, story_lines

log = logging.getLogger("rsrv.control")

#: seconds between two looks, while somebody watches
_EVERY = 1.0
#: lines of the event log, and seconds of the timeline, that a new watcher gets
_LINES = 200
_SECONDS = 30.0
#: lines about weights that move, in a second
_MOVES = 5
#: answers of the timeline that are read at a look: what is beyond is read at the next one
_PAGES = 5
#: events that wait for a watcher who does not take them; beyond, he is let go
_UNTAKEN = 1024


class Event(NamedTuple):
    """`json`: what `name` says, as the page takes it."""

    name: str
    json: str


#: what was told before is told again
_BEGIN = Event("begin", "null")


class Live:
    """Looks at the runtime only while somebody watches; the event log is always kept. `run` keeps it up."""

    def __init__(
        self,
        link: RuntimeLink,
        failures: Callable[[], Mapping[str, str]],
        clock: Callable[[], float] = time.time,
        every: float = _EVERY,
    ) -> None:
        """`failures`: why models are not as their bundles say, by name; `clock`: Unix time."""
        self._link, self._failures = link, failures
        self._clock, self._every = clock, every
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._watched = asyncio.Event()
        self._log: deque[Event] = deque(maxlen=_LINES)
        self._spans: deque[tuple[float, Event]] = deque()
        self._overview = Overview()
        self._instance, self._next = "", 0
        #: the one in which weights moved last, and how often they did
        self._second, self._moves = 0, 0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_log())
            group.create_task(self._look())

    async def watch(self) -> AsyncGenerator[Event, None]:
        """What there is, then what happens. Ends for a watcher who is too slow: he may begin anew."""
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
            if events.qsize() < _UNTAKEN:
                events.put_nowait(event)
            else:
                self._watchers.discard(events)
                events.put_nowait(None)

    # --- the event log ------------------------------------------------------------------------------------

    async def _keep_log(self) -> None:
        entries: dict[str, ModelVersion] = {}
        up, subscription = False, self._link.subscribe()
        try:
            while True:
                match await subscription.next():
                    case None:
                        if up:  # else it is not there yet
                            self._note("the runtime does not answer")
                        up = False
                    case StateSnapshot(instance, _, found):
                        up, entries = True, dict(found)
                        self._note(f"runtime {instance}: {len(entries)} versions of models")
                    case StateChange(_, _, key, entry):
                        text = describe(entries.get(key), entry)
                        if text is not None and (not moves_only(entries.get(key), entry) or self._has_room()):
                            self._note(text)
                        if entry is None:
                            entries.pop(key, None)
                        else:
                            entries[key] = entry
        finally:
            subscription.close()

    def _has_room(self) -> bool:
        """For one more line about weights: where hundreds move in a second, all else would be lost among them."""
        second = int(self._clock())
        if second != self._second:
            unsaid = self._moves - _MOVES
            self._second, self._moves = second, 0
            if unsaid > 0:
                self._note(f"weights moved {unsaid} times more")
        self._moves += 1
        return self._moves <= _MOVES

    def _note(self, text: str) -> None:
        event = Event("log", json.dumps({"t": round(self._clock(), 3), "text": text}))
        self._log.append(event)
        self._tell(event)

    # --- what there is --------------------------------------------------------------------------------------

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
                # A page is nothing to end the control process for.
                log.exception("a look for the live page failed")
            await asyncio.sleep(self._every)

    async def _state(self) -> dict[str, Any]:
        link = self._link
        state = {"t": self._clock(), "up": True, "instance": link.instance}
        try:
            figures = await link.command({"command": "overview"})
        except StatusError as error:
            return {**state, "up": False, "why": str(error)}
        return state | self._overview.take(figures, link.entries, self._failures(), self._clock())

    async def _read_timeline(self) -> None:
        for _ in range(_PAGES):
            said = await self._link.command({"command": "timeline", "since": self._next})
            if said["instance"] != self._instance:
                self._instance, self._next = said["instance"], 0
                continue
            now, self._next = self._clock(), said["next"]
            spans = [
                (kind, key.rpartition("@")[0], round(now - ago, 6), seconds, rows, size, requests, failed)
                for kind, key, ago, seconds, rows, size, requests, failed in said["spans"]
                if ago - seconds < _SECONDS
            ]
            if spans:
                event = Event("spans", json.dumps({"spans": spans}))
                self._spans.append((now, event))
                self._tell(event)
            while self._spans and now - self._spans[0][0] > _SECONDS:
                self._spans.popleft()
            if self._next >= said["end"]:
                return


class OneServer:
    """The page's source where it is this server's own."""

    def __init__(self, live: Live, link: RuntimeLink) -> None:
        self._live, self._link = live, link

    async def events(self) -> AsyncGenerator[tuple[str, str, str], None]:
        async with aclosing(self._live.watch()) as events:
            async for event in events:
                yield "server", event.name, event.json

    async def story(self, server: str, model: str) -> list[str]:
        said = await self._ask({"command": "story", "model": model})
        return story_lines(said["stories"])

    async def steer(self, server: str, model: str, what: str) -> None:
        if what in RESIDENCIES:
            await self._ask({"command": "residency", "model": model, "residency": RESIDENCIES[what]})
        else:
            await self._ask({"command": what, "model": model})

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._link.command(command)
        except StatusError as refused:
            raise PageError.of(refused.code, str(refused)) from None

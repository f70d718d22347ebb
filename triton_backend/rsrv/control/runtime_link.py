"""The runtime, as the control process knows it: connected for as long as there is one, and watched for silence."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rsrv.control.grpc_service import StatusError
from rsrv.control.overrides import Command, Overrides
from rsrv.control.protocols import ModelVersion
from rsrv.wire import socket as wire
from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header, unpack_json
from rsrv.wire.memory import SharedMemoryError, read_document

log = logging.getLogger("rsrv.control")

#: seconds between two pings, and without an answer to one until the runtime counts as not there. What shows readiness
#: must be right within a second.
_PING = 0.25
_SILENCE = 0.6
#: seconds between two tries to reach a runtime
_PAUSE = 0.1
#: seconds that starting or ending a profile may take
_SLOW = 60.0
#: changes that wait for somebody who does not take them; beyond, they get a snapshot instead
_UNTAKEN = 4096
#: frames that are read before the loop does something else
_BURST = 64
#: how a runtime that has just started refuses what is said of a model: it does not know it, or has not built it
_NOT_YET = frozenset(["NOT_FOUND", "FAILED_PRECONDITION"])


class RuntimeDown(StatusError):
    """The runtime does not answer."""

    def __init__(self) -> None:
        super().__init__(
            "UNAVAILABLE",
            "the runtime does not answer: it has ended, or it hangs. The models cannot serve before one does; the server's "
            "log may say more",
        )


@dataclass(frozen=True, slots=True)
class StateChange:
    """`entry` None: it is gone."""

    instance: str
    revision: int
    key: str
    entry: ModelVersion | None


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The next change has the next revision."""

    instance: str
    revision: int
    entries: Mapping[str, ModelVersion]


#: None: the runtime does not answer
StateUpdate = StateSnapshot | StateChange | None


Answer = asyncio.Future[dict[str, Any]]


class ControlConnection:
    """`on_state` gets the JSON of each STATE frame, or of its document; it raises ProtocolError if that cannot be.

    `ended` is done when the connection is over, with the reason.
    """

    def __init__(self, path: Path, on_state: Callable[[dict[str, Any]], None]) -> None:
        """Raises OSError when nobody listens, ProtocolError when the listener is another user's."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._on_state = on_state
        self._waiting: deque[tuple[Kind, Answer]] = deque()
        self._sock = wire.connect(path)
        self._sock.setblocking(False)
        self._receiver = wire.Receiver(self._sock)
        self._loop.add_reader(self._sock, self._readable)
        #: the runtime's first frame
        self.greeting = self.ask(hello(), Kind.WELCOME)

    def send(self, frame: bytes) -> None:
        """Something that has no answer of its own; ends the connection if the runtime does not take it."""
        if self.ended.done():
            return
        try:
            wire.send(self._sock, frame)
        except BlockingIOError:
            self._end("the runtime does not read what it is asked")
        except (wire.Closed, OSError) as error:
            self._end(str(error))

    def ask(self, question: bytes, answer: Kind) -> Answer:
        """The JSON object that is the answer: in a document if there is one, else in the frame.

        Cancelled when the connection ends before. May be cancelled, or be given a result, by whoever asks.
        """
        future = self._loop.create_future()
        if self.ended.done():
            future.cancel()
            return future
        self._waiting.append((answer, future))
        self.send(question)
        return future

    def close(self) -> None:
        self._end("closed")

    def _end(self, reason: str) -> None:
        if self.ended.done():
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self.ended.set_result(reason)
        waiting, self._waiting = self._waiting, deque()
        for _, future in waiting:
            future.cancel()

    def _readable(self) -> None:
        try:
            for _ in range(_BURST):
                if self.ended.done():
                    return
                frame, fds = self._receiver.receive()
                try:
                    self._take(frame, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except BlockingIOError:
            pass
        except (wire.Closed, ProtocolError, SharedMemoryError, OSError) as error:
            self._end(str(error))

    def _take(self, frame: memoryview, fds: list[int]) -> None:
        kind, _ = read_header(frame)
        if kind is Kind.STATE:
            self._on_state(read_document(fds[0]) if fds else unpack_json(frame))
            return
        expected, future = self._waiting.popleft() if self._waiting else (None, None)
        if kind is not expected or future is None:
            raise ProtocolError(f"the runtime sends {kind.name} instead of what it is asked for")
        if kind is Kind.WELCOME:
            check_hello(frame)
            value = unpack_json(frame)
        else:
            value = read_document(fds[0]) if fds else unpack_json(frame)
        with suppress(asyncio.InvalidStateError):  # whoever asked does not wait any more
            future.set_result(value)


class RuntimeLink:
    """A `RuntimeView`, and the way to tell the runtime something. Belongs to one event loop; `run` keeps it up.

    A runtime that the link meets for the first time is told what `overrides` has: of single models, once they are there.
    """

    def __init__(
        self,
        path: Path,
        overrides: Overrides,
        *,
        ping: float = _PING,
        silence: float = _SILENCE,
        pause: float = _PAUSE,
    ) -> None:
        self._path = path
        self.overrides = overrides
        self._ping, self._silence, self._pause = ping, silence, pause
        self._loop = asyncio.get_running_loop()
        self._connection: ControlConnection | None = None
        self._up = False
        self._down = self._loop.create_future()
        self._since = 0.0
        self._changes = 0
        self._changed = self._loop.create_future()
        self._entries: dict[str, ModelVersion] = {}
        self.instance = ""
        #: runtimes that it has met
        self.lives = 0
        self.revision = 0
        #: names of models that the runtime still has to be told of
        self._untold: set[str] = set()
        self._subscriptions: set[Subscription] = set()

    # --- what is seen -------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        return self._up

    @property
    def since(self) -> float:
        return self._since

    @property
    def entries(self) -> Mapping[str, ModelVersion]:
        return self._entries

    @property
    def changes(self) -> int:
        return self._changes

    def stubs(self) -> Mapping[str, frozenset[int]]:
        found: dict[str, frozenset[int]] = {}
        for entry in self._entries.values() if self._up else ():
            found[entry["name"]] = found.get(entry["name"], frozenset()).union(entry["stubs"])
        return found

    async def wait_change(self, seen: int | None = None) -> None:
        if seen is None or seen == self._changes:
            await asyncio.shield(self._changed)

    def subscribe(self) -> "Subscription":
        """All changes from now on, a snapshot first. To be closed."""
        return Subscription(self, self._subscriptions)

    # --- what is asked and told ---------------------------------------------------------------------------

    async def command(self, command: Command) -> dict[str, Any]:
        """What comes of a COMMAND. Raises RuntimeDown, StatusError."""
        done = partial(self.overrides.commanded, command)
        return _check(await self._ask(Kind.COMMAND, command, Kind.COMMANDED, done), "INTERNAL")

    async def configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """The scheduler's section as it holds after these changes of it. Raises RuntimeDown, StatusError."""
        done = partial(self.overrides.configured, changes) if changes else None
        return _check(await self._ask(Kind.CONFIGURE, changes, Kind.CONFIGURED, done), "INVALID_ARGUMENT")

    async def status(self) -> dict[str, Any]:
        """As docs/protocol.md has it. Raises RuntimeDown."""
        return await self._ask(Kind.STATUS, {}, Kind.STATUS_REPLY)

    async def slow_command(self, command: Command) -> dict[str, Any]:
        """As `command`, for those whose answer takes its time: what is asked meanwhile is not kept waiting.

        Raises RuntimeDown, StatusError.
        """
        if not self._up:
            raise RuntimeDown
        try:
            connection = ControlConnection(self._path, lambda _: None)
        except (OSError, ProtocolError):
            raise RuntimeDown from None
        try:
            answer = connection.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
            await asyncio.wait({answer}, timeout=_SLOW)
            if not answer.done() or answer.cancelled():
                raise RuntimeDown
            return _check(answer.result(), "INTERNAL")
        finally:
            connection.close()

    async def _ask(
        self, kind: Kind, body: dict[str, Any], answer_kind: Kind, done: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """`done` is called if the runtime does it, also when whoever asked has gone by then."""
        if not self._up or self._connection is None:
            raise RuntimeDown
        try:
            question = pack_json(kind, body)
        except ProtocolError as error:
            raise StatusError("INVALID_ARGUMENT", str(error)) from None
        answer = self._connection.ask(question, answer_kind)
        if done is not None:
            answer.add_done_callback(partial(_when_done, done))
        # Not cancelled with whoever asks: the answers keep their order.
        await asyncio.wait({answer, self._down}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() or answer.cancelled():
            raise RuntimeDown
        return answer.result()

    # --- the connection -----------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """For ever: connect, watch, and connect again."""
        complaint = ""
        while True:
            try:
                reason = await self._serve()
            except OSError:
                reason = ""  # nobody listens yet, or not any more
            except ProtocolError as error:
                reason = str(error)
            if self._up:
                self._go_down()
                log.warning("the runtime's connection ended: %s", reason)
                continue  # the next runtime may be there already
            if reason and reason != complaint:
                log.error("the runtime cannot be watched: %s", reason)
            complaint = reason
            await asyncio.sleep(self._pause)

    async def _serve(self) -> str:
        """One connection, to its end; says why that came. Raises OSError, ProtocolError."""
        connection = self._connection = ControlConnection(self._path, self._on_state)
        try:
            connection.send(pack_json(Kind.WATCH, {}))
            pinging = asyncio.create_task(self._keep_pinging(connection))
            try:
                return await asyncio.shield(connection.ended)
            finally:
                pinging.cancel()
        finally:
            connection.close()
            self._connection = None

    async def _keep_pinging(self, connection: ControlConnection) -> None:
        while not connection.ended.done():
            answer = connection.ask(pack_json(Kind.COMMAND, {"command": "ping"}), Kind.COMMANDED)
            await asyncio.wait({answer}, timeout=self._silence)
            if not answer.done():
                silenced = self._up
                if silenced:
                    log.warning("the runtime has not answered for %g s", self._silence)
                    self._go_down()
                await asyncio.wait({answer})
                if silenced and not answer.cancelled():
                    self._come_up()
            await asyncio.sleep(self._ping)

    def _on_state(self, state: dict[str, Any]) -> None:
        """A snapshot, or a change that follows on what is known."""
        try:
            revision = int(state["revision"])
            if "entries" in state:
                self._entries = dict(state["entries"])
                self._since = self._loop.time()
                new = state["instance"] != self.instance
                self.lives += new
                self.instance, self.revision = str(state["instance"]), revision
                log.info("connected to the runtime, instance %s", self.instance)
                self._come_up()
                if new:
                    self._tell_all()
                return
            if revision != self.revision + 1:
                raise ProtocolError(f"the runtime's state goes from revision {self.revision} to {revision}")
            key, entry = str(state["key"]), state["entry"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a STATE frame without its {error}") from None
        self.revision = revision
        if entry is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = entry
            self._tell_of(entry["name"])
        self._note()
        if self._up:  # else a snapshot will tell
            self._publish(StateChange(self.instance, revision, key, entry))

    def _come_up(self) -> None:
        self._up = True
        self._down = self._loop.create_future()
        self._note()
        self._publish(None)

    def _go_down(self) -> None:
        self._up = False
        self._down.set_result(None)
        self._note()
        self._publish(None)

    def _note(self) -> None:
        self._changes += 1
        changed, self._changed = self._changed, self._loop.create_future()
        changed.set_result(None)

    def _publish(self, change: StateChange | None) -> None:
        for subscription in self._subscriptions:
            subscription.tell(change)

    # --- what operators set, for a new runtime --------------------------------------------------------------

    def _tell_all(self) -> None:
        assert self._connection is not None
        self._untold = self.overrides.models
        if self.overrides.scheduler:
            answer = self._connection.ask(
                pack_json(Kind.CONFIGURE, self.overrides.scheduler), Kind.CONFIGURED
            )
            answer.add_done_callback(partial(self._told, "", self.overrides.scheduler))
        for command in self.overrides.for_all():
            self._tell("", command)
        for name in {entry["name"] for entry in self._entries.values()}:
            self._tell_of(name)

    def _tell_of(self, name: str) -> None:
        if name in self._untold:
            self._untold.discard(name)
            for command in self.overrides.for_model(name):
                self._tell(name, command)

    def _tell(self, name: str, command: Command) -> None:
        assert self._connection is not None
        answer = self._connection.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
        answer.add_done_callback(partial(self._told, name, command))

    def _told(self, name: str, command: Command, answer: Answer) -> None:
        if answer.cancelled():
            return
        said = answer.result()
        if "error" not in said:
            log.info("told the runtime again: %s", command)
        elif said.get("code") in _NOT_YET:
            self._untold.add(name)  # with its next change
        else:
            log.error("the runtime does not take again what was set, %s: %s", command, said["error"])


class Subscription:
    """What changes, from the first snapshot on. Who is slow gets another snapshot in place of many changes."""

    def __init__(self, link: RuntimeLink, subscriptions: "set[Subscription]") -> None:
        self._link = link
        self._subscriptions = subscriptions
        self._changes: deque[StateChange] = deque()
        #: nothing but a snapshot will do
        self._stale = True
        self._some = asyncio.Event()
        self._some.set()
        subscriptions.add(self)

    def tell(self, change: StateChange | None) -> None:
        """A change; None: more than one entry, or whether the runtime is up."""
        if change is None or len(self._changes) >= _UNTAKEN:
            self._stale = True
            self._changes.clear()
        if change is not None and not self._stale:
            self._changes.append(change)
        if self._stale or self._changes:
            self._some.set()

    async def next(self) -> StateUpdate:
        """The next one, waited for."""
        await self._some.wait()
        if self._stale:
            self._stale = False
            self._some.clear()
            link = self._link
            return StateSnapshot(link.instance, link.revision, dict(link.entries)) if link.up else None
        change = self._changes.popleft()
        if not self._changes:
            self._some.clear()
        return change

    def close(self) -> None:
        self._subscriptions.discard(self)


def _when_done(done: Callable[[], None], answer: Answer) -> None:
    if not answer.cancelled() and "error" not in answer.result():
        done()


def _check(answer: dict[str, Any], code: str) -> dict[str, Any]:
    """Raises StatusError, with this code if the answer has none."""
    if "error" in answer:
        raise StatusError(str(answer.get("code", code)), str(answer["error"]))
    return answer

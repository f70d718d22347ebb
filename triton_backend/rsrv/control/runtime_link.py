"""The control process's link to the runtime: it reconnects, follows the runtime's state, and notices when it is silent."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rsrv.control.grpc_service import StatusError
from rsrv.control.overrides import LASTING, Command, Overrides
from rsrv.control.protocols import ModelVersion, moves_only
from rsrv.wire import socket as wire
from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header, unpack_json
from rsrv.wire.memory import SharedMemoryError, read_document
from rsrv.wire.paths import FAILURE, NO_DEVICE, asleep_since, start_time

log = logging.getLogger("rsrv.control")

#: Seconds that stubs have to connect to a runtime that has come up.
CONNECT_S = 10.0
#: Seconds that stubs have to start a runtime again. If all of them are dead, it is not started.
RESTART_S = 15.0
#: Seconds that starting or ending a profile may take.
_SLOW_COMMAND_S = 60.0
#: Changes that a subscription holds; beyond, its reader gets a snapshot instead.
_MAX_PENDING_CHANGES = 4096
#: Frames that are read before the event loop does something else.
_MAX_FRAMES = 64
#: Codes of a runtime that has just started and does not know the model yet, or has not built it.
_NOT_YET = frozenset(["NOT_FOUND", "FAILED_PRECONDITION"])


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Intervals of a link, in seconds."""

    #: Between two pings.
    ping_s: float = 0.25
    #: Without an answer to a ping, after which the runtime counts as down. Readiness must be right within a second.
    silence_s: float = 0.6
    #: Between two attempts to reach a runtime.
    pause_s: float = 0.1


class ChangeCounter:
    """Counts the changes of what several links know. Belongs to one event loop."""

    def __init__(self) -> None:
        self.count = 0
        #: Those that were no mere moves of weights, which are many.
        self.others = 0
        self._next = asyncio.get_running_loop().create_future()

    def note(self, *, moves: bool = False) -> None:
        """Count a change; `moves`: only weights have moved."""
        self.count += 1
        self.others += not moves
        changed, self._next = self._next, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    async def wait(self, seen: int | None = None) -> None:
        """Return at once if `count` is not `seen` any more, else after the next change (None: as it is now)."""
        if seen is None or seen == self.count:
            await asyncio.shield(self._next)


class RuntimeDown(StatusError):
    """The runtime does not answer."""

    def __init__(self, obstacle: str = "") -> None:
        super().__init__(
            "UNAVAILABLE",
            "the runtime does not answer: it has ended, or it hangs. No model can serve until it is back; "
            + (obstacle or "see the server's log"),
        )


class RuntimeAsleep(RuntimeDown):
    """The runtime's device sleeps, and a command is no reason to wake it."""

    def __init__(self) -> None:
        StatusError.__init__(self, "UNAVAILABLE", "the device sleeps: wake it first, with `rsrv wake`")


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change of one version. `entry` None: the version is gone."""

    instance: str
    revision: int
    key: str
    entry: ModelVersion | None


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The whole state. The next change has the next revision."""

    instance: str
    revision: int
    entries: Mapping[str, ModelVersion]


#: None: the runtime does not answer.
StateUpdate = StateSnapshot | StateChange | None


Answer = asyncio.Future[dict[str, Any]]


class ControlConnection:
    """A greeted connection to the runtime, on an event loop. Questions are answered in the order in which they were asked.

    `on_state` gets the JSON of each STATE frame, or of its document; it raises ProtocolError if that is not valid.
    `ended` is done when the connection has ended, with the reason.
    """

    def __init__(self, path: Path, on_state: Callable[[dict[str, Any]], None]) -> None:
        """Connect. Raises OSError if no process listens, ProtocolError if the listener belongs to another user."""
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._on_state = on_state
        self._waiting: deque[tuple[Kind, Answer]] = deque()
        self._sock = wire.connect(path)
        self._sock.setblocking(False)
        #: Process id of the runtime.
        self.pid = wire.check_peer(self._sock)
        self._receiver = wire.Receiver(self._sock)
        self._loop.add_reader(self._sock, self._readable)
        self.ask(hello(), Kind.WELCOME)

    def send(self, frame: bytes) -> None:
        """Send a frame without an answer; end the connection if the runtime does not take it."""
        if self.ended.done():
            return
        try:
            wire.send(self._sock, frame)
        except BlockingIOError:
            self._end("the runtime does not read its socket")
        except (wire.Closed, OSError) as error:
            self._end(str(error))

    def ask(self, question: bytes, answer: Kind) -> Answer:
        """Send a question; return the future of its answer, the JSON object of the frame or of its document.

        The future is cancelled if the connection ends first. The caller may cancel it.
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
            for _ in range(_MAX_FRAMES):
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
            raise ProtocolError(f"the runtime sent {kind.name} instead of the answer that was due")
        if kind is Kind.WELCOME:
            check_hello(frame)
            value = unpack_json(frame)
        else:
            value = read_document(fds[0]) if fds else unpack_json(frame)
        with suppress(asyncio.InvalidStateError):  # the caller does not wait any more
            future.set_result(value)


class RuntimeLink:
    """The link to one runtime: its state, and commands. Belongs to one event loop; `run` keeps it up.

    A new runtime gets the settings of `overrides` again: those of a model as soon as it knows the model.
    """

    def __init__(
        self,
        path: Path,
        overrides: Overrides,
        changes: ChangeCounter,
        timing: LinkTiming | None = None,
        device: int | None = None,
    ) -> None:
        """`changes`: of all links of the server; `device`: the number of the runtime's; None: the server has one only."""
        self._path = path
        self._device = device or 0
        self._who = "the runtime" if device is None else f"the runtime of device {device}"
        self._overrides = overrides
        self._changes = changes
        self._timing = timing or LinkTiming()
        self._loop = asyncio.get_running_loop()
        self._connection: ControlConnection | None = None
        self.up = False
        self._down = self._loop.create_future()
        self.since = 0.0
        self._down_at = self._loop.time()
        #: Models with a stub before the runtime's last silence or end, which have had none since.
        self._served_before: set[str] = set()
        #: Unix time since which the device sleeps; None: it is awake. Whether to wake it; and the models whose stubs have not
        #: connected since a sleep, or have left as cold, because no request has come for them, with the time of that.
        self.asleep_since: float | None = None
        self._wakes = False
        self._dismissed: dict[str, float] = {}
        self.entries: dict[str, ModelVersion] = {}
        self._ready: frozenset[str] | None = None
        self.instance = ""
        #: Number of runtimes so far, and of those that ended because an operator restarted them.
        self.lives = self.restarts = 0
        self.revision = 0
        #: Names of models whose overrides the runtime does not have yet.
        self._pending_models: set[str] = set()
        #: Lasting commands that the runtime did not get while it was silent, by what they set; and such settings.
        self._missed: dict[tuple[str, ...], Command] = {}
        self._missed_settings: dict[str, Any] = {}
        self._subscriptions: set[Subscription] = set()

    # --- the view -------------------------------------------------------------------------------------

    @property
    def obstacle(self) -> str:
        """The reason why the device serves nothing, by the latest attempt to start its runtime; empty: it has a device."""
        for name in (FAILURE, NO_DEVICE):
            with suppress(OSError):
                return (self._path.parent / name).read_text()
        return ""

    @property
    def down_s(self) -> float:
        """Seconds since the runtime answered last, or since the link's beginning; 0.0 while it does."""
        return 0.0 if self.up else self._loop.time() - self._down_at

    @property
    def silent_pid(self) -> int:
        """Process id of a runtime that takes connections and does not answer; 0: there is none."""
        if self.up or self._connection is None:
            return 0
        # A socket that a spare holds still has the name of the runtime that listened on it last.
        return self._connection.pid if start_time(self._connection.pid) else 0

    @property
    def ready(self) -> frozenset[str]:
        """Names of the models and meta models that have a ready version; the same object until that changes."""
        if self._ready is None:
            self._ready = frozenset(
                entry["name"] for entry in self.entries.values() if entry["state"] == "ready"
            )
        return self._ready

    @property
    def loading(self) -> set[str]:
        """Names of the models and meta models that have no ready version, and one that is being loaded."""
        return {entry["name"] for entry in self.entries.values() if entry["state"] == "loading"} - self.ready

    def served(self) -> set[str]:
        """Return the names of the models and meta models with a stub; none while the runtime is down.

        During a sleep, stubs wait for requests without a connection.
        """
        if self.asleep_since is not None:
            return set(self._dismissed)
        return {entry["name"] for entry in self.entries.values() if entry["stubs"]} if self.up else set()

    @property
    def dismissed(self) -> set[str]:
        """Names of the models that this runtime, or the one before a sleep, asked to leave until a request comes."""
        return set(self._dismissed)

    def check_dismissed(self, cold: Collection[str]) -> None:
        """Forget dismissed models whose stubs were seen dead, or are loaded no more; `cold`: those that were seen alive."""
        until = self._loop.time() - CONNECT_S
        self._dismissed = {
            name: since for name, since in self._dismissed.items() if since > until or name in cold
        }

    def returning(self) -> set[str]:
        """Return the models whose stub may connect again: those of the runtime before, while the next one is awaited."""
        waited = self._loop.time() - (self.since if self.up else self._down_at)
        return self._served_before if waited < (CONNECT_S if self.up else RESTART_S) else set()

    @property
    def unreturned(self) -> set[str]:
        """Names of the models that had a stub before the runtime's last end, and none since. Their processes may be dead."""
        return self._served_before - self._dismissed.keys()

    def wake(self) -> None:
        """Connect although the device sleeps, which wakes it."""
        self._wakes = True

    def subscribe(self, some: asyncio.Event | None = None) -> "Subscription":
        """Subscribe to all changes from now on, after a snapshot; each sets the event. Close the subscription."""
        return Subscription(self, self._subscriptions, some or asyncio.Event())

    # --- commands ---------------------------------------------------------------------------

    async def command(self, command: Command) -> dict[str, Any]:
        """Send a COMMAND; return its result. Raises RuntimeDown, StatusError."""
        done = partial(self._overrides.commanded, command, self._device)
        return _check(await self._ask(Kind.COMMAND, command, Kind.COMMANDED, done), "INTERNAL")

    async def configure(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change keys of the scheduler's section; return the whole section. Raises RuntimeDown, StatusError."""
        done = partial(self._overrides.configured, changes) if changes else None
        return _check(await self._ask(Kind.CONFIGURE, changes, Kind.CONFIGURED, done), "INVALID_ARGUMENT")

    async def status(self) -> dict[str, Any]:
        """Return the status of docs/protocol.md. Raises RuntimeDown."""
        return await self._ask(Kind.STATUS, {}, Kind.STATUS_REPLY)

    async def slow_command(self, command: Command, seconds: float = _SLOW_COMMAND_S) -> dict[str, Any]:
        """Send a command that takes up to `seconds`, on a connection of its own: answers keep their order, so others would wait.

        Raises RuntimeDown, StatusError.
        """
        if not self.up:
            raise self._absence()
        try:
            connection = ControlConnection(self._path, lambda _: None)
        except (OSError, ProtocolError):
            raise RuntimeDown from None
        try:
            answer = connection.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
            await asyncio.wait({answer, self._down}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():
                raise RuntimeDown
            return _check(answer.result(), "INTERNAL")
        finally:
            connection.close()

    def _absence(self) -> RuntimeDown:
        return RuntimeDown() if self.asleep_since is None else RuntimeAsleep()

    async def _ask(
        self, kind: Kind, body: dict[str, Any], answer_kind: Kind, done: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Ask; call `done` if the runtime succeeds, also if the caller has been cancelled by then."""
        if not self.up or self._connection is None:
            raise self._absence()
        try:
            question = pack_json(kind, body)
        except ProtocolError as error:
            raise StatusError("INVALID_ARGUMENT", str(error)) from None
        answer = self._connection.ask(question, answer_kind)
        if done is not None:
            answer.add_done_callback(partial(_if_done, done))
        # The answer is not cancelled with the caller: answers keep their order.
        await asyncio.wait({answer, self._down}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() or answer.cancelled():
            raise RuntimeDown
        return answer.result()

    # --- the connection -----------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Connect, follow the state, and connect again, until cancelled."""
        logged = ""
        while True:
            if self._sleeps():
                await asyncio.sleep(self._timing.pause_s)
                continue
            try:
                reason = await self._serve()
            except OSError:
                reason = ""  # no runtime listens yet, or not any more
            except ProtocolError as error:
                reason = str(error)
            if not self._wakes:
                self.asleep_since = None
            if self.up:
                self._go_down()
                if self.asleep_since is None:
                    log.warning("%s: the connection ended: %s", self._who, reason)
                continue  # the next runtime may listen already
            if reason and reason != logged:
                log.error("cannot follow the state of %s: %s", self._who, reason)
            logged = reason
            await asyncio.sleep(self._timing.pause_s)

    def _sleeps(self) -> bool:
        """Look whether the device sleeps and is not to be woken."""
        since = asleep_since(self._path.parent)
        if since is None or self._wakes:
            return False
        if self.asleep_since is None:
            self._fall_asleep(since)
            self._changes.note()
        return True

    def _fall_asleep(self, since: float) -> None:
        self.asleep_since = since
        self._dismissed |= dict.fromkeys(self._served_before, self._loop.time())
        for entry in self.entries.values():
            entry["weights"] = "absent" if entry["weights"] else None

    async def _serve(self) -> str:
        """Use one connection to its end; return the reason of the end. Raises OSError, ProtocolError."""
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
            await asyncio.wait({answer}, timeout=self._timing.silence_s)
            if not answer.done():
                was_up = self.up
                if was_up:
                    log.warning("%s has not answered for %g s", self._who, self._timing.silence_s)
                    self._go_down()
                await asyncio.wait({answer})
                if was_up and not answer.cancelled():
                    self._come_up()
            await asyncio.sleep(self._timing.ping_s)

    def _on_state(self, state: dict[str, Any]) -> None:
        """Take a snapshot, or the next change."""
        try:
            revision = int(state["revision"])
            if "entries" in state:
                self.entries = dict(state["entries"])
                for found in self.entries.values():
                    self._note_dismissal(found)
                self._ready = None
                self.since = self._loop.time()
                new = state["instance"] != self.instance
                self.lives += new and self.asleep_since is None
                self.instance, self.revision = str(state["instance"]), revision
                log.info("connected to %s, instance %s", self._who, self.instance)
                if new:
                    self._missed.clear()
                    self._missed_settings.clear()
                self._come_up()
                if new:
                    self._send_overrides()
                return
            if revision != self.revision + 1:
                raise ProtocolError(f"the runtime's state jumps from revision {self.revision} to {revision}")
            key, entry = str(state["key"]), state["entry"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"a STATE frame lacks its {error}") from None
        self.revision = revision
        before = self.entries.pop(key, None) if entry is None else self.entries.get(key)
        if entry is not None:
            self.entries[key] = entry
            self._note_dismissal(entry)
            if entry["stubs"] and self.up:
                self._served_before.discard(entry["name"])
            self._send_model(entry["name"])
        moves = moves_only(before, entry)
        self._ready = self._ready if moves else None
        self._changes.note(moves=moves)
        if self.up:  # else a snapshot follows
            self._publish(StateChange(self.instance, revision, key, entry))

    def _note_dismissal(self, entry: Any) -> None:
        """Note whether the runtime has asked the stubs of a model to leave; its version is leaving then."""
        if entry["state"] == "cold":
            self._dismissed[entry["name"]] = self._loop.time()
            entry["state"] = "leaving"
        elif entry["stubs"]:
            self._dismissed.pop(entry["name"], None)

    def _come_up(self) -> None:
        self.up, self._wakes, self.asleep_since = True, False, None
        self._served_before -= self.served()
        self._down = self._loop.create_future()
        missed, self._missed = self._missed, {}
        settings, self._missed_settings = self._missed_settings, {}
        self._send_settings(settings)
        for command in missed.values():
            self._send(str(command.get("model") or ""), command)
        self._changes.note()
        self._publish(None)

    def _go_down(self) -> None:
        self._served_before = self.served() | self.returning()
        self.up = False
        since = asleep_since(self._path.parent)
        if since is not None:
            self._fall_asleep(since)
        self._down_at = self._loop.time()
        self._down.set_result(None)
        self._changes.note()
        self._publish(None)

    def _publish(self, change: StateChange | None) -> None:
        for subscription in self._subscriptions:
            subscription.tell(change)

    # --- overrides for a new runtime, and for one that was silent ---------------------------------

    def configure_later(self, changes: dict[str, Any]) -> None:
        """Change keys that other runtimes have changed when this one answers again."""
        if self.up:
            self._send_settings(changes)
        else:
            self._missed_settings |= changes

    def send_later(self, command: Command, refusal: StatusError) -> None:
        """Send a command that other runtimes carried out when this one can, if the command's effect lasts.

        `refusal`: why this one did not.
        """
        model = str(command.get("model") or "")
        if command["command"] not in LASTING:
            return
        if not isinstance(refusal, RuntimeDown):
            if refusal.code in _NOT_YET:
                self._pending_models.add(model)
            return
        # The next runtime of this device gets what holds then.
        self._overrides.commanded(command, self._device)
        if self.up:
            self._send(model, command)
        else:
            # The latest of those that set the same, in the order of the latest.
            what = (str(command["command"]), model, *sorted(command))
            self._missed.pop(what, None)
            self._missed[what] = command

    def _send_overrides(self) -> None:
        self._pending_models = self._overrides.models
        self._send_settings(self._overrides.scheduler)
        for command in self._overrides.for_all():
            self._send("", command)
        for name in {entry["name"] for entry in self.entries.values()}:
            self._send_model(name)

    def _send_settings(self, changes: dict[str, Any]) -> None:
        assert self._connection is not None
        if changes:
            answer = self._connection.ask(pack_json(Kind.CONFIGURE, changes), Kind.CONFIGURED)
            answer.add_done_callback(partial(self._on_answer, "", changes))

    def _send_model(self, name: str) -> None:
        if name in self._pending_models:
            self._pending_models.discard(name)
            for command in self._overrides.for_model(name, self._device):
                self._send(name, command)

    def _send(self, name: str, command: Command) -> None:
        assert self._connection is not None
        answer = self._connection.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
        answer.add_done_callback(partial(self._on_answer, name, command))

    def _on_answer(self, name: str, command: Command, answer: Answer) -> None:
        if answer.cancelled():
            return
        result = answer.result()
        if "error" not in result:
            log.info("set again in %s: %s", self._who, command)
        elif result.get("code") in _NOT_YET:
            self._pending_models.add(name)  # retry at its next change
        else:
            log.error("%s refuses an earlier setting, %s: %s", self._who, command, result["error"])


class Subscription:
    """Changes of the runtime's state, after a first snapshot. A slow reader gets another snapshot in place of many changes."""

    def __init__(self, link: RuntimeLink, subscriptions: "set[Subscription]", some: asyncio.Event) -> None:
        self._link = link
        self._subscriptions = subscriptions
        self._some = some
        self._changes: deque[StateChange] = deque()
        #: True if the next item must be a snapshot.
        self._stale = True
        some.set()
        subscriptions.add(self)

    def tell(self, change: StateChange | None) -> None:
        """Add a change; None: more than one version changed, or the runtime came up or went down."""
        if change is None or len(self._changes) >= _MAX_PENDING_CHANGES:
            self._stale = True
            self._changes.clear()
        if change is not None and not self._stale:
            self._changes.append(change)
        if self.pending:
            self._some.set()

    @property
    def pending(self) -> bool:
        """True if there is a change or snapshot to take."""
        return self._stale or bool(self._changes)

    def take(self) -> StateUpdate:
        """Return the next change or snapshot, which must be pending."""
        if self._stale:
            self._stale = False
            link = self._link
            return StateSnapshot(link.instance, link.revision, dict(link.entries)) if link.up else None
        return self._changes.popleft()

    async def next(self) -> StateUpdate:
        """Wait for the next change or snapshot, and return it. Only if no other subscription sets the event."""
        while not self.pending:
            self._some.clear()
            await self._some.wait()
        return self.take()

    def close(self) -> None:
        self._subscriptions.discard(self)


def _if_done(done: Callable[[], None], answer: Answer) -> None:
    if not answer.cancelled() and "error" not in answer.result():
        done()


def _check(answer: dict[str, Any], code: str) -> dict[str, Any]:
    """Return the answer. Raises StatusError if it is an error, with this code if it has none."""
    if "error" in answer:
        raise StatusError(str(answer.get("code", code)), str(answer["error"]))
    return answer

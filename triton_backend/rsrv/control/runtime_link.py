"""The control process's link to a runtime. It reconnects, follows the runtime's state, and notices if the runtime is silent."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from google.protobuf.message import DecodeError

from rsrv.control.desired_state import DesiredState
from rsrv.control.grpc_service import StatusError
from rsrv.control.presence import DevicePresence
from rsrv.control.records import RuntimeRecords
from rsrv.control.runtime_state import ChangeCounter, RuntimeState
from rsrv.control.v1 import control_pb2 as pb
from rsrv.desired import DesiredChanges, DesiredDocument, difference
from rsrv.wire import socket as wire
from rsrv.wire.frames import Kind, ProtocolError, check_hello, hello, pack_json, read_header, unpack_json
from rsrv.wire.memory import SharedMemoryError, create_document, read_document, read_flat
from rsrv.wire.paths import FAILURE, LAST_RECORD, NO_DEVICE, asleep_since, start_time

log = logging.getLogger(__name__)

#: Seconds that starting or ending a profile may take.
_SLOW_COMMAND_S = 60.0
#: Maximum number of frames that are read before the event loop does other work.
_MAX_FRAMES = 64

Command = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """Intervals of a link, in seconds."""

    #: Time between two pings.
    ping_s: float = 0.25
    #: A runtime that does not answer a ping for this long counts as down. The time is short,
    #: because readiness must be right within a second.
    silence_s: float = 0.6
    #: Pause between two attempts to reach a runtime.
    pause_s: float = 0.1


class RuntimeDown(StatusError):
    """The runtime does not answer."""

    def __init__(self, obstacle: str = "") -> None:
        super().__init__(
            "UNAVAILABLE",
            "the runtime does not answer: it has ended, or it hangs. No model can serve until a runtime answers again; "
            + (obstacle or "see the server's log"),
        )


class RuntimeAsleep(RuntimeDown):
    """The runtime's device sleeps, and commands do not wake it."""

    def __init__(self) -> None:
        StatusError.__init__(self, "UNAVAILABLE", "the device sleeps: wake it first, with `rsrv wake`")


Answer = asyncio.Future[Any]


class ControlConnection:
    """A greeted connection to the runtime, on an event loop. The runtime answers questions in their order.

    `on_state` gets the JSON of each STATE frame, or of the document that the frame carries. It raises ProtocolError if the JSON
    is not valid. `ended` is a future with the reason for the end of the connection.
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

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame that has no answer. If the runtime does not read it, end the connection."""
        if self.ended.done():
            return
        try:
            wire.send(self._sock, frame, fds)
        except BlockingIOError:
            self._end("the runtime does not read its socket")
        except (wire.Closed, OSError) as error:
            self._end(str(error))

    def ask(self, question: bytes, answer: Kind, fds: Sequence[int] = ()) -> Answer:
        """Send a question, and return the future of its answer.

        The answer is the JSON object of a frame or of its document, or a record. The future is cancelled if the connection ends
        first. The caller may cancel it.
        """
        future = self._loop.create_future()
        if self.ended.done():
            future.cancel()
            return future
        self._waiting.append((answer, future))
        self.send(question, fds)
        return future

    def ask_large(self, command: Command) -> Answer:
        """Send a COMMAND of any size, as `ask`."""
        try:
            return self.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
        except ProtocolError:  # the command does not fit in a frame
            fd = create_document(command)
            try:
                return self.ask(pack_json(Kind.COMMAND, {}), Kind.COMMANDED, (fd,))
            finally:
                os.close(fd)

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
            raise ProtocolError(f"the runtime sent a {kind.name} frame instead of the expected answer")
        value: Any
        if kind is Kind.STATUS_REPLY:
            try:
                value = pb.DeviceRecord.FromString(read_flat(fds[0]))
            except (DecodeError, IndexError) as error:
                raise ProtocolError(f"a record cannot be read: {error}") from None
        elif kind is Kind.WELCOME:
            check_hello(frame)
            value = unpack_json(frame)
        else:
            value = read_document(fds[0]) if fds else unpack_json(frame)
        with suppress(asyncio.InvalidStateError):  # the caller does not wait any more
            future.set_result(value)


class DocumentSender:
    """Sends a runtime its desired document: first the whole document on each connection, and then only changes."""

    def __init__(self, desired: DesiredState, device: int, who: str) -> None:
        """`who` names the runtime in the log."""
        self._desired, self._device, self._who = desired, device, who
        self._connection: ControlConnection | None = None
        #: The latest document that was sent on this connection, with its revision. None: the next document is sent whole.
        self._sent: tuple[int, DesiredDocument] | None = None
        #: The answer to the latest document of this connection.
        self.answer: Answer | None = None
        desired.follow(self._send)

    def begin(self, connection: ControlConnection) -> None:
        self._connection, self._sent, self.answer = connection, None, None
        self._send()

    def end(self) -> None:
        self._connection = None

    @property
    def sent(self) -> int:
        """The latest revision that was sent on this connection. 0: the next document is sent whole."""
        return 0 if self._sent is None else self._sent[0]

    def is_reached(self, revision: int, answer: Mapping[str, Any]) -> bool:
        """Return True if the runtime's answer to a document says that it follows this revision or a later one."""
        return answer.get("instance") == self._desired.instance and answer.get("revision", 0) >= revision

    def _send(self) -> None:
        """Send the document if it has changed since it was last sent on this connection."""
        if self._connection is None:
            return  # `begin` will send the whole document on the next connection.
        revision, document = self._desired.revision, self._desired.document(self._device)
        since: int | None = None
        changes: DesiredDocument | DesiredChanges = document
        if self._sent is not None:
            since, changes = self._sent[0], difference(self._sent[1], document)
            if not changes:
                return
        self._sent = revision, document
        self.answer = self._connection.ask_large(
            {
                "command": "follow",
                "instance": self._desired.instance,
                "revision": revision,
                "since": since,
                "document": changes,
            }
        )
        self.answer.add_done_callback(partial(self._on_followed, revision, since))

    def _on_followed(self, revision: int, since: int | None, answer: Answer) -> None:
        if answer.cancelled():
            return
        reply = answer.result()
        if "error" in reply:
            log.error("%s refuses revision %d of its settings: %s", self._who, revision, reply["error"])
            # Send the whole document next time. Otherwise, a retry by the operator would send nothing.
            self._sent = None
        elif self.is_reached(revision, reply):
            log.debug("%s follows revision %d of its settings", self._who, revision)
        elif since is None:
            log.error("%s takes its settings from another control process: %s", self._who, reply)
        else:
            # The runtime has refused an earlier revision, so these changes do not apply. Send the whole document.
            self._sent = None
            self._send()


class RuntimeLink:
    """The link to one runtime: its state, its desired document, and commands. Belongs to one event loop. `run` connects it."""

    def __init__(
        self,
        path: Path,
        desired: DesiredState,
        presence: DevicePresence,
        changes: ChangeCounter,
        timing: LinkTiming | None = None,
        device: int | None = None,
    ) -> None:
        """Make the link to the runtime of a device.

        Args:
            path: Path of the runtime's socket.
            desired: The desired documents of all runtimes.
            presence: Models of this device. The link updates it.
            changes: Counts the changes on all links of the server.
            timing: Intervals.
            device: Number of the device, or None if the server has only one.
        """
        self._path = path
        self._who = "the runtime" if device is None else f"the runtime of device {device}"
        self._document = DocumentSender(desired, device or 0, self._who)
        self.presence = presence
        self.state = RuntimeState()
        self._changes = changes
        self._timing = timing or LinkTiming()
        self._connection: ControlConnection | None = None
        self.records = RuntimeRecords()
        #: A future that is done when the runtime stops answering. There is a new future each time that it answers again.
        self._down = asyncio.get_running_loop().create_future()
        #: Times of the event loop: when the link last connected to a runtime, and when a runtime last stopped answering.
        self.since, self._down_at = 0.0, _now()
        #: True if the link connects even if the device sleeps, which wakes it.
        self._wakes = False
        #: Number of restarts by an operator.
        self.restarts = 0

    # --- the view -------------------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """True while the runtime answers."""
        return self.presence.up

    @property
    def asleep_since(self) -> float | None:
        """Unix time since which the device sleeps. None: it is awake."""
        return self.presence.asleep_since

    @property
    def obstacle(self) -> str:
        """Reason why the latest attempt to start the runtime failed. Empty: it did not fail."""
        for name in (FAILURE, NO_DEVICE):
            with suppress(OSError):
                return (self._path.parent / name).read_text()
        return ""

    @property
    def down_s(self) -> float:
        """Seconds since the runtime last answered, or since the link was made. 0.0 while the runtime answers."""
        return 0.0 if self.up else _now() - self._down_at

    @property
    def silent_pid(self) -> int:
        """Process id of a runtime that accepts connections but does not answer. 0: there is none."""
        if self.up or self._connection is None:
            return 0
        # The kernel reports the process that called listen(). If a spare process has inherited the socket, this is an earlier
        # runtime, which may have ended.
        return self._connection.pid if start_time(self._connection.pid) else 0

    def last_records(self) -> RuntimeRecords:
        """Return the last records of a sleeping device's runtime, without waiting requests and weights on the device.

        Call this on a thread, because it reads a file.
        """
        try:
            last = pb.DeviceRecord.FromString((self._path.parent / LAST_RECORD).read_bytes())
        except (OSError, DecodeError):
            # The runtime has left no record, or another version of rsrv wrote it.
            return RuntimeRecords()
        return RuntimeRecords().updated(last).at_rest()

    def wake(self) -> None:
        """Make the link connect even if the device sleeps, which wakes the device."""
        self._wakes = True

    # --- commands ---------------------------------------------------------------------------

    async def command(self, command: Command) -> dict[str, Any]:
        """Send a COMMAND, and return its result. Raises RuntimeDown, StatusError."""
        return _check(await self._ask(Kind.COMMAND, command, Kind.COMMANDED))

    def followed(self) -> Awaitable[bool]:
        """Wait until the runtime follows the current document, and return True. Return False if the runtime goes down first.

        After False, the next runtime will follow the document. Raises StatusError if the runtime refuses the document.
        """
        return self._followed(self._document.sent, self._document.answer)

    async def _followed(self, revision: int, answer: Answer | None) -> bool:
        while self.up and answer is not None:
            await asyncio.wait({answer, self._down}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done() or answer.cancelled():
                break
            if self._document.is_reached(revision, _check(answer.result())):
                return True
            # The runtime has refused an earlier revision. `DocumentSender` has then sent the whole document, so wait for the
            # answer to that.
            before, answer = answer, self._document.answer
            if answer is before:
                break  # The runtime follows another control process.
        return False

    async def record(self, since: int = 0) -> pb.DeviceRecord:
        """Return the runtime's record, or its changes since the record with the number `since`. Raises RuntimeDown."""
        record: pb.DeviceRecord = await self._ask(Kind.STATUS, {"since": since}, Kind.STATUS_REPLY)
        return record

    async def refresh(self, *, whole: bool = False) -> RuntimeRecords:
        """Update `records`, and return them. If `whole` is True, read the whole record. Raises RuntimeDown."""
        before = self.records.device
        same = before.instance == self.state.instance and not whole
        latest = await self.record(before.next if same else 0)
        self.records = self.records.updated(latest)
        return self.records

    async def slow_command(self, command: Command, seconds: float = _SLOW_COMMAND_S) -> dict[str, Any]:
        """Send a command that takes up to `seconds`, and return its result. Raises RuntimeDown, StatusError.

        The command has a connection of its own. On the common connection, the answers to later commands would have to wait for
        its answer, because the runtime answers in order.
        """
        self.check_up()
        try:
            connection = ControlConnection(self._path, lambda _: None)
        except (OSError, ProtocolError):
            raise RuntimeDown from None
        try:
            answer = connection.ask(pack_json(Kind.COMMAND, command), Kind.COMMANDED)
            return _check(await self._answered(answer, seconds))
        finally:
            connection.close()

    def check_up(self) -> None:
        """Raise RuntimeDown unless the runtime answers."""
        if not self.up:
            raise RuntimeDown() if self.asleep_since is None else RuntimeAsleep()

    async def _ask(self, kind: Kind, body: dict[str, Any], answer_kind: Kind) -> Any:
        self.check_up()
        assert self._connection is not None
        try:
            question = pack_json(kind, body)
        except ProtocolError as error:
            raise StatusError("INVALID_ARGUMENT", str(error)) from None
        return await self._answered(self._connection.ask(question, answer_kind))

    async def _answered(self, answer: Answer, seconds: float | None = None) -> Any:
        """Return an answer. Raises RuntimeDown if the runtime goes down first, or after this time."""
        # If the caller is cancelled, do not cancel the future of the answer: it keeps the order of the later answers.
        await asyncio.wait({answer, self._down}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
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
                reason = ""  # no runtime is listening
            except ProtocolError as error:
                reason = str(error)
            if not self._wakes:
                self.presence.asleep_since = None
            if self.up:
                self._go_down()
                if self.asleep_since is None:
                    log.warning("%s: the connection ended: %s", self._who, reason)
                continue  # Connect at once, because the next runtime may already listen.
            if reason and reason != logged:
                log.error("cannot read the state of %s: %s", self._who, reason)
            logged = reason
            await asyncio.sleep(self._timing.pause_s)

    def _sleeps(self) -> bool:
        """Return True if the device sleeps and should not be woken."""
        since = asleep_since(self._path.parent)
        if since is None or self._wakes:
            return False
        if self.asleep_since is None:
            self._fall_asleep(since)
            self._changes.note()
        return True

    def _fall_asleep(self, since: float) -> None:
        self.presence.fall_asleep(since, _now())
        self.state.free_weights()

    async def _serve(self) -> str:
        """Use one connection until it ends, and return the reason for the end. Raises OSError, ProtocolError."""
        connection = self._connection = ControlConnection(self._path, self._on_state)
        try:
            self._document.begin(connection)
            connection.send(pack_json(Kind.WATCH, {}))
            pinging = asyncio.create_task(self._keep_pinging(connection))
            try:
                return await asyncio.shield(connection.ended)
            finally:
                pinging.cancel()
        finally:
            connection.close()
            self._document.end()
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

    def _on_state(self, frame: dict[str, Any]) -> None:
        """Apply a STATE frame, which is a snapshot or the next change."""
        state = self.state
        if "entries" in frame:
            new = state.take_snapshot(frame)
            self.presence.begin(state.entries, _now())
            self.since = _now()
            state.lives += new and self.asleep_since is None
            log.info("connected to %s, instance %s", self._who, state.instance)
            self._come_up()
            return
        change = state.take_change(frame)
        moves = change.moves
        if not moves:
            self.presence.follow(change.key, change.entry, _now())
        self._changes.note(moves=moves)
        if self.up:  # Otherwise, subscribers get a snapshot when the runtime answers again.
            state.publish(change)

    def _come_up(self) -> None:
        self._wakes = False
        self.presence.come_up()
        self._down = asyncio.get_running_loop().create_future()
        self._changes.note()
        self.state.publish(None, up=True)

    def _go_down(self) -> None:
        self.presence.go_down()
        since = asleep_since(self._path.parent)
        if since is not None:
            self._fall_asleep(since)
        self._down_at = _now()
        self._down.set_result(None)
        self._changes.note()
        self.state.publish(None, up=False)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _check(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the answer. Raise StatusError if it is an error."""
    if "error" in answer:
        raise StatusError(str(answer.get("code", "INTERNAL")), str(answer["error"]))
    return answer

"""Connections of the runtime: frames on non-blocking sockets, all in one epoll. Only `wait` blocks."""

import fcntl
import logging
import os
import resource
import select
import socket
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from rsrv.runtime.start_queue import Demand
from rsrv.wire.frames import (
    MAX_FRAME,
    Completion,
    Kind,
    OtherVersionError,
    ProtocolError,
    check_hello,
    pack_completions,
    pack_json,
    read_header,
)
from rsrv.wire.generation import pack_tokens
from rsrv.wire.memory import Bytes, SharedMemoryError, create_document, map_segment
from rsrv.wire.socket import Closed, Receiver, check_peer, send
from rsrv.wire.traces import Mark

#: Maximum seconds that a runtime that ends as planned waits until its peers have read its last frames.
_SETTLE_S = 0.05
#: Seconds between two checks whether the peers have read these frames.
_SETTLE_POLL_S = 0.001
#: Limits of the backlog of a stub that does not read: frames, bytes and descriptors. If one is exceeded, the connection is
#: closed.
_MAX_BACKLOG = 4096
_MAX_BACKLOG_BYTES = 16 << 20
_MAX_BACKLOG_FDS = 64
#: Limits of the memory that a stub makes the runtime map. Each segment takes one of the 65,530 mappings of a process.
#: The bytes are only address space until they are used.
_MAX_SEGMENTS = 1024
_MAX_SEGMENT_BYTES = 1 << 40
#: Maximum number of a connection's marks whose traced requests have not arrived. If there are more, some of these requests will
#: never arrive, so all marks are dropped.
_MAX_MARKS = 4096


@dataclass(slots=True, eq=False)
class MetaCounts:
    """Numbers of a meta model's runs, by outcome, and of their sub-calls."""

    outcomes: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    #: Device seconds of the sub-calls. Each sub-call gets a share of its execution's seconds, in proportion to its rows.
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """A model, or a meta model with its callees, that connections have registered."""

    key: str
    name: str
    #: Digest of the bundle.
    digest: str
    #: Keys of the model, or of the callees in the order of REGISTER. These models are not unloaded while the registration exists.
    models: tuple[str, ...]
    #: Tensors of the clients: {"inputs": [(name, dtype, dims)...], "outputs": [...]}.
    client: dict[str, list[tuple[str, str, tuple[int, ...]]]]
    is_meta: bool = False
    #: For a meta model, names of the callees, in any order.
    calls: tuple[str, ...] = ()
    #: Counts of the meta model's runs.
    counts: MetaCounts = field(default_factory=MetaCounts)
    #: Connections with this registration, by id.
    connections: "dict[int, PeerConnection]" = field(default_factory=dict)


class PeerConnection:
    """Non-blocking connection of a stub or a tool. Methods raise ProtocolError or Closed if the connection must be closed."""

    def __init__(self, id: int, sock: socket.socket, peer: int, buffer: memoryview | None = None) -> None:
        """`buffer`: memory for received frames. Connections may share it (see `Receiver`)."""
        self.id = id
        self.sock = sock
        self.peer = peer
        self.greeted = False
        self.watched_for_write = False
        self.closed = False
        self.registering = False
        #: True if REGISTER is answered in flat form.
        self.flat = False
        self.group: Registration | None = None  # None: it has not registered a model.
        #: Demand of the requests that wait for the registration's answer.
        self.demand = Demand()
        #: If the stub imports a slow model.py now, the time when the import began, and the current line. Otherwise None.
        self.importing: tuple[float, int] | None = None
        #: Memory that the stub shares, by the segment's number.
        self.segments: dict[int, Bytes] = {}
        self.completions: list[Completion] = []
        #: Tokens to send: pairs of the connection's number for the generation, and the token.
        self.tokens: list[tuple[int, int]] = []
        #: Marks of traced requests that have not arrived, by the connection's numbers of the requests.
        self.marks: dict[int, Mark] = {}
        self.receiver = Receiver(sock, buffer)
        #: Frames that the socket has no room for, because the peer does not read, with their descriptors. This is a list, because
        #: it is nearly always empty, and a deque would take 760 bytes for each connection.
        self.backlog: list[tuple[bytes, tuple[int, ...]]] = []
        self._backlog_bytes = 0
        self._backlog_fds = 0

    def note_import(self, note: Any, now: float) -> None:
        """Record what a stub reports about its import of model.py. `note` is `importing` of REPORT, or None."""
        self.importing = None
        if note is not None:
            try:
                seconds, line = note
                seconds, line = float(seconds), int(line)
                if not (0 <= seconds < inf and line >= 0):
                    raise ValueError(f"{seconds} s, line {line}")
                self.importing = now - seconds, line
            except (OverflowError, TypeError, ValueError) as error:
                raise ProtocolError(f"a REPORT of an import that cannot be read: {error}") from None

    def add_segment(self, id: int, fds: list[int]) -> None:
        if len(fds) != 1:
            raise ProtocolError(f"SEGMENT with {len(fds)} descriptors")
        if id in self.segments:
            raise ProtocolError(f"segment {id} twice")
        if len(self.segments) >= _MAX_SEGMENTS:
            raise ProtocolError(f"more than {_MAX_SEGMENTS} segments")
        left = _MAX_SEGMENT_BYTES - sum(len(segment) for segment in self.segments.values())
        try:
            self.segments[id] = map_segment(fds[0], left)
        except SharedMemoryError as error:
            raise ProtocolError(str(error)) from None

    def mark(self, marks: Iterable[Mark]) -> None:
        """Add marks of traced requests that arrive next."""
        self.marks.update((mark.request, mark) for mark in marks)
        if len(self.marks) > _MAX_MARKS:
            self.marks.clear()

    def send(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send a frame, or queue it if the stub is slow. Other stubs do not wait for it."""
        if not self.backlog:
            try:
                send(self.sock, frame, fds)
            except BlockingIOError:
                pass
            else:
                return
        self.backlog.append((frame, tuple(os.dup(fd) for fd in fds)))
        self._backlog_bytes += len(frame)
        self._backlog_fds += len(fds)
        if (
            len(self.backlog) > _MAX_BACKLOG
            or self._backlog_bytes > _MAX_BACKLOG_BYTES
            or self._backlog_fds > _MAX_BACKLOG_FDS
        ):
            raise Closed(f"{len(self.backlog)} frames unread")

    def send_document(self, kind: Kind, value: dict[str, Any] | bytes) -> None:
        """Send a JSON object, or a document in flat form, of any size, in a memfd."""
        fd = create_document(value)
        try:
            self.send(pack_json(kind, {}), (fd,))
        finally:
            os.close(fd)

    def send_object(self, kind: Kind, value: dict[str, Any]) -> None:
        """Send a JSON object in the frame, or in a memfd if it does not fit."""
        try:
            frame = pack_json(kind, value)
        except ProtocolError:
            self.send_document(kind, value)
        else:
            self.send(frame)

    def flush(self) -> None:
        while self.backlog:
            frame, fds = self.backlog[0]
            try:
                send(self.sock, frame, fds)
            except BlockingIOError:
                return
            del self.backlog[0]
            self._backlog_bytes -= len(frame)
            self._backlog_fds -= len(fds)
            for fd in fds:
                os.close(fd)

    def has_unread(self) -> bool:
        """True if the peer has not read all frames that were sent."""
        return any(fcntl.ioctl(self.sock, termios.TIOCOUTQ, bytes(4)))

    def send_completions(self) -> None:
        """Send all tokens, and then all completions."""
        if self.tokens:
            tokens, self.tokens = self.tokens, []
            for frame in pack_tokens(tokens):
                self.send(frame)
        done, self.completions = self.completions, []
        for frame in pack_completions(done):
            self.send(frame)

    def close(self) -> None:
        self.closed = True
        self.sock.close()
        for _, fds in self.backlog:
            for fd in fds:
                os.close(fd)
        self.backlog.clear()
        self.segments.clear()
        self.completions.clear()
        self.tokens.clear()


log = logging.getLogger(__name__)

#: Number of frames that are read from one connection before the other connections get a turn.
_MAX_FRAMES_PER_TURN = 32
#: Number of connections of one model's stub: one for requests, one for deferred answers and one for metrics.
_CONNECTIONS_PER_MODEL = 3
#: Number of descriptors that are reserved for other files: files of weights, and documents that are being sent.
_RESERVED_FDS = 256

OnFrame = Callable[[PeerConnection, Kind, int, memoryview, list[int]], None]


class Transport:
    """Connections of the runtime, and the callbacks for their events.

    `on_frame` is called with each frame after the greeting. `on_close` is called with each connection that has ended for any
    reason. If `on_frame` raises ProtocolError, only that connection is closed.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[PeerConnection], None],
        on_frame: OnFrame,
        on_close: Callable[[PeerConnection], None],
    ) -> None:
        self._listener = listener
        self._greet = greet
        self._on_frame = on_frame
        self._on_close = on_close
        self._next_id = 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        #: Maximum number of connections: half of the descriptors that are not reserved.
        self._max_connections = max(1, (limit - _RESERVED_FDS) // 2)
        self._max_files = limit
        log.info("room for %s, because %d files may be open", self._room(), limit)
        # All connections share the buffer, because each frame is handled before any connection receives the next one.
        self._buffer = memoryview(bytearray(MAX_FRAME))
        self._epoll = select.epoll()
        #: Function that waits at most a number of seconds for events, and returns them for `handle`.
        self.wait: Callable[[float | None], list[tuple[int, int]]] = self._epoll.poll
        self._targets: dict[int, PeerConnection | Callable[[], None]] = {}
        self.watch(listener.fileno(), self._accept)

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` in `handle` whenever `fd` is readable."""
        self._targets[fd] = action
        self._epoll.register(fd, select.EPOLLIN)

    @property
    def connections(self) -> list[PeerConnection]:
        return [target for target in self._targets.values() if isinstance(target, PeerConnection)]

    def handle(self, ready: list[tuple[int, int]]) -> None:
        """Handle the events that `wait` returned."""
        for fd, mask in ready:
            target = self._targets.get(fd)  # None: an earlier event of this round has closed the connection.
            if isinstance(target, PeerConnection):
                self.guard(target, self._serve, target, mask)
            elif target is not None:
                target()

    def guard(self, connection: PeerConnection, action: Callable[..., None], *args: Any) -> None:
        """Run an action for a connection. If the action raises an exception, only that connection is closed."""
        if connection.closed:
            return
        try:
            action(*args)
        except Closed:
            self._close(connection)
        except ProtocolError as error:
            log.error("closing the connection of pid %d: %s", connection.peer, error)
            self._close(connection)
        except Exception:
            log.exception("closing the connection of pid %d", connection.peer)
            self._close(connection)
        else:
            congested = bool(connection.backlog)
            if congested != connection.watched_for_write and not connection.closed:
                connection.watched_for_write = congested
                extra = select.EPOLLOUT if congested else 0
                self._epoll.modify(connection.sock, select.EPOLLIN | extra)

    def settle(self) -> None:
        """Wait briefly until the peers have read all frames.

        Otherwise, a peer may notice the end of its connection before it reads the last frames.
        """
        until = time.monotonic() + _SETTLE_S
        while any(connection.has_unread() for connection in self.connections) and time.monotonic() < until:
            time.sleep(_SETTLE_POLL_S)

    def close(self) -> None:
        """Close all connections without a message, as the end of the process would."""
        for connection in self.connections:
            connection.close()
        self._targets.clear()
        self._epoll.close()

    def _accept(self) -> None:
        while True:
            try:
                if len(self._targets) > self._max_connections:
                    raise OSError(f"the limit is {self._room()}")
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # The maximum number of connections is reached, or no descriptor is free. Stop listening until a connection ends.
                # Otherwise, epoll would return at once again and again.
                log.error(
                    "cannot accept another connection: %s. New connections wait until one ends. To allow more, raise the "
                    "hard limit of open files (%d) where tritonserver is started: ulimit -Hn, a container's --ulimit nofile",
                    error,
                    self._max_files,
                )
                self._epoll.modify(self._listener, 0)
                return
            sock.setblocking(False)
            try:
                peer = check_peer(sock)
            except ProtocolError as error:
                log.warning("refused a connection: %s", error)
                sock.close()
                continue
            self._next_id += 1
            self._targets[sock.fileno()] = PeerConnection(self._next_id, sock, peer, self._buffer)
            self._epoll.register(sock, select.EPOLLIN)

    def _room(self) -> str:
        return f"{self._max_connections} connections (about {self._max_connections // _CONNECTIONS_PER_MODEL} models)"

    def _serve(self, connection: PeerConnection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            connection.flush()
        for _ in range(_MAX_FRAMES_PER_TURN):
            try:
                frame, fds = connection.receiver.receive()
            except BlockingIOError:
                return
            try:
                kind, count = read_header(frame)
                if connection.greeted:
                    self._on_frame(connection, kind, count, frame, fds)
                else:
                    try:
                        check_hello(frame)
                    except OtherVersionError:
                        self._greet(connection)  # The greeting tells the peer why it is disconnected.
                        raise
                    connection.greeted = True
                    self._greet(connection)
            finally:
                for fd in fds:
                    os.close(fd)
            # A stub may send hundreds of SPANS, which are not urgent. A frame may have closed its own connection.
            if kind is Kind.SPANS or connection.closed:
                return

    def _close(self, connection: PeerConnection) -> None:
        if connection.closed:
            return
        del self._targets[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.close()
        self._epoll.modify(self._listener, select.EPOLLIN)
        self._on_close(connection)

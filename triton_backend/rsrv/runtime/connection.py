"""One stub's connection, as the loop sees it: frames in, frames out, the stub's memory mapped."""

import os
import socket
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rsrv.wire.frames import Completion, Kind, ProtocolError, pack_completions, pack_json
from rsrv.wire.memory import Bytes, SharedMemoryError, create_document, map_segment
from rsrv.wire.socket import Closed, Receiver, send
from rsrv.wire.traces import Mark

#: what may wait for a stub that does not read: frames, their bytes, and descriptors; beyond, it is taken for dead
_MAX_BACKLOG = 4096
_MAX_BACKLOG_BYTES = 16 << 20
_MAX_BACKLOG_FDS = 64
#: what a stub may have the runtime map: segments, each of which is a mapping, of which a process has 65,530, and bytes,
#: which are address space only until somebody touches them
_MAX_SEGMENTS = 1024
_MAX_SEGMENT_BYTES = 1 << 40
#: marks of traced requests whose requests have not come; beyond, those that never came are in it
_MAX_MARKS = 4096


@dataclass(slots=True, eq=False)
class MetaCounts:
    """Runs of a meta model by how they ended, and their sub-calls."""

    outcomes: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    #: each sub-call's share, by rows, of the executions that it was part of
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Registration:
    """What a connection is for: one model, or a meta model and all that it calls."""

    key: str
    name: str
    #: of its bundle
    digest: str
    #: keys of the model, or of the called ones in the order of REGISTER, which are held for as long as it is there
    models: tuple[str, ...]
    #: what clients send and get: {"inputs": [(name, dtype, dims)...], "outputs": [...]}
    client: dict[str, list[tuple[str, str, tuple[int, ...]]]]
    #: of a meta model: names of those, in any order, and what its runs came to
    calls: tuple[str, ...] = ()
    counts: MetaCounts | None = None


class Connection:
    """Non-blocking. Raises ProtocolError or Closed when the connection is to be closed."""

    def __init__(self, id: int, sock: socket.socket, peer: int, buffer: bytearray | None = None) -> None:
        """`buffer` is what it receives into, which others may use as well (`Receiver`)."""
        self.id = id
        self.sock = sock
        self.peer = peer
        self.greeted = False
        self.watched_for_write = False
        self.closed = False
        self.registering = False
        self.group: Registration | None = None  # once it is registered
        self.segments: dict[int, Bytes] = {}
        self.completions: list[Completion] = []
        #: traced requests that come next, by the connection's own numbers
        self.marks: dict[int, Mark] = {}
        self._receiver = Receiver(sock, buffer)
        self._backlog: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._backlog_bytes = 0
        self._backlog_fds = 0

    def receive(self) -> tuple[memoryview, list[int]] | None:
        """A frame, valid until the next call, with its descriptors, which the caller owns. None: no more now."""
        try:
            return self._receiver.receive()
        except BlockingIOError:
            return None

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
        """Requests that come next are traced."""
        self.marks.update((mark.request, mark) for mark in marks)
        if len(self.marks) > _MAX_MARKS:
            self.marks.clear()

    def send(self, frame: bytes, fds: tuple[int, ...] = ()) -> None:
        """Send, or keep for later when the stub is slow: nobody else waits for it."""
        if not self._backlog:
            try:
                send(self.sock, frame, fds)
            except BlockingIOError:
                pass
            else:
                return
        self._backlog.append((frame, tuple(os.dup(fd) for fd in fds)))
        self._backlog_bytes += len(frame)
        self._backlog_fds += len(fds)
        if (
            len(self._backlog) > _MAX_BACKLOG
            or self._backlog_bytes > _MAX_BACKLOG_BYTES
            or self._backlog_fds > _MAX_BACKLOG_FDS
        ):
            raise Closed(f"{len(self._backlog)} frames unread")

    def send_document(self, kind: Kind, value: dict[str, Any]) -> None:
        """A JSON object of any size: it travels in a memfd."""
        fd = create_document(value)
        try:
            self.send(pack_json(kind, {}), (fd,))
        finally:
            os.close(fd)

    def send_object(self, kind: Kind, value: dict[str, Any]) -> None:
        """A JSON object: in the frame, if it fits."""
        try:
            frame = pack_json(kind, value)
        except ProtocolError:
            self.send_document(kind, value)
        else:
            self.send(frame)

    def flush(self) -> None:
        while self._backlog:
            frame, fds = self._backlog[0]
            try:
                send(self.sock, frame, fds)
            except BlockingIOError:
                return
            self._backlog.popleft()
            self._backlog_bytes -= len(frame)
            self._backlog_fds -= len(fds)
            for fd in fds:
                os.close(fd)

    @property
    def congested(self) -> bool:
        return bool(self._backlog)

    def send_completions(self) -> None:
        done, self.completions = self.completions, []
        for frame in pack_completions(done):
            self.send(frame)

    def close(self) -> None:
        self.closed = True
        self.sock.close()
        for _, fds in self._backlog:
            for fd in fds:
                os.close(fd)
        self._backlog.clear()
        self.segments.clear()
        self.completions.clear()

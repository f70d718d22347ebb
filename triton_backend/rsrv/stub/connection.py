"""One connection to the runtime, and the memory that the requests on it live in."""

import os
import select
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any, TypeVar
from weakref import finalize

import numpy as np
import numpy.typing as npt

from rsrv.stub.launch import Greeted
from rsrv.stub.memory_limits import spare_memory
from rsrv.wire import frames
from rsrv.wire.calls import (
    Call,
    Entrance,
    Leaving,
    Release,
    pack_calls,
    pack_entrances,
    pack_leavings,
    pack_releases,
)
from rsrv.wire.frames import Completion, Kind, ProtocolError, Submission
from rsrv.wire.layout import NUMPY, Tensor
from rsrv.wire.memory import Arena, Bytes, Place, read_document
from rsrv.wire.socket import Closed, send
from rsrv.wire.traces import Mark, Span, pack_marks, pack_spans

Array = npt.NDArray[Any]
T = TypeVar("T")

#: seconds that requests may wait for a runtime that does not read: execute() waits with them
_SHORT = 0.1
#: the same for what a run of a meta model says on its own connection, which then is of no use
_LONG = 1.0


class Rejected(Exception):
    """The runtime cannot load the model; the message says why.

    `client`: what its clients may be told, if anything.
    """

    def __init__(self, reason: str, client: str = "") -> None:
        super().__init__(reason)
        self.client = client


@dataclass(slots=True, eq=False)
class Slab:
    """The memory of one batch of requests."""

    place: Place
    segment: Bytes
    users: int

    def view(self, offset: int, tensor: Tensor, rows: int) -> Array:
        """A tensor at `offset` bytes of the segment."""
        return np.ndarray(tensor.shape(rows), NUMPY[tensor.dtype], self.segment, offset)


class _ArrayMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of one array. A type of its own, so that numpy does not go past it to what it lies in."""


class RuntimeConnection:
    """Sends from any thread; receives from one thread at a time."""

    def __init__(self, greeted: Greeted) -> None:
        self.sock = greeted.sock
        self.sock.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self.sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self.sock, select.POLLOUT)
        self._receiver = greeted.receiver
        self._board = greeted.board
        self._arena = Arena(spare=spare_memory)
        self._lock = Lock()  # the arena and the order of frames
        self._next_id = 0
        #: whether the runtime did not read in time: until it does nobody waits for it again
        self._stuck = False
        #: places of arrays that nothing refers to any more
        self._returned: deque[Place] = deque()

    # --- registration -------------------------------------------------------------------------------------

    def register(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Wait, however long compiling takes, until the model is ready. Raises Rejected, Closed, ProtocolError."""
        if not self._send(frames.pack_json(Kind.REGISTER, wanted), _LONG):
            raise Closed("the runtime does not read")
        self._readable.poll()
        frame, fds = self._receiver.receive()
        try:
            kind, _ = frames.read_header(frame)
            if kind is Kind.REJECTED:
                said = frames.unpack_json(frame)
                raise Rejected(str(said.get("reason")), str(said.get("client", "")))
            if kind is not Kind.REGISTERED or len(fds) != 1:
                raise ProtocolError(f"{kind.name} where REGISTERED was expected")
            return read_document(fds[0])
        finally:
            for fd in fds:
                os.close(fd)

    def report(self, report: dict[str, Any], patience: float) -> dict[str, Any]:
        """Say what was measured; what the runtime answers. On a connection for nothing else.

        Raises TimeoutError when it says nothing for `patience` seconds, Closed, ProtocolError.
        """
        if not self._send(frames.pack_json(Kind.REPORT, report), patience):
            raise TimeoutError("the runtime does not read")
        if not self._readable.poll(patience * 1e3):
            raise TimeoutError("the runtime does not answer")
        frame, fds = self._receiver.receive()
        for fd in fds:
            os.close(fd)
        if frames.read_header(frame)[0] is not Kind.REPORTED:
            raise ProtocolError("something else where REPORTED was expected")
        return frames.unpack_json(frame)

    def tell_spans(self, spans: Sequence[Span], dropped: int, patience: float) -> None:
        """What was seen of traced requests, on a connection as `report`'s. Raises TimeoutError, Closed."""
        if not all(self._send(frame, patience) for frame in pack_spans(spans, dropped)):
            raise TimeoutError("the runtime does not read")

    # --- memory -------------------------------------------------------------------------------------------

    def take(self, nbytes: int, users: int) -> Slab:
        """Memory that `users` requests share until each has released it. Raises OSError when there is none."""
        with self._lock:
            place = self._arena.take(nbytes)
            return Slab(place, self._arena.segment(place), users)

    def release(self, slab: Slab, users: int = 1) -> None:
        with self._lock:
            slab.users -= users
            if slab.users == 0:
                self._arena.give(slab.place)
                self._drop()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array in memory that the runtime sees, until nothing refers to it. Raises OSError when there is none."""
        nbytes = prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            place = self._arena.take(nbytes)
            held = _ArrayMemory((place.nbytes,), np.uint8, self._arena.memory(place), place.offset)
        # Whichever thread finds that nothing refers to it: it may hold the lock.
        finalize(held, self._returned.append, place).atexit = False
        return np.ndarray(shape, dtype, held)

    def tidy(self) -> None:
        """The connection is not used for a while: give up the memory of large arrays that nothing refers to."""
        with self._lock:
            self._take_back()
            self._drop()

    def _take_back(self) -> None:
        while self._returned:
            self._arena.give(self._returned.popleft())

    def _drop(self) -> None:
        """Now, for as long as the runtime maps it the memory of a large request stays in use."""
        if self._arena.dropped:
            with suppress(Closed, OSError):
                self._announce(0)  # later ones tell what this one could not

    def locate(self, array: Array) -> tuple[int, int] | None:
        """(segment, offset in bytes) of an array that lies in this connection's memory as the runtime reads it; else None."""
        if not array.flags.c_contiguous:
            return None
        with self._lock:
            place = self._arena.locate(array.__array_interface__["data"][0], array.nbytes)
        return place if place is None or place[1] % array.itemsize == 0 else None

    # --- requests -----------------------------------------------------------------------------------------

    def next_ids(self, count: int) -> range:
        with self._lock:
            first, self._next_id = self._next_id, self._next_id + count
        return range(first, first + count)

    def submit(self, submissions: Sequence[Submission]) -> int:
        """How many of them could be sent; the others could not, because the runtime does not read. Raises Closed."""
        return self._request(submissions, frames.pack_submissions)

    def enter(self, entrances: Sequence[Entrance]) -> int:
        """Ask to let runs of a meta model in. As `submit`."""
        return self._request(entrances, pack_entrances)

    def mark(self, marks: Sequence[Mark]) -> None:
        """These requests, which are sent next, are traced. If that cannot be said now, they are not."""
        with suppress(Closed, OSError), self._lock:
            for at in range(0, len(marks), frames.MAX_ENTRIES):
                self._send(pack_marks(marks[at : at + frames.MAX_ENTRIES]), 0)

    def _request(self, entries: Sequence[T], pack: Callable[[Sequence[T]], bytes]) -> int:
        with self._lock:
            if not self._announce(_SHORT):
                return 0
            for at in range(0, len(entries), frames.MAX_ENTRIES):
                if not self._send(pack(entries[at : at + frames.MAX_ENTRIES]), _SHORT):
                    return at
            return len(entries)

    def call(self, calls: Sequence[Call], releases: Sequence[Release]) -> None:
        """Send sub-calls, after giving up what is not needed on the device any more.

        Raises Closed, also when the runtime does not read, and ProtocolError.
        """
        with self._lock:
            well = self._announce(_LONG) and all(
                self._send(frame, _LONG) for frame in (*_pack_releases(releases), *pack_calls(calls))
            )
        if not well:
            raise Closed("the runtime does not read")

    def leave(self, leaving: Leaving, patience: float = _LONG) -> None:
        """A run is over. Raises Closed, also when the runtime does not read within `patience` seconds."""
        with self._lock:
            if not self._send(pack_leavings([leaving]), patience):
                raise Closed("the runtime does not read")

    def cancel(self, ids: Sequence[int]) -> bool:
        """Whether it could be said, as the runtime reads. Raises Closed."""
        with self._lock:
            return self._send(frames.pack_ids(Kind.CANCEL, ids), 0)

    def _announce(self, patience: float) -> bool:
        """Tell the runtime which segments are new and which are gone, as far as it reads; whether that was all."""
        while self._arena.fresh:
            id, fd = self._arena.fresh[0]
            if not self._send(frames.pack_ids(Kind.SEGMENT, [id]), patience, [fd]):
                return False
            self._arena.announced()
        if self._arena.dropped:
            if not self._send(frames.pack_ids(Kind.DROP_SEGMENT, self._arena.dropped), patience):
                return False
            self._arena.dropped.clear()
        return True

    def _send(self, frame: bytes, patience: float, fds: Sequence[int] = ()) -> bool:
        """Whether the runtime took it. It is waited for at most `patience` seconds, and then not again."""
        try:
            send(self.sock, frame, fds)
        except BlockingIOError:
            if self._stuck or not self._writable.poll(patience * 1e3):
                self._stuck = self._stuck or patience > 0
                return False
            send(self.sock, frame, fds)
        self._stuck = False
        return True

    @property
    def reads(self) -> bool:
        """Whether the runtime takes what it is sent."""
        return bool(self._writable.poll(0))

    @property
    def robbed(self) -> bool:
        """Whether somebody else has closed its socket: code in this process that closes what is not its own."""
        fd = self.sock.fileno()
        if fd < 0:
            return False
        try:
            lost = not stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            lost = True
        # Another thread of ours may have closed it meanwhile, and then has forgotten its number first.
        return lost and self.sock.fileno() == fd

    def receive(self, timeout: float) -> list[Completion]:
        """The next completions, waiting at most `timeout` seconds. Raises TimeoutError, Closed, ProtocolError."""
        if not self._readable.poll(max(0.0, timeout * 1e3)):
            raise TimeoutError
        frame, fds = self._receiver.receive()
        for fd in fds:  # a runtime sends none with answers
            os.close(fd)
        kind, count = frames.read_header(frame)
        if kind is not Kind.DONE:
            raise ProtocolError(f"{kind.name} where DONE was expected")
        return frames.unpack_completions(frame, count)

    def device_free_in_ns(self) -> int:
        """When the device will have done what it has to do now, as the runtime predicts; 0: it is free."""
        ahead: int = self._board[0] - time.monotonic_ns()
        return max(0, ahead)

    def close(self) -> None:
        with self._lock:
            self.abandon()
            self._arena.close()

    def abandon(self) -> None:
        """Let go of the socket only, from a process that was forked: the runtime must see the end of its parent."""
        with suppress(OSError):  # somebody else closed it
            self.sock.close()


def _pack_releases(releases: Sequence[Release]) -> Iterator[bytes]:
    for at in range(0, len(releases), frames.MAX_ENTRIES):
        yield pack_releases(releases[at : at + frames.MAX_ENTRIES])

"""One connection to the runtime, and the shared memory of the requests on it."""

import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any
from weakref import finalize

import numpy as np

from rsrv.front.rules import DOES_NOT_READ, GREETING_TIMEOUT_S, NO_BOARD, NOT_ACCEPTED, SEND_S
from rsrv.limits import spare_memory
from rsrv.stub.tensors import Array
from rsrv.wire import frames
from rsrv.wire.blackbox import BlackBoxReader
from rsrv.wire.calls import (
    Call,
    Release,
    RunExit,
    pack_calls,
    pack_leavings,
    pack_releases,
)
from rsrv.wire.frames import Completion, Kind, ProtocolError, check_hello, hello
from rsrv.wire.generation import unpack_tokens
from rsrv.wire.memory import SILENT_S, Arena, Bytes, Place, read_board, read_document
from rsrv.wire.socket import Closed, Receiver, send
from rsrv.wire.traces import Mark, Span, pack_marks, pack_spans

#: Like SEND_S, for frames of a meta model's run on its own connection. The connection counts as broken after this time.
_RUN_SEND_S = 1.0


class Rejected(Exception):
    """The runtime cannot load the model; the message says why."""

    def __init__(self, reason: str, client: str = "") -> None:
        """`client` is the text for the model's clients, "" for none."""
        super().__init__(reason)
        self.client = client

    @property
    def dangerous(self) -> bool:
        """True if the model has crashed runtimes. Only in this case, REJECTED has a text for clients."""
        return self.client != ""


class Cold(Exception):
    """The model is cold. The runtime starts it when a request waits for it; until then, it needs no connection."""

    def __init__(self, start_timeout_s: float) -> None:
        """`start_timeout_s` limits how long requests wait for the start."""
        super().__init__("the model starts with its first request")
        self.start_timeout_s = start_timeout_s


class LaunchError(Exception):
    """The runtime cannot be started; the message says why and what to set."""


@dataclass(frozen=True, slots=True)
class Greeted:
    """A connected socket after the first frames on it."""

    sock: socket.socket
    receiver: Receiver
    board: memoryview
    #: Number of the server's devices. Each device has a runtime.
    devices: int
    #: Black box of the runtime. None: each end of the runtime counts as a crash.
    blackbox: BlackBoxReader | None = None


def greet(sock: socket.socket) -> Greeted:
    """Exchange the first frames on a new connection.

    On an error, close the socket. Raises LaunchError, Closed, ProtocolError, OSError.
    """
    sock.settimeout(GREETING_TIMEOUT_S)
    try:
        send(sock, hello())
        receiver = Receiver(sock)
        frame, fds = receiver.receive()
        try:
            check_hello(frame)
            devices = frames.unpack_json(frame).get("devices")
            if len(fds) != 1 or not isinstance(devices, int):
                raise ProtocolError(NO_BOARD)
            board = read_board(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
    except TimeoutError:
        sock.close()
        raise LaunchError(NOT_ACCEPTED % GREETING_TIMEOUT_S) from None
    except BaseException:
        sock.close()
        raise
    return Greeted(sock, receiver, board, devices)


@dataclass(slots=True, eq=False)
class Slab:
    """The memory of one batch of requests."""

    place: Place
    segment: Bytes
    users: int


class _ArrayMemory(np.ndarray[Any, np.dtype[np.uint8]]):
    """The memory of one array.

    All views of the array keep this object alive, because numpy leaves out only those bases that have the views' own type.
    """


class RuntimeConnection:
    """A connection to the runtime. Sends from any thread; receives from one thread at a time."""

    def __init__(self, greeted: Greeted) -> None:
        self.sock = greeted.sock
        self.sock.setblocking(False)
        self._readable = select.poll()
        self._readable.register(self.sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(self.sock, select.POLLOUT)
        self._receiver = greeted.receiver
        self._board = greeted.board
        #: Value of the board's first word when requests were last sent, and the time when requests were first sent at this value.
        #: While the word has this value, the runtime may not have noticed these requests.
        self._word_at_send, self._sent_at = -1, 0.0
        self.devices = greeted.devices
        self._blackbox = greeted.blackbox
        self._arena = Arena(spare=spare_memory)
        self._lock = Lock()  # This lock guards the arena and the order of frames.
        self._next_id = 0
        #: True if the runtime did not read in time. Until it reads again, frames do not wait for it.
        self._stuck = False
        #: The demand that the runtime knows, while `register` waits for an answer; otherwise None.
        self._demand: Mapping[str, int] | None = None
        #: Seconds that requests may wait for the next start. Set when COLD arrives on a registered connection; otherwise None.
        self.dismissed: float | None = None
        #: Requests and their next tokens from the latest TOKENS.
        self._tokens: Iterable[tuple[int, int]] = ()
        #: True if this process has left the runtime, which still runs.
        self.left = False
        #: Places of arrays that were garbage-collected.
        self._returned: deque[Place] = deque()

    # --- registration -------------------------------------------------------------------------------------

    def register(
        self,
        registration: dict[str, Any],
        starting: Callable[[frames.StartProgress], object] = lambda progress: None,
    ) -> dict[str, Any]:
        """Register, and wait until the model is ready, however long compiling takes.

        `starting` is called with each step of the start. Raises Cold, Rejected, Closed, ProtocolError.
        """
        if not self._send(frames.pack_json(Kind.REGISTER, registration), _RUN_SEND_S):
            raise Closed(DOES_NOT_READ)
        self._demand = {key: registration[key] for key in ("asked", "deadline_ns") if registration.get(key)}
        while True:
            self._readable.poll()
            frame, fds = self._receiver.receive()
            try:
                kind, _ = frames.read_header(frame)
                if kind is Kind.STARTING:
                    starting(frames.unpack_starting(frame))
                    continue
                self._demand = None
                if kind is Kind.REJECTED:
                    answer = frames.unpack_json(frame)
                    raise Rejected(str(answer.get("reason")), str(answer.get("client", "")))
                if kind is Kind.COLD:
                    raise Cold(_start_timeout(frame))
                if kind is not Kind.REGISTERED or len(fds) != 1:
                    raise ProtocolError(f"{kind.name} where REGISTERED was expected")
                return read_document(fds[0])
            finally:
                for fd in fds:
                    os.close(fd)

    def tell_demand(self, demand: Mapping[str, int]) -> None:
        """Report a changed demand for the model while `register` waits on another thread. Thread-safe.

        `demand` has the keys "asked" and "deadline_ns" of REGISTER. If the runtime does not read now, the next call reports it.
        """
        if self._demand not in (None, demand):
            with suppress(Closed, OSError):
                if self._send(frames.pack_json(Kind.DEMAND, {"asked": False, **demand}), 0):
                    self._demand = demand

    def report(self, report: dict[str, Any], patience: float) -> None:
        """Report measurements, and wait until the runtime has received them. Use a connection that is only for reports.

        Raises TimeoutError if the runtime does not answer for `patience` seconds, Closed, ProtocolError.
        """
        if not self._send(frames.pack_json(Kind.REPORT, report), patience):
            raise TimeoutError(DOES_NOT_READ)
        while True:
            if not self._readable.poll(patience * 1e3):
                raise TimeoutError("the runtime does not answer")
            frame, fds = self._receiver.receive()
            for fd in fds:
                os.close(fd)
            kind, _ = frames.read_header(frame)
            if kind is Kind.REPORTED:
                return
            # Ignore COLD: the runtime also sends it on the connection for answers, whose reader handles it.
            if kind is not Kind.COLD:
                raise ProtocolError(f"{kind.name} where REPORTED was expected")

    def report_spans(self, spans: Sequence[Span], dropped: int, patience: float) -> None:
        """Report ended spans, on a connection for reports. Raises TimeoutError, Closed."""
        if not all(self._send(frame, patience) for frame in pack_spans(spans, dropped)):
            raise TimeoutError(DOES_NOT_READ)

    # --- memory -------------------------------------------------------------------------------------------

    def take(self, nbytes: int, users: int) -> Slab:
        """Allocate memory that `users` requests share until each has released it.

        Raises OSError if no memory is left, and Closed if the runtime was lost.
        """
        with self._lock:
            if self.sock.fileno() < 0:
                raise Closed("the runtime was lost")
            place = self._arena.take(nbytes)
            return Slab(place, self._arena.segment(place), users)

    def release(self, slab: Slab, users: int = 1) -> None:
        with self._lock:
            slab.users -= users
            if slab.users == 0:
                self._arena.give(slab.place)
                self._drop()

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Allocate an array in memory that the runtime sees. Garbage collection frees it. Raises OSError if no memory is left."""
        nbytes = prod(shape) * dtype.itemsize
        with self._lock:
            self._take_back()
            place = self._arena.take(nbytes)
            memory = _ArrayMemory((place.nbytes,), np.uint8, self._arena.memory(place), place.offset)
        # Garbage collection calls `append`. This must take no lock, because any thread may collect the array, even one that holds
        # the lock.
        finalize(memory, self._returned.append, place).atexit = False
        return np.ndarray(shape, dtype, memory)

    def tidy(self) -> None:
        """Free the memory of garbage-collected large arrays, before the connection is idle for some time."""
        with self._lock:
            self._take_back()
            self._drop()

    def _take_back(self) -> None:
        while self._returned:
            self._arena.give(self._returned.popleft())

    def _drop(self) -> None:
        """Announce dropped segments at once, because a large request's memory stays in use while the runtime maps it."""
        if self._arena.dropped:
            with suppress(Closed, OSError):
                self._announce(0)  # The next announcement has the rest.

    def locate(self, array: Array) -> tuple[int, int] | None:
        """Return (segment, offset in bytes) of an array in this connection's memory.

        Return None if the array is elsewhere, or if its layout or alignment is one that the runtime does not read.
        """
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

    def submit(
        self, entries: Sequence[Any], pack: Callable[[Sequence[Any]], bytes] = frames.pack_submissions
    ) -> int:
        """Send requests, in frames that `pack` makes. Return the number of sent requests.

        If fewer than all were sent, the runtime does not read. Raises Closed.
        """
        with self._lock:
            if (word := self._board[0]) != self._word_at_send:
                self._word_at_send, self._sent_at = word, time.monotonic()
            if (self._arena.fresh or self._arena.dropped) and not self._announce(SEND_S):
                return 0
            for at in range(0, len(entries), frames.MAX_ENTRIES):
                if not self._send(pack(entries[at : at + frames.MAX_ENTRIES]), SEND_S):
                    return at
            return len(entries)

    def mark(self, marks: Sequence[Mark]) -> None:
        """Announce the traced requests among the requests that are sent next.

        If the runtime does not read now, these requests are not traced.
        """
        with suppress(Closed, OSError), self._lock:
            for at in range(0, len(marks), frames.MAX_ENTRIES):
                self._send(pack_marks(marks[at : at + frames.MAX_ENTRIES]), 0)

    def call(self, calls: Sequence[Call], releases: Sequence[Release]) -> None:
        """Send sub-calls, and before them the releases of device tensors that are not needed any more.

        Raises Closed, also if the runtime does not read, and ProtocolError.
        """
        with self._lock:
            sent = self._announce(_RUN_SEND_S) and all(
                self._send(frame, _RUN_SEND_S) for frame in (*_pack_releases(releases), pack_calls(calls))
            )
        if not sent:
            raise Closed(DOES_NOT_READ)

    def leave(self, leaving: RunExit, patience: float = _RUN_SEND_S) -> None:
        """End a run. Raises Closed, also if the runtime does not read within `patience` seconds."""
        with self._lock:
            if not self._send(pack_leavings([leaving]), patience):
                raise Closed(DOES_NOT_READ)

    def cancel(self, ids: Sequence[int]) -> bool:
        """Ask to cancel requests. Returns False if the runtime does not read now. Raises Closed."""
        with self._lock:
            return self._send(frames.pack_ids(Kind.CANCEL, ids), 0)

    def _announce(self, patience: float) -> bool:
        """Announce new and dropped segments. Returns False if the runtime did not read all of the frames."""
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
        """Send a frame. Return False if the runtime does not read within `patience` seconds.

        After that, frames fail at once until the runtime reads again.
        """
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
        """True if the runtime reads. Thread-safe, because each call makes a poll object, which serves one thread at a time."""
        fd, poll = self.sock.fileno(), select.poll()
        if fd < 0:
            return False
        poll.register(fd, select.POLLOUT)
        return bool(poll.poll(0))

    @property
    def closed_by_others(self) -> bool:
        """True if code outside of rsrv, for example in model.py, has closed the socket's file descriptor."""
        fd = self.sock.fileno()
        if fd < 0:
            return False
        try:
            is_lost = not stat.S_ISSOCK(os.fstat(fd).st_mode)
        except OSError:
            is_lost = True
        # If another thread of rsrv has closed the socket during this check, fileno() is -1.
        return is_lost and self.sock.fileno() == fd

    def receive(self, timeout: float) -> list[Completion]:
        """Return the next completions, within `timeout` seconds.

        The list is empty if the frame is COLD, which sets `dismissed`, or TOKENS, whose tokens `take_tokens` returns. Raises
        TimeoutError, Closed, ProtocolError.
        """
        if not self._readable.poll(max(0.0, timeout * 1e3)):
            raise TimeoutError
        frame, fds = self._receiver.receive()
        for fd in fds:  # A runtime sends no descriptors with answers.
            os.close(fd)
        kind, count = frames.read_header(frame)
        if kind is Kind.COLD:
            self.dismissed = _start_timeout(frame)
            return []
        if kind is Kind.TOKENS:
            self._tokens = unpack_tokens(frame, count)
            return []
        if kind is not Kind.DONE:
            raise ProtocolError(f"{kind.name} where DONE was expected")
        return frames.unpack_completions(frame, count)

    def take_tokens(self) -> Iterable[tuple[int, int]]:
        """Return each request's next token from the latest frame, once."""
        tokens, self._tokens = self._tokens, ()
        return tokens

    def device_free_in_s(self) -> float:
        """Return the predicted seconds until the device has done all of its work, or 0 if the device is free.

        Work that is overdue by s seconds is expected to take s more seconds.
        """
        word: int = self._board[0]
        return abs(word - time.monotonic_ns()) / 1e9 if word & 1 else 0.0

    def unnoticed_s(self) -> float:
        """Return for how many seconds the runtime has not responded, or 0 if it seems to work.

        A runtime does not respond if it has not noticed requests that were sent here, or if it is idle and its last round is
        more than SILENT_S ago.
        """
        word, now = self._board[0], time.monotonic()
        waiting_s = now - self._sent_at if word == self._word_at_send else 0.0
        return waiting_s if word & 1 else max(waiting_s, now - word / 1e9 - SILENT_S)

    def admission_in_s(self) -> float:
        """Return the predicted seconds until the runtime would admit another run of a meta model."""
        return float(self._board[1]) / 1e9

    def load_in_s(self, slots: Sequence[int]) -> float:
        """Return the predicted seconds for loading the weights of these models, or 0 if all weights are on the device."""
        return sum(self._board[slot] for slot in slots) / 1e9

    def ended_by(self, key: str = "") -> bool:
        """Return True if executing the model `key` (empty: any model) may have crashed the runtime."""
        return not self.left and (self._blackbox is None or self._blackbox.is_suspect(key))

    @property
    def device_sleeps(self) -> bool:
        """True if the runtime ended because its device was put to sleep."""
        return self._blackbox is not None and self._blackbox.sleeps

    def leave_runtime(self) -> None:
        """Close the socket, when the model becomes cold.

        The memory stays, because Triton may still read answers from it.
        """
        self.left = True
        self.abandon()

    def close(self) -> None:
        with self._lock:
            self.abandon()
            self._arena.close()

    def abandon(self) -> None:
        """Close the socket, but keep the memory.

        A forked child process calls this. If its copy of the socket stayed open, the runtime could not see the parent's end.
        """
        with suppress(OSError):  # Other code has closed it.
            self.sock.close()


def _start_timeout(frame: bytes | memoryview) -> float:
    try:
        return float(frames.unpack_json(frame)["start_timeout_s"])
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("COLD without the time that a start may take") from None


def _pack_releases(releases: Sequence[Release]) -> Iterator[bytes]:
    for at in range(0, len(releases), frames.MAX_ENTRIES):
        yield pack_releases(releases[at : at + frames.MAX_ENTRIES])

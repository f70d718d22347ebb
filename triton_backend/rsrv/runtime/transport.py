"""The sockets: every connection on one epoll. Nothing here blocks but `poll`."""

import logging
import os
import resource
import select
import socket
from collections.abc import Callable
from typing import Any

from rsrv.runtime.connection import Connection
from rsrv.wire.frames import MAX_FRAME, Kind, ProtocolError, check_hello, read_header
from rsrv.wire.socket import Closed, check_peer

log = logging.getLogger("rsrv.transport")

#: frames read from one connection before the others get their turn
_BURST = 32
#: connections of one model: its stub's for requests, for answers that come later, and for reports. A meta model has one
#: more for each run.
_EACH = 3
#: descriptors that are not for connections but for what these bring along: weights' files, documents under way
_SPARE = 256

OnFrame = Callable[[Connection, Kind, int, memoryview, list[int]], None]


class Transport:
    """`on_frame` gets each frame after the greeting; `on_close` each connection that ended, for whatever reason.

    What a connection does wrong ends that connection, and nothing else: `on_frame` raises ProtocolError.
    """

    def __init__(
        self,
        listener: socket.socket,
        greet: Callable[[Connection], None],
        on_frame: OnFrame,
        on_close: Callable[[Connection], None],
    ) -> None:
        self._listener = listener
        self._greet = greet
        self._on_frame = on_frame
        self._on_close = on_close
        self._next_id = 0
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        #: of descriptors, half of what there are
        self._most = max(1, (limit - _SPARE) // 2)
        self._files = limit
        log.info("room for %s, with the %d files that may be open", self._room(), limit)
        # A frame is dealt with before the next one is received, from whomever.
        self._buffer = bytearray(MAX_FRAME)
        self._epoll = select.epoll()
        self._targets: dict[int, Connection | Callable[[], None]] = {}
        self.watch(listener.fileno(), self._accept)

    def watch(self, fd: int, action: Callable[[], None]) -> None:
        """Call `action` in `handle` whenever `fd` is readable."""
        self._targets[fd] = action
        self._epoll.register(fd, select.EPOLLIN)

    @property
    def connections(self) -> list[Connection]:
        return [target for target in self._targets.values() if isinstance(target, Connection)]

    def wait(self, timeout: float | None) -> list[tuple[int, int]]:
        """Wait at most `timeout` seconds for anything; what is there is for `handle`."""
        return self._epoll.poll(timeout)

    def handle(self, ready: list[tuple[int, int]]) -> None:
        """Handle all that `wait` found."""
        for fd, mask in ready:
            target = self._targets.get(fd)  # None: closed by an earlier one of this round
            if isinstance(target, Connection):
                self.guard(target, self._serve, target, mask)
            elif target is not None:
                target()

    def guard(self, connection: Connection, action: Callable[..., None], *args: Any) -> None:
        """Do something for a connection; whatever fails, that connection is closed and the others go on."""
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
            if connection.congested != connection.watched_for_write and not connection.closed:
                connection.watched_for_write = connection.congested
                extra = select.EPOLLOUT if connection.congested else 0
                self._epoll.modify(connection.sock, select.EPOLLIN | extra)

    def close(self) -> None:
        """End all connections without a word, as the process's end would."""
        for connection in self.connections:
            connection.close()
        self._targets.clear()
        self._epoll.close()

    def _accept(self) -> None:
        while True:
            try:
                if len(self._targets) > self._most:
                    raise OSError(f"there are {self._room()} already")
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # No descriptor may be taken: listen again when a connection has ended, or epoll would spin.
                log.error(
                    "cannot take another connection: %s. Whoever comes waits until one has ended. For more, raise the hard limit of "
                    "open files (%d) where tritonserver is started: ulimit -Hn, a container's --ulimit nofile",
                    error,
                    self._files,
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
            self._targets[sock.fileno()] = Connection(self._next_id, sock, peer, self._buffer)
            self._epoll.register(sock, select.EPOLLIN)

    def _room(self) -> str:
        return f"{self._most} connections (about {self._most // _EACH} models)"

    def _serve(self, connection: Connection, mask: int) -> None:
        if mask & select.EPOLLOUT:
            connection.flush()
        for _ in range(_BURST):
            received = connection.receive()
            if received is None:
                return
            frame, fds = received
            try:
                kind, count = read_header(frame)
                if connection.greeted:
                    self._on_frame(connection, kind, count, frame, fds)
                else:
                    check_hello(frame)
                    connection.greeted = True
                    self._greet(connection)
            finally:
                for fd in fds:
                    os.close(fd)
            if kind is Kind.SPANS:
                return  # a stub may have hundreds of them, and none is urgent

    def _close(self, connection: Connection) -> None:
        if connection.closed:
            return
        del self._targets[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)
        connection.close()
        self._epoll.modify(self._listener, select.EPOLLIN)
        self._on_close(connection)

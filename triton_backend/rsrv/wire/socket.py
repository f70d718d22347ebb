"""Sockets between stub and runtime: SOCK_SEQPACKET, one frame per message, with descriptors attached."""

import array
import errno
import os
import select
import socket
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from rsrv.wire.frames import (
    HEADER,
    MAX_FRAME,
    Kind,
    ProtocolError,
    check_hello,
    hello,
    pack_json,
    read_header,
)
from rsrv.wire.memory import read_flat
from rsrv.wire.paths import SOCKET, runtime_directory

#: Maximum number of connections that wait to be accepted.
_BACKLOG = 1024
#: Maximum number of descriptors in one received frame.
_MAX_FDS = 4
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_CREDENTIALS = struct.Struct("3i")
# The flags are plain numbers, because combining the library's enum members takes more time than the system call.
_TRUNCATED = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)


class Closed(Exception):
    """The peer has closed the connection."""


class NoDescriptors(ProtocolError):
    """The descriptors of a frame are lost, because this process may not open more files."""


def may_open(count: int) -> bool:
    """Return False if this process may not open `count` further files."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.eventfd(0))
    except OSError as error:
        return error.errno != errno.EMFILE
    finally:
        for fd in opened:
            os.close(fd)
    return True


def lacks_descriptors(error: BaseException) -> bool:
    """Return True if an operation failed because this process may not open more files."""
    return isinstance(error, NoDescriptors) or (isinstance(error, OSError) and error.errno == errno.EMFILE)


def listen(path: Path) -> socket.socket:
    """Return a non-blocking listening socket at `path`, which only this user can reach."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    sock.bind(str(path))
    sock.listen(_BACKLOG)
    return sock


def take_over(fd: int) -> socket.socket:
    """Return the listening socket of a process that has ended. Connections that wait to be accepted are kept."""
    sock = socket.socket(fileno=fd)
    # Call listen() again: clients see the credentials of the process that called it last.
    sock.listen(_BACKLOG)
    return sock


def connect(path: Path) -> socket.socket:
    """Connect to a listener. Raises OSError if there is none, and ProtocolError if the listener belongs to another user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(path))
        check_peer(sock)
    except BaseException:
        sock.close()
        raise
    return sock


def readable(fds: Iterable[int], timeout_s: float | None = None) -> set[int]:
    """Wait until a descriptor can be read, or a pidfd's process has ended. Return all such descriptors.

    This uses poll(), because select() is limited to descriptors up to 1023 and a server has more.
    """
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)}


def check_peer(sock: socket.socket) -> int:
    """Return the peer's pid. Raises ProtocolError if the peer runs as another user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.getuid():
        raise ProtocolError(
            f"the peer runs as uid {uid}, and this side as {os.getuid()}: run both as one user"
        )
    return int(pid)


def send(sock: socket.socket, frame: bytes, fds: Sequence[int] = ()) -> None:
    """Send one frame. Raises Closed, and BlockingIOError if the socket is non-blocking and full."""
    try:
        if fds:
            socket.send_fds(sock, [frame], list(fds), _NOSIGNAL)
        else:
            sock.send(frame, _NOSIGNAL)
    except (BrokenPipeError, ConnectionError) as error:
        raise Closed(str(error)) from None


class Receiver:
    """Reads frames into one buffer, so that a read allocates nothing.

    Receivers may share one `buffer` of MAX_FRAME bytes. A frame is valid until any of these receivers gets the next frame.
    """

    __slots__ = ("_buffer", "_sock")

    def __init__(self, sock: socket.socket, buffer: memoryview | None = None) -> None:
        self._sock = sock
        self._buffer = memoryview(bytearray(MAX_FRAME)) if buffer is None else buffer

    def receive(self) -> tuple[memoryview, list[int]]:
        """Return one frame and its descriptors. The frame is valid until the next call, and the caller owns the descriptors.

        Raises Closed, ProtocolError, and BlockingIOError if the socket is non-blocking and empty.
        """
        try:
            try:
                size, ancillary, flags, _ = self._sock.recvmsg_into([self._buffer], _FD_SPACE, _CLOEXEC)
            except ConnectionResetError:
                # The peer ended with unread frames. The kernel reports this once, before it delivers the frames that the peer
                # had sent.
                size, ancillary, flags, _ = self._sock.recvmsg_into([self._buffer], _FD_SPACE, _CLOEXEC)
        except ConnectionError as error:
            raise Closed(str(error)) from None
        fds = _descriptors(ancillary) if ancillary else []
        if flags & _TRUNCATED:
            for fd in fds:
                os.close(fd)
            if flags & socket.MSG_CTRUNC and not may_open(_MAX_FDS):
                raise NoDescriptors("this process has reached its limit of open files (ulimit -n)")
            raise ProtocolError(f"a frame is larger than {MAX_FRAME} bytes or carries too many descriptors")
        if not size:
            raise Closed("end of stream")
        return self._buffer[:size], fds


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def read_record(server_pid: int, gpu: str = "0", timeout: float = 10.0) -> bytes:
    """Return the record of a tritonserver's runtime, a DeviceRecord of control.proto.

    RSRV_RUNTIME_DIR must be the same as for the server. Raises OSError if there is no runtime, or if it does not answer for
    `timeout` seconds. Raises Closed if the runtime ends during the call, and ProtocolError if another user runs it.
    """
    return ask(server_pid, gpu, timeout, pack_json(Kind.STATUS, {}), Kind.STATUS_REPLY)


def ask(server_pid: int, gpu: str, timeout: float, question: bytes, answer: Kind) -> bytes:
    """Send the frame `question` to a runtime, and return the body of its answer. Raises the errors of `read_record`."""
    with connect(runtime_directory(server_pid, gpu) / SOCKET) as sock:
        sock.settimeout(timeout)
        receiver = Receiver(sock)
        send(sock, hello())
        frame, fds = receiver.receive()
        _close(fds)
        check_hello(frame)
        send(sock, question)
        frame, fds = receiver.receive()
        try:
            if read_header(frame)[0] is not answer:
                raise ProtocolError(f"the runtime's answer is not {answer.name}")
            return read_flat(fds[0]) if fds else bytes(frame[HEADER.size :])
        finally:
            _close(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)

"""The order in which connections are read, limits for slow stubs, and wrong reports of stubs."""

import socket
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.wire.frames import Kind, ProtocolError, hello, pack_ids, pack_json
from rsrv.wire.socket import connect, listen, send
from tests.logged import logged_here
from tests.waiting import PATIENCE_S


def turns(tmp_path: Path, frame: bytes, each: int) -> list[int]:
    """Return the order in which two connections are read, if each has `each` frames before the first read."""
    read: list[int] = []
    ignored: Callable[..., Any] = lambda *_: None

    def on_frame(connection: PeerConnection, *_: object) -> None:
        read.append(connection.id)

    listener = listen(tmp_path / "socket")
    transport = Transport(listener, ignored, on_frame, ignored)
    peers: list[socket.socket] = []
    for _ in range(2):
        peers.append(connect(tmp_path / "socket"))
        send(peers[-1], hello())
        for _ in ("accept", "greet"):
            transport.handle(transport.wait(PATIENCE_S))
    for peer in peers * each:
        send(peer, frame)
    while len(read) < 2 * each:
        transport.handle(transport.wait(PATIENCE_S))
    transport.close()
    for sock in (*peers, listener):
        sock.close()
    return read


def test_frames_of_one_stub_are_read_together(tmp_path: Path) -> None:
    """A connection's frames are read together before the next connection's."""
    first, second, *rest = turns(tmp_path, pack_ids(Kind.CANCEL, [1]), 2)

    assert first == second
    assert first not in rest


def test_a_connection_ends_its_turn_after_spans(tmp_path: Path) -> None:
    """A connection's turn ends after a frame with spans, because reading spans takes long."""
    read = turns(tmp_path, pack_json(Kind.SPANS, {}), 3)

    assert all(len(set(read[at : at + 2])) == 2 for at in (0, 2, 4))


def test_a_planned_end_waits_until_the_answers_are_read(tmp_path: Path) -> None:
    """Before a planned end, the runtime waits until its peers have read all frames.

    A peer that does not read delays it only briefly.
    """
    ignored: Callable[..., Any] = lambda *_: None
    with listen(tmp_path / "socket") as listener:
        transport = Transport(listener, ignored, ignored, ignored)
        with connect(tmp_path / "socket") as peer:
            transport.handle(transport.wait(PATIENCE_S))
            (connection,) = transport.connections
            assert not connection.has_unread()
            connection.send(hello())
            assert connection.has_unread()
            transport.settle()
            peer.recv(100)
            assert not connection.has_unread()
        transport.close()


def test_a_stub_that_is_slow_again_and_again_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub that often reads late stays connected, because the limits apply only to frames that it has not read yet."""
    monkeypatch.setattr("rsrv.runtime.transport._MAX_BACKLOG_BYTES", 10_000)
    monkeypatch.setattr("rsrv.runtime.transport._MAX_BACKLOG_FDS", 2)
    frame = pack_ids(Kind.CANCEL, range(500))
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        for end in (left, right):
            end.setblocking(False)
        connection = PeerConnection(1, left, 1)
        for _ in range(10):
            sent = 0
            while not connection.backlog:
                connection.send(frame, (left.fileno(),))
                sent += 1
            for _ in range(sent - 1):
                assert right.recv(len(frame)) == frame
            connection.flush()
            assert right.recv(len(frame)) == frame


def test_a_connection_that_a_frame_closes_is_not_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If an answer finds that the peer has closed, the connection is not read any more, and no error is logged."""
    ignored: Callable[..., Any] = lambda *_: None

    def answer(connection: PeerConnection, *_: object) -> None:
        transport.guard(connection, connection.send, hello())

    with listen(tmp_path / "socket") as listener:
        transport = Transport(listener, ignored, answer, ignored)
        with connect(tmp_path / "socket") as peer:
            send(peer, hello())
            for _ in ("accept", "greet"):
                transport.handle(transport.wait(PATIENCE_S))
            for _ in range(2):
                send(peer, pack_ids(Kind.CANCEL, [1]))
        transport.handle(transport.wait(PATIENCE_S))
        transport.close()

    assert not [record for record in logged_here(caplog) if record.levelname == "ERROR"]


@pytest.mark.parametrize("report", [[1, inf], [inf, 1], [nan, 1], [-1.0, 1], [1, -1], [10**400, 1]])
def test_an_import_that_cannot_be_is_a_violation_of_the_protocol(report: list[float]) -> None:
    """A report of an import with impossible numbers, such as NaN or Infinity in JSON, is an error of the protocol.

    It must not end the runtime's loop.
    """
    left, right = socket.socketpair()
    with left, right:
        connection = PeerConnection(1, left, 1)
        connection.note_import([2.0, 3], 100.0)
        assert connection.importing == (98.0, 3)
        with pytest.raises(ProtocolError):
            connection.note_import(report, 100.0)
        assert connection.importing is None

"""Whose frames are read when."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rsrv.runtime.transport import PeerConnection, Transport
from rsrv.wire.frames import Kind, hello, pack_ids, pack_json
from rsrv.wire.socket import connect, listen, send


def turns(tmp_path: Path, frame: bytes, each: int) -> list[int]:
    """Which of two connections is read when, if so many frames of each have come when the first one is read."""
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
            transport.handle(transport.wait(10))
    for peer in peers * each:
        send(peer, frame)
    while len(read) < 2 * each:
        transport.handle(transport.wait(10))
    transport.close()
    for sock in (*peers, listener):
        sock.close()
    return read


def test_what_one_stub_sends_is_read_together(tmp_path: Path) -> None:
    """Then it is the other's turn."""
    one, other, *rest = turns(tmp_path, pack_ids(Kind.CANCEL, [1]), 2)

    assert one == other
    assert one not in rest


def test_spans_let_others_have_their_turn(tmp_path: Path) -> None:
    """However many frames of them a stub tells: reading takes long, and others have requests."""
    read = turns(tmp_path, pack_json(Kind.SPANS, {}), 3)

    assert all(len(set(read[at : at + 2])) == 2 for at in (0, 2, 4))

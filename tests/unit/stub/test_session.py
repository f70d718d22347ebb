"""The connections of a session: the questions that any thread may ask, and a runtime that sends wrong frames or hangs."""

import os
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from rsrv.stub.connection import Greeted, RuntimeConnection
from rsrv.wire.calls import RunExit
from rsrv.wire.frames import Kind, ProtocolError, Status, pack_json
from rsrv.wire.memory import SILENT_S
from rsrv.wire.socket import Receiver, send
from tests.waiting import wait_until


def test_any_thread_may_ask_whether_the_runtime_reads() -> None:
    """A thread can find out whether the runtime reads, even while another thread waits until it can send a frame."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = RuntimeConnection(Greeted(ours, Receiver(ours), memoryview(bytes(16)).cast("Q"), 1))
    sent = 0
    with suppress(BlockingIOError):
        while ours.send(b"frame"):
            sent += 1
    leaving = threading.Thread(target=connection.leave, args=(RunExit(1, Status.OK), 60.0))
    leaving.start()

    assert not any(connection.reads for _ in range(10_000))

    for _ in range(sent):
        theirs.recv(100)
    leaving.join()
    theirs.close()
    connection.close()
    assert not connection.reads


@pytest.mark.parametrize("frame", [pack_json(Kind.STARTING, {"start_s": "soon"}), b"not a frame"])
def test_descriptors_of_a_runtime_that_misbehaves_are_closed(frame: bytes) -> None:
    """If an answer to REGISTER cannot be read, the descriptors that came with it are closed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = RuntimeConnection(Greeted(ours, Receiver(ours), memoryview(bytes(8)).cast("q"), 1))
        files = len(os.listdir("/proc/self/fd"))
        send(theirs, frame, [0])
        with pytest.raises(ProtocolError):
            connection.register({})
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_a_runtime_is_silent_only_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle runtime does not respond if the latest round of its loop is too long ago.

    A busy runtime does not respond only if it has not noticed the requests that were sent to it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        board = memoryview(bytearray(16)).cast("q")
        connection = RuntimeConnection(Greeted(ours, Receiver(ours), board, 1))
        now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: now)

        def unnoticed(round_at: float, *, busy: bool) -> float:
            board[0] = int(1e9 * round_at) | busy
            return round(connection.unnoticed_s(), 3)

        assert unnoticed(now - SILENT_S / 2, busy=False) == 0
        assert unnoticed(now - SILENT_S - 2, busy=False) == 2
        assert unnoticed(now - SILENT_S - 2, busy=True) == 0
        assert connection.submit([]) == 0
        now += 3
        assert round(connection.unnoticed_s(), 3) == 3
        assert unnoticed(now, busy=True) == 0
        assert unnoticed(now, busy=False) == 0
        connection.close()


def test_the_memory_of_a_collected_array_serves_the_next_one() -> None:
    """When an array is garbage-collected, its memory is used for the next array.

    So a run that makes many arrays one after another needs memory for only one array.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = RuntimeConnection(Greeted(ours, Receiver(ours), memoryview(bytes(16)).cast("q"), 1))
        places = set()
        for _ in range(3):
            array = connection.array((1 << 20,), np.dtype(np.uint8))
            places.add(connection.locate(array))
            del array
        assert len(places) == 1
        connection.close()

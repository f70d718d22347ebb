"""The connections of a session: what other threads may ask, and what a runtime that misbehaves leaves."""

import os
import socket
import threading
from contextlib import suppress

import pytest

from rsrv.stub.connection import Greeted, RuntimeConnection
from rsrv.wire.calls import RunExit
from rsrv.wire.frames import Kind, ProtocolError, Status, pack_json
from rsrv.wire.socket import Receiver, send
from tests.waiting import wait_until


def test_any_thread_may_ask_whether_the_runtime_reads() -> None:
    """Also while another one waits for it to read."""
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
    """An answer to REGISTER that cannot be read may come with a file, which nothing else would close."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        connection = RuntimeConnection(Greeted(ours, Receiver(ours), memoryview(bytes(8)).cast("q"), 1))
        files = len(os.listdir("/proc/self/fd"))
        send(theirs, frame, [0])
        with pytest.raises(ProtocolError):
            connection.register({})
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)

"""Reconnecting after a crash of the runtime: the back-off, and the failures of clients meanwhile."""

import os
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from rsrv.stub.connection import Greeted, LaunchError, Rejected, RuntimeConnection
from rsrv.stub.session import DOWN, Session
from rsrv.wire.calls import RunExit
from rsrv.wire.frames import Kind, ProtocolError, Status, pack_json
from rsrv.wire.socket import Closed, Receiver, send


class Backoffs(threading.Event):
    """Waits take no time; the fourteenth ends the session."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        if len(self.seconds) == 14:
            self.set()
        return True


@pytest.mark.parametrize(
    ("error", "longest", "down"),
    [
        (LaunchError("no Python"), 5, DOWN),
        (RuntimeError("unforeseen"), 5, DOWN),
        (Rejected("it hung", "m: it hung"), 60, "m: it hung"),
        (
            Rejected("/models/m: is gone"),
            60,
            "the model runtime does not load this model again; the server's log says why",
        ),
    ],
)
def test_attempts_become_rarer(error: Exception, longest: float, down: str) -> None:
    """The back-off doubles up to five seconds, or up to a minute if the runtime rejects the model."""

    def refuse() -> Greeted:
        raise error

    backoffs = Backoffs()
    session = Session(refuse, "m", "/models/m")
    session._closed, session.started = backoffs, True

    session._bring_up()

    assert backoffs.seconds[:4] == [0.05, 0.1, 0.2, 0.4]
    assert backoffs.seconds[-1] == longest
    assert session.down == down


def test_the_end_of_a_runtime_that_rejects_the_model_shortens_the_back_off() -> None:
    """The next runtime may serve the model, and need not wait for a minute until it is asked."""
    errors: list[Exception] = [Rejected("no device")] * 11 + [Closed("end of stream")] * 3

    def refuse() -> Greeted:
        raise errors.pop(0)

    session = Session(refuse, "m", "/models/m")
    session._closed = backoffs = Backoffs()
    session.started = True

    session._bring_up()

    assert backoffs.seconds[9:] == [25.6, 51.2, 5, 5, 5]


def test_a_first_load_outlives_crashes_of_the_runtime() -> None:
    """It is tried ten times while runtimes crash, and not again after another error."""
    attempts = iter([Closed("end of stream"), ConnectionResetError(), Rejected("no")])

    def open_() -> Greeted:
        raise next(attempts)

    session = Session(open_, "m", "/models/m")
    session._closed = backoffs = Backoffs()

    with pytest.raises(Rejected):
        session.begin()

    assert backoffs.seconds == [0.05, 0.1]
    attempts = iter([Closed("end of stream")] * 10)
    with pytest.raises(Closed):
        session.begin()
    assert next(attempts, None) is None


def test_without_a_thread_to_reconnect_the_next_request_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the model would have no runtime for good."""
    begun = threading.Event()
    session = Session(lambda: pytest.fail("not reached"), "m", "/models/m")
    session._bring_up = begun.set  # type: ignore[method-assign]
    attachment: Any = SimpleNamespace(deferred=SimpleNamespace(device_sleeps=False))
    session.attachment, session.started = attachment, True

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        session.lost(attachment, "end of stream")
    assert session.cold

    session.start()
    assert begun.wait(10)


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
        with pytest.raises((ProtocolError, ValueError)):
            connection.register({})
        assert len(os.listdir("/proc/self/fd")) == files

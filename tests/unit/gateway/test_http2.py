"""The picker's HTTP/2, frame by frame, with all that a peer might send."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsrv_gateway.http2 import STREAMS_MAX, EnvoyConnection
from tests.waiting import looped

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, PADDED, ACK = 1, 4, 8, 1


class Echo:
    """Answers a message with the message itself.

    Exceptions: `quiet` gets no answer, `bye` is the last message, `soon` is answered later, `bad` is not a message, and `bug` makes
    the exchange fail.
    """

    def __init__(self) -> None:
        self.done = False
        self.ended = 0
        self.released = asyncio.Event()
        self.pending = False

    def take(self, data: bytes) -> Iterable[bytes]:
        if data == b"bad":
            raise ValueError("bad")
        if data == b"bug":
            raise RuntimeError("bug")
        self.done = data == b"bye"
        self.pending = data in (b"soon", b"soon a bug")
        self._bug = data == b"soon a bug"
        return [] if self.pending or data.startswith(b"quiet") else [data]

    async def pending_answers(self) -> Iterable[bytes]:
        await self.released.wait()
        self.pending = False
        if self._bug:
            raise RuntimeError("bug")
        return [b"late"]

    def end(self) -> None:
        self.ended += 1


class Peer:
    """The other end of a connection, without a network."""

    def __init__(self, window: int | None = None, tls: bool = False) -> None:
        self.tls = tls
        self.exchanges: list[Echo] = []
        self.known: set[EnvoyConnection] = set()
        self.connection = EnvoyConnection(self._accept, self.known)
        self.closed = ""
        self.paused = False
        self._written = bytearray()
        self.connection.connection_made(self)
        settings = b"" if window is None else struct.pack(">HI", 4, window)
        self.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        self.frames()

    def _accept(self) -> Echo:
        self.exchanges.append(Echo())
        return self.exchanges[-1]

    def write(self, data: bytes) -> None:
        self._written += data

    def close(self) -> None:
        self.closed = "closed"

    def can_write_eof(self) -> bool:
        return not self.tls

    def write_eof(self) -> None:
        self.closed = "half"

    def abort(self) -> None:
        self.closed = "aborted"

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return bool(self.closed)

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def open(self, number: int = 1) -> Echo:
        self.send(frame(HEADERS, END_HEADERS, number, b"\x83"))
        return self.exchanges[-1]

    def say(self, *messages: bytes, number: int = 1, flags: int = 0) -> None:
        """Send messages in frames of at most 16 KiB. `flags` are the flags of the last frame."""
        data = b"".join(map(framed, messages))
        while len(data) > 1 << 14:
            self.send(frame(DATA, 0, number, data[: 1 << 14]))
            data = data[1 << 14 :]
        self.send(frame(DATA, flags, number, data))

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames since the last call. Each has a kind, flags, a stream and a payload."""
        frames, data = [], bytes(self._written)
        self._written.clear()
        while data:
            size = int.from_bytes(data[:3], "big")
            frames.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
            data = data[9 + size :]
        return frames

    def said(self) -> tuple[bytes, str]:
        """Return the bytes of all answers since the last call, and the status that ended the stream."""
        data, status = b"", ""
        for kind, flags, _, payload in self.frames():
            if kind == DATA:
                data += payload
            if kind == HEADERS and flags & END_STREAM:
                status = payload.rpartition(b"grpc-status")[2][1:].decode()
        return data, status


def frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, number) + payload


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def test_a_call_is_answered_and_ends_with_its_client() -> None:
    """Each message gets its answer. The stream has headers, data and trailers, and ends when the client ends it."""
    peer = Peer()
    echo = peer.open()
    peer.say(b"one", b"two")
    assert [fields[0] for fields in peer.frames()] == [HEADERS, DATA, DATA]
    peer.say(b"three", flags=END_STREAM)
    assert peer.said() == (framed(b"three"), "0")
    assert echo.ended == 1
    peer.open(3)
    peer.say(b"one", b"bye", b"ignored", number=3)
    assert peer.said() == (framed(b"one") + framed(b"bye"), "0")
    peer.say(b"ignored", number=3, flags=END_STREAM)
    assert peer.said() == (b"", "")


@given(st.lists(st.integers(1, 40), max_size=30))
def test_bytes_may_arrive_in_any_pieces(cuts: list[int]) -> None:
    """Frames and messages are read the same way if they arrive in pieces or with padding."""
    message = framed(b"hello") + framed(b"")
    data = frame(HEADERS, END_HEADERS, 1, b"\x83") + frame(9, END_HEADERS, 1, b"\x83")
    data += frame(DATA, PADDED, 1, b"\x03" + message[:7] + b"\0\0\0") + frame(
        DATA, END_STREAM, 1, message[7:]
    )
    peer = Peer()
    for cut in cuts:
        peer.send(data[:cut])
        data = data[cut:]
    peer.send(data)
    assert peer.said() == (message, "0")


@pytest.mark.parametrize(
    ("payload", "status"),
    [(b"\1\0\0\0\0", "12"), (b"\0\x7f\0\0\0", "8"), (framed(b"bad"), "3"), (framed(b"bug"), "13")],
    ids=["compressed", "too long", "no message", "a fault"],
)
def test_a_wrong_message_ends_its_stream_only(payload: bytes, status: str) -> None:
    """A wrong message ends its stream with a status. Other streams of the connection continue."""
    peer = Peer()
    peer.open()
    other = peer.open(3)
    peer.send(frame(DATA, 0, 1, payload))
    assert peer.said() == (b"", status)
    peer.say(b"still", number=3)
    assert peer.said()[0] == framed(b"still")
    assert [echo.ended for echo in peer.exchanges] == [1, 0]
    peer.connection.connection_lost(None)
    assert (other.ended, peer.known) == (1, set())


def test_answers_wait_for_the_peers_windows() -> None:
    """No more bytes are sent than the windows of stream and connection allow. The rest and the end follow when the windows open."""
    peer = Peer(window=10)
    peer.open()
    peer.say(b"x" * 20, flags=END_STREAM)
    data, status = peer.said()
    assert (len(data), status) == (10, "")
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 5)))
    data += peer.said()[0]
    peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100)))
    more, status = peer.said()
    assert (data + more, status) == (framed(b"x" * 20), "0")
    # The window of the connection has 65,535 bytes for all its streams.
    peer = Peer(window=1 << 30)
    for number in (1, 3):
        peer.open(number)
        peer.say(b"y" * 40_000, number=number)
    assert len(peer.said()[0]) == 65_535
    peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 20)))
    assert len(peer.said()[0]) == 2 * 40_005 - 65_535


def test_windows_are_given_back_before_they_close() -> None:
    """After 16 MiB on one stream, the windows of the stream and the connection are as large as before."""
    peer = Peer()
    peer.open()
    for _ in range(16):
        peer.say(b"quiet" + b"z" * ((1 << 20) - 10))
    increments = Counter[int]()
    for kind, _, number, payload in peer.frames():
        if kind == WINDOW_UPDATE:
            increments[number] += int.from_bytes(payload, "big")
    assert increments == {0: 1 << 24, 1: 1 << 24}


@looped
async def test_a_stream_that_waits_holds_little() -> None:
    """While the answer to a message is not ready, the stream's window is not enlarged. After the answer, it is.

    A peer that sends more than the window allows is disconnected.
    """
    peer = Peer()
    echo = peer.open()
    peer.say(b"soon", *[b"quiet" + b"z" * 3_000_000] * 2)
    await asyncio.sleep(0)
    assert peer.frames() == []
    echo.released.set()
    while not (frames := peer.frames()):
        await asyncio.sleep(0)
    assert [kind for kind, *_ in frames] == [HEADERS, DATA, WINDOW_UPDATE]
    echo.released.clear()
    peer.say(b"soon")
    await asyncio.sleep(0)
    peer.say(*[b"quiet" + b"z" * 3_000_000] * 3)
    assert (peer.frames()[-1][0], peer.closed) == (GOAWAY, "closed")
    peer.connection.connection_lost(None)


def test_a_peer_that_takes_no_answers_is_held_back() -> None:
    """While answers do not fit into the peer's window, no further messages are answered. Later, all are answered in order.

    A peer that sends more messages than the window allows is disconnected.
    """
    peer = Peer(window=10)
    peer.open()
    messages = [bytes([n]) * 1_500_000 for n in range(4)]
    peer.say(*messages)
    assert [kind for kind, *_ in peer.frames()] == [HEADERS, DATA]
    peer.say(messages[0], messages[0])
    assert (peer.frames()[-1][0], peer.closed) == (GOAWAY, "closed")
    peer = Peer(window=10)
    peer.open()
    peer.say(*messages)
    data, _ = peer.said()
    peer.send(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1 << 30)))
    peer.send(frame(WINDOW_UPDATE, 0, 1, struct.pack(">I", 1 << 30)))
    assert data + peer.said()[0] == b"".join(map(framed, messages))


def test_a_peer_that_reads_nothing_is_not_read() -> None:
    """While the transport's buffer is full of answers, for example to pings, nothing more is read from the peer."""
    peer = Peer()
    peer.connection.pause_writing()
    assert peer.paused
    peer.connection.resume_writing()
    assert not peer.paused


def test_more_streams_than_a_connection_may_have_are_refused() -> None:
    """A stream above the limit is refused so that Envoy may try again. When another stream has ended, a new one is accepted."""
    peer = Peer()
    for number in range(STREAMS_MAX):
        peer.open(2 * number + 1)
    peer.open(2 * STREAMS_MAX + 1)
    assert peer.frames() == [(RST_STREAM, 0, 2 * STREAMS_MAX + 1, struct.pack(">I", 7))]
    assert len(peer.exchanges) == STREAMS_MAX
    peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
    peer.open(2 * STREAMS_MAX + 3)
    assert len(peer.exchanges) == STREAMS_MAX + 1


def test_a_reset_or_lost_stream_ends_at_once() -> None:
    """A reset ends the exchange without an answer. Later frames of the stream are ignored."""
    peer = Peer()
    echo = peer.open()
    peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))
    assert echo.ended == 1
    peer.say(b"late")
    peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, b""))
    assert peer.said() == (b"", "")


@looped
async def test_an_answer_may_come_later() -> None:
    """If an answer is not ready at once, it is sent when it is ready. If its stream has ended by then, nothing is sent."""
    peer = Peer()
    first, second = peer.open(), peer.open(3)
    peer.say(b"soon")
    peer.say(b"soon", number=3)
    await asyncio.sleep(0)
    peer.send(frame(RST_STREAM, 0, 3, struct.pack(">I", 8)))
    first.released.set()
    second.released.set()
    while not (body := peer.said()[0]):
        await asyncio.sleep(0)
    assert body == framed(b"late")


def test_a_stream_may_be_reset_before_its_late_answer_is_awaited(recwarn: pytest.WarningsRecorder) -> None:
    """If Envoy resets a stream before the wait for its answer begins, Python does not warn about a coroutine that was never awaited."""

    async def main() -> None:
        peer = Peer()
        peer.open()
        peer.say(b"soon")
        peer.send(frame(RST_STREAM, 0, 1, struct.pack(">I", 8)))

    # Earlier tests may have left objects that cause a warning when they are collected.
    gc.collect()
    recwarn.clear()
    asyncio.run(main())
    gc.collect()
    assert [*recwarn] == []


@looped
async def test_a_late_answer_that_fails_ends_its_stream() -> None:
    """If an exchange fails while its answer waits, its stream ends with INTERNAL. Other streams are not affected."""
    peer = Peer()
    echo = peer.open()
    peer.say(b"soon a bug")
    echo.released.set()
    while not (status := peer.said()[1]):
        await asyncio.sleep(0)
    assert (status, echo.ended) == ("13", 1)
    peer.open(3)
    peer.say(b"hello", number=3)
    assert peer.said()[0] == framed(b"hello")


@pytest.mark.parametrize(("tls", "closed"), [(False, "half"), (True, "closed")])
def test_at_the_end_streams_end_well(tls: bool, closed: str) -> None:
    """At the end, the connection announces its end, ends each stream with OK, and sends nothing more.

    Without TLS, the peer closes the connection.
    """
    peer = Peer(tls=tls)
    peer.open()
    peer.open(3)
    peer.connection.finish()
    assert [(kind, flags & END_STREAM) for kind, flags, _, _ in peer.frames()] == [
        (GOAWAY, 0),
        (HEADERS, 0),
        (HEADERS, END_STREAM),
        (RST_STREAM, 0),
        (HEADERS, 0),
        (HEADERS, END_STREAM),
        (RST_STREAM, 0),
    ]
    assert peer.closed == closed
    peer.send(frame(PING, 0, 0, b"12345678"))
    assert peer.frames() == []


def test_the_connection_answers_pings_and_settings() -> None:
    """Pings and settings are acknowledged. Acknowledgements are not."""
    peer = Peer()
    peer.send(
        frame(PING, 0, 0, b"12345678") + frame(PING, ACK, 0, b"12345678") + frame(SETTINGS, ACK, 0, b"")
    )
    peer.send(frame(SETTINGS, 0, 0, b""))
    assert peer.frames() == [(PING, ACK, 0, b"12345678"), (SETTINGS, ACK, 0, b"")]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\0\0\0\0\0\1",
        frame(HEADERS, END_HEADERS, 2, b""),
        frame(SETTINGS, 0, 0, b"12345"),
        frame(WINDOW_UPDATE, 0, 0, b"1"),
        frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 2**31 - 1)),
        frame(HEADERS, END_HEADERS, 1, b"") + frame(DATA, PADDED, 1, b""),
    ],
    ids=["a frame too long", "an even stream", "settings", "an update", "a window too wide", "padding"],
)
def test_a_peer_that_breaks_the_protocol_is_told_and_left(data: bytes) -> None:
    """If a peer breaks the protocol, the connection sends GOAWAY with an error and closes."""
    peer = Peer()
    peer.send(data)
    assert [kind for kind, *_ in peer.frames()][-1] == GOAWAY
    assert peer.closed == "closed"


def test_a_peer_that_speaks_something_else_is_left() -> None:
    """If a peer does not speak HTTP/2, the connection closes without an answer."""
    peer = Peer()
    peer.connection = EnvoyConnection(peer._accept, peer.known)
    peer.connection.connection_made(peer)
    peer.frames()
    peer.send(b"PRI * HT")
    assert peer.closed == ""
    peer.send(b"GET / HTTP/1.1\r\n\r\n")
    assert peer.closed == "aborted"


@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 7), st.binary(max_size=40)),
        max_size=30,
    )
)
def test_no_frames_break_the_connections_state(sent: list[tuple[int, int, int, bytes]]) -> None:
    """After any frames, the connection is closed or can serve a new stream. Each exchange ends exactly once."""
    peer = Peer()
    for fields in sent:
        if not peer.closed:
            peer.send(frame(*fields))
    if not peer.closed:
        peer.send(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 20)))
        peer.frames()
        peer.open(9)
        peer.say(b"hello", number=9, flags=END_STREAM)
        assert framed(b"hello") in peer.said()[0]
    peer.connection.connection_lost(None)
    assert [echo.ended for echo in peer.exchanges] == [1] * len(peer.exchanges)

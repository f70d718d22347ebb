"""A connection that misbehaves is closed; the runtime and the other connections go on."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rsrv.settings import load_settings
from rsrv.wire import frames
from rsrv.wire.frames import HEADER, Kind, Status, Submission
from rsrv.wire.layout import Interface
from rsrv.wire.memory import create_sealed
from rsrv.wire.socket import Closed, Receiver, connect, send
from tests.held import open_files
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.waiting import PATIENCE_S, wait_until


class Client:
    """A registered connection with room for one request of one row."""

    def __init__(self, runtime: Runtime, bundle: Path) -> None:
        self.lane = runtime.connect()
        body = self.lane.register({"model": "doubling", "bundle": str(bundle)})
        variant = Interface.from_json(body["models"][0]["interface"]).variants[0]
        self.inputs = variant.inputs.places[1].nbytes
        self.place = self.lane.take(self.inputs + variant.outputs.places[1].nbytes, users=1).place

    def submission(self, id: int = 0, **changes: int) -> Submission:
        at = self.place.offset
        good = Submission(id, 0, 1, 0, 0, self.place.segment, 0, at, at + self.inputs)
        return good._replace(**changes)

    def read_on(self) -> None:
        """Read until the connection is closed, which raises Closed."""
        while True:
            self.lane.receive(PATIENCE_S)

    def works(self) -> bool:
        self.lane.submit([self.submission()])
        return self.lane.receive(PATIENCE_S)[0].status is Status.OK


Misdeed = Callable[[Client], object]

MISDEEDS: dict[str, Misdeed] = {
    "inputs beyond the segment": lambda c: c.lane.submit([c.submission(inputs_at=1 << 40)]),
    "outputs beyond the segment": lambda c: c.lane.submit(
        [c.submission(outputs_at=(1 << 20) - 64, rows=100)]
    ),
    "a place that is not aligned": lambda c: c.lane.submit([c.submission(inputs_at=1)]),
    "an unknown segment": lambda c: c.lane.submit([c.submission(segment=77)]),
    "an unknown variant": lambda c: c.lane.submit([c.submission(variant=5)]),
    "a length of a model without a padded axis": lambda c: c.lane.submit([c.submission(length=1)]),
    "an unknown flag": lambda c: c.lane.submit([c.submission(flags=4)]),
    "an id that is too large": lambda c: c.lane.submit([c.submission(id=1 << 41)]),
    "one id twice": lambda c: c.lane.submit([c.submission(id=3), c.submission(id=3)]),
    "garbage": lambda c: send(c.lane.sock, os.urandom(100)),
    "an empty body": lambda c: send(c.lane.sock, HEADER.pack(Kind.SUBMIT, 0, 3)),
    "a frame for stubs": lambda c: send(c.lane.sock, frames.pack_ids(Kind.DONE, [])),
    "registering twice": lambda c: send(
        c.lane.sock, frames.pack_json(Kind.REGISTER, {"model": "a", "bundle": "b"})
    ),
    "a segment without a descriptor": lambda c: send(c.lane.sock, frames.pack_ids(Kind.SEGMENT, [9])),
}


@pytest.mark.parametrize("misdeed", MISDEEDS.values(), ids=MISDEEDS.keys())
def test_a_misbehaving_stub_loses_its_connection_only(
    runtime: Runtime, doubling: Path, misdeed: Misdeed
) -> None:
    """A misbehaving stub's connection is closed; another stub of the model is served."""
    other, culprit = Client(runtime, doubling), Client(runtime, doubling)
    assert culprit.works()

    misdeed(culprit)

    with pytest.raises(Closed):
        culprit.read_on()
    assert other.works()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"model": "a"},
        {"model": 1, "bundle": 2},
        {"model": "two\nlines", "bundle": "b"},
        {"model": "a" * 256, "bundle": "b"},
        {"key": "nobody"},
        {"key": []},
        {"key": {"a": 1}},
    ],
)
def test_a_registration_without_sense_is_refused(runtime: Runtime, body: dict[str, object]) -> None:
    """A malformed registration closes the connection. A registration that names an unknown model by its key is rejected."""
    greeted = runtime.request_model(**body)

    if "key" in body:
        frame, _ = greeted.receiver.receive()
        assert frames.read_header(frame)[0] is Kind.REJECTED
    else:
        with pytest.raises(Closed):
            greeted.receiver.receive()


@pytest.mark.parametrize(
    "greeting",
    [b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(Kind.HELLO, 0, 0) + b"[" * 100_000],
    ids=["another protocol", "JSON too deep to read"],
)
def test_a_stranger_is_turned_away_at_the_greeting(runtime: Runtime, doubling: Path, greeting: bytes) -> None:
    """A peer that does not greet as a stub is disconnected, and stubs are served."""
    sock = connect(runtime.socket)
    send(sock, greeting)

    with pytest.raises(Closed):
        Receiver(sock).receive()
    sock.close()
    client = Client(runtime, doubling)
    assert client.works()


def test_a_stub_of_another_version_learns_what_to_do(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime sends its greeting to a stub of another version, and disconnects the stub.

    From the greeting, the stub makes an error that names both versions and the remedy.
    """
    sock = connect(runtime.socket)
    send(sock, frames.pack_json(Kind.HELLO, {"magic": frames.MAGIC, "version": 1}))
    receiver = Receiver(sock)
    welcome, fds = receiver.receive()
    os.close(fds[0])
    monkeypatch.setattr(frames, "PROTOCOL_VERSION", 1)
    with pytest.raises(
        frames.ProtocolError,
        match=r"version \d+ of the protocol, and this side uses 1: .* restart tritonserver",
    ):
        frames.check_hello(bytes(welcome))
    with pytest.raises(Closed):
        receiver.receive()
    sock.close()


def test_stubs_that_die_before_their_answers_disturb_no_other(runtime: Runtime, doubling: Path) -> None:
    """Stubs that die before their answers do not disturb other stubs.

    It does not matter whether the connection or the execution ends first.
    """
    other = Client(runtime, doubling)
    # The device's thread executes, so that both ends can happen at the same time.
    runtime.device.seconds = 0.01
    for _ in range(50):
        culprit = Client(runtime, doubling)
        culprit.lane.submit([culprit.submission(id=i) for i in range(5)])
        culprit.lane.close()

    assert other.works()


def test_a_stub_that_dies_with_requests_in_flight_disturbs_no_other(runtime: Runtime, doubling: Path) -> None:
    """If a stub dies, its requests end. Their memory is freed only after the device has used it."""
    other, culprit = Client(runtime, doubling), Client(runtime, doubling)
    runtime.device.gate.clear()
    culprit.lane.submit([culprit.submission(id=i) for i in range(20)])
    culprit.lane.close()
    runtime.device.gate.set()

    assert other.works()


def test_a_stub_that_does_not_read_stalls_no_other(start_runtime: StartRuntime, doubling: Path) -> None:
    """Completions for a stub that does not read wait in the runtime, while other stubs get theirs."""
    runtime = start_runtime(load_settings("scheduler: {max_queue_depth: 10000}"))
    other, lazy = Client(runtime, doubling), Client(runtime, doubling)
    for start in range(0, 4000, 500):
        lazy.lane.submit([lazy.submission(id=start + i) for i in range(500)])

    assert other.works()

    received = 0
    while received < 4000:
        received += len(lazy.lane.receive(PATIENCE_S))


def test_a_repeated_segment_id_closes_the_connection(runtime: Runtime) -> None:
    """A second descriptor for the same segment closes the connection."""
    greeted = runtime.open()
    fd = create_sealed(4096, "twice")
    send(greeted.sock, frames.pack_ids(Kind.SEGMENT, [0]), [fd])
    send(greeted.sock, frames.pack_ids(Kind.SEGMENT, [0]), [fd])
    os.close(fd)

    with pytest.raises(Closed):
        greeted.receiver.receive()
    greeted.sock.close()


def test_a_deadline_that_is_years_away_does_not_end_the_runtime(runtime: Runtime, doubling: Path) -> None:
    """A deadline beyond epoll's range does not end the runtime while its request waits."""
    client = Client(runtime, doubling)
    runtime.device.gate.clear()
    years = time.monotonic_ns() + 10**17
    client.lane.submit([client.submission(id=i, deadline_ns=years, rows=1) for i in range(20)])
    runtime.device.gate.wait_until_held()
    client.lane.submit([client.submission(id=20 + i, deadline_ns=years) for i in range(20)])
    runtime.device.gate.set()

    received = 0
    while received < 40:
        received += len(client.lane.receive(PATIENCE_S))


def test_a_peer_that_asks_and_does_not_read_is_given_up(runtime: Runtime, doubling: Path) -> None:
    """A peer that sends commands without reading the answers is disconnected, because each answer holds a descriptor."""
    other = Client(runtime, doubling)
    greeted = runtime.open()
    before = len(open_files())

    def ask_on() -> None:
        while True:
            send(greeted.sock, frames.pack_json(Kind.STATUS, {}))

    with pytest.raises(Closed):
        ask_on()
    assert other.works()
    greeted.sock.close()
    wait_until(lambda: len(open_files()) < before, what="its descriptors are closed")


def test_segments_without_end_close_their_connection(runtime: Runtime, doubling: Path) -> None:
    """A connection with too many segments is closed, because a process has a limited number of mappings."""
    other, culprit = Client(runtime, doubling), Client(runtime, doubling)
    fd = create_sealed(4096, "one of many")
    culprit.lane.sock.setblocking(True)

    def add_on() -> None:
        for id in range(10, 2000):
            send(culprit.lane.sock, frames.pack_ids(Kind.SEGMENT, [id]), [fd])
        culprit.read_on()

    with pytest.raises(Closed):
        add_on()
    os.close(fd)
    assert other.works()


def test_address_space_without_end_closes_its_connection(runtime: Runtime, doubling: Path) -> None:
    """A connection whose segments take too much address space is closed."""
    other, culprit = Client(runtime, doubling), Client(runtime, doubling)
    for id in (10, 11):
        fd = create_sealed(600 << 30, "hollow")
        send(culprit.lane.sock, frames.pack_ids(Kind.SEGMENT, [id]), [fd])
        os.close(fd)

    with pytest.raises(Closed):
        culprit.read_on()
    assert other.works()


def test_connections_without_end_wait_outside(
    start_runtime: StartRuntime,
    doubling: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Connections may take half of the descriptors that are not reserved for other files.

    Further connections wait, and the log says which limit to raise. Open connections are served. When one closes, a waiting
    connection takes its place.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr("rsrv.runtime.transport.resource.getrlimit", lambda of: (256 + 40, 256 + 40))
    runtime = start_runtime()
    client = Client(runtime, doubling)
    crowd = [connect(runtime.socket) for _ in range(50)]
    for sock in crowd:
        send(sock, frames.hello())

    assert client.works()
    waiting = crowd[-1]
    waiting.settimeout(0.1)
    with pytest.raises(TimeoutError):
        Receiver(waiting).receive()
    assert "room for 20 connections (about 6 models), because 296 files may be open" in caplog.messages
    (line,) = wait_until(
        lambda: {line for line in caplog.messages if "cannot accept another connection" in line}
    )
    assert "the limit is 20 connections (about 6 models)" in line
    assert "raise the hard limit of open files (296)" in line
    for sock in crowd[:40]:
        sock.close()
    waiting.settimeout(PATIENCE_S)
    assert frames.read_header(Receiver(waiting).receive()[0])[0] is Kind.WELCOME
    assert client.works()
    for sock in crowd:
        sock.close()

"""Good and bad frames of every kind, sent to a runtime's loop and to a stub.

The loop answers each sender or disconnects it. The stub gets its frames from a runtime that misbehaves.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex

from rsrv.desired import document_of
from rsrv.runtime.device import Array
from rsrv.runtime.loop import Loop, ServerProcess
from rsrv.settings import load_settings
from rsrv.stub.connection import Cold, Greeted, Rejected, RuntimeConnection, greet
from rsrv.wire import frames
from rsrv.wire.frames import Kind, ProtocolError, Status, Submission
from rsrv.wire.generation import Generate, pack_generate
from rsrv.wire.layout import Interface
from rsrv.wire.memory import Board, SharedMemoryError, create_document, create_sealed, read_board
from rsrv.wire.socket import Closed, Receiver, connect, listen, send
from tests.fakes import FakeDevice
from tests.fuzz.manifests import Files
from tests.fuzz.speaker import Random, Speaker, some_fds
from tests.fuzz.watched import Verdict, watch
from tests.unit.runtime.counting import count, export_counting

SECONDS = 4.0
NBYTES = 256 << 20
#: Seconds within which a healthy loop answers.
_PATIENCE = 20.0
#: Number of additional descriptors that may be open for a moment.
_FEW = 12


def check_frames(seeds: Sequence[int], good: Sequence[Files], scratch: Path) -> Iterator[Verdict]:
    """For every seed, one connection misbehaves. Other connections must still be served."""
    started: list[_Served] = []
    generator = scratch / "generator"
    if not generator.exists():
        export_counting(generator)

    def case(seed: int) -> str:
        if not started:  # Threads do not survive a fork, so they are started in the child process.
            started.append(_Served(good[0], generator, scratch))
        return started[0].misbehave(Random(seed))

    yield from watch(case, seeds, seconds=SECONDS, nbytes=NBYTES)


def check_answers(seeds: Sequence[int]) -> Iterator[Verdict]:
    """For every seed, a runtime misbehaves towards a stub."""
    yield from watch(lambda seed: _hear(Random(seed)), seeds, seconds=SECONDS, nbytes=NBYTES)


class _Served:
    """A loop with a model, a meta model that calls it, and a model that generates. Each has a connection."""

    def __init__(self, model: Files, generator: Path, scratch: Path) -> None:
        # The loop logs every connection that it closes, which would be most lines. Errors of the loop itself are still logged.
        logging.getLogger("rsrv.runtime.transport").addFilter(lambda record: record.exc_info is not None)
        place = Path(scratch, f"served-{os.getpid()}")
        bundle, meta = place / "model", place / "meta"
        for directory, files in ((bundle, model), (meta, _META)):
            directory.mkdir(parents=True)
            for name, content in files.items():
                (directory / name).write_bytes(content)
        self._path = place / "socket"
        self._settings = settings = load_settings("traces: {endpoint: 'http://nowhere'}")
        device = FakeDevice(_compute)
        listener = listen(self._path)
        self._loop = Loop(listener, ServerProcess(os.getpid()), settings, lambda: device)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()
        self._witness = self._lane()
        body = self._witness.register({"model": "m", "bundle": str(bundle)})
        self._keys = [body["key"]]
        self._meta = self._lane()
        registration = {"model": "meta", "bundle": str(meta), "calls": {"m": str(bundle)}}
        self._keys.append(self._meta.register(registration)["key"])
        self._generator = self._lane()
        registration = {"model": "generator", "bundle": str(generator)}
        self._keys.append(self._generator.register(registration)["key"])
        variant = Interface.from_json(body["models"][0]["interface"]).variants[0]
        self._inputs = variant.inputs.places[1].nbytes
        self._request = self._witness.take(self._inputs + variant.outputs.places[1].nbytes, 1).place
        self._ids = 0
        self.is_well()
        self._descriptors = _descriptors()

    def _lane(self) -> RuntimeConnection:
        return RuntimeConnection(greet(connect(self._path)))

    def is_well(self) -> None:
        """Check that the good connections are served. Raises AssertionError."""
        self._ids += 1
        at = self._request.offset
        self._witness.submit(
            [Submission(self._ids, 0, 1, 0, 0, self._request.segment, 0, at, at + self._inputs)]
        )
        (done,) = self._witness.receive(_PATIENCE)
        assert (done.request, done.status) == (self._ids, Status.OK), done
        assert self._thread.is_alive(), "the loop has ended"
        self._ids += 1
        send(self._generator.sock, pack_generate(Generate(self._ids, [3, 4], 3)))
        while not (ends := self._generator.receive(_PATIENCE)):
            pass
        assert [(end.request, end.status) for end in ends] == [(self._ids, Status.OK)], ends

    def _undo(self) -> None:
        """Restore the settings of rsrv.yaml, which a bad connection may have changed. For example, a paused model answers no request."""
        undo = {
            "command": "follow",
            "instance": token_hex(8),
            "revision": 1,
            "document": document_of(self._settings),
        }
        with connect(self._path) as sock:
            sock.settimeout(_PATIENCE)
            receiver = Receiver(sock)
            send(sock, frames.hello())
            _close(receiver.receive()[1])
            send(sock, frames.pack_json(Kind.COMMAND, undo))
            answer = frames.unpack_json(receiver.receive()[0])
            assert answer == {"instance": undo["instance"], "revision": 1}, answer

    def misbehave(self, rng: Random) -> str:
        sock = connect(self._path)
        sock.settimeout(_PATIENCE)
        with sock:
            try:
                outcome = self._talk(rng, sock)
            except (Closed, ProtocolError, BrokenPipeError, ConnectionError):
                outcome = "closed"
        self._undo()
        self.is_well()
        assert _descriptors() <= self._descriptors + _FEW, "descriptors are lost"
        return outcome

    def _talk(self, rng: Random, sock: socket.socket) -> str:
        receiver = Receiver(sock)
        speaker = Speaker(rng, self._keys)
        if not speaker.is_wild():
            send(sock, frames.hello())
            _close(receiver.receive()[1])
        if not speaker.is_wild():
            send(sock, frames.pack_json(Kind.REGISTER, {"key": speaker.key}))
            _close(receiver.receive()[1])
            fd = create_sealed(1 << 16, "good")
            send(sock, frames.pack_ids(Kind.SEGMENT, [0]), [fd])
            os.close(fd)
        for _ in range(rng.choice((1, 3, 20, 200))):
            frame = speaker.frame()
            with ExitStack() as stack:
                fds = some_fds(rng, stack) if speaker.is_wild() else []
                send(sock, frame, fds)
        if rng.random() < 0.3:
            return "left"
        send(sock, frames.pack_json(Kind.STATUS, {}))
        while True:
            answer, fds = receiver.receive()
            _close(fds)
            if frames.read_header(answer)[0] is Kind.STATUS_REPLY:
                return "answered"


_META: Files = {
    "manifest.yaml": json.dumps(
        {
            "format_version": 3,
            "kind": "meta",
            "meta": {"calls": ["m"]},
            "client_inputs": [{"name": "x", "dtype": "f32", "shape": "nc", "dims": {"c": 4}}],
            "client_outputs": [{"name": "y", "dtype": "f32", "shape": "nc", "dims": {"c": 1}}],
        }
    ).encode(),
    "model.py": b"def run(inputs, call): ...\n",
}


def _compute(inputs: Sequence[Array], weights: Sequence[Array]) -> list[Array]:
    return [inputs[0][:, :1]] if len(inputs) == 1 else count(inputs, weights)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


# --- frames for a stub ------------------------------------------------------------------------------------


def _hear(rng: Random) -> str:
    """Let a stub read a few frames of a misbehaving runtime. Return the outcome."""
    before = _descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    speaker = Speaker(rng, ())
    listens, kind = rng.choice(
        (
            (_be_greeted, Kind.WELCOME),
            (_register, Kind.REGISTERED),
            (_register, Kind.REJECTED),
            (_receive, Kind.DONE),
            (_receive, Kind.TOKENS),
        )
    )
    with ours, theirs:
        ours.setblocking(False)
        for _ in range(3):
            frame = speaker.frame(None if speaker.is_wild() else kind)
            with ExitStack() as stack, suppress(OSError):
                send(ours, frame, _fds_with(kind, rng, stack))
        ours.shutdown(socket.SHUT_WR)
        try:
            outcome = listens(theirs)
        except (Closed, ProtocolError, SharedMemoryError, Cold, Rejected, TimeoutError) as error:
            outcome = type(error).__name__
    assert _descriptors() <= before, "descriptors are lost"
    return outcome


def _fds_with(kind: Kind, rng: Random, stack: ExitStack) -> list[int]:
    """Return the descriptors that belong to a frame, or wrong ones."""
    if rng.random() < 0.3:
        return some_fds(rng, stack)
    if kind not in (Kind.WELCOME, Kind.REGISTERED):
        return []
    fd = create_document(rng.choice(({}, {"key": 5}, {"a": [[]] * 5000})))
    stack.callback(os.close, fd)
    if rng.random() < 0.2:
        os.pwrite(fd, rng.choice((b"[[", b"\xff", b"1")), 0)
    return [fd]


def _lane(sock: socket.socket) -> RuntimeConnection:
    fd = Board().fd
    board = read_board(fd)
    os.close(fd)
    return RuntimeConnection(Greeted(sock, Receiver(sock), board, 1))


def _be_greeted(sock: socket.socket) -> str:
    greet(sock)
    return "greeted"


def _register(sock: socket.socket) -> str:
    _lane(sock).register({"model": "m", "bundle": "b"})
    return "registered"


def _receive(sock: socket.socket) -> str:
    lane = _lane(sock)
    while True:
        lane.receive(1.0)
        list(lane.take_tokens())

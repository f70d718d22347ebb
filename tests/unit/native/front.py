"""The native front in a program that plays tritonserver, and a runtime that answers it or misbehaves."""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

import native_front
from rsrv.wire import paths
from rsrv.wire.frames import (
    Completion,
    Kind,
    Status,
    Submission,
    pack_cold,
    pack_completions,
    pack_json,
    read_header,
    unpack_ids,
    unpack_json,
    unpack_submissions,
)
from rsrv.wire.layout import Block, Interface, Tensor, Variant, pack_flat
from rsrv.wire.memory import Board, Bytes, create_document, map_segment
from rsrv.wire.socket import Closed, Receiver, listen, send

HERE = Path(__file__).parent
BUILT = native_front.ROOT / "build" / "native"

#: Compiler options by sanitizer. Zig contains only the first sanitizer. A build of Zig's own report of a fault takes
#: 15 s, so a trap ends the program instead. The other sanitizers need the system's compiler.
SANITIZERS: dict[str, Sequence[str]] = {
    "undefined": ("-fsanitize=undefined", "-fsanitize-trap=undefined"),
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}


def driver(sanitizer: str) -> Path:
    """Return the program, and build it again if one of its sources is newer."""
    program = BUILT / f"driver-{sanitizer}"
    # Leave out guard.c, which needs Triton itself. tests/e2e/test_hostile_requests.py tests it.
    parts = [source for source in native_front.SOURCES.glob("*.c") if source.name != "guard.c"]
    sources = [HERE / "driver.c", *parts]
    watched = [*sources, *native_front.SOURCES.glob("*.h"), Path(__file__)]
    with native_front.one_builds():
        if not program.is_file() or program.stat().st_mtime < max(path.stat().st_mtime for path in watched):
            BUILT.mkdir(parents=True, exist_ok=True)
            _build(program, sanitizer, sources)
    return program


def _build(program: Path, sanitizer: str, sources: Sequence[Path]) -> None:
    compiler = native_front.compiler()
    if sanitizer != "undefined":
        path = shutil.which("cc")
        assert path is not None, "this sanitizer takes a C compiler of the system: install gcc or clang"
        compiler = [path]
    options = (
        "-std=c11",
        "-D_GNU_SOURCE",
        "-g",
        "-O1",
        "-Wall",
        "-Wextra",
        "-pthread",
        # The program replaces these functions to make the front's frames fail, and to delay the runtime's frames.
        "-Dsendmsg=driver_sendmsg",
        "-Drecvmsg=driver_recvmsg",
        *SANITIZERS[sanitizer],
    )
    new = program.with_suffix(".new")
    subprocess.run([*compiler, *options, "-o", new, *sorted(sources), "-lm"], check=True)
    new.replace(program)


COLUMNS = 4
CLIENT = {"inputs": [("x", "f32", (-1, COLUMNS))], "outputs": [("y", "f32", (-1, COLUMNS))]}
INTERFACE = Interface(
    (
        Variant(
            Block((Tensor("x", "f32", (-1, COLUMNS), 0),)),
            Block((Tensor("y", "f32", (-1, COLUMNS), 0),)),
            (1, 8),
        ),
    ),
    exact=False,
)


def described(*, traced: bool = False, retry_s: float = 60.0) -> bytes:
    retry_ns = int(1e9 * retry_s)
    key = "doubling@0123456789ab"
    return pack_flat(CLIENT, INTERFACE, batched=True, traced=traced, retry_ns=retry_ns, key=key)


def submissions(frame: bytes, count: int) -> list[Submission]:
    """Return the requests of a SUBMIT frame."""
    return [Submission(*fields) for fields in unpack_submissions(frame, count)]


class Connection:
    """The runtime's end of one connection with the front."""

    def __init__(self, sock: socket.socket, devices: int = 1) -> None:
        """`devices`: the number of the server's devices that the runtime reports."""
        self.sock = sock
        self.devices = devices
        self.board = Board()
        self._receiver = Receiver(sock)
        self.segments: dict[int, Bytes] = {}

    def receive(self) -> tuple[Kind, int, bytes]:
        """Return the kind, the number of entries and the content of the next frame. Map the segments that come before it."""
        while True:
            frame, fds = self._receiver.receive()
            kind, count = read_header(frame)
            content = bytes(frame)
            if kind is Kind.SEGMENT:
                self.segments[unpack_ids(content, count)[0]] = map_segment(fds[0], 1 << 40)
            for fd in fds:
                os.close(fd)
            if kind is not Kind.SEGMENT:
                return kind, count, content

    def receive_requests(self) -> tuple[int, bytes]:
        """Return the number of requests of the next SUBMIT frame, and the frame."""
        kind, count, frame = self.receive()
        while kind is not Kind.SUBMIT:
            kind, count, frame = self.receive()
        return count, frame

    def greet(self) -> dict[str, Any]:
        """Receive HELLO, answer with WELCOME, and return the registration."""
        assert self.receive()[0] is Kind.HELLO
        send(self.sock, pack_json(Kind.WELCOME, {}, self.devices), (self.board.fd,))
        kind, _, frame = self.receive()
        assert kind is Kind.REGISTER
        registration = unpack_json(frame)
        assert registration["flat"] is True
        return registration

    def dismiss(self, start_timeout_s: float = 60.0) -> None:
        """Send COLD, with which the front may close the connection and regard the model as cold."""
        send(self.sock, pack_cold(start_timeout_s, flat=True))

    def register(self, document: bytes) -> None:
        fd = create_document(document)
        send(self.sock, pack_json(Kind.REGISTERED, {}), (fd,))
        os.close(fd)

    def answer(self, frame: bytes, count: int) -> None:
        """Answer the requests of a SUBMIT frame with their doubled inputs."""
        done = []
        for submission in submissions(frame, count):
            memory = self.segments[submission.segment]
            nbytes = submission.rows * COLUMNS * 4
            values = memory[submission.inputs_at : submission.inputs_at + nbytes].view(np.float32)
            memory[submission.outputs_at : submission.outputs_at + nbytes].view(np.float32)[:] = 2 * values
            done.append(Completion(submission.request, Status.OK, 8, submission.rows, 1000))
        for answer in pack_completions(done):
            send(self.sock, answer)

    def launch(self, frame: bytes, count: int) -> None:
        """Mark the outputs of a SUBMIT frame, as a runtime does when it gives the requests to its device."""
        for submission in submissions(frame, count):
            self.segments[submission.segment][submission.outputs_at] = 1

    def answer_all(self) -> None:
        """Answer requests until the front is gone."""
        while True:
            count, frame = self.receive_requests()
            self.answer(frame, count)


#: A function that serves one connection of the front until the function returns or the connection ends.
Behaviour = Callable[[Connection], object]


def behave(connection: Connection) -> None:
    """Serve a connection as a runtime should."""
    connection.greet()
    connection.register(described())
    connection.answer_all()


class Front:
    """A running program with a front, and the fake runtimes to which the front connects. A context manager.

    Each connection is served on a thread with the next behaviour of its device, and with `behave` when no behaviour
    is left. The server has one device for each list of behaviours.
    """

    def __init__(
        self, program: Path, folder: Path, behaviours: Sequence[Behaviour] = (), *further: Sequence[Behaviour]
    ) -> None:
        #: Behaviours of device 0 that have not served a connection yet.
        self.behaviours = list(behaviours)
        environment = {
            **os.environ,
            "RSRV_RUNTIME_DIR": str(folder / "run"),
            # The test serves the runtimes' sockets, so the program must not start a runtime.
            "RSRV_RUNTIME_PYTHON": "/bin/false",
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        self._folder = folder
        self._log = (folder / "front.log").open("w+")
        self.process = subprocess.Popen(
            [program, folder / "repository" / "doubling"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
        )
        (folder / "run").mkdir(mode=0o700)
        self._listeners = []
        #: Lines of the program, and None at their end.
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        all_behaviours = (self.behaviours, *map(list, further))
        for device, some in enumerate(all_behaviours):
            listener = listen(self.directory(device, create=True) / paths.SOCKET)
            listener.setblocking(True)
            self._listeners.append(listener)
            arguments = (listener, some, len(all_behaviours))
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.process.kill()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        status = self.process.wait(60)
        self._reader.join(60)
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # The shutdown wakes the thread.
            listener.close()
        self._log.close()
        assert error is not None or status == 0, f"the front ended with {status}:\n{self._log_tail()}"

    def directory(self, device: int, *, create: bool = False) -> Path:
        """Return the directory of a device's runtime. If `create`, make the directory."""
        pid = self.process.pid
        path = self._folder / "run" / f"{pid}-{paths.start_time(pid)}-gpu{device}"
        if create:
            path.mkdir(mode=0o700)
        return path

    def tell(self, *commands: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("".join(f"{command}\n" for command in commands))

    def hear(self, count: int = 1) -> list[str]:
        """Return the next `count` lines of the program, sorted."""
        lines = []
        for _ in range(count):
            try:
                line = self._said.get(timeout=60)
            except queue.Empty:
                raise AssertionError(f"no answer:\n{self._log_tail()}") from None
            assert line is not None, f"the front ended with {self.process.wait(60)}:\n{self._log_tail()}"
            lines.append(line)
        return sorted(lines)

    def ask(self, *commands: str) -> list[str]:
        """Send commands that print one line each, and return these lines."""
        self.tell(*commands)
        return self.hear(len(commands))

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._said.put(line.rstrip("\n"))
        self._said.put(None)

    def _log_tail(self) -> str:
        return Path(self._log.name).read_text(errors="replace")[-4000:]

    def _serve(self, listener: socket.socket, behaviours: list[Behaviour], devices: int) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            behaviour = behaviours.pop(0) if behaviours else behave
            connection = Connection(sock, devices)
            threading.Thread(target=self._talk, args=(connection, behaviour), daemon=True).start()

    def _talk(self, connection: Connection, behaviour: Behaviour) -> None:
        board = connection.board
        with connection.sock, suppress(Closed, OSError):
            behaviour(connection)
        os.close(board.fd)

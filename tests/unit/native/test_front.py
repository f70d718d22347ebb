"""The native front answers each request once and does not crash, with runtimes that answer and with runtimes that misbehave.

The program is built with a sanitizer, which ends it at the first fault. Every sanitizer runs in the long tests.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest

from rsrv.front.rules import ENDED_SILENTLY
from rsrv.placement.device_choice import PINNED
from rsrv.stub.connection import LaunchError
from rsrv.stub.session import Launcher
from rsrv.wire import frames, paths
from rsrv.wire.frames import (
    HEADER,
    Completion,
    Kind,
    Status,
    pack_completions,
    pack_json,
    pack_rejected,
)
from rsrv.wire.layout import Interface, pack_flat
from rsrv.wire.memory import Board
from rsrv.wire.placement_table import PlacementWriter
from rsrv.wire.socket import send
from rsrv.wire.traces import Mark, Span, read_spans, unpack_marks
from tests.fuzz.natives import load, misbehaving
from tests.unit.native.front import (
    CLIENT,
    INTERFACE,
    SANITIZERS,
    Behaviour,
    Connection,
    Front,
    behave,
    described,
    driver,
    submissions,
)
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(
    params=[
        name if name == "undefined" else pytest.param(name, marks=pytest.mark.long) for name in SANITIZERS
    ]
)
def program(request: pytest.FixtureRequest) -> Path:
    """Return the program with each sanitizer in turn."""
    return driver(request.param)


def doubled(number: int, rows: int = 1) -> str:
    """Return the line that the program prints for a right answer to the request `number`.

    The request's values count up from this number.
    """
    count = 4 * rows
    return f"answer {number} ok {rows} {2 * (count * number + count * (count - 1) / 2):g}"


def refusing(status: Status, text: str) -> Behaviour:
    """Return a runtime that ends every request with this status and text."""

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while True:
            kind, count, frame = connection.receive()
            if kind is Kind.SUBMIT:
                ids = [entry[0] for entry in frames.unpack_submissions(frame, count)]
                for answer in pack_completions([Completion(id, status, text=text) for id in ids]):
                    send(connection.sock, answer)

    return serve


def rejecting(reason: str, client: str = "") -> Behaviour:
    """Return a runtime that rejects the model. `client` is the reason for clients, which the runtime sends after crashes."""

    def reject(connection: Connection) -> None:
        connection.greet()
        send(connection.sock, pack_rejected(reason, client))

    return reject


def test_requests_are_answered(program: Path, tmp_path: Path) -> None:
    """A single request, a request whose rows are in several buffers, and many requests of one call get the answers to their own rows."""
    with Front(program, tmp_path) as front:
        assert front.ask("open") == ["opened - ok 0 0"]
        assert front.ask("send 7 1", "send 8 8") == [doubled(7), doubled(8, 8)]
        front.tell("batch 100 200")
        assert front.hear(200) == sorted(doubled(number) for number in range(100, 300))
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize(
    ("status", "code", "tag"),
    [
        (Status.INVALID, 3, ""), (Status.NOT_FOUND, 2, ""), (Status.QUEUE_FULL, 4, "[rsrv:QUEUE_FULL] "),
        (Status.DEADLINE, 4, "[rsrv:DEADLINE] "), (Status.CANCELLED, 7, ""), (Status.INTERNAL, 1, ""),
        (Status.RUNTIME_DOWN, 4, "[rsrv:RUNTIME_DOWN] "), (Status.NOT_RESIDENT, 4, "[rsrv:NOT_RESIDENT] "),
        (Status.PAUSED, 4, "[rsrv:PAUSED] "), (Status.SEQUENCE_LOST, 2, "[rsrv:SEQUENCE_LOST] "),
        (Status.STARTING, 4, "[rsrv:STARTING] "),
    ],
)  # fmt: skip
def test_each_status_has_its_code_and_its_tag(tmp_path: Path, status: Status, code: int, tag: str) -> None:
    """The client gets the runtime's text after the tag of the status. The text for a sub-call always has a tag."""
    with Front(driver("undefined"), tmp_path, [refusing(status, "because \u20ac")]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [f"answer 1 {code} {tag}because \u20ac"]
        assert front.ask("send 2 1 rsrv_run=5") == [f"answer 2 {code} [rsrv:{status.name}] because \u20ac"]
        front.ask("close")


def test_a_rejected_model_is_refused_with_the_reason(program: Path, tmp_path: Path) -> None:
    """The load of a rejected model fails with the runtime's reason. A later load may succeed."""
    with Front(program, tmp_path, [rejecting("its weights are cursed")]) as front:
        assert front.ask("open") == ["refused - 1 doubling: its weights are cursed"]
        assert front.ask("open") == ["opened - ok 0 0"]
        assert front.ask("send 1 1", "close")[0] == doubled(1)


@pytest.mark.parametrize("last_words", ["runtime.devices is wrong", ""])
def test_a_runtime_that_does_not_start_is_refused_as_by_the_python_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_words: str
) -> None:
    """If no runtime starts, the native front reports the same error as the Python front.

    The error names RSRV_RUNTIME_PYTHON only if the process gave no reason.
    """
    python = tmp_path / "python"
    # The last argument is the descriptor to which the process writes its reason.
    python.write_text(f"#!/bin/bash\necho -n '{last_words}' >&${{!#}}\nexit 3\n")
    python.chmod(0o700)
    monkeypatch.setenv("RSRV_RUNTIME_PYTHON", str(python))
    monkeypatch.setenv("RSRV_RUNTIME_DIR", str(tmp_path))
    launcher = Launcher(os.getpid(), "0", tmp_path / "rsrv.yaml", tmp_path, dict(os.environ))
    with pytest.raises(LaunchError) as error:
        launcher.open()
    assert ("RSRV_RUNTIME_PYTHON" in str(error.value)) is (last_words == "")

    command = [driver("undefined"), tmp_path / "doubling"]
    native = subprocess.run(command, input="open\n", capture_output=True, text=True, check=True)
    assert native.stdout == f"refused - 1 doubling: {error.value}\n"


def test_answers_of_a_runtime_that_ended_since_are_delivered(program: Path, tmp_path: Path) -> None:
    """Answers that a runtime sent before its end are delivered.

    The next runtime gets only the requests that the first one did not read.
    """
    counts: list[int] = []

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while True:
            kind, count, frame = connection.receive()
            if kind is Kind.SUBMIT:
                counts.append(count)
                connection.answer(frame, count)

    def end(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        submitted = [connection.receive()[1:] for _ in range(3)]
        connection.sock.recv(1, socket.MSG_PEEK)
        for count, frame in submitted:
            connection.answer(frame, count)

    with Front(program, tmp_path, [end, serve]) as front:
        front.ask("open")
        front.tell("batch 1 200")
        assert front.hear(200) == sorted(doubled(number) for number in range(1, 201))
        assert sum(counts) == 197
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_child_with_the_socket_of_a_lost_runtime_does_no_harm(program: Path, tmp_path: Path) -> None:
    """A child's copy of a socket keeps the socket open after its runtime's end.

    Events of this socket do not disturb the next connection.
    """

    def end(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        connection.receive_requests()

    with Front(program, tmp_path, [end]) as front:
        front.ask("open")
        front.tell("copy")
        assert front.ask("send 1 1") == [doubled(1)]
        assert front.ask("send 2 1", "close") == [doubled(2), "closed - ok 0 0"]


def test_a_cancelled_request_is_cancelled_in_the_runtime(program: Path, tmp_path: Path) -> None:
    """For a cancelled request, the front sends CANCEL. The client gets the runtime's answer to it."""

    def wait(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while True:
            kind, count, frame = connection.receive()
            if kind is Kind.CANCEL:
                ids = frames.unpack_ids(frame, count)
                completions = [
                    Completion(id, Status.CANCELLED, text="the request was cancelled") for id in ids
                ]
                send(connection.sock, pack_completions(completions)[0])

    with Front(program, tmp_path, [wait]) as front:
        front.ask("open")
        front.tell("send 1 1", "cancel 1")
        assert front.hear() == ["answer 1 7 the request was cancelled"]
        front.ask("close")


def test_a_deadline_holds_without_the_runtime(program: Path, tmp_path: Path) -> None:
    """If the runtime does not answer, a request ends at its deadline, and other requests are answered.

    The late answer is dropped.
    """

    def be_late(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        first: tuple[bytes, int] | None = None
        while True:
            kind, count, frame = connection.receive()
            if kind is Kind.SUBMIT:
                if submissions(frame, count)[0].deadline_ns:
                    first = frame, count
                else:
                    if first is not None:
                        connection.answer(*first)
                    connection.answer(frame, count)

    with Front(program, tmp_path, [be_late]) as front:
        front.ask("open")
        assert front.ask("send 1 1 reactant_timeout_ns=1000000") == [
            "answer 1 4 [rsrv:DEADLINE] the deadline passed before the answer was ready"
        ]
        assert front.ask("send 2 1") == [doubled(2)]
        front.ask("close")


def test_deadlines_of_a_model_that_was_idle_are_checked_again(program: Path, tmp_path: Path) -> None:
    """The deadline of a request is kept even if the model was idle before and has reported its figures."""
    reported = threading.Event()

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while not reported.is_set():
            kind, count, frame = connection.receive()
            if kind is Kind.SUBMIT:
                connection.answer(frame, count)
            if kind is Kind.REPORT:
                assert frames.unpack_json(frame)["responses"] == {"ok": 1}
                reported.set()
        while True:
            connection.receive()

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [doubled(1)]
        assert reported.wait(PATIENCE_S)
        (answer,) = front.ask("send 2 1 reactant_timeout_ns=1000000")
        assert answer.startswith("answer 2 4 [rsrv:DEADLINE] ")
        assert front.ask("close") == ["closed - ok 0 0"]


class Silent:
    """A runtime that reads requests of several models and answers none. `end` closes its connections."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def serve(self, connection: Connection) -> None:
        connection.greet()
        self._sockets.append(connection.sock)
        connection.register(described())
        while True:
            connection.receive()

    def end(self) -> None:
        for sock in self._sockets:
            sock.shutdown(socket.SHUT_RDWR)


def test_the_deadlines_of_one_model_do_not_hide_those_of_another(program: Path, tmp_path: Path) -> None:
    """Deadlines of two models pass one after another.

    The request with the earliest deadline of each model ends before most others.
    """
    runtime, staggered, commands = Silent(), 150, list[str]()
    with Front(program, tmp_path, [runtime.serve] * 2) as front:
        for model in (0, 1):
            front.tell(f"use {model}")
            front.ask("open")
            commands.append(f"use {model}")
            for number in range(staggered):
                commands.append(
                    f"send {1000 * model + number} 1 reactant_timeout_ns={1 + 20_000_000 * number}"
                )
        front.tell(*commands)
        heard: set[str] = set()
        while not heard >= {"0", "1000"}:
            heard.add(front.hear()[0].split()[1])
        assert len(heard) < staggered
        runtime.end()
        front.hear(2 * staggered - len(heard))
        assert front.ask("close") == ["closed - ok 0 0"]
        front.tell("use 0")
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_runtime_that_does_not_read_is_waited_for_once(tmp_path: Path) -> None:
    """The front waits once for a runtime that does not read.

    While the socket is full, further requests are refused at once.
    """

    def sleep(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        end.wait()

    end, further = threading.Event(), 1000
    refusal = "4 [rsrv:QUEUE_FULL] the model runtime accepts no requests at the moment; try again later"
    with Front(driver("undefined"), tmp_path, [sleep]) as front:
        front.ask("open")
        front.tell("batch 0 5000")
        refused, line = 0, ""
        begun = time.monotonic()
        front.tell(*(f"send {number} 1" for number in range(5000, 5000 + further)))
        while not line.startswith(f"answer {4999 + further} "):
            (line,) = front.hear()
            assert line.endswith(refusal)
            refused += 1
        # If each request waited for the socket, each would take 0.1 s.
        assert time.monotonic() - begun < further * 0.1
        end.set()
        front.hear(5000 + further - refused)
        front.ask("close")


def test_requests_that_the_kernel_does_not_take_are_sent_again(program: Path, tmp_path: Path) -> None:
    """If the kernel has no memory for a frame, the next connection gets the frame's requests."""
    with Front(program, tmp_path) as front:
        front.ask("open")
        front.tell("jam")
        assert front.ask("send 1 1") == [doubled(1)]
        front.ask("close")


def test_a_model_may_have_as_many_batch_sizes_as_a_bundle(program: Path, tmp_path: Path) -> None:
    """A model with a thousand batch sizes is accepted, and its largest batch is answered."""
    sizes = tuple(range(1, 1001))
    variant = replace(INTERFACE.variants[0], sizes=sizes)
    document = pack_flat(CLIENT, Interface((variant,), exact=False), batched=True)

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(document)
        connection.answer_all()

    with Front(program, tmp_path, [serve]) as front:
        assert front.ask("open") == ["opened - ok 0 0"]
        assert front.ask("send 1 1000") == [doubled(1, 1000)]
        front.ask("close")


TRACE, PARENT = "0123456789abcdef" * 2, "fedcba9876543210"


@pytest.mark.parametrize(
    ("parameter", "is_traced"),
    [
        (f"TraceParent=00-{TRACE}-{PARENT}-01", True),
        (f"triton=00-{TRACE}-{PARENT}-01", True),
        (f"traceparent=cc-{TRACE}-{PARENT}-03-more", True),
        (f"traceparent=00-{TRACE}-{PARENT}-00", False),
        (f"traceparent=00-{TRACE}-{PARENT}-01-more", False),
        (f"traceparent=ff-{TRACE}-{PARENT}-01", False),
        (f"traceparent=00-{32 * '0'}-{PARENT}-01", False),
        (f"traceparent=00-{TRACE[:-1]}-{PARENT}-01", False),
        (f"traceparent=00-{TRACE.upper()}-{PARENT}-01", False),
        ("traceparent=1", False),
    ],
)
def test_a_request_with_a_sampled_context_is_traced(
    program: Path, tmp_path: Path, parameter: str, is_traced: bool
) -> None:
    """If a request has a sampled trace context, the front sends a mark before the request, and a span after it has failed.

    Otherwise the front sends neither.
    """
    marks: list[Mark] = []
    spans: list[Span] = []

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described(traced=True))
        marked = 0
        while True:
            kind, count, frame = connection.receive()
            if kind is Kind.TRACE:
                marks.extend(unpack_marks(frame, count))
            elif kind is Kind.SPANS:
                spans.extend(read_spans(frames.unpack_json(frame))[0])
            elif kind is Kind.SUBMIT:
                marked = len(marks) - marked
                assert marked == is_traced
                text = '\u20ac"\n' * 300
                ids = [entry[0] for entry in frames.unpack_submissions(frame, count)]
                for answer in pack_completions([Completion(id, Status.INTERNAL, text=text) for id in ids]):
                    send(connection.sock, answer)

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        (answer,) = front.ask(f"send 7 2 {parameter}")
        assert answer.startswith("answer 7 1 \u20ac")
        front.ask("close")
        wait_until(lambda: len(spans) == is_traced, what="the span")
    if is_traced:
        ((span,), (mark,)) = spans, marks
        assert (mark.request, mark.trace, mark.span) == (0, TRACE, span.id)
        assert (span.trace, span.parent, span.name) == (TRACE, PARENT, "infer doubling")
        assert span.error.startswith('\u20ac"\n\u20ac')
        assert span.attributes == {
            "rsrv.model": "doubling", "rsrv.version": "0123456789ab", "rsrv.rows": 2, "rsrv.request_id": "7",
            "rsrv.status": "INTERNAL",
        }  # fmt: skip


# --- several devices ------------------------------------------------------------------------------------------

#: Number of the device that is the home of the program's model, if there are two devices.
HOME = crc32(b"doubling") % 2


class Device:
    """A device's runtime that counts the requests that it answers, or ends when it gets requests."""

    def __init__(self, *, ends: bool = False, launches: bool = False) -> None:
        """`ends`: the runtime ends at its first requests. `launches`: it first marks requests as given to the device."""
        self.answered = 0
        self._ends, self._launches = ends, launches
        self._board: Board | None = None

    def serve(self, connection: Connection) -> None:
        self._board = connection.board
        self.rest()
        connection.greet()
        connection.register(described())
        while True:
            kind, count, frame = connection.receive()
            if kind is not Kind.SUBMIT:
                continue
            if self._launches:
                connection.launch(frame, count)
            if self._ends:
                return
            self.answered += count
            connection.answer(frame, count)

    def rest(self) -> None:
        """Show on the board that the device is idle.

        The time of the last round is in the future, so that the runtime does not seem to hang during the test.
        """
        assert self._board is not None
        self._board.publish(time.monotonic_ns() + 3600 * 10**9, busy=False)

    def stop(self) -> None:
        """Show on the board that the device is idle, and that its last round was a second ago."""
        assert self._board is not None
        self._board.publish(time.monotonic_ns() - 10**9, busy=False)

    def work_for(self, seconds: float) -> None:
        """Show on the board that the device is busy for these seconds."""
        assert self._board is not None
        self._board.publish(time.monotonic_ns() + int(seconds * 1e9), busy=True)


def in_order(home: Device, other: Device) -> list[list[Behaviour]]:
    """Return the behaviours of both devices in the order of the devices' numbers."""
    devices = [home, other] if HOME == 0 else [other, home]
    return [[device.serve] for device in devices]


def test_each_request_goes_to_the_device_that_answers_first(program: Path, tmp_path: Path) -> None:
    """A request goes to the model's home if it is idle, and to the other device while the home is busy."""
    home, other = Device(), Device()
    with Front(program, tmp_path, *in_order(home, other)) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [doubled(1)]
        assert (home.answered, other.answered) == (1, 0)
        home.work_for(10000)
        assert front.ask("send 2 1") == [doubled(2)]
        other.work_for(10000)
        home.rest()
        assert front.ask("send 3 1") == [doubled(3)]
        assert (home.answered, other.answered) == (2, 1)
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_runtime_without_rounds_gets_no_request(program: Path, tmp_path: Path) -> None:
    """If the last round of a runtime was a second ago, it gets no requests, although its board shows an idle device."""
    home, other = Device(), Device()
    with Front(program, tmp_path, *in_order(home, other)) as front:
        front.ask("open")
        home.stop()
        assert front.ask("send 1 1") == [doubled(1)]
        assert (home.answered, other.answered) == (0, 1)
        assert front.ask("close") == ["closed - ok 0 0"]


def test_the_placement_table_says_which_devices_serve(program: Path, tmp_path: Path) -> None:
    """Only devices of the placement table get requests.

    The front follows new tables, also into a larger file. A damaged table changes nothing.
    """
    home, other = Device(), Device()
    bit = {home: 1 << HOME, other: 2 >> HOME}
    with Front(program, tmp_path, *in_order(home, other)) as front:
        table = PlacementWriter(front.directory(0) / paths.PLACEMENT)
        table.write({"doubling": bit[other], "another": 3})
        front.ask("open", "send 1 1")
        assert (home.answered, other.answered) == (0, 1)
        table.write({f"model_{number}": 3 for number in range(1000)} | {"doubling": bit[home]})
        front.ask("send 2 1")
        assert (home.answered, other.answered) == (1, 1)
        table.write({"doubling": bit[other]})
        path, header = front.directory(0) / paths.PLACEMENT, 64
        path.write_bytes(path.read_bytes()[:header].ljust(path.stat().st_size, b"\xff"))
        front.ask("send 3 1")
        assert (home.answered, other.answered) == (2, 1)
        table.close()
        front.ask("close")


def test_a_device_outside_of_the_table_helps_if_it_is_far_sooner(program: Path, tmp_path: Path) -> None:
    """While the table's device is overloaded, another device gets the requests.

    If an operator has pinned the model, no other device gets them.
    """
    home, other = Device(), Device()
    bit = 1 << HOME
    with Front(program, tmp_path, *in_order(home, other)) as front:
        table = PlacementWriter(front.directory(0) / paths.PLACEMENT)
        table.write({"doubling": bit})
        front.ask("open")
        home.work_for(10000)
        front.ask("send 1 1")
        assert (home.answered, other.answered) == (0, 1)
        table.write({"doubling": bit | PINNED})
        front.ask("send 2 1")
        assert (home.answered, other.answered) == (1, 1)
        table.close()
        front.ask("close")


@pytest.mark.parametrize("launched", [False, True])
def test_requests_of_a_device_that_dies_go_to_another(program: Path, tmp_path: Path, launched: bool) -> None:
    """If a device's runtime dies, the other device answers its requests.

    These include requests that were executing, because one death does not prove that they caused it.
    """
    home, other = Device(ends=True, launches=launched), Device()
    with Front(program, tmp_path, *in_order(home, other)) as front:
        front.ask("open")
        front.tell("batch 1 5")
        assert front.hear(5) == [doubled(number) for number in range(1, 6)]
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_model_that_a_device_rejects_is_served_by_another(
    program: Path, tmp_path: Path, devices: int
) -> None:
    """If device 0 rejects the model, device 1 serves it, even if device 1's runtime reports a wrong number of devices."""
    other = Device()

    def serve(connection: Connection) -> None:
        connection.devices = devices
        other.serve(connection)

    with Front(program, tmp_path, [rejecting("it needs 9 GB")] * 9, [serve]) as front:
        (front.directory(0) / paths.DEVICES).write_text('["0", "1"]')
        assert front.ask("open", "send 1 1") == [doubled(1), "opened - ok 0 0"]
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize(
    ("reasons", "text"),
    [
        ((("it needs 9 GB", ""), ("it needs 9 GB, too", "")), "device 0: it needs 9 GB; device 1: it needs 9 GB, too"),
        ((("it needs 9 GB", ""), ("it needs 9 GB", "")), "it needs 9 GB"),
        ((("it ended two runtimes", "fix it"), ("never asked", "")), "it ended two runtimes"),
    ],
)  # fmt: skip
def test_a_model_that_no_device_serves_is_refused_with_all_reasons(
    program: Path, tmp_path: Path, reasons: Sequence[tuple[str, str]], text: str
) -> None:
    """If all devices reject the model, the load fails, and the error has each different reason once.

    After crashes of runtimes, no further device tries the model.
    """
    with Front(program, tmp_path, *([rejecting(*reason)] for reason in reasons)) as front:
        (front.directory(0) / paths.DEVICES).write_text('["0", "1"]')
        assert front.ask("open") == [f"refused - 1 doubling: {text}"]


def test_a_device_that_hangs_delays_no_other(program: Path, tmp_path: Path) -> None:
    """While the runtime of one device accepts a connection and sends nothing, the other device connects again and answers."""
    hung, end = threading.Event(), threading.Event()
    sockets: list[socket.socket] = []

    def serve(connection: Connection) -> None:
        sockets.append(connection.sock)
        behave(connection)

    def hang(connection: Connection) -> None:
        hung.set()
        end.wait(60)

    with Front(program, tmp_path, [serve], [serve, hang]) as front:
        front.ask("open")
        sockets[1].shutdown(socket.SHUT_RDWR)
        assert hung.wait(PATIENCE_S)
        sockets[0].shutdown(socket.SHUT_RDWR)
        assert front.ask("send 1 1") == [doubled(1)]
        assert front.ask("close") == ["closed - ok 0 0"]
        end.set()


def test_models_share_the_mapping_of_a_runtimes_board(program: Path, tmp_path: Path) -> None:
    """The front maps the board of a runtime once for three models. The mapping ends with the last model."""
    board = Board()

    def serve(connection: Connection) -> None:
        connection.board = board
        behave(connection)

    with Front(program, tmp_path, [serve] * 3) as front:

        def mappings() -> int:
            return Path(f"/proc/{front.process.pid}/maps").read_text().count("rsrv-board")

        for model in range(3):
            front.ask(f"use {model}\nopen")
        assert mappings() == 1
        for model in range(3):
            assert mappings() == 1
            front.ask(f"use {model}\nclose")
        wait_until(lambda: mappings() == 0, what="the end of the mapping")


# --- a runtime that misbehaves --------------------------------------------------------------------------------


def broken_descriptions() -> Iterator[bytes]:
    """Yield descriptions of a model that are cut, too long, or wrong in some bytes."""
    good = described()
    yield good + b"\0"
    yield from (good[:at] for at in range(1, len(good), 7))
    for at in range(len(good)):
        yield good[:at] + bytes([good[at] ^ 0x80]) + good[at + 1 :]
    for at in range(4, len(good) - 4, 3):
        yield good[:at] + b"\xff\xff\xff\xff" + good[at + 4 :]
    yield struct.pack("<IIIII", 0x54414C46, 0, 2**32 - 1, 2**32 - 1, 2**32 - 1)


def test_no_description_of_a_model_does_harm(program: Path, tmp_path: Path) -> None:
    """A description with wrong bytes is refused, or accepted if it happens to be valid.

    After all of these, a right description is accepted.
    """
    documents = list(broken_descriptions())

    def describe(document: bytes) -> Behaviour:
        def serve(connection: Connection) -> None:
            connection.greet()
            connection.register(document)
            connection.receive()

        return serve

    with Front(program, tmp_path, [describe(document) for document in documents]) as front:
        for _ in documents:
            (line,) = front.ask("open")
            if line.startswith("opened"):
                assert front.ask("close") == ["closed - ok 0 0"]
            else:
                assert line.startswith("refused - 1 doubling: ")
        assert front.ask("open", "send 1 1", "close")[0] == doubled(1)


MISDEEDS = {
    "a frame without a header": b"\1",
    "an unknown kind": HEADER.pack(999, 0, 0),
    "a frame for runtimes": HEADER.pack(Kind.SUBMIT, 0, 0),
    "registered twice": pack_json(Kind.REGISTERED, {}),
    "more answers than bytes": HEADER.pack(Kind.DONE, 0, 2**32 - 1),
    "an unknown status": HEADER.pack(Kind.DONE, 0, 1) + struct.pack("<QHHIIIQ", 0, 99, 0, 1, 1, 0, 1),
    "a text that is too long": HEADER.pack(Kind.DONE, 0, 1)
    + struct.pack("<QHHIIIQ", 0, 1, 0, 1, 1, 2**32 - 1, 1),
    "bytes behind the texts": HEADER.pack(Kind.DONE, 0, 1)
    + struct.pack("<QHHIIIQ", 0, 0, 0, 1, 1, 0, 1)
    + b"x",
}


@pytest.mark.parametrize("frame", MISDEEDS.values(), ids=MISDEEDS.keys())
def test_a_runtime_that_breaks_the_protocol_is_left(tmp_path: Path, frame: bytes) -> None:
    """If a runtime sends a frame that breaks the protocol, the front closes the connection.

    The next connection gets the request.
    """

    def misbehave(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while connection.receive()[0] is not Kind.SUBMIT:
            pass
        send(connection.sock, frame)
        connection.receive()

    with Front(driver("undefined"), tmp_path, [misbehave]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [doubled(1)]
        front.ask("close")


def test_a_further_device_whose_runtime_does_not_start_is_left_alone_for_a_while(
    program: Path, tmp_path: Path
) -> None:
    """If the runtime of a further device does not start, the front keeps the reason in a file of the device's directory.

    While this file is recent, attempts to use the device report the reason and start nothing.
    """

    def with_two_devices(connection: Connection) -> None:
        connection.devices = 2
        behave(connection)

    log = tmp_path / "front.log"
    with Front(program, tmp_path, [with_two_devices]) as front:
        front.ask("open")
        failure = front.directory(1) / paths.FAILURE
        assert failure.read_text() == ENDED_SILENTLY % "/bin/false"
        failure.write_text("another server holds the card")
        text = "no connection to the runtime yet: another server holds the card"
        wait_until(lambda: text in log.read_text(), what="the next attempt")
        assert front.ask("send 1 1", "close") == [doubled(1), "closed - ok 0 0"]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_frames_of_a_runtime_do_no_harm(program: Path, tmp_path: Path, seed: int) -> None:
    """Runtimes of two devices send frames with random faults and descriptors. Each request is answered once."""
    runtimes, is_over = misbehaving(seed, 30 if seed == 0 else 500)
    with Front(program, tmp_path, *runtimes) as front:
        load(front, is_over, 60 if seed == 0 else 600)

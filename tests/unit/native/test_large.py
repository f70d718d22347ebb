"""Requests of the native front with more rows than the largest compiled size. They are submitted in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rsrv.front.rules import LATE, MAX_PARTS
from rsrv.wire import frames
from rsrv.wire.frames import ALONE, WAITED, Completion, Kind, Status, Submission, pack_completions
from rsrv.wire.socket import send
from tests.unit.native.front import COLUMNS, Connection, Front, described, submissions
from tests.unit.native.test_front import doubled, program

__all__ = ["program"]

#: Number of rows of a request that has seven parts.
ROWS = 53


class PartRuntime:
    """A runtime that gets the parts of large requests. The test answers the parts one by one."""

    def __init__(self) -> None:
        self.waiting: dict[int, Submission] = {}
        #: First row of each submitted part, in order of submission.
        self.firsts: list[int] = []
        self.most = 0

    def parts(self, connection: Connection, number: int) -> Iterator[Submission]:
        """Yield the parts of the request `number` in order. The caller answers each part, or ends the connection."""
        while True:
            while not self.waiting:
                kind, count, frame = connection.receive()
                self.take(connection, kind, count, frame, number)
            yield self.waiting.pop(min(self.waiting))

    def take(self, connection: Connection, kind: Kind, count: int, frame: bytes, number: int) -> None:
        if kind is not Kind.SUBMIT:
            return
        for submission in submissions(frame, count):
            self.waiting[submission.request] = submission
            self.firsts.append(first_row(connection, submission, number))
        self.most = max(self.most, len(self.waiting))


def first_row(connection: Connection, part: Submission, number: int) -> int:
    """Return the first row of this part of the request `number`."""
    values = connection.segments[part.segment][part.inputs_at : part.inputs_at + 4].view(np.float32)
    return (int(values[0]) - number) // COLUMNS


def answer(connection: Connection, submission: Submission) -> None:
    connection.answer(frames.pack_submissions([submission]), 1)


def test_any_number_of_rows_is_answered(program: Path, tmp_path: Path) -> None:
    """Requests of any number of rows are answered.

    No part has more rows than the largest size, and few parts are submitted at a time.
    """
    runtime, sizes = PartRuntime(), list[int]()

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        for part in runtime.parts(connection, 1):
            sizes.append(part.rows)
            answer(connection, part)

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask("send 1 9") == [doubled(1, 9)]
        assert front.ask(f"send 2 {ROWS}") == [doubled(2, ROWS)]
        assert front.ask("send 3 500") == [doubled(3, 500)]
        assert front.ask("close") == ["closed - ok 0 0"]
    assert (max(sizes), sum(sizes)) == (8, 9 + ROWS + 500)
    assert runtime.most <= MAX_PARTS
    assert runtime.firsts[:9] == [0, 8, *range(0, 56, 8)]


def test_only_the_first_part_may_find_the_queue_full(program: Path, tmp_path: Path) -> None:
    """The first part takes the request's place in the queue. The runtime accepts the other parts even if the queue is full.

    No part waits for a runtime: with `stub.retry_s: 0`, a request that waits would fail.
    """
    runtime, flags = PartRuntime(), list[int]()

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described(retry_s=0.0))
        for part in runtime.parts(connection, 1):
            flags.append(part.flags)
            answer(connection, part)

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask(f"send 1 {ROWS}") == [doubled(1, ROWS)]
        assert front.ask("close") == ["closed - ok 0 0"]
    assert flags == [0] + [WAITED] * 6


def test_the_first_failure_ends_the_request(program: Path, tmp_path: Path) -> None:
    """The client gets the failure of the second part. The other parts are cancelled, and no further part is submitted."""
    runtime, cancelled = PartRuntime(), list[int]()

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        parts = runtime.parts(connection, 1)
        first, second, third = next(parts), next(parts), next(parts)
        send(connection.sock, pack_completions([Completion(second.request, Status.INTERNAL, text="no")])[0])
        while len(cancelled) < 3:
            kind, count, frame = connection.receive()
            runtime.take(connection, kind, count, frame, 1)
            if kind is Kind.CANCEL:
                cancelled.extend(frames.unpack_ids(frame, count))
        unanswered = (first.request, third.request, *runtime.waiting)
        completions = [
            Completion(id, Status.CANCELLED, text="the request was cancelled") for id in unanswered
        ]
        runtime.waiting.clear()
        for frame in pack_completions(completions):
            send(connection.sock, frame)
        for part in parts:
            answer(connection, part)

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask(f"send 1 {ROWS}") == ["answer 1 1 no"]
        assert len(cancelled) == MAX_PARTS - 1
        assert runtime.firsts == [0, 8, 16, 24]
        assert front.ask("send 2 1") == [doubled(2)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_deadline_ends_the_request_once(program: Path, tmp_path: Path) -> None:
    """If the runtime does not answer, a large request ends once, at its deadline. Late answers of its parts are ignored."""
    runtime = PartRuntime()

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        late = [
            late_part for _, late_part in zip(range(MAX_PARTS), runtime.parts(connection, 1), strict=False)
        ]
        for part in runtime.parts(connection, 2):
            answer(connection, part)
            for other in late:
                answer(connection, other)
            late.clear()

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask(f"send 1 {ROWS} reactant_timeout_ns=50000000") == [
            f"answer 1 4 [rsrv:DEADLINE] {LATE}"
        ]
        assert front.ask("send 2 1") == [doubled(2)]
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize("launches", [False, True])
def test_a_death_repeats_only_the_parts_without_an_answer(
    program: Path, tmp_path: Path, launches: bool
) -> None:
    """After a death, the next runtime gets each part without an answer once.

    A part that was executing is submitted alone.
    """
    first, second, answered, flags = PartRuntime(), PartRuntime(), set[int](), list[int]()

    def die(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        for number, part in enumerate(first.parts(connection, 1)):
            if number == 2:
                if launches:
                    connection.launch(frames.pack_submissions([part]), 1)
                return
            answered.add(first_row(connection, part, 1))
            answer(connection, part)

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        for part in second.parts(connection, 1):
            flags.append(part.flags)
            answer(connection, part)

    with Front(program, tmp_path, [die, serve]) as front:
        front.ask("open")
        assert front.ask(f"send 1 {ROWS}") == [doubled(1, ROWS)]
        assert front.ask("close") == ["closed - ok 0 0"]
    # On a busy machine, the part that follows an answer may arrive before the parts that were submitted at the start.
    assert len(answered) == 2
    assert sorted(second.firsts) == sorted({*range(0, 56, 8)} - answered)
    assert flags.count(WAITED | ALONE) == launches


def test_a_large_request_waits_as_a_whole_for_a_runtime(program: Path, tmp_path: Path) -> None:
    """A large request that starts a cold model waits as a whole, and is submitted in parts when the model is ready."""

    def cold(connection: Connection) -> None:
        connection.greet()
        connection.dismiss()

    with Front(program, tmp_path, [cold]) as front:
        front.ask("open")
        assert front.ask(f"send 1 {ROWS}") == [doubled(1, ROWS)]
        assert front.ask("close") == ["closed - ok 0 0"]

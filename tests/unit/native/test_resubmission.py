"""Requests of the native front whose runtime dies, or that arrive while there is no runtime.

Their errors are the same as the Python front's.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from rsrv.front.rules import DOWN, EQUAL, LATE, MAX_REQUEST_BYTES, MAX_REQUESTS, NO_DESCRIPTORS, SUSPECT
from rsrv.placement.device_choice import PINNED
from rsrv.wire import paths
from rsrv.wire.frames import ALONE, WAITED
from rsrv.wire.placement_table import PlacementWriter
from tests.unit.native.front import Behaviour, Connection, Front, behave, described, driver, submissions
from tests.unit.native.test_front import HOME, Device, doubled, program, rejecting
from tests.waiting import PATIENCE_S, wait_until

__all__ = ["program"]


def dying(retry_s: float = 60.0, *, launches: bool = False, after: int = 1) -> Behaviour:
    """Return a runtime that dies after it has read `after` frames of requests.

    If `launches`, it marks them as given to the device.
    """

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described(retry_s=retry_s))
        for _ in range(after):
            count, frame = connection.receive_requests()
            if launches:
                connection.launch(frame, count)

    return serve


class Outage:
    """A runtime that registers the model only after `is_over` is set."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def serve(self, connection: Connection) -> None:
        self.is_over.wait(60)
        behave(connection)


def test_the_next_runtime_answers(program: Path, tmp_path: Path) -> None:
    """The next runtime answers the requests that were in flight at a death, and the requests that come while there is no runtime."""
    outage = Outage()
    with Front(program, tmp_path, [dying(), outage.serve]) as front:
        front.ask("open")
        front.tell("batch 1 100", "send 200 8", "send 201 1")
        outage.is_over.set()
        single = [doubled(number) for number in (*range(1, 101), 201)]
        assert front.hear(102) == sorted([*single, doubled(200, 8)])
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize("retry_s", [0.3, 0.0])
def test_no_runtime_for_longer_than_the_limit(program: Path, tmp_path: Path, retry_s: float) -> None:
    """Requests are refused when they have waited for stub.retry_s.

    Later requests are answered when there is a runtime again.
    """
    outage = Outage()
    with Front(program, tmp_path, [dying(retry_s), outage.serve]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [f"answer 1 4 [rsrv:RUNTIME_DOWN] {DOWN}"]
        outage.is_over.set()
        number = 2
        while (lines := front.ask(f"send {number} 1")) != [doubled(number)]:
            assert lines == [f"answer {number} 4 [rsrv:RUNTIME_DOWN] {DOWN}"]
            number += 1
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize("devices", [1, 2])
def test_suspects_go_one_after_another_and_end_two_runtimes_at_most(
    program: Path, tmp_path: Path, devices: int
) -> None:
    """After a death, the five requests that may have caused it are submitted one after another.

    The request that executes at the second death fails. The other requests, including a new one, are answered.
    """
    # For each frame, the number of its requests and the flags of its first request.
    received: list[tuple[int, int]] = []
    seen, is_over = threading.Event(), threading.Event()

    def come_back(connection: Connection) -> None:
        assert is_over.wait(60)
        behave(connection)

    def die_again(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while len(received) < 2:
            count, frame = connection.receive_requests()
            if not received:
                connection.launch(frame, count)
                seen.set()
            received.append((count, submissions(frame, count)[0].flags))
        is_over.set()

    lives: list[list[Behaviour]] = [[dying(launches=True, after=5), come_back], [die_again]]
    if devices == 1:
        lives = [[dying(launches=True, after=5), die_again]]
    elif HOME == 1:
        lives.reverse()
    with Front(program, tmp_path, *lives) as front:
        front.ask("open")
        front.tell("batch 1 5")
        assert seen.wait(PATIENCE_S)
        # This request does not wait for the suspects. It is sent while the runtime has only one suspect.
        front.tell("send 6 1")
        answers = front.hear(6)
        (failed,) = (answer for answer in answers if " ok " not in answer)
        number = int(failed.split()[1])
        assert failed == f"answer {number} 1 {SUSPECT}"
        assert sorted([*answers, doubled(number)]) == sorted(
            [failed, *(doubled(request_number) for request_number in range(1, 7))]
        )
        assert received == [(1, ALONE | WAITED), (1, 0)]
        assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize(
    ("slot", "text", "is_blamed"),
    [
        (b"", b"", False),
        (b"\4\0" + bytes(8) + b"doubling@0123456789ab", b"", False),
        (b"\4\0" + bytes(8) + b"doubling@0123456789ab", b"Fatal", True),
        (b"\x84\0" + bytes(8) + b"doubling@0123456789ab", b"Fatal", True),
        (b"\4\0" + bytes(8) + b"another@0123456789ab", b"Fatal", False),
        (b"\3\0" + bytes(8) + b"doubling@0123456789ab", b"Fatal", False),
        (b"\4\1" + bytes(8) + b"doubling@0123456789ab", b"", True),
        (b"\4\1" + bytes(8) + b"another@0123456789ab", b"Fatal", False),
        (b"", b"Fatal", True),
        (b"\5\1", b"", True),
    ],
    ids=[
        "killed", "killed while it executes", "crashed", "crashed alone", "another model executes",
        "loading", "hung", "another model hung", "crashed outside of executions", "the loop hung",
    ],
)  # fmt: skip
def test_only_crashes_and_hangs_count(
    program: Path, tmp_path: Path, slot: bytes, text: bytes, is_blamed: bool
) -> None:
    """After two deaths, a request is refused only if the black box shows that the model may have caused a crash or hung.

    Otherwise the third runtime answers the request.
    """
    deaths = [dying(launches=True)] * 2
    with Front(program, tmp_path, deaths) as front:
        (front.directory(0) / paths.BLACKBOX).write_bytes(slot.ljust(7 * 512, b"\0") + text)
        front.ask("open")
        answer = f"answer 1 1 {SUSPECT}" if is_blamed else doubled(1)
        assert front.ask("send 1 1") == [answer]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_waiting_requests_are_bounded(program: Path, tmp_path: Path) -> None:
    """As many requests as the limit allows wait for a runtime. Further requests are refused."""
    outage = Outage()
    with Front(program, tmp_path, [dying(), outage.serve]) as front:
        front.ask("open")
        front.tell(f"batch 0 {MAX_REQUESTS + 20}")
        refused = [front.hear()[0] for _ in range(20)]
        assert all(line.endswith(f" 4 [rsrv:RUNTIME_DOWN] {DOWN}") for line in refused)
        outage.is_over.set()
        assert all(" ok 1 " in line for line in front.hear(MAX_REQUESTS))
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_hostile_request_is_told_so_among_many(program: Path, tmp_path: Path) -> None:
    """A request that executes at two deaths fails with this reason, even if the queue before it is full."""
    has_suspect = threading.Event()

    def die_again(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        _, suspect = connection.receive_requests()
        has_suspect.set()
        remaining = MAX_REQUESTS
        while remaining:
            remaining -= connection.receive_requests()[0]
        connection.answer(suspect, 1)
        count, frame = connection.receive_requests()
        connection.launch(frame, count)

    with Front(program, tmp_path, [dying(launches=True, after=2), die_again]) as front:
        front.ask("open")
        front.tell("batch 1 2")
        assert has_suspect.wait(PATIENCE_S)
        front.tell(f"batch 10 {MAX_REQUESTS}")
        answers = front.hear(MAX_REQUESTS + 2)
        assert [answer for answer in answers if " ok " not in answer] == [f"answer 2 1 {SUSPECT}"]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_waiting_requests_go_where_the_operator_wants_them(program: Path, tmp_path: Path) -> None:
    """When the device to which the model is pinned is back, a waiting request is sent to this device.

    This holds although the pinned device is busy and the other device is idle.
    """
    home, has_suspect, is_back = Device(), threading.Event(), threading.Event()
    received: list[int] = []

    def stand_in(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        while True:
            count, frame = connection.receive_requests()
            received.append(count)
            has_suspect.set()
            assert is_back.wait(PATIENCE_S)
            connection.answer(frame, count)

    def come_back(connection: Connection) -> None:
        assert has_suspect.wait(PATIENCE_S)
        home.serve(connection)

    lives: list[list[Behaviour]] = [[dying(launches=True, after=2), come_back], [stand_in]]
    if HOME == 1:
        lives.reverse()
    with Front(program, tmp_path, *lives) as front:
        table = PlacementWriter(front.directory(0) / paths.PLACEMENT)
        table.write({"doubling": 1 << HOME | PINNED})
        front.ask("open")
        front.tell("batch 1 2")
        assert has_suspect.wait(PATIENCE_S)
        log = tmp_path / "front.log"
        wait_until(lambda: "reconnected" in log.read_text(), what="the pinned device to be back")
        home.work_for(10000)
        is_back.set()
        assert front.hear(2) == [doubled(1), doubled(2)]
        assert (received, home.answered) == ([1], 1)
        table.close()
        assert front.ask("close") == ["closed - ok 0 0"]


def test_requests_with_the_inputs_of_a_killer_are_refused(program: Path, tmp_path: Path) -> None:
    """Two runtimes died while they executed these inputs, so no third one gets them. Other inputs are answered."""
    with Front(program, tmp_path, [dying(launches=True)] * 2) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [f"answer 1 1 {SUSPECT}"]
        assert front.ask("like 2 1", "send 3 1") == [f"answer 2 1 {EQUAL}", doubled(3)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_inputs_that_were_answered_since_a_death_are_no_suspects(program: Path, tmp_path: Path) -> None:
    """An answer clears the record of a death for its inputs, so the next death with these inputs is the first one again.

    The next runtime therefore answers a request with these inputs.
    """

    def answer_and_die(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        count, frame = connection.receive_requests()
        connection.answer(frame, count)
        count, frame = connection.receive_requests()
        connection.launch(frame, count)

    with Front(program, tmp_path, [dying(launches=True), answer_and_die]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [doubled(1)]
        assert front.ask("like 2 1") == [doubled(1).replace("answer 1", "answer 2")]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_request_without_a_descriptor_for_its_memory_names_the_limit(program: Path, tmp_path: Path) -> None:
    """If there is no descriptor for a request's memory, the request fails with INTERNAL, because a retry would not help.

    When descriptors are available again, the next request is answered.
    """
    with Front(program, tmp_path) as front:
        front.ask("open")
        pid = front.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        assert front.ask("send 1 1") == [f"answer 1 1 tritonserver {NO_DESCRIPTORS}"]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert front.ask("send 2 1") == [doubled(2)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_server_without_descriptors_names_its_limit(program: Path, tmp_path: Path) -> None:
    """If tritonserver has too few descriptors, the kernel drops the runtime's descriptor.

    The log names the limit and does not blame the runtime.
    """
    log = tmp_path / "front.log"

    def limit(connection: Connection) -> None:
        taken = {int(name) for name in os.listdir(f"/proc/{front.process.pid}/fd")}
        free = next(number for number in range(len(taken) + 1) if number not in taken)
        resource.prlimit(front.process.pid, resource.RLIMIT_NOFILE, (free, before[1]))
        connection.greet()

    with Front(program, tmp_path, [dying(), limit]) as front:
        before = resource.prlimit(front.process.pid, resource.RLIMIT_NOFILE)
        front.ask("open")
        front.tell("batch 1 1")
        wait_until(lambda: "has reached its limit of open files" in log.read_text(), what="the reason")
        resource.prlimit(front.process.pid, resource.RLIMIT_NOFILE, before)
        assert front.hear() == [doubled(1)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_the_bytes_of_waiting_requests_are_bounded(tmp_path: Path) -> None:
    """If the inputs of all waiting requests exceed a limit in bytes, a further request is refused.

    The request that already waits is answered.
    """
    outage = Outage()
    with Front(driver("undefined"), tmp_path, [dying(), outage.serve]) as front:
        front.ask("open")
        front.tell("send 1 1")
        assert front.ask(f"send 2 {MAX_REQUEST_BYTES // 16}") == [f"answer 2 4 [rsrv:RUNTIME_DOWN] {DOWN}"]
        outage.is_over.set()
        assert front.hear() == [doubled(1)]
        front.ask("close")


@pytest.mark.parametrize(
    ("send", "then", "answer"),
    [
        ("send 2 1", ("cancel 2",), "7 the request was cancelled"),
        ("send 2 1 reactant_timeout_ns=100000000", (), f"4 [rsrv:DEADLINE] {LATE}"),
        ("send 2 1 rsrv_run=5", (), f"4 [rsrv:RUNTIME_DOWN] {DOWN}"),
        (
            "send 2 1 rsrv_priority=-1",
            (),
            "3 parameter rsrv_priority must be a whole number from 0 to 65534, got -1",
        ),
    ],
    ids=["cancelled", "late", "a sub-call, whose run is gone", "malformed"],
)
def test_a_wait_that_is_in_vain_ends(
    program: Path, tmp_path: Path, send: str, then: tuple[str, ...], answer: str
) -> None:
    """While there is no runtime, a request that cannot wait any longer, or must not wait, gets the reason.

    The other request continues to wait and is answered.
    """
    outage = Outage()
    with Front(program, tmp_path, [dying(), outage.serve]) as front:
        front.ask("open")
        front.tell("send 1 1", send, *then)
        (line,) = front.hear()
        assert line == f"answer 2 {answer}"
        outage.is_over.set()
        assert front.hear() == [doubled(1)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_model_that_the_next_runtime_refuses_waits_for_none(program: Path, tmp_path: Path) -> None:
    """If the next runtime rejects the model, waiting requests and later requests get the runtime's text."""
    with Front(program, tmp_path, [dying(), *[rejecting("it crashed", "fix it")] * 9]) as front:
        front.ask("open")
        assert front.ask("send 1 1", "send 2 1") == [
            f"answer {number} 4 [rsrv:RUNTIME_DOWN] fix it" for number in (1, 2)
        ]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_an_unload_waits_for_the_requests_that_wait(program: Path, tmp_path: Path) -> None:
    """An unload waits until all waiting requests are answered, here by the next runtime."""
    outage = Outage()
    with Front(program, tmp_path, [dying(), outage.serve]) as front:
        front.ask("open")
        front.tell("batch 1 5", "close")
        outage.is_over.set()
        heard = [front.hear()[0] for _ in range(6)]
        assert heard[-1] == "closed - ok 0 0"


def test_many_deaths_leave_nothing(program: Path, tmp_path: Path) -> None:
    """Every second one of 20 runtimes ends while it executes.

    All requests are answered, and no descriptor, thread or memory is left over.
    """
    lives = iter(range(20))

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        life, remaining = next(lives, 0), 40
        while remaining:
            count, frame = connection.receive_requests()
            connection.launch(frame, count)
            if life % 2:
                return
            connection.answer(frame, count)
            remaining -= count

    with Front(program, tmp_path, [serve] * 20) as front:
        process = Path(f"/proc/{front.process.pid}")

        def resources() -> tuple[int, ...]:
            memory = (process / "maps").read_text().count("memfd:")
            return memory, *(len(os.listdir(process / kind)) for kind in ("fd", "task"))

        assert front.ask("open", "send 0 1") == [doubled(0), "opened - ok 0 0"]
        first = resources()
        for number in range(0, 11 * 40, 40):
            count = 40 if number else 39
            front.tell(f"batch {number + 1} {count}")
            assert front.hear(count) == sorted(doubled(number + 1 + index) for index in range(count))
        assert not front.behaviours
        wait_until(lambda: resources() == first, what=f"{resources()} to be {first}")
        assert front.ask("close") == ["closed - ok 0 0"]

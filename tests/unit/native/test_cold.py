"""Cold models of the native front: requests start them, wait, and are answered or refused with the reason.

Idle models become cold.
"""

from __future__ import annotations

import queue
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rsrv.placement.device_choice import PINNED
from rsrv.wire import paths
from rsrv.wire.blackbox import ASLEEP_AT, BYTES
from rsrv.wire.frames import (
    HEADER,
    Completion,
    Kind,
    StartProgress,
    Status,
    pack_completions,
    pack_rejected,
    pack_starting,
    unpack_json,
)
from rsrv.wire.placement_table import PlacementWriter
from rsrv.wire.socket import Closed, send
from tests.unit.native.front import Behaviour, Connection, Front, behave, described, driver
from tests.unit.native.test_front import HOME, doubled, program
from tests.waiting import PATIENCE_S

__all__ = ["program"]

TOO_LONG = (
    r"the model is starting\. This request has waited for \d+\.?\d* s; requests wait at most 0\.5 s without progress, and at most "
    "5 s in all. The start continues: send the request again later or with a later deadline, or start the model in advance "
    "with `rsrv prefetch --warm`"
)
TOO_SOON = (
    r"the model is starting, which takes \d\d\.\d s more, and this request's deadline is earlier. The start continues: "
    "send the request again later or with a later deadline, or start the model in advance with `rsrv prefetch --warm`"
)


class Lazy:
    """A runtime whose model is cold until a request asks for it."""

    def __init__(self, start_timeout_s: float = 60.0) -> None:
        self.start_timeout_s = start_timeout_s
        #: Registrations that the front has sent, in order.
        self.registrations: list[dict[str, Any]] = []
        #: Set when the front has closed the connection of the cold model.
        self.left = threading.Event()
        #: The start of the model lasts until this event is set.
        self.may_start = threading.Event()
        self.starting = threading.Event()

    def cold(self, connection: Connection) -> None:
        """Answer a registration with COLD."""
        self.registrations.append(connection.greet())
        self._leave(connection)

    def start(self, connection: Connection) -> None:
        """Start the model when `may_start` is set, and serve it."""
        self.registrations.append(connection.greet())
        self.starting.set()
        assert self.may_start.wait(60)
        connection.register(described())
        connection.answer_all()

    def serve_once(self, connection: Connection) -> None:
        """Serve the model for one frame of requests, and then let the model become cold."""
        self.registrations.append(connection.greet())
        connection.register(described())
        count, frame = connection.receive_requests()
        connection.answer(frame, count)
        self._leave(connection)

    def _leave(self, connection: Connection) -> None:
        connection.dismiss(self.start_timeout_s)
        with suppress(Closed):
            while connection.receive()[0] is Kind.REPORT:
                pass
            raise AssertionError("the front has not left")
        self.left.set()


def test_a_cold_model_is_loaded_without_a_connection_and_starts_with_its_first_requests(
    program: Path, tmp_path: Path
) -> None:
    """A cold model is loaded and keeps no connection.

    The first requests register it with `asked`, and later requests wait for the same start.
    """
    lazy = Lazy()
    with Front(program, tmp_path, [lazy.cold, lazy.start]) as front:
        assert front.ask("open") == ["opened - ok 0 0"]
        assert lazy.left.wait(60)
        front.tell("batch 1 3")
        assert lazy.starting.wait(60)
        front.tell("send 9 8")
        lazy.may_start.set()
        assert front.hear(4) == sorted([*(doubled(number) for number in (1, 2, 3)), doubled(9, 8)])
        assert front.ask("close") == ["closed - ok 0 0"]
    cold, starting = lazy.registrations
    assert not cold["asked"]
    assert (starting["asked"], starting["model"], "started" in starting) == (True, "doubling", False)
    assert "deadline_ns" not in starting


def test_the_earliest_deadline_is_told(tmp_path: Path) -> None:
    """The registration that starts a model has the earliest deadline of the waiting requests.

    If a request with an earlier deadline arrives during the start, a DEMAND frame reports the deadline. The runtime
    orders starts by deadlines.
    """
    heard = queue.SimpleQueue[dict[str, Any]]()
    lazy = Lazy()

    def die(connection: Connection) -> None:
        lazy.registrations.append(connection.greet())
        lazy.starting.set()
        kind, _, frame = connection.receive()
        assert kind is Kind.DEMAND
        heard.put(unpack_json(frame))

    with Front(driver("undefined"), tmp_path, [lazy.cold, die, lazy.start]) as front:
        front.ask("open")
        front.tell(f"send 1 1 reactant_timeout_ns={2 * 10**12}")
        assert lazy.starting.wait(60)
        front.tell(f"send 2 1 reactant_timeout_ns={10**12}")
        demand = heard.get(timeout=PATIENCE_S)
        lazy.may_start.set()
        assert front.hear(2) == [doubled(1), doubled(2)]
        front.ask("close")
    first, second = lazy.registrations[1:]
    assert 10**12 < second["deadline_ns"] == demand["deadline_ns"] < first["deadline_ns"]


def test_a_runtime_hears_of_requests_that_come_and_go_during_the_start(program: Path, tmp_path: Path) -> None:
    """While a model starts again after a death, a DEMAND frame reports each change of the waiting requests.

    In this test, a request arrives and ends at its deadline, and another request arrives.
    """
    heard = queue.SimpleQueue[dict[str, Any]]()
    lazy = Lazy()

    def die(connection: Connection) -> None:
        connection.greet()
        connection.register(described(retry_s=60.0))
        assert lazy.may_start.wait(60)

    def start(connection: Connection) -> None:
        lazy.registrations.append(connection.greet())
        lazy.starting.set()
        for _ in range(3):
            kind, _, frame = connection.receive()
            assert kind is Kind.DEMAND
            heard.put(unpack_json(frame))
        connection.register(described())
        connection.answer_all()

    with Front(program, tmp_path, [die, start]) as front:
        front.ask("open")
        lazy.may_start.set()
        assert lazy.starting.wait(60)
        assert front.ask("send 1 1 reactant_timeout_ns=300000000")[0].startswith(
            "answer 1 4 [rsrv:DEADLINE] "
        )
        # Send the next request only after the runtime knows that no request waits. Otherwise one DEMAND frame would
        # replace the other.
        hurried, none = (heard.get(timeout=PATIENCE_S) for _ in range(2))
        front.tell("send 2 1")
        assert front.hear() == [doubled(2)]
        front.ask("close")
    assert (lazy.registrations[0]["asked"], lazy.registrations[0]["started"]) == (False, True)
    patient = heard.get(timeout=PATIENCE_S)
    assert hurried["asked"]
    assert hurried["deadline_ns"] > 10**8
    assert (none, patient) == ({"asked": False}, {"asked": True})


def test_requests_whose_deadline_is_before_the_end_of_the_start_are_refused_at_once(
    program: Path, tmp_path: Path
) -> None:
    """Requests whose deadline is before the announced end of the start are refused at once.

    The others wait for the start.
    """
    lazy = Lazy()

    def start(connection: Connection) -> None:
        lazy.registrations.append(connection.greet())
        send(connection.sock, pack_starting(StartProgress("it is compiled", 60.0, 50.0), flat=True))
        assert lazy.may_start.wait(60)
        connection.register(described())
        connection.answer_all()

    with Front(program, tmp_path, [lazy.cold, start]) as front:
        front.ask("open")
        front.tell("send 1 1")
        for number in ("2", "3"):
            (refused,) = front.ask(f"send {number} 1 reactant_timeout_ns=40000000000")
            assert re.fullmatch(rf"answer {number} 4 \[rsrv:DEADLINE\] {TOO_SOON}", refused)
        front.tell("send 4 1 reactant_timeout_ns=60000000000")
        lazy.may_start.set()
        assert front.hear(2) == [doubled(1), doubled(4)]
        front.ask("close")
    assert [registration["asked"] for registration in lazy.registrations] == [False, True]


def test_a_model_is_unloaded_while_it_is_cold(program: Path, tmp_path: Path) -> None:
    """A cold model can be unloaded, although it has no connection whose end would complete the unload."""
    with Front(program, tmp_path, [Lazy().cold]) as front:
        assert front.ask("open", "close") == ["closed - ok 0 0", "opened - ok 0 0"]


def test_a_model_is_unloaded_while_it_starts(program: Path, tmp_path: Path) -> None:
    """If a model is unloaded while it starts, further STARTING frames of its runtime do no harm."""

    def never_ready(connection: Connection) -> None:
        connection.greet()
        while True:
            send(connection.sock, pack_starting(StartProgress("it is compiled", 60.0, 50.0), flat=True))

    rounds = 10
    with Front(program, tmp_path, [Lazy().cold, never_ready] * rounds) as front:
        for number in range(rounds):
            front.ask("open")
            (refused,) = front.ask(f"send {number} 1 reactant_timeout_ns=100000000")
            assert refused.startswith(f"answer {number} 4 [rsrv:DEADLINE] ")
            assert front.ask("close") == ["closed - ok 0 0"]


@pytest.mark.parametrize("kind", [Kind.COLD, Kind.DONE])
def test_a_frame_that_is_handled_after_its_model_was_unloaded(
    program: Path, tmp_path: Path, kind: Kind
) -> None:
    """A model is unloaded while the reader has received a frame but not handled it. The front then serves the next model.

    Only the sanitizers `address` and `thread` notice a use of freed memory.
    """
    may_send = threading.Event()

    def late(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        assert may_send.wait(60)
        if kind is Kind.COLD:
            connection.dismiss()
        else:
            (frame,) = pack_completions([Completion(1, Status.OK, 8, 1, 1000)])
            send(connection.sock, frame)

    with Front(program, tmp_path, [late]) as front:
        assert front.ask("open") == ["opened - ok 0 0"]
        assert front.ask("hold") == ["holds - ok 0 0"]
        may_send.set()
        assert front.ask("close") == ["closed - ok 0 0"]
        front.tell("use 1")
        assert front.ask("open") == ["opened - ok 0 0"]
        assert front.ask("send 1 1") == [doubled(1)]
        assert front.ask("close") == ["closed - ok 0 0"]


def test_a_start_that_failed_early_leaves_no_time_to_wait_for(tmp_path: Path) -> None:
    """After a failed start, the announced end of that start is forgotten.

    A request with an earlier deadline starts the model again.
    """
    lazy = Lazy()
    lazy.may_start.set()

    def fail(connection: Connection) -> None:
        connection.greet()
        send(connection.sock, pack_starting(StartProgress("it is compiled", 60.0, 50.0), flat=True))
        send(connection.sock, pack_rejected("its weights are cursed", ""))

    with Front(driver("undefined"), tmp_path, [lazy.cold, fail, lazy.start]) as front:
        front.ask("open")
        text = "the model could not be started: its weights are cursed"
        assert front.ask("send 1 1") == [f"answer 1 4 [rsrv:RUNTIME_DOWN] {text}"]
        number = 2
        while (lines := front.ask(f"send {number} 1 reactant_timeout_ns=40000000000")) != [doubled(number)]:
            assert lines == [f"answer {number} 4 [rsrv:RUNTIME_DOWN] {text}"]
            number += 1
        front.ask("close")


def test_requests_that_cannot_wait_for_the_start_say_so(program: Path, tmp_path: Path) -> None:
    """A request with a deadline waits for a start until its deadline.

    A request without one waits for `start_timeout_s`. Both get the reason.
    """
    lazy = Lazy(0.5)
    with Front(program, tmp_path, [lazy.cold, lazy.start]) as front:
        front.ask("open")
        (late,) = front.ask("send 1 1 reactant_timeout_ns=200000000")
        assert re.fullmatch(rf"answer 1 4 \[rsrv:DEADLINE\] {TOO_LONG}", late)
        (long,) = front.ask("send 2 1")
        assert re.fullmatch(rf"answer 2 4 \[rsrv:STARTING\] {TOO_LONG}", long)
        lazy.may_start.set()
        assert front.ask("send 3 1", "close") == [doubled(3), "closed - ok 0 0"]


def test_a_start_that_advances_is_waited_for(program: Path, tmp_path: Path) -> None:
    """Each step of a start restarts the time limit of waiting requests, also in a start after a runtime's death.

    The refusal says how far the start has come.
    """
    lazy = Lazy(5.0)
    advances, stands, is_back = threading.Event(), threading.Event(), threading.Event()

    def start(connection: Connection) -> None:
        connection.greet()
        for done in range(1, 5):
            advances.wait(1.5)
            step = StartProgress(f"{done} of its 4 modules are compiled \u20ac", 5.0)
            send(connection.sock, pack_starting(step, flat=True))
        assert stands.wait(60)
        connection.register(described(retry_s=2.0))
        count, frame = connection.receive_requests()
        connection.answer(frame, count)

    def build_again(connection: Connection) -> None:
        assert connection.greet()["started"] is True
        send(connection.sock, pack_starting(StartProgress("it waits for its turn", 0.3), flat=True))
        is_back.set()
        assert lazy.may_start.wait(60)
        connection.register(described())
        connection.answer_all()

    with Front(program, tmp_path, [lazy.cold, start, build_again]) as front:
        front.ask("open")
        (refusal,) = front.ask("send 1 1")
        text = r"the model is starting: 4 of its 4 modules are compiled \u20ac\. This request has waited for \d+\.?\d* s"
        assert re.match(
            rf"answer 1 4 \[rsrv:STARTING\] {text}; requests wait at most 5 s without progress", refusal
        )
        stands.set()
        assert front.ask("send 2 1") == [doubled(2)]
        assert is_back.wait(60)
        (refusal,) = front.ask("send 3 1")
        assert refusal.startswith(
            "answer 3 4 [rsrv:STARTING] the model is starting: it waits for its turn. This request"
        )
        lazy.may_start.set()
        assert front.ask("send 4 1", "close") == [doubled(4), "closed - ok 0 0"]


@pytest.mark.parametrize(
    "body", [b"", bytes(16), (1).to_bytes(8, "little"), (1).to_bytes(8, "little") * 2 + b"x" * 401]
)
def test_a_step_that_cannot_be_read_ends_the_connection(tmp_path: Path, body: bytes) -> None:
    """A STARTING frame without its two times, without a limit or with too long a text ends the connection.

    The next connection serves the model.
    """

    def broken(connection: Connection) -> None:
        connection.greet()
        send(connection.sock, HEADER.pack(Kind.STARTING, 0, 0) + body)
        with pytest.raises(Closed):
            connection.receive()

    lazy = Lazy()
    lazy.may_start.set()
    with Front(driver("undefined"), tmp_path, [lazy.cold, broken, lazy.start]) as front:
        front.ask("open")
        assert front.ask("send 1 1", "close") == [doubled(1), "closed - ok 0 0"]


def test_an_idle_model_falls_back_and_starts_again(program: Path, tmp_path: Path) -> None:
    """After COLD, the front closes the connection.

    The next request starts the model. The front then registers the model with `asked` and without `started`.
    """
    lazy = Lazy()
    with Front(program, tmp_path, [lazy.serve_once, lazy.start]) as front:
        front.ask("open")
        assert front.ask("send 1 1") == [doubled(1)]
        assert lazy.left.wait(60)
        lazy.may_start.set()
        assert front.ask("send 2 1", "close") == [doubled(2), "closed - ok 0 0"]
    assert "started" not in lazy.registrations[1]
    assert lazy.registrations[1]["asked"] is True


def test_requests_that_a_sleep_interrupts_wait_as_for_a_start(program: Path, tmp_path: Path) -> None:
    """If the device falls asleep, its requests wait as they wait for a start.

    The limit `retry_s` applies only after a death, so it does not end them.
    """
    lazy = Lazy()

    def sleep(connection: Connection) -> None:
        connection.greet()
        connection.register(described(retry_s=0.0))
        connection.receive_requests()
        connection.dismiss()
        box = front.directory(0) / paths.BLACKBOX
        with box.open("r+b") as file:
            file.seek(ASLEEP_AT)
            file.write(b"\1")
        box.unlink()  # The next runtime may do this before the front sees this one's end.

    with Front(program, tmp_path, [sleep, lazy.start]) as front:
        (front.directory(0) / paths.BLACKBOX).write_bytes(bytes(BYTES))
        front.ask("open")
        front.tell("send 1 1")
        assert lazy.starting.wait(60)
        front.tell("send 2 1")
        lazy.may_start.set()
        assert front.hear(2) == [doubled(1), doubled(2)]
        front.ask("close")
    assert (lazy.registrations[0]["asked"], "started" in lazy.registrations[0]) == (True, False)


def test_a_model_with_requests_stays(program: Path, tmp_path: Path) -> None:
    """If COLD arrives while a request is in flight, the front keeps the connection.

    The runtime answers the request on this connection.
    """

    def serve(connection: Connection) -> None:
        connection.greet()
        connection.register(described())
        count, frame = connection.receive_requests()
        connection.dismiss()
        connection.answer(frame, count)
        connection.answer_all()

    with Front(program, tmp_path, [serve]) as front:
        front.ask("open")
        assert front.ask("send 1 1", "send 2 1", "close") == [doubled(1), doubled(2), "closed - ok 0 0"]


def test_a_started_model_stays_warm_over_a_death(program: Path, tmp_path: Path) -> None:
    """If a runtime dies during a model's start, the model's next registration has `asked`.

    If the runtime dies after the start, the next registration also has `started`.
    """
    lazy = Lazy()

    def die(connection: Connection) -> None:
        lazy.registrations.append(connection.greet())

    def serve_and_die(connection: Connection) -> None:
        die(connection)
        connection.register(described())
        connection.receive_requests()

    with Front(program, tmp_path, [lazy.cold, die, serve_and_die, lazy.start]) as front:
        front.ask("open")
        lazy.may_start.set()
        assert front.ask("send 1 1", "close") == [doubled(1), "closed - ok 0 0"]
    registered = [(registration["asked"], registration.get("started")) for registration in lazy.registrations]
    assert registered == [(False, None), (True, None), (True, None), (True, True)]


@pytest.mark.parametrize("table", [False, True])
def test_a_cold_model_starts_on_one_device(program: Path, tmp_path: Path, table: bool) -> None:
    """A cold model starts on its home, or on the device that the placement table names.

    The other device is not asked to start it.
    """
    lazies = [Lazy(), Lazy()]
    for lazy in lazies:
        lazy.may_start.set()
    expected = 1 - HOME if table else HOME
    behaviours: list[list[Behaviour]] = [[lazy.start] for lazy in lazies]
    behaviours[0].insert(0, lazies[0].cold)
    with Front(program, tmp_path, *behaviours) as front:
        front.ask("open")
        if table:
            writer = PlacementWriter(front.directory(0) / paths.PLACEMENT)
            writer.write({"doubling": PINNED | 1 << expected})
        assert front.ask("send 1 1", "send 2 1", "close") == [doubled(1), doubled(2), "closed - ok 0 0"]
    counts = [[registration["asked"] for registration in lazy.registrations].count(True) for lazy in lazies]
    assert counts == [int(expected == 0), int(expected == 1)]


@pytest.mark.parametrize("client", ["", "it ended two runtimes"])
def test_a_cold_model_that_its_home_rejects_starts_on_another_device(
    program: Path, tmp_path: Path, client: str
) -> None:
    """If the home rejects a cold model, another device starts it for the waiting requests.

    If the home rejects the model after crashes, no other device starts it, and requests get the reason.
    """
    other = Lazy()
    other.may_start.set()

    def reject(connection: Connection) -> None:
        connection.greet()
        send(connection.sock, pack_rejected("it needs 9 GB", client))

    behaviours: list[list[Behaviour]] = [[reject], [other.start]]
    if HOME:
        behaviours.reverse()
    behaviours[0].insert(0, Lazy().cold)
    with Front(program, tmp_path, *behaviours) as front:
        front.ask("open")
        (answer,) = front.ask("send 1 1")
        front.ask("close")
    refused = "answer 1 4 [rsrv:RUNTIME_DOWN] the model could not be started: it needs 9 GB"
    assert (answer, len(other.registrations)) == ((refused, 0) if client else (doubled(1), 1))


def test_a_broken_cold_frame_ends_the_connection(tmp_path: Path) -> None:
    """A COLD frame with a wrong timeout ends the connection, and the front registers with the next runtime."""

    def broken(connection: Connection) -> None:
        connection.greet()
        connection.dismiss(0.0)

    with Front(driver("undefined"), tmp_path, [broken, behave]) as front:
        assert front.ask("open", "send 1 1", "close") == sorted(
            ["opened - ok 0 0", doubled(1), "closed - ok 0 0"]
        )

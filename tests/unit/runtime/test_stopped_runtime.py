"""A runtime that does not respond: clients are answered in time, and later requests are served."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.engine import Engine
from rsrv.wire.frames import Submission
from tests.fakes import FakeBackstop, FakeError, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartEngine, StartRuntime
from tests.unit.runtime.metas import (
    answer_of,
    ask,
    assert_fails,
    assert_served,
    assert_y,
    chain,
    engine_of,
    request,
    rows,
    status_of,
)
from tests.waiting import PATIENCE_S, wait_until

StartMeta = Callable[..., Any]

#: Number of requests. They do not all fit in the socket between stub and runtime.
FLOOD = 2000
#: Time limit in seconds for the execute() calls of these requests on a slow machine. They would take minutes if execute()
#: waited for the stopped runtime, or if each refusal took 0.2 s as the first one does.
FLOOD_S = PATIENCE_S


@contextmanager
def stopped(runtime: Runtime) -> Iterator[None]:
    """Stop the runtime's loop."""
    inside, go = threading.Event(), threading.Event()

    def stop() -> None:
        inside.set()
        go.wait(2 * PATIENCE_S)

    runtime.loop._inbox.post(stop)
    assert inside.wait(PATIENCE_S)
    try:
        yield
    finally:
        go.set()


def give_up_direct(engine: Engine) -> FakeRequest:
    """Send a request that occupies the connection for answers in place, so that a thread answers later requests."""
    client_request = request()
    assert engine.execute([client_request]) is None
    return client_request


def idle(engine: Engine) -> bool:
    """Return whether no request has memory on the connection for later answers."""
    return engine._attachment.deferred._arena.idle


def test_deadlines_are_kept_while_the_runtime_is_stopped(runtime: Runtime, start_engine: StartEngine) -> None:
    """Requests are answered at their deadlines while the runtime is stopped.

    Their memory is not reused before the runtime answers.
    """
    engine = start_engine()
    with stopped(runtime):
        give_up_direct(engine)
        started = time.monotonic()
        requests = [request(timeout=0.2) for _ in range(100)]
        patient = request(timeout=1000)
        for client_request in (*requests, patient):
            assert engine.execute([client_request]) is None

        for client_request in requests:
            assert_fails(answer_of(client_request), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
            assert time.monotonic() - started >= 0.2
        assert not idle(engine)
        assert patient.answers.empty()

    assert_y(answer_of(patient), 2 * rows(1) + 1)
    wait_until(lambda: idle(engine))
    assert all(waiting_request.answers.empty() for waiting_request in requests)
    (answer,) = ask(engine, request(value=5))
    assert_y(answer, rows(1, 11))


def test_a_late_answer_runs_no_hook(
    runtime: Runtime, doubling: Path, pass_stub_time: Callable[[float], None]
) -> None:
    """If an answer comes after its request's deadline, no postprocess hook is called for it."""
    calls = []
    hooks = Hooks(postprocess=lambda arrays: calls.append(1) or arrays)  # type: ignore[func-returns-value]
    engine = engine_of(runtime.open, doubling, hooks=hooks)
    runtime.device.gate.clear()
    late = request(timeout=1000)
    assert engine.execute([late]) is None
    runtime.device.gate.wait_until_held()
    pass_stub_time(2000.0)
    assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    runtime.device.gate.set()
    (answer,) = ask(engine, request())
    assert answer.error is None
    # Wait until the late request's connection is free again.
    wait_until(lambda: engine._direct is engine._attachment.direct)
    assert calls == [1]
    engine.close()


def takes_requests(engine: Engine) -> bool:
    return engine.session.reading is not None


def test_more_than_a_stopped_runtime_can_be_told_is_refused_at_once(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """Requests that do not fit in the socket of a stopped runtime are refused at once. The others are answered later."""
    runtime = start_runtime(load_settings("scheduler: {max_queue_depth: 10000}"))
    engine = engine_of(runtime.open, doubling)
    assert takes_requests(engine)
    with stopped(runtime):
        give_up_direct(engine)
        requests = [request(value=n) for n in range(FLOOD)]
        started = time.monotonic()
        for client_request in requests:
            assert engine.execute([client_request]) is None
        assert time.monotonic() - started < FLOOD_S
        assert not takes_requests(engine)
    refused = 0
    for number, client_request in enumerate(requests):
        answer = answer_of(client_request)
        if answer.error is None:
            assert_y(answer, rows(1, 2 * number + 1))
        else:
            assert_fails(answer, FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")
            refused += 1
    assert 0 < refused < FLOOD
    wait_until(lambda: idle(engine))
    wait_until(lambda: takes_requests(engine))
    (answer,) = ask(engine, request(value=5))
    assert_y(answer, rows(1, 11))
    engine.close()


def test_a_batch_that_a_stopped_runtime_takes_half_of_is_answered_in_full(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """If a batch fits only partly in the socket of a stopped runtime, the rest of it is refused."""
    settings = "{scheduler: {max_queue_depth: 10000}, stub: {in_place_ms: 1000000}}"
    runtime = start_runtime(load_settings(settings))
    engine = engine_of(runtime.open, doubling)
    engine._largest = 1  # Each request gets a frame of its own.
    with stopped(runtime):
        requests = [request(value=n) for n in range(FLOOD)]
        started = time.monotonic()
        assert engine.execute(list(requests)) is None
        assert time.monotonic() - started < FLOOD_S
    answers = [answer_of(client_request) for client_request in requests]
    well = [n for n, answer in enumerate(answers) if answer.error is None]
    assert well == list(range(len(well)))
    assert 0 < len(well) < FLOOD
    for number in well:
        assert_y(answers[number], rows(1, 2 * number + 1))
    for answer in answers[len(well) :]:
        assert_fails(answer, FakeError.UNAVAILABLE, "[rsrv:QUEUE_FULL]")
    engine.close()


def test_runs_that_wait_to_be_let_in_keep_their_deadline(
    start_runtime: StartRuntime, start_meta: StartMeta
) -> None:
    """A run that waits for admission is answered at its deadline, and is not admitted later."""
    runtime = start_runtime(load_settings("scheduler: {meta_concurrency: 1}"))
    engine = start_meta(runtime, chain)
    assert_served(engine)
    with stopped(runtime):
        requests = [request(timeout=0.2 if n % 2 else 0, value=n) for n in range(6)]
        assert engine.execute(list(requests)) is None
        for client_request in requests[1::2]:
            assert_fails(answer_of(client_request), FakeError.UNAVAILABLE, "[rsrv:DEADLINE]")
    for client_request in requests[::2]:
        assert answer_of(client_request).error is None
    wait_until(lambda: not status_of()["running"])
    assert_served(engine)


def test_segments_are_announced_once_however_often_it_takes(runtime: Runtime, doubling: Path) -> None:
    """If a segment cannot be announced, the next send announces it, once and in order."""
    lane = runtime.connect()
    body = lane.register({"model": "doubling", "bundle": str(doubling)})
    assert body["key"]
    with stopped(runtime):
        slab = lane.take(1024, 1)
        submission = Submission(
            0, 0, 1, 0, 0, slab.place.segment, 0, slab.place.offset, slab.place.offset + 512
        )
        sent = 0
        while lane.submit([submission._replace(request=sent)]):
            sent += 1
        large = [lane.take(2 << 20, 1) for _ in range(3)]
        assert not lane.submit([submission._replace(request=sent)])
        for large_slab in large:
            lane.release(large_slab)
        assert not lane.cancel([0])
    answered = 0
    while answered < sent:
        with suppress(TimeoutError):
            answered += len(lane.receive(1))
    slab = lane.take(8 << 20, 1)
    at = slab.place.offset
    wait_until(lambda: lane.submit([Submission(sent, 0, 1, 0, 0, slab.place.segment, 0, at, at + 512)]))
    assert [done.request for done in lane.receive(PATIENCE_S)] == [sent]


def test_a_connection_detects_that_its_socket_was_closed_by_others(runtime: Runtime) -> None:
    """A connection knows whether other code has closed its socket. Closing the connection itself does not count."""
    well, closed_by_others, closed = (RuntimeConnection(runtime.open()) for _ in range(3))
    os.close(closed_by_others.sock.fileno())
    closed.close()

    assert [lane.closed_by_others for lane in (well, closed_by_others, closed)] == [False, True, False]
    for lane in (well, closed_by_others):
        lane.close()


def test_a_connection_that_is_closed_while_it_is_checked_was_not_robbed(
    start_runtime: StartRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a thread closes a connection while another thread checks it, the check does not blame other code."""
    lane = start_runtime().connect()
    real = os.fstat

    def meanwhile(fd: int) -> os.stat_result:
        lane.close()
        return real(fd)

    monkeypatch.setattr(os, "fstat", meanwhile)
    assert not lane.closed_by_others


def test_memory_that_the_machine_does_not_have_is_not_asked_for(
    runtime: Runtime, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection does not allocate memory that the machine lacks.

    The allocation would succeed, but the kernel would kill a process when the memory is written.
    """
    monkeypatch.setattr("rsrv.stub.connection.spare_memory", lambda: 3 << 20)
    lane = runtime.connect()
    assert lane.array((1 << 20,), np.dtype(np.uint8)).nbytes == 1 << 20
    with pytest.raises(OSError, match="has no"):
        lane.array((4 << 20,), np.dtype(np.uint8))


def test_every_request_is_heard_whose_stub_ends(runtime: Runtime, start_engine: StartEngine) -> None:
    """When a stub ends because a hook hangs, its waiting requests get the reason. Later requests get RUNTIME_DOWN."""
    engine = start_engine()
    statuses: list[int] = []
    engine._process.end._leave = statuses.append
    engine._process.end._backstop = FakeBackstop()
    with stopped(runtime):
        give_up_direct(engine)
        requests = [FakeRequest({"x": rows(1)}) for _ in range(5)]
        for client_request in requests:
            assert engine.execute([client_request]) is None

        engine._process.end("the model's hook hangs")

        for client_request in requests:
            assert_fails(answer_of(client_request), FakeError.INTERNAL, "the model's hook hangs")
        assert statuses == [1]
        late = request()
        assert engine.execute([late]) is None
        assert_fails(answer_of(late), FakeError.UNAVAILABLE, "[rsrv:RUNTIME_DOWN]")

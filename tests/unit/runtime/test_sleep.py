"""The command `sleep`: a runtime ends, its stubs become cold, and the next runtime waits until a stub connects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rsrv.control.v1 import control_pb2 as pb
from rsrv.runtime import spare
from rsrv.runtime.crash_history import BlackBox
from rsrv.settings import load_settings
from rsrv.stub.engine import Engine
from rsrv.wire.frames import Kind, read_header, unpack_json
from rsrv.wire.memory import read_document
from rsrv.wire.socket import Closed
from tests.status import status_of
from tests.unit.runtime.conftest import Runtime, StartRuntime, answer_to_register
from tests.unit.runtime.engines import answered, make_engine, send_one
from tests.unit.runtime.test_restart import one_executes_and_one_waits
from tests.unit.runtime.watchers import Operator
from tests.waiting import PATIENCE_S, wait_until

SETTINGS = load_settings("stub: {in_place_ms: 0}")


@dataclass
class Successor(spare.Successor):
    """Records what the runtime asks of the next runtime."""

    problem: str = ""
    disk_is_full: bool = False
    asked: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    def prepare(self, done: Callable[[str], object], *, fresh: bool) -> None:
        self.asked.append("prepare fresh" if fresh else "prepare")
        done(self.problem)

    def withdraw(self) -> None:
        self.asked.append("withdraw")

    def stay_back(self, record: bytes) -> None:
        if self.disk_is_full:
            raise OSError("No space left on device")
        self.asked.append("stay back")
        self.status = status_of(pb.DeviceRecord.FromString(record))


@pytest.fixture
def successor() -> Successor:
    return Successor()


@pytest.fixture
def runtime(start_runtime: StartRuntime, successor: Successor) -> Runtime:
    runtime = start_runtime(SETTINGS)
    runtime.loop.have_successor(successor)
    return runtime


def test_stubs_hear_cold_before_the_runtime_ends(
    runtime: Runtime, successor: Successor, doubling: Path
) -> None:
    """Before the runtime ends for a sleep, its stub gets COLD.

    No fresh spare is started. The existing spare gets `stay_back`, so that it waits for a connection.
    """
    greeted = runtime.request_model(model="doubling", bundle=str(doubling))
    greeted.sock.settimeout(PATIENCE_S)
    frame, fds = answer_to_register(greeted)
    assert read_header(frame)[0] is Kind.REGISTERED
    read_document(fds[0])
    with Operator(runtime) as operator:
        assert operator.do("sleep", drain_s=30) == {}
    frame, _ = greeted.receiver.receive()
    assert read_header(frame)[0] is Kind.COLD
    assert unpack_json(frame)["start_timeout_s"] > 0
    with pytest.raises(Closed):
        greeted.receiver.receive()
    greeted.sock.close()
    wait_until(lambda: not runtime.alive)
    assert runtime.loop.sleeps
    assert successor.asked == ["prepare", "stay back"]
    # The counters are shown while the device sleeps.
    assert successor.status["models"]["doubling"]["outcomes"]["answered"] == 0


def test_a_device_with_waiting_requests_does_not_sleep(
    runtime: Runtime, engine: Engine, successor: Successor
) -> None:
    """If a request waits, the sleep fails and the spare is withdrawn. The runtime answers all requests."""
    executing, waiting = one_executes_and_one_waits(runtime, engine)
    with Operator(runtime) as operator:
        operator.send(command="sleep", drain_s=30.0)
        wait_until(lambda: successor.asked == ["prepare"])
        runtime.device.gate.set()
        refused = operator.hear()
    assert refused["code"] == "FAILED_PRECONDITION"
    assert refused["error"].startswith("1 requests wait and 0 models are being built: they would wake")
    assert [answered(request) for request in (executing, waiting)] == [1, 1]
    assert successor.asked == ["prepare", "withdraw"]
    assert runtime.alive


@pytest.mark.parametrize(
    ("successor", "why"),
    [
        (Successor(problem="no module named jax"), "the runtime continues: no module named jax"),
        (Successor(disk_is_full=True), "cannot be written: No space left on device"),
    ],
)
def test_without_a_next_runtime_the_device_stays_awake(
    runtime: Runtime, engine: Engine, successor: Successor, why: str
) -> None:
    """If there can be no next runtime, each attempt to sleep fails with the reason.

    Requests are answered as before.
    """
    with Operator(runtime) as operator:
        for _ in range(2):
            refused = operator.do("sleep", drain_s=30)
            assert refused["code"] == "FAILED_PRECONDITION"
            assert why in refused["error"]
    assert answered(send_one(engine)) == 1
    assert successor.asked[-1] == "withdraw"


def test_a_sleep_is_refused_during_a_restart_and_withdrawn_with_its_caller(
    runtime: Runtime, engine: Engine, successor: Successor
) -> None:
    """A sleep is refused during a restart. A restart or a sleep is withdrawn if its caller leaves."""
    executing, waiting = one_executes_and_one_waits(runtime, engine)
    first = Operator(runtime)
    first.send(command="restart", drain_s=30)
    wait_until(lambda: successor.asked == ["prepare fresh"])
    with Operator(runtime) as second:
        refused = second.do("sleep", drain_s=30)
        assert refused["error"] == "another restart or sleep is in progress; wait until it has ended"
    first.close()
    wait_until(lambda: successor.asked == ["prepare fresh", "withdraw"])

    second = Operator(runtime)
    second.send(command="sleep", drain_s=30)
    wait_until(lambda: successor.asked[2:] == ["prepare"])
    second.close()
    wait_until(lambda: successor.asked[3:] == ["withdraw"])
    runtime.device.gate.set()
    assert [answered(request) for request in (executing, waiting)] == [1, 1]
    assert runtime.alive


def test_requests_that_a_sleep_interrupts_wait_as_for_a_start(
    start_runtime: StartRuntime, successor: Successor, doubling: Path, tmp_path: Path
) -> None:
    """Requests that a forced sleep interrupts wait as for the start of a model, and not only for `retry_s`.

    `retry_s` is for deaths. After a sleep, the next runtime may have to import its modules first.
    """
    settings = load_settings("stub: {in_place_ms: 0, retry_s: 0}")
    runtime = start_runtime(settings, blackbox=BlackBox(tmp_path))
    runtime.loop.have_successor(successor)
    engine = make_engine(runtime, doubling)
    try:
        interrupted = one_executes_and_one_waits(runtime, engine)
        with Operator(runtime) as operator:
            assert operator.do("sleep", drain_s=0, force=True) == {}
        wait_until(lambda: not runtime.alive)
        wait_until(lambda: engine._process.front.snapshot.waiting)
        later = send_one(engine)

        start_runtime(settings)

        assert [answered(request) for request in (*interrupted, later)] == [1, 1, 1]
    finally:
        runtime.device.gate.set()
        engine.close()


def test_a_device_without_requests_sleeps_by_itself(
    start_runtime: StartRuntime, successor: Successor, doubling: Path
) -> None:
    """A device sleeps when it has had no request for `idle.server` seconds. A request in progress is answered before that."""
    runtime = start_runtime(load_settings("{stub: {in_place_ms: 0}, runtime: {idle: {server: 1}}}"))
    runtime.loop.have_successor(successor)
    engine = make_engine(runtime, doubling)
    try:
        runtime.device.gate.clear()
        executing = send_one(engine)
        runtime.device.gate.wait_until_held()
        assert runtime.alive
        runtime.device.gate.set()
        assert answered(executing) == 1
        wait_until(lambda: not runtime.alive)
        assert successor.asked[-1] == "stay back"
    finally:
        engine.close()

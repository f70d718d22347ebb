"""A stub with a replica on each of two runtimes: what their boards say, and one runtime's death."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

import pytest

from rsrv.hooks.loader import Hooks
from rsrv.settings import load_settings
from rsrv.stub.connection import RuntimeConnection
from rsrv.stub.endpoint import WireTensor
from rsrv.stub.engine import Engine
from rsrv.stub.replica import StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.session import Attachment, Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.socket import Closed
from tests.fakes import FakePbUtils, FakeRequest
from tests.unit.runtime.conftest import Runtime, StartRuntime
from tests.unit.runtime.engines import ramp
from tests.unit.runtime.metas import answer_of, assert_y
from tests.waiting import PATIENCE_S, wait_until


class TwoRuntimes:
    """A model's stub, with its engines and runtimes by device."""

    def __init__(self, start: StartRuntime, bundle: Path, settings: str) -> None:
        self.runtimes: list[Runtime] = []
        self.engines: list[Engine] = []
        process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))

        def open_session(device: int) -> Session:
            # The next runtime takes the socket's path, so this one gets another one.
            runtime = start(load_settings(settings), devices=2)
            runtime.socket = runtime.socket.rename(runtime.socket.with_name(f"{device}.sock"))
            self.runtimes.append(runtime)
            return Session(runtime.open, "doubling", str(bundle), device=device)

        def make(session: Session, attachment: Attachment) -> Engine:
            outputs = [WireTensor("y", "f32", (-1, 3))]
            self.engines.append(Engine(session, attachment, process, Hooks(), outputs, True))
            return self.engines[-1]

        self.replicas = Replicas(open_session, make, "doubling", process)
        self.replicas.load()
        self.runtimes[0].users.callback(self.replicas.close)

    def hold(self, device: int) -> None:
        self.runtimes[device].device.gate.clear()

    def send(self, device: int, *requests: FakeRequest) -> None:
        """Give a batch to a device; the replica answers it later."""
        assert self.engines[device].execute(list(requests)) is None


@pytest.fixture
def two(start_runtime: StartRuntime, doubling: Path) -> TwoRuntimes:
    return TwoRuntimes(start_runtime, doubling, "stub: {in_place_ms: 0}")


def request(start: float) -> FakeRequest:
    return FakeRequest({"x": ramp(8, start)})


def test_both_devices_execute_parts_of_one_batch(two: TwoRuntimes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Executions take 1 ms each, so twelve of them end sooner on two devices, and each answer is right."""
    # A runtime that waits for a core does not look stopped.
    monkeypatch.setattr("rsrv.stub.connection.SILENT_S", inf)
    batch = [request(number) for number in range(12)]
    wait_until(lambda: all((expected := one.forecast()) and expected.warm for one in two.engines))

    assert two.replicas.execute(batch) is None

    for number, one in enumerate(batch):
        assert_y(answer_of(one), 2 * ramp(8, number) + 1)
    executed = [sum(runtime.device.executed) for runtime in two.runtimes]
    assert min(executed) >= 4 * 8


def test_requests_survive_their_runtime(two: TwoRuntimes) -> None:
    """The one that executes and those in the queue are answered by the other device, and right."""
    two.hold(0)
    executing, queued = request(0), [request(start) for start in (1, 2, 3)]
    two.send(0, executing)
    two.runtimes[0].device.gate.wait_until_held()
    two.send(0, *queued)
    # The runtime has read them.
    wait_until(lambda: two.engines[0].answers_in_s() > two.engines[1].answers_in_s())

    two.runtimes[0].stop()

    for start, one in enumerate([executing, *queued]):
        assert_y(answer_of(one), 2 * ramp(8, start) + 1)


def test_a_batch_that_is_answered_in_place_survives_as_well(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """Of a batch of two executions, both are answered by the other device, later."""
    two = TwoRuntimes(start_runtime, doubling, "")
    two.hold(0)
    batch = [request(0), request(1)]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(two.engines[0].execute, batch)
        two.runtimes[0].device.gate.wait_until_held()
        two.runtimes[0].stop()
        assert asked.result(PATIENCE_S) is None

    for start, one in enumerate(batch):
        assert_y(answer_of(one), 2 * ramp(8, start) + 1)


def test_requests_behind_a_broken_connection_survive(
    start_runtime: StartRuntime, doubling: Path, monkeypatch: pytest.MonkeyPatch, long_in_place: None
) -> None:
    """A runtime that dies before a batch's first frame has launched none of it, also where earlier answers lay."""
    two = TwoRuntimes(start_runtime, doubling, "")
    # No answer begins with a byte of 0, as memory without an answer does.
    batch = [request(number + 0.1) for number in range(12)]
    assert two.engines[0].execute(batch) is not None
    submit, attachment = RuntimeConnection.submit, two.engines[0].session.attachment
    assert attachment is not None

    def broken(self: RuntimeConnection, *rest: Any) -> int:
        if self is attachment.direct:
            raise Closed("the runtime ended")
        return submit(self, *rest)

    monkeypatch.setattr(RuntimeConnection, "submit", broken)
    batch = [request(number + 0.1) for number in range(12)]
    assert two.engines[0].execute(batch) is None

    assert [answer_of(one).error for one in batch] == [None] * 12


def test_an_overdue_execution_makes_its_device_look_busy(two: TwoRuntimes) -> None:
    """The longer it takes, the later the device is expected to be free, also if its runtime goes on working."""
    two.hold(0)
    held = request(0)
    two.send(0, held)
    two.runtimes[0].device.gate.wait_until_held()

    wait_until(lambda: two.engines[0].answers_in_s() > 0.2)
    # The loop publishes again.
    two.runtimes[0].open().sock.close()
    wait_until(lambda: two.engines[0].answers_in_s() > 0.3)
    wait_until(lambda: two.engines[1].answers_in_s() < 0.1)

    two.runtimes[0].device.gate.set()
    assert answer_of(held).error is None
    wait_until(lambda: two.engines[0].answers_in_s() < 0.1)


def test_a_stopped_runtime_looks_busy(two: TwoRuntimes) -> None:
    """No request has to find that out; the other runtime, which is idle, looks free."""
    go_on = two.runtimes[0].device.uploads
    go_on.clear()
    two.runtimes[0].loop._inbox.post(go_on.enter)

    wait_until(lambda: two.engines[0].answers_in_s() > 0.5)
    wait_until(lambda: two.engines[1].answers_in_s() < 0.1)
    one = request(1)
    two.replicas.execute([one])
    assert answer_of(one).error is None
    go_on.set()
    wait_until(lambda: two.engines[0].answers_in_s() < 0.1)


def test_a_runtime_that_does_not_notice_requests_looks_busy(
    two: TwoRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the next round of a stopped runtime is due, its board shows an idle device; what was sent says otherwise."""
    monkeypatch.setattr("rsrv.stub.connection.SILENT_S", 60.0)
    blocked, go_on = two.runtimes[0], two.runtimes[0].device.uploads
    go_on.clear()
    blocked.loop._inbox.post(go_on.enter)
    go_on.wait_until_held()
    held = request(0)
    assert two.engines[0].answers_in_s() < 0.1

    two.send(0, held)

    wait_until(lambda: two.engines[0].answers_in_s() > 0.2)
    go_on.set()
    assert answer_of(held).error is None
    wait_until(lambda: two.engines[0].answers_in_s() < 0.1)

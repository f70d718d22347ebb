"""A stub with a replica on each of two runtimes: which device it prefers, and what happens if one runtime dies."""

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
    """A model's stub, and its engines and runtimes by device."""

    def __init__(self, start: StartRuntime, bundle: Path, settings: str) -> None:
        self.runtimes: list[Runtime] = []
        self.engines: list[Engine] = []
        process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))

        def open_session(device: int) -> Session:
            # The next runtime takes the socket's path, so this runtime's socket is renamed.
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
        """Send a batch to the engine of a device, which answers it later."""
        assert self.engines[device].execute(list(requests)) is None


@pytest.fixture
def two(start_runtime: StartRuntime, doubling: Path) -> TwoRuntimes:
    return TwoRuntimes(start_runtime, doubling, "stub: {in_place_ms: 0}")


def request(start: float) -> FakeRequest:
    return FakeRequest({"x": ramp(8, start)})


def test_both_devices_execute_parts_of_one_batch(two: TwoRuntimes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of twelve executions is divided between both devices, because this takes less time, and each answer is right."""
    # Otherwise a runtime that waits for a processor might seem to be stopped.
    monkeypatch.setattr("rsrv.stub.connection.SILENT_S", inf)
    batch = [request(number) for number in range(12)]
    wait_until(lambda: all((expected := engine.forecast()) and expected.warm for engine in two.engines))

    assert two.replicas.execute(batch) is None

    for number, client_request in enumerate(batch):
        assert_y(answer_of(client_request), 2 * ramp(8, number) + 1)
    executed = [sum(runtime.device.executed) for runtime in two.runtimes]
    assert min(executed) >= 4 * 8


def test_requests_survive_their_runtime(two: TwoRuntimes) -> None:
    """If one device's runtime dies, the other device answers its executing request and its queued ones."""
    two.hold(0)
    executing, queued = request(0), [request(start) for start in (1, 2, 3)]
    two.send(0, executing)
    two.runtimes[0].device.gate.wait_until_held()
    two.send(0, *queued)
    # Wait until the runtime has read the requests.
    wait_until(lambda: two.engines[0].answers_in_s() > two.engines[1].answers_in_s())

    two.runtimes[0].stop()

    for start, client_request in enumerate([executing, *queued]):
        assert_y(answer_of(client_request), 2 * ramp(8, start) + 1)


def test_a_batch_that_is_answered_in_place_survives_as_well(
    start_runtime: StartRuntime, doubling: Path
) -> None:
    """If a runtime dies while a batch of two executions is answered in place, the other device answers both later."""
    two = TwoRuntimes(start_runtime, doubling, "")
    two.hold(0)
    batch = [request(0), request(1)]
    with ThreadPoolExecutor(1) as pool:
        execution = pool.submit(two.engines[0].execute, batch)
        two.runtimes[0].device.gate.wait_until_held()
        two.runtimes[0].stop()
        assert execution.result(PATIENCE_S) is None

    for start, client_request in enumerate(batch):
        assert_y(answer_of(client_request), 2 * ramp(8, start) + 1)


def test_requests_behind_a_broken_connection_survive(
    start_runtime: StartRuntime, doubling: Path, monkeypatch: pytest.MonkeyPatch, long_in_place: None
) -> None:
    """If a runtime dies before it gets the first frame of a batch, all requests of the batch are repeated.

    The memory of these requests still has the answers to an earlier batch, which must not be used.
    """
    two = TwoRuntimes(start_runtime, doubling, "")
    # No answer begins with a zero byte. Memory without an answer does.
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

    assert [answer_of(client_request).error for client_request in batch] == [None] * 12


def test_an_overdue_execution_makes_its_device_look_busy(two: TwoRuntimes) -> None:
    """The longer an execution is overdue, the later its device seems to be free, even if its loop still works."""
    two.hold(0)
    held = request(0)
    two.send(0, held)
    two.runtimes[0].device.gate.wait_until_held()

    wait_until(lambda: two.engines[0].answers_in_s() > 0.2)
    # The loop accepts this connection, and then publishes its board again.
    two.runtimes[0].open().sock.close()
    wait_until(lambda: two.engines[0].answers_in_s() > 0.3)
    wait_until(lambda: two.engines[1].answers_in_s() < 0.1)

    two.runtimes[0].device.gate.set()
    assert answer_of(held).error is None
    wait_until(lambda: two.engines[0].answers_in_s() < 0.1)


def test_a_stopped_runtime_looks_busy(two: TwoRuntimes) -> None:
    """If a runtime is stopped, the stub regards its device as busy, even without requests.

    The other device, whose runtime is idle, still looks free.
    """
    go_on = two.runtimes[0].device.uploads
    go_on.clear()
    two.runtimes[0].loop._inbox.post(go_on.enter)

    wait_until(lambda: two.engines[0].answers_in_s() > 0.5)
    wait_until(lambda: two.engines[1].answers_in_s() < 0.1)
    client_request = request(1)
    two.replicas.execute([client_request])
    assert answer_of(client_request).error is None
    go_on.set()
    wait_until(lambda: two.engines[0].answers_in_s() < 0.1)


def test_a_runtime_that_does_not_notice_requests_looks_busy(
    two: TwoRuntimes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a runtime stops just after a round, its board still shows an idle device.

    The stub regards the device as busy nevertheless, because the runtime has not read the requests sent to it.
    """
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

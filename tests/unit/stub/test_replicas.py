"""The choice of the device whose replica answers a batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from errno import EMFILE
from math import inf
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rsrv.front.states import ServingState
from rsrv.hooks.loader import HookError
from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.placement.device_choice import PINNED, by_preference
from rsrv.stub.connection import Cold, LaunchError, Rejected, RuntimeConnection
from rsrv.stub.metrics import Meters
from rsrv.stub.replica import ModelReplica, StubProcess
from rsrv.stub.replicas import Replicas
from rsrv.stub.replies import Responses
from rsrv.stub.request import ArrivalTime, ClientRequest
from rsrv.stub.session import Session
from rsrv.stub.tensors import Tensors
from rsrv.wire.placement_table import PlacementReader, PlacementWriter
from rsrv.wire.socket import Closed
from tests.fakes import FakePbUtils, FakeRequest
from tests.waiting import PATIENCE_S, wait_until


class FakeSession:
    """A session with the runtime of a device. The runtime accepts a connection at once."""

    def __init__(self, device: int, devices: int, transport: str = "direct", *, cold: bool = False) -> None:
        self.device = device
        self.attachment: Any = None
        #: Errors of the next attempts to connect, in order.
        self.failing: list[Exception] = []
        self.cold = cold
        self._devices, self._transport = devices, transport

    def attach(self, on_step: object, *, started: bool, asked: bool) -> Any:
        if self.failing:
            raise self.failing.pop(0)
        if self.cold and not (started or asked):
            raise Cold(60.0)
        return SimpleNamespace(
            direct=SimpleNamespace(devices=self._devices),
            settings={"meta": {"transport": self._transport}, "stub": {"retry_s": 10.0}},
            since=0.0,
            key="m@1",
            close=lambda: None,
        )

    def publish(self, attachment: Any) -> None:
        self.attachment = attachment

    def tell(self, demand: object) -> None: ...

    def open_connection(self, key: str) -> RuntimeConnection:
        raise Closed("there is none for reports")


@dataclass
class FakeReplica:
    """A replica that answers with the number of its device."""

    session: FakeSession
    seconds: float = 1.0
    closed: bool = False
    asked: int = 0
    taken: list[ClientRequest] = field(default_factory=list)
    meters: Meters = field(default_factory=Meters)
    warm: bool = True

    @property
    def device(self) -> int:
        return self.session.device

    def use(self, attachment: object) -> None: ...

    def watch(self, attachment: object) -> None: ...

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        self.asked += len(requests)
        return [self.device] * len(requests)

    def execute_later(self, requests: Sequence[Any]) -> list[Any] | None:
        for request in requests:
            request.get_response_sender().send(self.device, FakePbUtils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None

    def answers_in_s(self) -> float:
        return self.seconds

    def forecast(self) -> Forecast | None:
        return (
            None if self.seconds == inf else Forecast(self.seconds, self.warm, ExecutionCosts((1,), (1.0,)))
        )

    def rows(self, requests: Sequence[Any]) -> list[int]:
        return [1] * len(requests)

    def take_over(self, request: ClientRequest) -> bool:
        self.taken.append(request)
        return True

    def guard_hooks(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def table(tmp_path: Path) -> Iterator[PlacementWriter]:
    writer = PlacementWriter(tmp_path / "placement")
    # Write a table first: a reader looks for a missing file only once a second.
    writer.write({})
    yield writer
    writer.close()


@pytest.fixture
def reader(table: PlacementWriter, tmp_path: Path) -> PlacementReader:
    return PlacementReader(tmp_path / "placement", "m")


class Fakes(dict[int, FakeReplica]):
    """The model's replicas so far, by device. `sessions` has a session for each device."""

    def __init__(self, devices: int, transport: str = "direct", *, cold: bool = False) -> None:
        super().__init__()
        self.sessions = {
            device: FakeSession(device, devices, transport, cold=cold) for device in range(devices)
        }

    def make(self, session: Any, attachment: Any) -> ModelReplica[Any]:
        replica = self[session.device] = FakeReplica(session)
        attachment.begins_in_s = lambda _: replica.seconds
        return cast(ModelReplica[Any], replica)

    def await_all(self, process: StubProcess) -> None:
        """Wait until each device has a replica."""
        wait_until(
            lambda: all(view.state is ServingState.READY for view in process.front.snapshot.devices.values())
        )


def unloaded(
    fakes: Fakes,
    name: str = "m",
    reader: PlacementReader | None = None,
    process: StubProcess | None = None,
    devices: Callable[[], int] | None = None,
) -> Replicas:
    """Return the replicas of a model that is not loaded yet."""
    return Replicas(
        lambda device: cast(Session, fakes.sessions[device]),
        fakes.make,
        name,
        process or StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)),
        reader,
        devices or (lambda: len(fakes.sessions)),
    )


@pytest.fixture(autouse=True)
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Replicas]]:
    """Close the models that a test has made."""
    begun: list[Replicas] = []
    begin = Replicas.__init__

    def remember(model: Replicas, *args: Any, **options: Any) -> None:
        begin(model, *args, **options)
        begun.append(model)

    monkeypatch.setattr(Replicas, "__init__", remember)
    yield begun
    for model in begun:
        model.close()


def made(
    devices: int,
    name: str = "m",
    failing: dict[int, list[Exception]] | None = None,
    reader: PlacementReader | None = None,
    process: StubProcess | None = None,
    transport: str = "direct",
) -> tuple[Replicas, Fakes]:
    """Return a loaded model, and its fake replicas by device.

    `failing` has the errors with which the first attempts to connect to a device fail.
    """
    fakes = Fakes(devices, transport)
    for device, errors in (failing or {}).items():
        fakes.sessions[device].failing = errors
    replicas = unloaded(fakes, name, reader, process)
    replicas.load()
    return replicas, fakes


def home_of(replicas: Replicas) -> int:
    (device,) = replicas.execute([FakeRequest({})]) or []
    return int(device)


def test_models_have_homes_on_all_devices() -> None:
    """The homes of many models are spread over all devices by the models' names."""
    homes = [by_preference(f"model{number}", 4)[0] for number in range(100)]
    assert all(homes.count(device) >= 15 for device in range(4))
    assert home_of(made(4, "model0")[0]) == homes[0]


def test_a_batch_leaves_its_home_only_for_a_clearly_earlier_answer() -> None:
    """A batch is sent to another device than the model's home only if that device will answer clearly earlier.

    A small difference of the predicted times changes nothing.
    """
    replicas, fakes = made(3)
    home = home_of(replicas)
    other = fakes[(home + 1) % 3]

    other.seconds = 0.9
    assert replicas.execute([object()]) == [home]
    other.seconds = 0.5
    assert replicas.execute([object()]) == [other.device]


def test_requests_of_a_divided_batch_go_to_one_device_and_are_answered_later() -> None:
    """`execute_later` sends part of an alias's batch to one device, as `execute` does with a whole batch.

    The requests are answered by their senders.
    """
    replicas, _ = made(3)
    home, batch = home_of(replicas), [FakeRequest({}) for _ in range(3)]

    replicas.execute_later(batch)

    answers: list[object] = [request.answers.get_nowait() for request in batch]
    assert answers == [home] * 3


def test_a_device_without_a_runtime_gets_nothing() -> None:
    """A device without a runtime gets no batch.

    If no device has a runtime, the home gets the batch and refuses it with the reason.
    """
    replicas, fakes = made(2)
    home = home_of(replicas)
    fakes[home].seconds = inf
    assert replicas.execute([object()]) == [1 - home]

    fakes[1 - home].seconds = inf
    assert replicas.execute([object()]) == [home]


def test_the_table_chooses_the_devices(table: PlacementWriter, reader: PlacementReader) -> None:
    """The placement table names some devices for a model. A batch is sent to the one that will answer first.

    A new table takes effect at once.
    """
    replicas, fakes = made(4, reader=reader)
    fakes[0].seconds = 0.3

    table.write({"m": 0b1010})
    assert home_of(replicas) in (1, 3)
    fakes[1].seconds = 0.1
    assert home_of(replicas) == 1
    fakes[3].seconds = 0.05
    assert home_of(replicas) == 3
    fakes[0].seconds = 0.1
    table.write({"m": 0b0001})
    assert home_of(replicas) == 0
    table.write({"others": 0b0010})
    fakes[3].seconds = 0.001
    assert home_of(replicas) == 3


def test_no_device_of_the_table_is_alive(table: PlacementWriter, reader: PlacementReader) -> None:
    """If no device of the table is alive, another live device answers. When a device of the table is back, it answers."""
    replicas, fakes = made(3, reader=reader)
    table.write({"m": 0b010})
    assert home_of(replicas) == 1

    fakes[1].seconds = inf
    fakes[0].seconds = 0.5
    assert home_of(replicas) == 0
    fakes[1].seconds = 1.9
    assert home_of(replicas) == 1


def test_a_device_outside_of_the_table_helps_if_it_is_far_sooner(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """If the table's device would answer much later than another one, the other device gets the requests.

    If an operator has pinned the model, it stays on the table's device unless this device has no runtime.
    """
    replicas, fakes = made(3, reader=reader)
    table.write({"m": 0b010})
    fakes[0].seconds, fakes[1].seconds, fakes[2].seconds = 1.0, 3.9, 2.0
    assert home_of(replicas) == 1
    fakes[1].seconds = 4.1
    assert home_of(replicas) == 0

    table.write({"m": 0b010 | PINNED})
    assert home_of(replicas) == 1
    fakes[1].seconds = inf
    assert home_of(replicas) == 0


def test_a_mask_of_devices_that_do_not_serve_the_model(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """If the table names no device that serves the model, any device may answer."""
    replicas, _ = made(2, reader=reader)
    table.write({"m": 1 << 40})

    assert home_of(replicas) in (0, 1)


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pauses after failed attempts to start a model very short."""
    monkeypatch.setattr("rsrv.front.rules.FIRST_START_PAUSE_S", 0.01)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("error", [Closed("it ended"), Rejected("no device"), ValueError("a fault")])
def test_a_further_device_that_fails_is_tried_again(error: Exception) -> None:
    """If a further device fails, the other devices serve the model, and the failed device is tried again."""
    held: list[Exception] = [error] * 3
    replicas, fakes = made(3, failing={1: held})
    fakes[0].seconds = fakes[2].seconds = 9.0
    assert home_of(replicas) in (0, 2)

    wait_until(lambda: home_of(replicas) == 1, what="the device's replica")

    replicas.close()
    assert fakes[0].closed
    assert fakes[2].closed


def test_a_request_without_a_runtime_goes_to_the_replica_that_answers_first() -> None:
    """A request that lost its runtime goes to the live replica that answers first.

    Without a live replica, it is not submitted.
    """
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    replicas, fakes = made(4, process=process)
    fakes[0].seconds, fakes[1].seconds, fakes[2].seconds = inf, 5.0, inf
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())

    assert replicas.submit(request)
    assert fakes[3].taken == [request]

    fakes[1].seconds = fakes[3].seconds = inf
    assert not replicas.submit(request)


def test_a_request_that_waited_goes_where_the_table_allows(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """A model is pinned to two devices, and one of them is down. A waiting request is submitted to the other one.

    A device outside of the table gets the request only if both are down.
    """
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    replicas, fakes = made(3, reader=reader, process=process)
    table.write({"m": 0b011 | PINNED})
    fakes[0].seconds, fakes[1].seconds, fakes[2].seconds = inf, 50.0, 0.1
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())

    assert replicas.submit(request)
    assert fakes[1].taken == [request]

    fakes[1].seconds = inf
    assert replicas.submit(request)
    assert fakes[2].taken == [request]


def test_idle_devices_share_a_batch(table: PlacementWriter, reader: PlacementReader) -> None:
    """A batch is divided among the idle devices of the table.

    Devices without the weights or without a runtime get no part.
    """

    def answers(count: int) -> list[int]:
        requests = [FakeRequest({}) for _ in range(count)]
        returned = replicas.execute(requests)
        return returned or [cast(int, request.answers.get(timeout=1)) for request in requests]

    replicas, fakes = made(4, reader=reader)
    table.write({"m": 0b0111})

    assert sorted(answers(6)) == [0, 0, 1, 1, 2, 2]
    fakes[1].warm = False
    fakes[1].seconds = 1.1
    assert sorted(answers(6)) == [0, 0, 0, 2, 2, 2]
    fakes[0].seconds = fakes[1].seconds = inf
    assert answers(6) == [2] * 6


def test_runs_whose_callees_have_no_device_in_common_go_by_stage(
    table: PlacementWriter, tmp_path: Path
) -> None:
    """If the table has no common device for the callees of a run, the run begins on the lowest of their devices.

    Each call is sent to the callee's device that will answer first.
    """
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    reader = PlacementReader(tmp_path / "placement", "m", ("a", "b"))
    replicas, fakes = made(4, reader=reader, process=process)

    def stages(device: int) -> dict[str, int]:
        return {name: cast(FakeReplica, replica).device for name, replica in replicas.stages(device).items()}

    table.write({"m": 0b0001, "a": 0b0010, "b": 0b1100})
    fakes[3].seconds = 0.5
    assert home_of(replicas) == 1
    assert stages(1) == {"a": 1, "b": 3}
    # The table does not name device 2 for `a`, but a run on this device may have begun before the table.
    assert stages(2) == {"a": 3, "b": 3}
    fakes[1].session.attachment, fakes[1].seconds = None, inf
    assert home_of(replicas) == 2

    table.write({"m": 0b0001, "a": 0b0101, "b": 0b1100})
    assert home_of(replicas) == 2
    assert stages(2) == {}


@pytest.mark.usefixtures("short_pauses")
def test_a_device_joins_while_a_run_by_stage_begins(table: PlacementWriter, tmp_path: Path) -> None:
    """Device 2 cannot be reached at first, so a run begins by stage, although the callees have this device in common.

    It becomes available just then. The batch is still sent to device 0, and the next batch is sent to device 2.
    """
    table.write({"m": 0b11, "a": 0b101, "b": 0b110})
    begun, fakes = Event(), Fakes(3)
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))

    class Beginning(FakeReplica):
        def answers_in_s(self) -> float:
            if not begun.is_set():
                begun.set()
                fakes.await_all(process)
            return self.seconds

    class Joining(FakeSession):
        def attach(self, on_step: object, *, started: bool, asked: bool) -> Any:
            if not self.failing:
                begun.wait(PATIENCE_S)
            return super().attach(on_step, started=started, asked=asked)

    def make(session: Any, attachment: object) -> ModelReplica[Any]:
        return cast(ModelReplica[Any], Beginning(session) if session.device == 0 else FakeReplica(session))

    fakes.sessions[2] = Joining(2, 3)
    fakes.sessions[2].failing = [LaunchError("the card is held")]
    reader = PlacementReader(tmp_path / "placement", "m", ("a", "b"))
    replicas = Replicas(
        lambda device: cast(Session, fakes.sessions[device]), make, "m", process, reader, lambda: 3
    )
    replicas.load()
    assert home_of(replicas) == 0
    assert home_of(replicas) == 2


def test_a_failure_that_cannot_be_sent_ends_no_other_request() -> None:
    """If a failure cannot be sent to one request of a batch, execute() raises no error, and the other requests get answers.

    An error raised by execute() would crash Triton.
    """
    replicas, fakes = made(2, transport="bls")
    for fake in fakes.values():
        vars(fake)["execute_later"] = lambda requests: ["failed"] * len(requests)

    class WithoutRoom(FakeRequest):
        def get_response_sender(self) -> Any:
            raise RuntimeError("no shared memory")

    def call(make: type[FakeRequest], device: int) -> FakeRequest:
        return make({}, parameters=json.dumps({"rsrv_run": "77", "rsrv_device": str(device)}))

    batch = [call(WithoutRoom, 0), call(FakeRequest, 0), call(FakeRequest, 1)]
    assert replicas.execute(batch) is None
    answers: list[Any] = [request.answers.get(timeout=1) for request in batch[1:]]
    assert answers == ["failed", "failed"]


def test_sub_calls_through_triton_go_to_the_device_of_their_run() -> None:
    """A sub-call is sent to the device of its run, because only the runtime of this device knows the run.

    If a batch has sub-calls of several devices, they are answered later by their senders.
    """
    replicas, _ = made(3, transport="bls")

    def call(device: int | None, run: str = "77") -> FakeRequest:
        parameters = {"rsrv_run": run} | ({} if device is None else {"rsrv_device": str(device)})
        return FakeRequest({}, parameters=json.dumps(parameters))

    assert replicas.execute([call(2), call(2)]) == [2, 2]
    assert replicas.execute([call(None)]) == [0]
    assert replicas.execute([FakeRequest({})]) == [home_of(replicas)]
    endless = '{"rsrv_run": "77", "rsrv_device": 1e999}'
    for wrong in (call(7), *(FakeRequest({}, parameters=text) for text in ("{", "[1]", endless))):
        assert len(replicas.execute([wrong]) or []) == 1
    mixed = [call(1), call(2), call(None)]
    assert replicas.execute(mixed) is None
    answers: list[Any] = [request.answers.get(timeout=1) for request in mixed]
    assert answers == [1, 2, 0]


def test_a_model_that_only_the_first_device_rejects_is_served_by_the_next() -> None:
    """If the first device rejects a model, for example because the device has too little memory, the next one serves it.

    If all devices reject the model, the error has all reasons.
    """
    replicas, fakes = made(3, failing={0: [Rejected("needs 9 GB, the card has 8 GB")] * 2})
    fakes[2].seconds = 9.0
    assert replicas.execute([object()]) == [1]
    replicas.close()

    with pytest.raises(Rejected, match=r"device 0: needs 9 GB; device 1: needs 9 GB, too"):
        made(2, failing={0: [Rejected("needs 9 GB")], 1: [Rejected("needs 9 GB, too")]})


def test_a_reason_that_all_devices_have_in_common_is_said_once() -> None:
    """If all devices reject a model for the same reason, the error has this reason once."""
    with pytest.raises(Rejected, match=r"^no such module$"):
        made(2, failing={0: [Rejected("no such module")], 1: [Rejected("no such module")]})


@pytest.mark.parametrize("last", [[], [Rejected("needs 9 GB, too")]])
def test_the_first_runtime_finds_further_devices_during_a_load(last: list[Exception]) -> None:
    """A first load learns the number of devices from the first runtime.

    If this runtime rejects the model, the load tries the other devices.
    """
    fakes, counts = Fakes(2), iter([1])
    fakes.sessions[0].failing = [Rejected("needs 9 GB")] * 2
    fakes.sessions[1].failing = [*last]
    model = unloaded(fakes, devices=lambda: next(counts, 2))
    errors: list[Exception] = []

    def load() -> None:
        try:
            model.load()
        except Rejected as error:
            errors.append(error)

    loading = Thread(target=load, daemon=True)
    loading.start()
    loading.join(PATIENCE_S)

    assert not loading.is_alive()
    if last:
        assert str(errors[0]) == "device 0: needs 9 GB; device 1: needs 9 GB, too"
    else:
        assert model.execute([FakeRequest({})]) == [1]


@pytest.mark.usefixtures("short_pauses")
def test_a_model_is_loaded_once_an_earlier_device_serves_it() -> None:
    """The first device rejects a model. While the load tries the second device, the first one is tried again and succeeds.

    The load then ends, although the second device has also rejected the model.
    """
    fakes = Fakes(2)
    fakes.sessions[0].failing = [Rejected("no memory")]
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))

    class Slow(FakeSession):
        def attach(self, on_step: object, *, started: bool, asked: bool) -> Any:
            wait_until(lambda: process.front.snapshot.devices[0].state is ServingState.READY)
            raise Rejected("too large")

    fakes.sessions[1] = Slow(1, 2)
    model = unloaded(fakes, process=process)

    model.load()

    assert model.execute([FakeRequest({})]) == [0]


def test_a_load_without_descriptors_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process has too few file descriptors for a load, the load fails with this reason.

    The process does not end, because it may serve other targets of an alias.
    """
    reasons: list[str] = []
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    monkeypatch.setattr(process, "end", reasons.append)
    monkeypatch.setattr("rsrv.stub.replicas.may_open", lambda count: False)
    fakes = Fakes(1)
    fakes.sessions[0].failing = [OSError(EMFILE, "Too many open files")]

    with pytest.raises(OSError, match="Too many open files"):
        unloaded(fakes, process=process).load()

    assert not reasons


def test_a_load_that_fails_leaves_the_hooks_of_other_models_guarded() -> None:
    """A failed load does not close the guard of hooks, which all targets of an alias share."""
    guard = Mock()
    fakes = Fakes(1)
    fakes.sessions[0].failing = [Rejected("no such module")]

    with pytest.raises(Rejected):
        unloaded(fakes, process=StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils), guard)).load()

    guard.close.assert_not_called()


def test_a_model_that_crashed_the_first_runtime_is_not_tried_elsewhere() -> None:
    """A model that has crashed the first device's runtime is not tried on other devices, whose runtimes serve other models."""
    fault = "the model has ended the runtime 3 times"
    with pytest.raises(Rejected, match=rf"^{fault}$"):
        made(2, failing={0: [Rejected(fault, fault)]})


@pytest.mark.usefixtures("short_pauses")
def test_a_model_is_loaded_while_the_first_device_is_gone() -> None:
    """If the first devices have no runtime, the next device with a runtime loads the model.

    The first devices serve it when they have runtimes again. If no device has a runtime, the error has all reasons.
    """
    gone = LaunchError("the GPU is lost")
    replicas, fakes = made(3, failing={0: [gone, gone], 1: [gone]})
    fakes[2].seconds = 9.0
    wait_until(lambda: replicas.execute([FakeRequest({})]) == [0], what="the first device's replica")
    replicas.close()

    with pytest.raises(Rejected, match="device 0: the GPU is lost; device 1: it is held"):
        made(2, failing={0: [gone], 1: [LaunchError("it is held")]})


def test_one_device_costs_a_request_nothing() -> None:
    """With one device, execute() is the replica's own method."""
    replicas, fakes = made(1)
    assert replicas.execute == fakes[0].execute


# --- cold models


def made_cold(
    devices: int, reader: PlacementReader | None = None, transport: str = "direct"
) -> tuple[StubProcess, Fakes, Replicas]:
    """Return the process of a stub, its fake replicas (none yet), and the cold model."""
    process, fakes = (
        StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)),
        Fakes(devices, transport, cold=True),
    )
    replicas = unloaded(fakes, "m", reader, process)
    replicas.load()
    return process, fakes, replicas


def start(process: StubProcess, fakes: Fakes, replicas: Replicas) -> ClientRequest:
    """Start a cold model with a request. When a replica has the request and no device is starting, return the request."""
    request = FakeRequest({})
    assert replicas.execute([request]) is None
    wait_until(lambda: any(fake.taken for fake in fakes.values()))
    settled = {ServingState.READY, ServingState.COLD}
    wait_until(lambda: {view.state for view in process.front.snapshot.devices.values()} <= settled)
    (taken,) = (client_request for fake in fakes.values() for client_request in fake.taken)
    return taken


def test_the_first_request_starts_a_cold_model_on_its_home_alone() -> None:
    """A cold model has no replica. The first request starts it on its home, whose replica gets the request."""
    process, fakes, replicas = made_cold(3)
    assert fakes == {}

    start(process, fakes, replicas)

    assert [*fakes] == [by_preference("m", 3)[0]]
    assert home_of(replicas) == by_preference("m", 3)[0]


def test_the_first_cold_model_of_a_server_starts_where_the_table_says(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """A cold model may be loaded before the number of devices is known.

    It still starts on the device that the table names.
    """
    table.write({"m": 1 << 2 | PINNED})
    process, fakes = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), Fakes(3, cold=True)
    counts = iter([1])
    replicas = unloaded(fakes, "m", reader, process, lambda: next(counts, 3))
    replicas.load()

    start(process, fakes, replicas)

    assert [*fakes] == [2]


def test_a_started_model_spreads_with_a_new_table(table: PlacementWriter, reader: PlacementReader) -> None:
    """When a new table names a further device for a started model, the next batch makes this device start the model, too."""
    home, second, third = by_preference("m", 3)
    table.write({"m": 1 << third})
    process, fakes, replicas = made_cold(3, reader)
    start(process, fakes, replicas)
    assert [*fakes] == [third]

    table.write({"m": 1 << third | 1 << second})

    wait_until(lambda: replicas.execute([object()]) and second in fakes)
    assert home not in fakes


def test_a_sub_call_starts_a_cold_model_on_the_device_of_its_run() -> None:
    """A sub-call starts the model on the device of its run, because only the runtime of this device knows the run.

    Until the model has started there, the model's home gets the call and answers that it must be repeated.
    """
    process, fakes, replicas = made_cold(2, transport="bls")
    start(process, fakes, replicas)
    home, other = by_preference("m", 2)
    call = FakeRequest({}, parameters=json.dumps({"rsrv_run": "77", "rsrv_device": str(other)}))

    assert replicas.execute([call]) == [home]

    wait_until(lambda: replicas.execute([call]) == [other])


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_without_a_thread_for_an_attempt_it_is_repeated(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no thread can be started for an attempt to connect, the attempt is repeated.

    Without the repetition, the model would never be connected to a runtime.
    """
    process, fakes, replicas = made_cold(1)
    begin = Thread.start

    def fail_once(thread: Thread) -> None:
        if thread.name == "connect":
            monkeypatch.setattr(Thread, "start", begin)
            raise error
        begin(thread)

    monkeypatch.setattr(Thread, "start", fail_once)

    start(process, fakes, replicas)

    assert home_of(replicas) == 0


def test_a_registration_that_cannot_be_used_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If an error occurs after the runtime has registered the model, the model is registered again."""
    faults = [RuntimeError("no memory for a thread")]

    def watch(replica: FakeReplica, attachment: object) -> None:
        if faults:
            raise faults.pop()

    monkeypatch.setattr(FakeReplica, "watch", watch)

    assert made(1)[0].execute([FakeRequest({})]) == [0]
    assert not faults


def test_a_registration_is_watched_before_requests_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica reads answers from its connection before requests use the connection.

    Otherwise, a request would conclude that the runtime is lost.
    """
    used: list[object] = []
    monkeypatch.setattr(FakeReplica, "watch", lambda replica, _: used.append(replica.session.attachment))

    made(1)

    assert used == [None]


@pytest.mark.parametrize("error", [HookError("no such function"), SystemExit(3)])
def test_a_fault_of_the_models_code_fails_its_start_on_all_devices(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """If the code of a model raises an error when its replica is made, requests fail with the error.

    No other device is tried, because the code would fail there, too.
    """
    process, fakes = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), Fakes(2, cold=True)
    monkeypatch.setattr(fakes, "make", Mock(side_effect=error))
    replicas = unloaded(fakes, process=process)
    replicas.load()
    request = FakeRequest({})

    assert replicas.execute([request]) is None

    answer: Any = request.answers.get(timeout=PATIENCE_S)
    assert answer.error.message.startswith("[rsrv:RUNTIME_DOWN] the model could not be started: ")
    assert str(error) in answer.error.message
    states = [view.state for view in process.front.snapshot.devices.values()]
    assert sorted(states) == [ServingState.REJECTED, ServingState.UNTRIED]


def test_a_model_that_is_unloaded_during_an_attempt_is_closed() -> None:
    """If a model is unloaded during an attempt to connect, the connections of the attempt are closed when it ends."""
    begun, go_on, closed = Event(), Event(), Event()

    class Slow(FakeSession):
        def attach(self, on_step: object, *, started: bool, asked: bool) -> Any:
            attachment = super().attach(on_step, started=started, asked=asked)
            if asked:
                begun.set()
                go_on.wait(PATIENCE_S)
                attachment.close = closed.set
            return attachment

    fakes = Fakes(1)
    fakes.sessions[0] = Slow(0, 1, cold=True)
    replicas = unloaded(fakes)
    replicas.load()
    request = FakeRequest({})
    assert replicas.execute([request]) is None
    assert begun.wait(PATIENCE_S)

    replicas.close()
    go_on.set()

    answer: Any = request.answers.get(timeout=PATIENCE_S)
    assert "unloaded" in answer.error.message
    assert closed.wait(PATIENCE_S)

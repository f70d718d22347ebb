"""Which device's replica answers a batch."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from threading import Event, Semaphore, Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from rsrv.placement.batch_shares import ExecutionCosts, Forecast
from rsrv.placement.device_choice import PINNED, by_preference
from rsrv.stub import replicas as under_test
from rsrv.stub.connection import Cold, LaunchError, Rejected
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


@dataclass
class FakeReplica:
    """Answers with its device's number."""

    device: int
    devices: int
    seconds: float = 1.0
    closed: bool = False
    asked: int = 0
    taken: list[ClientRequest] = field(default_factory=list)
    meters: Any = None
    transport: str = "direct"
    warm: bool = True
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        direct = SimpleNamespace(devices=self.devices)
        attachment = SimpleNamespace(
            direct=direct,
            settings={"meta": {"transport": self.transport}},
            begins_in_s=lambda _: self.seconds,
            since=0.0,
        )
        self.started = 0
        self.session = cast(
            Session,
            SimpleNamespace(
                attachment=attachment,
                device=self.device,
                start=self._start,
                cold=False,
                started=True,
                rejected=False,
                dangerous=False,
                lost_at=inf,
            ),
        )

    def _start(self) -> None:
        self.started += 1

    @property
    def ready(self) -> bool:
        return self.seconds < inf

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
    yield writer
    writer.close()


@pytest.fixture
def reader(tmp_path: Path) -> PlacementReader:
    return PlacementReader(tmp_path / "placement", "m")


def made(
    devices: int,
    name: str = "m",
    failing: dict[int, list[Exception]] | None = None,
    reader: PlacementReader | None = None,
    process: StubProcess | None = None,
    transport: str = "direct",
) -> tuple[Replicas, list[Any]]:
    """Return a model's replicas, and the fakes by device; None for those that failed. `failing`: errors of the attempts."""
    fakes: dict[int, FakeReplica] = {}

    def make(device: int) -> ModelReplica[Any]:
        if failing and failing.get(device):
            raise failing[device].pop(0)
        fakes[device] = FakeReplica(device, devices, transport=transport)
        return cast(ModelReplica[Any], fakes[device])

    replicas = Replicas(
        make,
        name,
        process or StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)),
        reader,
        lambda: devices,
    )
    return replicas, [fakes.get(device) for device in range(devices)]


def home_of(replicas: Replicas) -> int:
    (device,) = replicas.execute([FakeRequest({})]) or []
    return int(device)


def test_models_have_homes_on_all_devices() -> None:
    """On a quiet server the models are spread by their names, and each stays where it is."""
    homes = [home_of(made(4, f"model{number}")[0]) for number in range(100)]
    again = [home_of(made(4, f"model{number}")[0]) for number in range(100)]
    assert homes == again
    assert all(homes.count(device) >= 15 for device in range(4))


def test_a_batch_leaves_its_home_only_for_a_clearly_earlier_answer() -> None:
    """Noise of the measured times does not move traffic; a backlog does."""
    replicas, fakes = made(3)
    home = home_of(replicas)
    other = fakes[(home + 1) % 3]

    other.seconds = 0.9
    assert replicas.execute([object()]) == [home]
    other.seconds = 0.5
    assert replicas.execute([object()]) == [other.device]


def test_requests_of_a_divided_batch_go_to_one_device_and_are_answered_later() -> None:
    """A part of an alias's batch goes where a batch would go, and nothing is returned."""
    replicas, _ = made(3)
    home, batch = home_of(replicas), [FakeRequest({}) for _ in range(3)]

    replicas.execute_later(batch)

    answers: list[object] = [one.answers.get_nowait() for one in batch]
    assert answers == [home] * 3


def test_a_device_without_a_runtime_gets_nothing() -> None:
    """If no device has one, the home refuses with its reason."""
    replicas, fakes = made(2)
    home = home_of(replicas)
    fakes[home].seconds = inf
    assert replicas.execute([object()]) == [1 - home]
    assert replicas.ready

    fakes[1 - home].seconds = inf
    assert replicas.execute([object()]) == [home]
    assert not replicas.ready


def test_the_table_chooses_the_devices(table: PlacementWriter, reader: PlacementReader) -> None:
    """A batch goes to the soonest device of the model's mask, and follows each new table."""
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
    """Any live device answers; when one of the table is back, it does."""
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
    """A stopped or overloaded device gets no more requests, unless an operator has pinned the model to it."""
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
    """The table is advice: the others answer."""
    replicas, _ = made(2, reader=reader)
    table.write({"m": 1 << 40})

    assert home_of(replicas) in (0, 1)


@pytest.mark.parametrize("error", [Closed("it ended"), Rejected("no device"), ValueError("a fault")])
def test_a_further_device_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The others serve the model meanwhile, and its stub is ready."""
    monkeypatch.setattr(under_test, "_FIRST_PAUSE_S", 0.01)
    held: list[Exception] = [error] * 3
    replicas, fakes = made(3, failing={1: held})
    fakes[0].seconds = fakes[2].seconds = 9.0
    assert home_of(replicas) in (0, 2)

    wait_until(lambda: home_of(replicas) == 1, what="the device's replica")

    replicas.close()
    assert fakes[0].closed
    assert fakes[2].closed


def test_a_request_without_a_runtime_goes_to_the_replica_that_answers_first() -> None:
    """The soonest live replica takes it; without one it waits."""
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    _, fakes = made(4, process=process)
    fakes[0].seconds, fakes[1].seconds, fakes[2].seconds = inf, 5.0, inf
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())

    assert process.resubmission.place(request)
    assert fakes[3].taken == [request]

    fakes[1].seconds = fakes[3].seconds = inf
    assert not process.resubmission.place(request)


def test_a_request_that_waited_goes_where_the_table_allows(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """The weights of a pinned model load on no other device while one of its own is alive."""
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    _, fakes = made(3, reader=reader, process=process)
    table.write({"m": 0b011 | PINNED})
    fakes[0].seconds, fakes[1].seconds, fakes[2].seconds = inf, 50.0, 0.1
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())

    assert process.resubmission.place(request)
    assert fakes[1].taken == [request]

    fakes[1].seconds = inf
    assert process.resubmission.place(request)
    assert fakes[2].taken == [request]


def test_idle_devices_share_a_batch(table: PlacementWriter, reader: PlacementReader) -> None:
    """Each request is answered once, later, by a live device of the table that has the weights."""

    def answers(count: int) -> list[int]:
        requests = [FakeRequest({}) for _ in range(count)]
        returned = replicas.execute(requests)
        return returned or [cast(int, one.answers.get(timeout=1)) for one in requests]

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
    """A run begins on the lowest device of its callees, and each call goes to the soonest device of its model."""
    process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
    reader = PlacementReader(tmp_path / "placement", "m", ("a", "b"))
    replicas, fakes = made(4, reader=reader, process=process)

    def stages(device: int) -> dict[str, int]:
        return {name: cast(FakeReplica, one).device for name, one in process.stages(device).items()}

    table.write({"m": 0b0001, "a": 0b0010, "b": 0b1100})
    fakes[3].seconds = 0.5
    assert home_of(replicas) == 1
    assert stages(1) == {"a": 1, "b": 3}
    # The run began before the table.
    assert stages(2) == {"a": 3, "b": 3}
    fakes[1].session.attachment, fakes[1].seconds = None, inf
    assert home_of(replicas) == 2

    table.write({"m": 0b0001, "a": 0b0101, "b": 0b1100})
    assert home_of(replicas) == 2
    assert stages(2) == {}


def test_a_device_joins_while_a_run_by_stage_begins(
    table: PlacementWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callees have a device in common from then on; the batch that came before is answered nevertheless."""
    monkeypatch.setattr(under_test, "_FIRST_PAUSE_S", 0.0)
    table.write({"m": 0b11, "a": 0b101, "b": 0b110})
    attempts: list[int] = []
    begun = Event()

    class Beginning(FakeReplica):
        def answers_in_s(self) -> float:
            if not begun.is_set():
                begun.set()
                wait_until(lambda: len(replicas._replicas) == 3)
            return self.seconds

    def make(device: int) -> ModelReplica[Any]:
        attempts.append(device)
        if device == 2:
            if attempts.count(2) == 1:
                raise LaunchError("the card is held")
            begun.wait(10)
        return cast(ModelReplica[Any], Beginning(device, 3) if device == 0 else FakeReplica(device, 3))

    reader = PlacementReader(tmp_path / "placement", "m", ("a", "b"))
    replicas = Replicas(make, "m", StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), reader)
    assert home_of(replicas) == 0
    assert home_of(replicas) == 2


def test_a_failure_that_cannot_be_sent_ends_no_other_request() -> None:
    """If execute() raised while replies of its batch are sent, Triton would crash."""
    replicas, fakes = made(2, transport="bls")
    for fake in fakes:
        fake.execute_later = lambda requests: ["failed"] * len(requests)

    class WithoutRoom(FakeRequest):
        def get_response_sender(self) -> Any:
            raise RuntimeError("no shared memory")

    def call(make: type[FakeRequest], device: int) -> FakeRequest:
        return make({}, parameters=json.dumps({"rsrv_run": "77", "rsrv_device": str(device)}))

    batch = [call(WithoutRoom, 0), call(FakeRequest, 0), call(FakeRequest, 1)]
    assert replicas.execute(batch) is None
    answers: list[Any] = [one.answers.get(timeout=1) for one in batch[1:]]
    assert answers == ["failed", "failed"]


def test_sub_calls_through_triton_go_to_the_device_of_their_run() -> None:
    """Its runtime alone knows the run. A batch of several devices' runs is answered later, by each of them."""
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
    answers: list[Any] = [one.answers.get(timeout=1) for one in mixed]
    assert answers == [1, 2, 0]


def test_a_model_that_only_the_first_device_rejects_is_served_by_the_next() -> None:
    """It may be too large for one of several cards; if all of them reject it, the error says why by device."""
    replicas, fakes = made(3, failing={0: [Rejected("needs 9 GB, the card has 8 GB")] * 2})
    fakes[2].seconds = 9.0
    assert replicas.execute([object()]) == [1]
    replicas.close()

    with pytest.raises(Rejected, match=r"device 0: needs 9 GB; device 1: needs 9 GB, too"):
        made(2, failing={0: [Rejected("needs 9 GB")], 1: [Rejected("needs 9 GB, too")]})


def test_a_reason_that_all_devices_have_in_common_is_said_once() -> None:
    """The bundle itself is at fault."""
    with pytest.raises(Rejected, match=r"^no such module$"):
        made(2, failing={0: [Rejected("no such module")], 1: [Rejected("no such module")]})


def test_a_model_that_crashed_the_first_runtime_is_not_tried_elsewhere() -> None:
    """The runtimes of the other devices serve other models."""
    fault = "the model has ended the runtime 3 times"
    with pytest.raises(Rejected, match=rf"^{fault}$"):
        made(2, failing={0: [Rejected(fault, fault)]})


def test_a_model_is_loaded_while_the_first_device_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device with a runtime answers; the others are joined when they are back."""
    monkeypatch.setattr(under_test, "_FIRST_PAUSE_S", 0.01)
    gone = LaunchError("the GPU is lost")
    replicas, fakes = made(3, failing={0: [gone, gone], 1: [gone]})
    fakes[2].seconds = 9.0
    wait_until(lambda: replicas.execute([FakeRequest({})]) == [0], what="the first device's replica")
    replicas.close()

    with pytest.raises(Rejected, match="device 0: the GPU is lost; device 1: it ended"):
        made(2, failing={0: [gone], 1: [Closed("it ended")]})


def test_a_runtime_that_dies_during_the_load_hides_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first replica has no attachment at that moment; the others are made nevertheless."""
    attach = FakeReplica.__post_init__

    def lost(replica: FakeReplica) -> None:
        attach(replica)
        if replica.device == 0:
            replica.session.attachment, replica.seconds = None, inf

    monkeypatch.setattr(FakeReplica, "__post_init__", lost)
    replicas, _ = made(2)
    assert replicas.execute([FakeRequest({})]) == [1]


def test_a_session_is_known_while_it_begins() -> None:
    """A child that a hook forks meanwhile closes its sockets, too; one that failed is forgotten."""
    process, known = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), []

    def begin() -> None:
        known.extend(process.sessions)
        raise Closed("it ended")

    session = cast(Session, SimpleNamespace(begin=begin, attachment=None, device=0))
    with pytest.raises(Closed):
        process.begin(session)
    assert known == [session]
    assert process.sessions == []


def test_one_device_costs_a_request_nothing() -> None:
    """With one device, Triton's call goes to its replica directly."""
    replicas, (only,) = made(1)
    assert replicas.execute == only.execute


def test_all_replicas_end_with_their_model() -> None:
    """None keeps its connections or threads."""
    replicas, fakes = made(3)
    replicas.close()
    assert all(one.closed for one in fakes)


# --- cold models


def made_cold(
    devices: int, reader: PlacementReader | None = None, transport: str = "direct"
) -> tuple[StubProcess, dict[int, FakeReplica], Callable[..., Replicas]]:
    """Return a stub's process, the replicas that it starts by device, and what makes all replicas of a cold model."""
    process, fakes = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils)), dict[int, FakeReplica]()

    def make(device: int) -> ModelReplica[Any]:
        if device not in process.wanted:
            raise Cold(60.0)
        fakes[device] = FakeReplica(device, devices, transport=transport)
        return cast(ModelReplica[Any], fakes[device])

    return process, fakes, partial(Replicas, make, "m", process, reader, lambda: devices)


def test_a_cold_model_starts_on_its_home_alone() -> None:
    """Nothing starts with the server; the start is on one device, and the others stay cold."""
    _, fakes, begin = made_cold(3)
    with pytest.raises(Cold):
        begin()
    assert fakes == {}

    replicas = begin(start=True)

    assert [*fakes] == [by_preference("m", 3)[0]]
    assert home_of(replicas) == by_preference("m", 3)[0]
    assert replicas._cold == {*range(3)} - fakes.keys()


def test_a_cold_model_starts_where_the_table_says_and_spreads_with_it(
    table: PlacementWriter, reader: PlacementReader
) -> None:
    """It starts on the first of its devices that it prefers; a table that names another device starts it there, too."""
    home, second, third = by_preference("m", 3)
    table.write({"m": 1 << third})
    _, fakes, begin = made_cold(3, reader)
    replicas = begin(start=True)
    assert [*fakes] == [third]

    table.write({"m": 1 << third | 1 << second})
    wait_until(lambda: replicas.execute([object()]) and second in fakes)

    wait_until(lambda: second in replicas._replicas)
    assert replicas._cold == {home}


def test_a_model_that_fell_back_starts_again_where_its_requests_go() -> None:
    """One that waits starts the home's session, and no other."""
    process, fakes, begin = made_cold(2)
    begin(start=True)
    (home,) = fakes.values()

    process.resubmission.wake()

    assert home.started == 1


def test_a_model_whose_runtime_stays_down_starts_on_another_device() -> None:
    """The next runtime gets a few seconds; then requests that wait start the model on one device where it is cold."""
    process, fakes, begin = made_cold(3)
    replicas = begin(start=True)
    home, second, third = by_preference("m", 3)
    session = fakes[home].session
    session.attachment, fakes[home].seconds, session.lost_at = None, inf, time.monotonic()
    process.resubmission.wake()
    assert [*fakes] == [home]

    session.lost_at -= 3.0
    process.resubmission.wake()

    wait_until(lambda: home_of(replicas) == second)
    process.resubmission.wake()
    assert replicas._cold == {third}


class Pauses(Event):
    """Pauses between attempts: each takes no time, and lasts until the test ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._ended = Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        self._ended.acquire(timeout=PATIENCE_S)
        return self.is_set()

    def end(self) -> None:
        self._ended.release()

    def begin(self, count: int) -> None:
        """Wait for the beginning of the pause of this number."""
        wait_until(lambda: len(self.seconds) == count, what=f"pause {count}")


def reject(fake: FakeReplica) -> None:
    """Have the device's runtime reject the model, which was cold there."""
    fake.session.attachment, fake.session.started, fake.session.rejected = None, False, True
    fake.seconds = inf


def reject_for(fake: FakeReplica, client: str, *, started: bool) -> Pauses:
    """Have the device's next runtime reject the model; `client` is the text for clients. Return the session's pauses."""

    def refuse() -> Any:
        raise Rejected("the log's reason", client)

    session = Session(refuse, "m", "/models/m", device=fake.device)
    session._closed = pauses = Pauses()
    session.started, session.lost_at = started, -inf
    fake.session, fake.seconds = session, inf
    Thread(target=session._bring_up, daemon=True).start()
    pauses.begin(1)
    return pauses


@pytest.mark.parametrize("error", [Rejected("no room"), ValueError("a fault")])
def test_a_model_that_its_home_rejects_starts_on_another_device(error: Exception) -> None:
    """The next device is tried at once, and again after pauses that double, in which requests get the reason."""
    process, fakes, begin = made_cold(2)
    replicas = begin(start=True)
    home, second = by_preference("m", 2)
    reject(fakes[home])
    replicas._closed = pauses = Pauses()
    make, waits = replicas._make, list[bool]()

    def fail(device: int) -> ModelReplica[Any]:
        make(device)
        waits.append(bool(process.resubmission.wake()))
        raise error

    replicas._make = fail
    assert process.resubmission.wake()
    for number in range(1, 9):
        pauses.begin(number)
        assert not process.resubmission.wake()
        if number == 8:
            replicas._make = make
        pauses.end()

    wait_until(lambda: home_of(replicas) == second)
    assert pauses.seconds == [1, 2, 4, 8, 16, 32, 60, 60]
    assert waits == [True] * 8


@pytest.mark.parametrize("error", [Closed("it ended"), ValueError("a fault")])
def test_a_device_of_the_table_that_fails_is_tried_again(
    table: PlacementWriter, reader: PlacementReader, error: Exception
) -> None:
    """The same table has the model start there after the pause."""
    home, second = by_preference("m", 2)
    table.write({"m": 1 << home})
    _, _, begin = made_cold(2, reader)
    replicas = begin(start=True)
    replicas._closed = pauses = Pauses()
    make, errors = replicas._make, [error]

    def fail_once(device: int) -> ModelReplica[Any]:
        if errors:
            raise errors.pop()
        return make(device)

    replicas._make = fail_once
    table.write({"m": 1 << home | 1 << second})
    replicas.execute([object()])
    pauses.begin(1)
    pauses.end()

    wait_until(lambda: second in replicas._replicas)


@pytest.mark.parametrize("started", [True, False])
@pytest.mark.parametrize("client", ["", "the model has crashed two runtimes"])
def test_a_model_that_has_crashed_runtimes_starts_on_no_other_device(client: str, started: bool) -> None:
    """Requests get the reason. A model that is rejected for another reason starts on the next device."""
    process, fakes, begin = made_cold(2)
    replicas = begin(start=True)
    home, second = by_preference("m", 2)
    reject_for(fakes[home], client, started=started)

    assert process.resubmission.wake() == (not client)

    assert replicas._cold == ({second} if client else set())


def test_a_model_that_has_crashed_another_device_starts_there_alone() -> None:
    """Requests get the reason while that device pauses, and wait for its next attempt."""
    process, fakes, begin = made_cold(3)
    replicas = begin(start=True)
    home, second, third = by_preference("m", 3)
    reject(fakes[home])
    assert process.resubmission.wake()
    wait_until(lambda: second in replicas._replicas)
    pauses = reject_for(fakes[second], "the model has crashed two runtimes", started=False)
    assert not process.resubmission.wake()

    pauses.end()
    wait_until(lambda: fakes[second].session.cold)
    assert process.resubmission.wake()

    pauses.begin(2)
    assert not process.resubmission.wake()
    assert pauses.seconds == [1, 2]
    assert replicas._cold == {third}


@pytest.mark.parametrize("client", ["", "the model has crashed two runtimes"])
def test_a_further_device_that_rejects_the_model_for_crashes_is_the_last_one(client: str) -> None:
    """A third device does not start the model then, also if the second one's runtime ends; otherwise it does."""
    process, fakes, begin = made_cold(3)
    replicas = begin(start=True)
    home, second, third = by_preference("m", 3)
    reject(fakes[home])
    replicas._closed = pauses = Pauses()
    make, errors = replicas._make, iter([Rejected("the log's reason", client), Closed("it ended")])

    def fail(device: int) -> ModelReplica[Any]:
        if device == second:
            raise next(errors)
        return make(device)

    replicas._make = fail
    assert process.resubmission.wake()
    pauses.begin(1)
    if client:
        assert not process.resubmission.wake()
        pauses.end()
        pauses.begin(2)

    assert process.resubmission.wake() == (not client)

    assert replicas._cold == ({third} if client else set())


def test_a_sub_call_starts_a_cold_model_on_the_device_of_its_run() -> None:
    """Only the runtime there knows the run: other replicas have the meta model repeat the call until then."""
    _, fakes, begin = made_cold(2, transport="bls")
    replicas = begin(start=True)
    home, other = by_preference("m", 2)
    call = FakeRequest({}, parameters=json.dumps({"rsrv_run": "77", "rsrv_device": str(other)}))

    assert replicas.execute([call]) == [home]

    wait_until(lambda: replicas.execute([call]) == [other])
    fakes[other].session.cold = True
    assert replicas.execute([call]) == [other]
    assert fakes[other].started > 0


def test_without_a_thread_for_a_further_device_requests_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """If execute() raised, Triton might crash. The device is started when there is a thread again."""
    process, _, begin = made_cold(2, transport="bls")
    replicas = begin(start=True)
    home, other = by_preference("m", 2)
    call = FakeRequest({}, parameters=json.dumps({"rsrv_run": "77", "rsrv_device": str(other)}))

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        assert replicas.execute([call]) == [home]
    assert (replicas._cold, process.wanted) == ({other}, set())

    wait_until(lambda: replicas.execute([call]) == [other])


def test_a_request_that_waits_for_the_start_is_taken_by_whole_replicas() -> None:
    """The thread that resubmits may look at each moment of the start, also as soon as there is a replica to give it to."""
    request = ClientRequest(FakeRequest({}), ArrivalTime.now())

    class Looking(StubProcess):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "live":
                self.resubmission.place(request)

    process = Looking(Tensors(FakePbUtils), Responses(FakePbUtils))
    _, (only,) = made(1, process=process)

    assert request in only.taken

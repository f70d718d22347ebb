"""Requests of sequences in a stub: what a request contains, and which device has the sequence's state."""

from __future__ import annotations

import threading
import time
from math import inf
from typing import Any, cast

import pytest

from rsrv.stub.replica import StubProcess
from rsrv.stub.replies import RequestFailure, Responses
from rsrv.stub.request import ArrivalTime, ClientRequest
from rsrv.stub.sequences import SequenceHomes, SequenceStep, read_step
from rsrv.stub.tensors import Tensors
from rsrv.wire.frames import END, START, Status
from tests.fakes import FakePbUtils, FakeRequest
from tests.unit.stub.test_replicas import Fakes, models, unloaded  # noqa: F401

BEGIN, FINISH = 1, 2


class Devices:
    """The replicas of a stateful model on several devices."""

    def __init__(self, count: int) -> None:
        self.all = Fakes(count)
        self.process = StubProcess(Tensors(FakePbUtils), Responses(FakePbUtils))
        self.process.homes = SequenceHomes(60.0)
        self.replicas = unloaded(self.all, process=self.process)
        self.replicas.load()

    def send(self, sequence: int, flags: int = 0) -> int:
        """Send a step of a sequence, and return the device that got it."""
        (device,) = self.replicas.execute([FakeRequest({}, sequence=sequence, flags=flags)]) or [-1]
        return int(device)

    def kill(self, device: int) -> None:
        self.all[device].session.attachment, self.all[device].seconds = None, inf


@pytest.mark.parametrize(
    ("id", "flags", "sent"),
    [(7, 0, 0), (7, BEGIN, START), (2**64 - 1, FINISH, END), ("seven", BEGIN | FINISH, START | END)],
)
def test_a_step_says_its_sequence_and_its_place(id: int | str, flags: int, sent: int) -> None:
    """A step's sequence id is a number, or a text, which is always converted to the same number.

    Triton's flags of the step become the protocol's flags.
    """
    step = read_step(FakeRequest({}, sequence=id, flags=flags))
    assert step.flags == sent
    assert 0 < step.sequence < 2**64
    assert step.sequence == (id if isinstance(id, int) else read_step(FakeRequest({}, sequence=id)).sequence)


@pytest.mark.parametrize("id", [0, ""])
def test_a_request_without_an_id_is_refused(id: int | str) -> None:
    """A request without an id is refused, and the text says which fields to set."""
    with pytest.raises(RequestFailure, match="set sequence_id, and sequence_start") as failed:
        read_step(FakeRequest({}, sequence=id))
    assert failed.value.status is Status.INVALID


def test_an_id_that_is_not_utf8_is_the_clients_fault() -> None:
    """An id that is not UTF-8 is the client's fault.

    HTTP lets any bytes through, and Triton's stub decodes them only when they are read.
    """

    class Hostile(FakeRequest):
        def correlation_id(self) -> str:
            return b"\xff".decode()

    with pytest.raises(RequestFailure, match="sequence_id must be UTF-8") as failed:
        read_step(Hostile({}))
    assert failed.value.status is Status.INVALID


def test_an_idle_sequence_is_forgotten() -> None:
    """The device of a sequence is forgotten at its last step, or when no step has arrived for a while."""
    homes = SequenceHomes(10.0)
    homes.keep(SequenceStep(1, True, False), 3, 0.0)
    homes.keep(SequenceStep(2, True, False), 3, 5.0)
    homes.keep(SequenceStep(1, False, False), 3, 19.0)
    assert [homes.find(sequence, -1) for sequence in (1, 2)] == [3, 3]

    homes.keep(SequenceStep(3, True, False), 0, 26.0)
    assert [homes.find(sequence, -1) for sequence in (1, 2, 3)] == [3, -1, 0]
    homes.keep(SequenceStep(1, False, True), 3, 27.0)
    assert homes.find(1, -1) == -1
    assert homes.count(3) == 0


def test_a_sequence_stays_on_its_device() -> None:
    """New sequences are divided equally among the devices. All steps of a sequence are sent to its device."""
    model = Devices(3)
    begun = {sequence: model.send(sequence, BEGIN) for sequence in range(1, 7)}
    assert sorted(begun.values()) == [0, 0, 1, 1, 2, 2]

    model.all[0].seconds = 0.01
    assert {sequence: model.send(sequence) for sequence in begun} == begun
    assert {sequence: model.send(sequence, FINISH) for sequence in begun} == begun
    assert sorted(model.send(sequence, BEGIN) for sequence in range(10, 13)) == [0, 1, 2]


def test_sequences_that_begin_at_once_get_devices_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences that begin at the same time get different devices.

    One thread waits until the other thread has chosen a device and recorded it.
    """
    model, devices = Devices(2), []
    homes = model.process.homes
    assert homes is not None
    count = homes.count
    other = threading.Thread(target=lambda: devices.append(model.send(2, BEGIN)))

    def counting(device: int) -> int:
        sequences = count(device)
        if other.ident is None:
            other.start()
            other.join(0.2)
        return sequences

    monkeypatch.setattr(homes, "count", counting)
    devices.append(model.send(1, BEGIN))
    other.join()
    assert sorted(devices) == [0, 1]


def test_a_batch_is_cut_by_the_devices_of_its_sequences() -> None:
    """A batch is divided by the devices of its sequences."""
    model = Devices(2)
    begun = {sequence: model.send(sequence, BEGIN) for sequence in (1, 2)}
    requests = [FakeRequest({}, sequence=sequence) for sequence in (2, 1)]

    assert model.replicas.execute(requests) is None

    assert [cast(Any, request.answers.get_nowait()) for request in requests] == [begun[2], begun[1]]


def test_after_the_runtimes_end_a_sequence_goes_elsewhere() -> None:
    """If the runtime of a sequence's device has ended, the next step is sent to another device.

    The sequence may begin again on any device that has a runtime.
    """
    model = Devices(2)
    home = model.send(1, BEGIN)
    model.kill(home)

    assert model.send(1) == 1 - home
    assert model.send(2, BEGIN) == 1 - home
    model.all[home].session.attachment = model.all[1 - home].session.attachment
    model.all[home].seconds = 1.0
    assert model.send(1, BEGIN) == home
    assert model.send(1) == home


def test_a_sequence_of_an_earlier_runtime_is_lost_until_it_begins_again() -> None:
    """When the device of a sequence has a new runtime, the sequence is lost, and its steps must be refused.

    These steps do not make it known again. Only a first step does.
    """
    model = Devices(1)
    model.send(1, BEGIN)
    homes = model.process.homes
    assert homes is not None
    now = cast(Any, model.all[0].session).attachment.since = time.monotonic()

    assert [model.send(1), model.send(1, FINISH)] == [0, 0]
    assert homes.is_lost(1, now)
    model.send(1, BEGIN)
    assert not homes.is_lost(1, now)
    assert not homes.is_lost(2, now)


def test_a_first_step_that_waited_for_a_runtime_takes_its_sequence_along() -> None:
    """The first step of a sequence has waited, because its device had no runtime, and is submitted to another device.

    Later steps of the sequence are then sent to this device.
    """
    model = Devices(2)
    home = model.send(1, BEGIN)
    model.kill(home)
    waited = ClientRequest(FakeRequest({}, sequence=1, flags=BEGIN), ArrivalTime.now())

    assert model.replicas.submit(waited)

    assert model.process.homes is not None
    assert model.process.homes.find(1, -1) == 1 - home
    assert model.send(1) == 1 - home


def test_a_request_without_an_id_reaches_a_replica() -> None:
    """A request without an id goes to a replica, which refuses it with the reason."""
    assert Devices(2).send(0) in (0, 1)

"""Which device's replica answers a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rsrv.stub.connection import Rejected
from rsrv.stub.replicas import ModelReplica, Replicas
from rsrv.stub.session import Session
from rsrv.wire.socket import Closed


@dataclass
class FakeReplica:
    """Answers with its device's number."""

    device: int
    devices: int
    seconds: float = 1.0
    closed: bool = False
    asked: int = 0
    meters: Any = None
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        attachment = SimpleNamespace(direct=SimpleNamespace(devices=self.devices))
        self.session = cast(Session, SimpleNamespace(attachment=attachment))

    @property
    def ready(self) -> bool:
        return self.seconds < inf

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        self.asked += len(requests)
        return [self.device] * len(requests)

    def answers_in_s(self) -> float:
        return self.seconds

    def guard_hooks(self) -> None: ...

    def close(self) -> None:
        self.closed = True


def made(
    devices: int, name: str = "m", failing: dict[int, Exception] | None = None
) -> tuple[Replicas, list[Any]]:
    """Return a model's replicas, and the fakes by device; None for those that failed."""
    fakes: dict[int, FakeReplica] = {}

    def make(device: int) -> ModelReplica:
        if failing and device in failing:
            raise failing[device]
        fakes[device] = FakeReplica(device, devices)
        return fakes[device]

    return Replicas(make, name), [fakes.get(device) for device in range(devices)]


def home_of(replicas: Replicas) -> int:
    (device,) = replicas.execute([object()]) or []
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


@pytest.mark.parametrize("error", [Closed("it ended"), ValueError("a fault")])
def test_a_further_device_that_fails_is_left_out(error: Exception) -> None:
    """The others serve the model, and its stub is ready."""
    replicas, fakes = made(3, failing={1: error})
    for busy in (0, 2):
        fakes[0].seconds = fakes[2].seconds = 1.0
        fakes[busy].seconds = 9.0
        assert replicas.execute([object()]) == [2 - busy]


def test_a_bundle_that_the_first_device_rejects_is_not_tried_elsewhere() -> None:
    """The reason is that of the first device."""
    with pytest.raises(Rejected, match="no such module"):
        made(2, failing={0: Rejected("no such module")})


def test_one_device_costs_a_request_nothing() -> None:
    """With one device, Triton's call goes to its replica directly."""
    replicas, (only,) = made(1)
    assert replicas.execute == only.execute


def test_all_replicas_end_with_their_model() -> None:
    """None keeps its connections or threads."""
    replicas, fakes = made(3)
    replicas.close()
    assert all(one.closed for one in fakes)

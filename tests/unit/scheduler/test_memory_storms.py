"""A model whose executions never find memory, among others that do."""

from __future__ import annotations

from collections import Counter

import pytest

from rsrv.scheduler.events import Event, ExecutionFinished, Outcome
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import program


class _Storm(Device):
    """A device on which executions of `bad` find no memory. If `alone` is True, the retries of `bad` find memory."""

    bad = "bad"
    alone = False

    def later(self, at: float, event: Event) -> None:
        if isinstance(event, ExecutionFinished):
            execute = self.executing[event.number]
            if execute.model == self.bad and not (self.alone and execute.again):
                event = ExecutionFinished(event.number, event.seconds, "no memory", True)
        super().later(at, event)

    def answers(self) -> Counter[str]:
        finishes = self.ended.values()
        return Counter(
            self.requests[finish.request].model for finish in finishes if finish.outcome is Outcome.ANSWERED
        )


def storm_of(discipline: str = "fair", depth: int = 1) -> _Storm:
    device = _Storm(SchedulerSettings(discipline=discipline, depth=depth), validate_every=100)
    for name in ("bad", "a", "b", "c"):
        device.model(program(name), load=0.1)
    return device


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_a_model_that_never_finds_memory_does_not_stop_the_others(discipline: str, depth: int) -> None:
    """A model that never finds memory does not stop other models.

    Between two retries, the other models are loaded again and execute for four times as long as these loads take.
    """
    device = storm_of(discipline, depth)
    device.saturate(["bad", "a", "b", "c"])
    device.run(3.0)

    assert sum(device.answers().values()) > 1_500
    assert device.loads["a"] <= 1 + 3.0 / (5 * 0.3)
    assert not device.answers()["bad"]


def test_a_model_that_finds_memory_only_alone_is_served_beside_others() -> None:
    """Each execution of a model finds memory only in its retry, for which all other models are evicted.

    The model is served in its turn. No request fails, and the other models are served as well.
    """
    device = storm_of()
    device.alone = True
    device.saturate(["bad", "a", "b", "c"])
    device.run(6.0)

    assert device.answers()["bad"] >= 3
    assert all(device.answers()[name] > 1000 for name in "abc")


def test_a_model_whose_second_try_evicted_nothing_does_not_wait() -> None:
    """If a retry evicted only idle models, the next execution of the model does not wait."""
    device = storm_of()
    device.alone = True
    device.clients(["bad"], think=0.0)
    device.run(1.0)

    assert device.answers()["bad"] > 300

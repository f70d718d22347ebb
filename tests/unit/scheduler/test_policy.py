"""Changes of one model's policy while it serves."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import CallerError, Outcome, PolicyChanged, Reason
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, executions, program

COST = {(0, 1): 0.010}


def test_shares_follow_a_changed_weight() -> None:
    """Two models with equal weights get half of the device each.

    When one has three times the weight, it gets three quarters.
    """
    device = Device()
    for name in "ab":
        device.model(program(name, COST))
    device.saturate("ab")
    device.run(2.0)
    assert device.got["a"] == pytest.approx(1.0, abs=0.03)
    device.send(PolicyChanged("a", weight=3.0))
    device.run(6.0)

    assert device.got["a"] == pytest.approx(1.0 + 3.0, abs=0.05)


@pytest.mark.parametrize(("low", "high"), [(0.99, 1.01), (0.1, 10.0)])
@pytest.mark.parametrize("every", [0.003, 0.05])
def test_frequent_changes_of_a_weight_cost_no_model_its_share(low: float, high: float, every: float) -> None:
    """A model's weight alternates between a small and a large value.

    It still gets half of the device, as the other model does.
    """
    device = Device(validate_every=50)
    for name in "ab":
        device.model(program(name, {(0, 1): 0.001}))
    device.saturate("ab")
    for step in range(int(4.0 / every)):
        device.run(step * every)
        device.send(PolicyChanged("a", weight=high if step % 2 else low))

    assert device.got["a"] == pytest.approx(2.0, abs=0.1)


def test_a_model_whose_weights_are_elsewhere_has_another_weight_too() -> None:
    """A weight that changes while the model's weights load applies when they are resident."""
    device = Device()
    device.model(program("a", COST), load=1.0, resident=False)
    device.model(program("b", COST))
    device.saturate("ab")
    device.send(PolicyChanged("a", weight=4.0))
    device.run(2.0)
    before = dict(device.got)
    device.run(7.0)

    assert device.got["a"] - before["a"] == pytest.approx(4.0, abs=0.1)


def test_requests_are_held_back_as_long_as_a_changed_delay_says(machine: Driver) -> None:
    """After a change of `max_delay`, a request waits for others for a tenth of a second.

    After a change to 0, it executes at once.
    """
    machine.add(program("a"))
    machine.send(PolicyChanged("a", max_delay=0.1))
    assert not executions(machine.arrive(machine.request()))
    assert machine.scheduler.next_wakeup() == pytest.approx(0.1)

    assert executions(machine.send(PolicyChanged("a", max_delay=0.0)))


def test_a_queue_that_became_too_short_keeps_what_waits(machine: Driver) -> None:
    """If `max_queue_depth` falls below the number of waiting requests, these requests stay.

    New requests are refused until fewer requests wait than allowed.
    """
    machine.add(program("a", COST, max_queue_depth=5))
    requests = machine.requests_of(5)
    machine.arrive(*requests)
    machine.send(PolicyChanged("a", max_queue_depth=2))
    late = machine.request()
    machine.arrive(late)
    machine.finish()
    machine.finish()
    again = machine.request()
    machine.arrive(again)
    machine.finish()
    in_time = machine.request()
    machine.arrive(in_time)
    machine.finish_all()

    assert machine.outcome(late) is Reason.QUEUE_FULL
    assert machine.outcome(again) is Reason.QUEUE_FULL
    assert all(machine.outcome(request) is Outcome.ANSWERED for request in (*requests, in_time))


def test_a_full_queue_refuses_no_request_that_waited_for_the_runtime(machine: Driver) -> None:
    """Requests that an earlier runtime had accepted are queued even beyond the limit. Later requests are refused."""
    machine.add(program("a", COST, max_queue_depth=2))
    waited = [machine.request(accepted=True) for _ in range(5)]
    machine.arrive(*waited)
    late = machine.request()
    machine.arrive(late)
    machine.finish_all()

    assert machine.outcome(late) is Reason.QUEUE_FULL
    assert all(machine.outcome(request) is Outcome.ANSWERED for request in waited)


def test_what_is_not_named_stays(machine: Driver) -> None:
    """A change of policy changes only the values that it names, and the history records it."""
    machine.add(program("a", max_queue_depth=1, weight=2.0))
    machine.send(PolicyChanged("a", max_delay=0.5))
    requests = machine.requests_of(2)
    machine.arrive(*requests)

    assert machine.outcome(requests[1]) is Reason.QUEUE_FULL
    assert machine.scheduler.history("a")[-3].details["why"] == "max_delay 0.5"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (PolicyChanged("a", weight=0.0), "weight must be above 0"),
        (PolicyChanged("a", max_delay=-1.0), "max_delay must not be negative"),
        (PolicyChanged("a", max_queue_depth=0), "max_queue_depth must be at least 1"),
        (PolicyChanged("b"), "there is no model 'b'"),
    ],
)
def test_impossible_policies_are_refused(machine: Driver, changed: PolicyChanged, words: str) -> None:
    """An impossible value is refused with a reason, and nothing changes."""
    machine.add(program("a"))
    history = machine.scheduler.history("a")
    with pytest.raises(CallerError, match=words):
        machine.scheduler.handle(changed, 0.0)

    assert machine.scheduler.history("a") == history

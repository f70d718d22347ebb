"""The slowest requests of a model: which ones are recorded, and where their time went."""

from math import inf

import pytest

from rsrv.scheduler.batching import VariantCosts
from rsrv.scheduler.events import Outcome, Pause, Request
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.slowest import MAX_SLOWEST, WINDOW_S, Ending, SlowestRequests, SlowRequest
from rsrv.scheduler.variant_queue import LiveRequest, VariantQueue
from tests.unit.scheduler.driver import Driver, program


@pytest.fixture
def machine() -> Driver:
    """A device that serves models in the order of arrival."""
    return Driver(SchedulerSettings(discipline="fifo", weight_budget_bytes=100))


def slowest(machine: Driver, model: str) -> SlowRequest:
    return machine.scheduler.slowest(model, machine.now)[0]


def parts(slow: SlowRequest) -> tuple[float, ...]:
    wait = slow.wait
    return tuple(round(part, 6) for part in (wait.weights, wait.peers, wait.others, wait.executing))


def test_a_request_waits_for_weights_that_were_evicted_for_another_model(machine: Driver) -> None:
    """The time that a request waits for a load is attributed to the weights.

    The record of the request names when, and for which model, the weights were evicted.
    """
    machine.add(program("a"))
    machine.add(program("b"), resident=False)
    machine.now = 1.0
    machine.arrive(machine.request("b"))
    machine.load("b", seconds=0.2)
    machine.finish(seconds=0.001)
    machine.now = 2.0
    machine.arrive(machine.request("a", rows=3))
    machine.load("a", seconds=0.5)
    machine.finish(seconds=0.004)

    slow = slowest(machine, "a")
    assert (slow.ending.outcome, slow.request.rows, slow.wait.arrived) == (Outcome.ANSWERED, 3, 2.0)
    assert parts(slow) == (0.5, 0.0, 0.0, 0.004)
    assert slow.wait.evicted is not None
    assert (slow.wait.evicted.at, slow.wait.evicted.details["model"]) == (1.0, "b")
    assert slow.ending.execute is not None
    assert slow.ending.execute.rows == 3


def test_a_request_waits_behind_another_model(machine: Driver) -> None:
    """The time of another model's execution is attributed to other requests. The record names that model."""
    machine.add(program("a", weight_bytes=10), program("b", weight_bytes=10))
    machine.arrive(machine.request("b"))
    machine.now = 0.25
    machine.arrive(machine.request("a"))
    machine.finish(seconds=0.75)
    machine.finish(seconds=0.125)

    slow = slowest(machine, "a")
    assert (slow.seconds, slow.ending.behind) == (0.875, ("b",))
    assert parts(slow) == (0.0, 0.0, 0.75, 0.125)
    assert slow.wait.evicted is None
    assert slowest(machine, "b").ending.behind == ()


def test_a_request_waits_for_others_to_join(machine: Driver) -> None:
    """The time in which `max_delay` keeps a request back is attributed to its peers. The delay ends when the batch is full."""
    machine.add(program("a", {(0, 1): 0.001, (0, 2): 0.001}, weight_bytes=10, max_delay=0.5))
    machine.arrive(machine.request("a"))
    machine.tick(0.5)
    machine.finish(seconds=0.001)
    assert parts(slowest(machine, "a")) == (0.0, 0.5, 0.0, 0.001)

    machine.now = 10.0
    machine.arrive(machine.request("a"))
    machine.now = 10.25
    machine.arrive(machine.request("a"))
    machine.finish(seconds=0.001)
    slow_requests = machine.scheduler.slowest("a", machine.now)
    assert [parts(slow) for slow in slow_requests[1:]] == [(0.0, 0.25, 0.0, 0.001), (0.0, 0.0, 0.0, 0.001)]


def test_a_pause_is_no_wait_for_weights(machine: Driver) -> None:
    """While an operator holds the model, the time is attributed to the pause, even if the weights are absent as well."""
    machine.add(program("a"), resident=False)
    machine.pause(Pause.HOLD, "a")
    machine.arrive(machine.request("a"))
    machine.now = 2.0
    machine.pause(None, "a")
    machine.load("a", seconds=0.5)
    machine.finish(seconds=0.004)

    slow = slowest(machine, "a")
    assert (slow.wait.paused, parts(slow)) == (2.0, (0.5, 0.0, 0.0, 0.004))


def test_the_latest_of_many_pauses_is_known(machine: Driver) -> None:
    """After many short pauses, a request waits for another model and then for a pause. Both times are recorded."""
    machine.add(program("a", weight_bytes=10), program("b", weight_bytes=10))
    for _ in range(20):
        machine.pause(Pause.HOLD, "a")
        machine.pause(None, "a")
    machine.arrive(machine.request("b"))
    machine.arrive(machine.request("a"))
    machine.now = 3.0
    machine.pause(Pause.HOLD, "a")
    machine.finish(seconds=0.0)
    machine.now = 5.0
    machine.pause(None, "a")
    machine.finish(seconds=0.5)

    slow = slowest(machine, "a")
    assert (slow.wait.paused, parts(slow)) == (2.0, (0.0, 0.0, 3.0, 0.5))


def test_a_request_whose_deadline_passed_is_kept(machine: Driver) -> None:
    """A request that expired without an execution is recorded with what it waited for."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request("a", deadline=0.25))
    machine.tick(0.25)

    slow = slowest(machine, "a")
    assert (slow.ending.outcome, slow.ending.execute, slow.seconds) == (Outcome.EXPIRED, None, 0.25)
    assert parts(slow) == (0.25, 0.0, 0.0, 0.0)


def test_requests_are_found_by_the_tags_of_their_clients(machine: Driver) -> None:
    """A search by a client's tag returns all requests with this tag. A search by the tag 0 alone returns nothing.

    For requests in progress, the times end now.
    """
    machine.add(program("a", weight_bytes=10), program("b", weight_bytes=10))
    done, runs, waits = (machine.request(model)._replace(tag=7) for model in "aab")
    machine.arrive(done)
    machine.finish(seconds=0.001)
    machine.arrive(runs)
    machine.arrive(waits, machine.request("b"))
    machine.now += 2.0

    entries = machine.scheduler.find_requests(7, None, machine.now)
    assert [slow.request for slow in entries] == [done, runs, waits]
    assert [slow.ending.outcome for slow in entries] == [Outcome.ANSWERED, None, None]
    assert [slow.ending.execute is None for slow in entries] == [False, False, True]
    assert (parts(entries[1]), parts(entries[2])) == ((0.0, 0.0, 0.0, 2.0), (0.0, 0.0, 2.0, 0.0))
    assert entries[2].ending.behind == ("a",)
    assert machine.scheduler.find_requests(0, done.id, machine.now) == entries[:1]
    assert machine.scheduler.find_requests(0, None, machine.now) == []


def offer(slow_requests: SlowestRequests, end: float, seconds: float) -> bool:
    """Record a request that ended at `end` after `seconds`, unless it is faster than all recorded ones.

    Return whether it was slow enough.
    """
    arrived = end - seconds
    if not arrived < slow_requests.latest_arrival(end):
        return False
    ending = Ending(end, arrived, seconds, -inf, (), (), Outcome.ANSWERED, None, (), None)
    entry = LiveRequest(Request(int(end), "a", 0, 1), (0, 0.0, 0), VariantQueue(0, VariantCosts({})), arrived)
    slow_requests.add([entry], ending)
    return True


def test_the_slowest_hundred_are_kept() -> None:
    """The hundred slowest requests are recorded.

    A request that is faster than all of them is not recorded. A slower request replaces the fastest one.
    """
    slow_requests = SlowestRequests()
    for second in range(MAX_SLOWEST):
        assert offer(slow_requests, second, 0.5 + second / 1000)

    assert not offer(slow_requests, MAX_SLOWEST, 0.25)
    assert offer(slow_requests, MAX_SLOWEST, 0.75)
    seconds = [slow.seconds for slow in slow_requests.read(MAX_SLOWEST)]
    assert (len(seconds), seconds[0], seconds[-1]) == (MAX_SLOWEST, 0.75, 0.501)


def test_requests_are_dropped_after_an_hour() -> None:
    """Requests are dropped an hour after their end. Then any other request, however fast, may take the free place."""
    slow_requests = SlowestRequests()
    for second in range(MAX_SLOWEST):
        offer(slow_requests, second, 10.0)

    assert not offer(slow_requests, WINDOW_S - 1, 0.5)
    assert offer(slow_requests, WINDOW_S, 0.5)
    assert [slow.seconds for slow in slow_requests.read(WINDOW_S)][-2:] == [10.0, 0.5]
    assert slow_requests.read(2 * WINDOW_S + 1) == []
    assert slow_requests.review_at == inf

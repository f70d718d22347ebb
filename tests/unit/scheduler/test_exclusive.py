"""Requests that execute alone, because they may end the process. If they do, no other request is suspected."""

from rsrv.scheduler.events import LoadWeights, Outcome, Prefetch
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, every_discipline, executions, ids, program


def test_a_request_that_executes_alone_shares_no_batch(machine: Driver) -> None:
    """A request that executes alone shares no batch: requests before it share one, and those after it another one."""
    machine.add(program("a", {(0, 1): 0.001, (0, 4): 0.0011}))
    machine.arrive(machine.request())
    before = machine.requests_of(2)
    alone = machine.request(exclusive=True)
    after = machine.requests_of(2)
    machine.arrive(*before, alone, *after)

    started = machine.finish_all()

    assert [execution.requests for execution in started[1:]] == [ids(before), ids([alone]), ids(after)]
    assert [execution.exclusive for execution in started[1:]] == [False, True, False]


def test_a_request_that_executes_alone_waits_for_the_executions_in_flight() -> None:
    """With a depth of 2, nothing is launched together with a request that executes alone, before it or after it."""
    machine = Driver(SchedulerSettings(depth=2, launch_ahead_ms=100.0))
    machine.add(program("a"), program("b"))
    machine.arrive(machine.request("a"), machine.request("a", exclusive=True))
    assert len(machine.executing) == 1
    machine.arrive(machine.request("a"))
    assert len(machine.executing) == 1

    (execute,) = executions(machine.finish())
    assert execute.exclusive
    assert not executions(machine.arrive(machine.request("b"), machine.request("a")))
    assert machine.scheduler.next_wakeup() is None

    assert len(executions(machine.finish())) == 2


def test_a_request_that_executes_alone_waits_for_a_load_and_lets_no_other_begin() -> None:
    """A request that executes alone waits for a load in progress. After that, it executes before another load begins."""
    machine = Driver(SchedulerSettings())
    machine.add(program("a"))
    machine.add(program("b"), program("c"), resident=False)
    machine.send(Prefetch("b"))
    assert not executions(machine.arrive(machine.request("a", exclusive=True), machine.request("c")))

    out = machine.load("b")

    assert [execution.model for execution in executions(out)] == ["a"]
    assert not any(isinstance(instruction, LoadWeights) for instruction in out)
    assert any(isinstance(instruction, LoadWeights) for instruction in machine.finish())
    machine.settle()
    assert machine.scheduler.snapshot().queued == 0


def test_a_request_that_executes_alone_waits_for_a_warm_up(machine: Driver) -> None:
    """A request that executes alone waits for a warm-up, because untried code may end the process as well."""
    machine.add(program("a"))
    machine.add(program("b"), warm_up=True)
    assert not executions(machine.arrive(machine.request("a", exclusive=True)))

    (execute,) = executions(machine.warm_up_ends("b"))

    assert execute.exclusive


def test_others_go_on_if_a_request_that_executes_alone_leaves() -> None:
    """If requests for which the device is kept free are cancelled or expire, other requests execute."""
    machine = Driver(SchedulerSettings(discipline="fifo", depth=2, launch_ahead_ms=100.0))
    machine.add(program("a"), program("b"))
    machine.arrive(machine.request("a"))
    cancelled = machine.request("a", exclusive=True)
    expiring = machine.request("a", exclusive=True, deadline=machine.now + 0.0005)
    machine.arrive(cancelled, expiring, machine.request("b"))
    assert len(machine.executing) == 1
    machine.cancel(cancelled)
    assert len(machine.executing) == 1

    wakeup = machine.scheduler.next_wakeup()
    assert wakeup is not None
    (execute,) = executions(machine.tick(wakeup))

    assert execute.model == "b"
    assert machine.outcome(expiring) is Outcome.EXPIRED


def test_company_is_not_waited_for() -> None:
    """A request that executes alone is not delayed by its model's `max_delay`."""
    machine = Driver(SchedulerSettings())
    machine.add(program("a", max_delay=1.0))

    assert executions(machine.arrive(machine.request(exclusive=True)))


@every_discipline
def test_a_crowd_of_requests_that_execute_alone_starves_no_other_model(discipline: str) -> None:
    """If all requests of a model execute alone, another model still takes turns with it."""
    machine = Driver(SchedulerSettings(discipline=discipline, depth=2))
    machine.add(program("a", {(0, 1): 0.001}), program("b", {(0, 1): 0.001}))
    pairs = [(machine.request("a", exclusive=True), machine.request("b")) for _ in range(20)]
    machine.arrive(*[request for pair in pairs for request in pair])

    started = [instruction.model for instruction in machine.finish_all()]

    assert started.count("a") == started.count("b") == 20
    assert 8 <= started[:20].count("a") <= 12


def test_the_budget_falls_while_the_device_is_kept() -> None:
    """While the device is kept free for a request, a smaller budget evicts the weights of the request's model.

    The weights are loaded again, and the request executes.
    """
    machine = Driver(SchedulerSettings(weight_budget_bytes=300))
    machine.add(program("a"))
    machine.add(program("b"), resident=False)
    machine.send(Prefetch("b"))
    request = machine.request("a", exclusive=True)
    machine.arrive(request)

    machine.change(weight_budget_bytes=0)
    machine.settle()

    assert machine.outcome(request) is Outcome.ANSWERED

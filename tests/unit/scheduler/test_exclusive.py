"""Requests that execute alone: they may end the process, and nothing else of the device shall be suspected then."""

from rsrv.scheduler.events import LoadWeights, Outcome, Prefetch
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, every_discipline, executions, ids, program


def test_a_request_that_executes_alone_shares_no_batch(machine: Driver) -> None:
    """Requests before it share a batch, those after it another."""
    machine.add(program("a", {(0, 1): 0.001, (0, 4): 0.0011}))
    machine.arrive(machine.request())
    before = machine.requests_of(2)
    alone = machine.request(exclusive=True)
    after = machine.requests_of(2)
    machine.arrive(*before, alone, *after)

    started = machine.finish_all()

    assert [one.requests for one in started[1:]] == [ids(before), ids([alone]), ids(after)]
    assert [one.exclusive for one in started[1:]] == [False, True, False]


def test_a_request_that_executes_alone_waits_for_the_executions_in_flight() -> None:
    """With a depth of 2, nothing is launched ahead of it, and nothing beside it."""
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
    """The weights of another model are on the link: after them, it goes first."""
    machine = Driver(SchedulerSettings())
    machine.add(program("a"))
    machine.add(program("b"), program("c"), resident=False)
    machine.send(Prefetch("b"))
    assert not executions(machine.arrive(machine.request("a", exclusive=True), machine.request("c")))

    out = machine.load("b")

    assert [one.model for one in executions(out)] == ["a"]
    assert not any(isinstance(one, LoadWeights) for one in out)
    assert any(isinstance(one, LoadWeights) for one in machine.finish())
    machine.settle()
    assert machine.scheduler.snapshot().queued == 0


def test_a_request_that_executes_alone_waits_for_a_warm_up(machine: Driver) -> None:
    """A model that was just built is being warmed up: untried code, which may end the process itself."""
    machine.add(program("a"))
    machine.add(program("b"), warm_up=True)
    assert not executions(machine.arrive(machine.request("a", exclusive=True)))

    (execute,) = executions(machine.warm_up_ends("b"))

    assert execute.exclusive


def test_others_go_on_if_a_request_that_executes_alone_leaves() -> None:
    """It is cancelled, or expires, while the device is kept for it."""
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
    """A model that holds requests back for company does not hold this one back."""
    machine = Driver(SchedulerSettings())
    machine.add(program("a", max_delay=1.0))

    assert executions(machine.arrive(machine.request(exclusive=True)))


@every_discipline
def test_a_crowd_of_requests_that_execute_alone_starves_no_other_model(discipline: str) -> None:
    """Two models take turns, although every request of the one executes alone."""
    machine = Driver(SchedulerSettings(discipline=discipline, depth=2))
    machine.add(program("a", {(0, 1): 0.001}), program("b", {(0, 1): 0.001}))
    pairs = [(machine.request("a", exclusive=True), machine.request("b")) for _ in range(20)]
    machine.arrive(*[request for pair in pairs for request in pair])

    started = [one.model for one in machine.finish_all()]

    assert started.count("a") == started.count("b") == 20
    assert 8 <= started[:20].count("a") <= 12


def test_the_budget_falls_while_the_device_is_kept() -> None:
    """The weights are evicted before their request has executed: they load again, and it executes."""
    machine = Driver(SchedulerSettings(weight_budget_bytes=300))
    machine.add(program("a"))
    machine.add(program("b"), resident=False)
    machine.send(Prefetch("b"))
    request = machine.request("a", exclusive=True)
    machine.arrive(request)

    machine.change(weight_budget_bytes=0)
    machine.settle()

    assert machine.outcome(request) is Outcome.ANSWERED

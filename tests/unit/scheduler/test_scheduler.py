"""Requests from their arrival to their end: one scenario per test shows which instructions follow from which events."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import (
    Execute,
    ExecutionFinished,
    Finish,
    LoadWeights,
    ModelAdded,
    Outcome,
    Reason,
    Request,
    RequestsArrived,
    RequestsCancelled,
    WeightsLoaded,
)
from tests.unit.scheduler.driver import Driver, executions, ids, program

# --- one request, many requests --------------------------------------------------------------------------


def test_life_of_one_request(machine: Driver) -> None:
    """A model is added, a request arrives, the weights are loaded, it executes and is answered."""
    assert machine.send(ModelAdded(program("a"))) == []

    request = machine.request("a")
    assert machine.arrive(request) == [LoadWeights("a", 1)]
    started = machine.send(WeightsLoaded("a", 1, 0.5), after=0.5)

    assert started == [Execute(1, "a", variant=0, size=1, rows=1, requests=(request.id,))]
    assert machine.send(ExecutionFinished(1, 0.001), after=0.001) == [Finish(request.id, Outcome.ANSWERED)]


def test_arrivals_of_one_event_run_together(machine: Driver) -> None:
    """31 requests of one row that arrive in one event are queued before the next instruction, so they share an execution."""
    machine.add(program("a"))
    requests = machine.requests_of(31)

    started = machine.arrive(*requests)

    assert started == [Execute(1, "a", 0, size=32, rows=31, requests=ids(requests))]


def test_64_singles_are_two_full_executions(machine: Driver) -> None:
    """64 requests of one row are two executions. The second one starts in the answer to the end of the first."""
    machine.add(program("a"))
    requests = machine.requests_of(64)
    machine.arrive(*requests)

    out = machine.finish()

    assert out == [
        *(Finish(request.id, Outcome.ANSWERED) for request in requests[:32]),
        Execute(2, "a", 0, size=32, rows=32, requests=ids(requests[32:])),
    ]


def test_work_that_arrives_while_the_device_is_busy_is_coalesced(machine: Driver) -> None:
    """Requests that arrive in several events during an execution share the next execution."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    for _ in range(10):
        machine.arrive(machine.request())

    [second] = executions(machine.finish())

    assert (second.size, second.rows) == (32, 10)


def test_model_that_does_not_coalesce_runs_one_by_one(machine: Driver) -> None:
    """If a model does not coalesce, each request executes alone, at the smallest size that has enough rows."""
    machine.add(program("a", {(0, 1): 0.001, (0, 4): 0.001}, coalesce=False))
    machine.arrive(*machine.requests_of(2), machine.request(rows=3))

    started = machine.finish_all()

    assert [(execution.size, execution.rows) for execution in started] == [(1, 1), (1, 1), (4, 3)]


def test_request_without_rows_is_answered(machine: Driver) -> None:
    """A request without rows is executed at the smallest size, and is answered."""
    machine.add(program("a"))
    request = machine.request(rows=0)

    assert executions(machine.arrive(request)) == [Execute(1, "a", 0, size=1, rows=0, requests=(request.id,))]

    machine.finish()
    assert machine.outcome(request) is Outcome.ANSWERED


def test_failed_execution_fails_its_requests_only(machine: Driver) -> None:
    """If an execution fails, all its requests fail with the error. Waiting requests execute next."""
    machine.add(program("a"))
    first, second = machine.request(), machine.request()
    machine.arrive(first)
    machine.arrive(second)

    out = machine.finish(error="device fault")

    assert out[0] == Finish(first.id, Outcome.FAILED, error="device fault")
    assert executions(out)[0].requests == (second.id,)


# --- refusals, in the order of the checks -----------------------------------------------------------------


def test_checks_come_in_their_order(machine: Driver) -> None:
    """Checks have a fixed order. A request with several faults is refused with the reason of the first check that fails."""
    machine.add(program("a", max_queue_depth=1), resident=False)
    machine.arrive(machine.request())
    past = machine.now
    wrong = [
        machine.request("nobody", 99, variant=7, deadline=past),
        machine.request("a", 99, variant=7, deadline=past),
        machine.request("a", 99, deadline=past),
        machine.request("a", 1, deadline=past),
        machine.request("a", 1),
    ]

    machine.arrive(*wrong)

    assert [machine.outcome(request) for request in wrong] == [
        Reason.UNKNOWN_MODEL,
        Reason.UNKNOWN_VARIANT,
        Reason.TOO_MANY_ROWS,
        Outcome.EXPIRED,
        Reason.QUEUE_FULL,
    ]


def test_row_limit_refuses_what_a_size_would_hold(machine: Driver) -> None:
    """If an execution may have at most 10 rows, a request of 11 rows is refused, even if size 32 exists."""
    machine.add(program("a", max_batch_rows=10))
    fits, does_not = machine.request(rows=10), machine.request(rows=11)

    machine.arrive(fits, does_not)

    assert machine.outcome(does_not) is Reason.TOO_MANY_ROWS
    assert machine.outcome(fits) is None


def test_row_limit_holds_after_a_warm_up(machine: Driver) -> None:
    """The limit of rows is the same after a warm-up has measured the costs."""
    machine.add(program("a", max_batch_rows=10), warm_up=True)
    machine.warm_up_ends("a")
    fits, does_not = machine.request(rows=10), machine.request(rows=11)

    machine.arrive(fits, does_not)

    assert machine.outcome(does_not) is Reason.TOO_MANY_ROWS
    assert machine.outcome(fits) is None
    assert machine.scheduler.snapshot().models["a"].max_rows == 10


def test_full_queue_says_when_to_retry(machine: Driver) -> None:
    """A full queue refuses a request with the time after which the client may retry.

    It is the remaining time of the running execution, here 2 ms, plus one batch of each model with waiting requests: `a`
    has 32 rows, which take 4 ms, and `b` has one row, which takes 1 ms.
    """
    machine.add(program("a", max_queue_depth=32), program("b"))
    machine.arrive(*machine.requests_of(32))
    machine.arrive(machine.request("b"))
    machine.tick(at=machine.now + 0.002)

    [*_, refused] = machine.arrive(*machine.requests_of(33))

    assert isinstance(refused, Finish)
    assert refused.reason is Reason.QUEUE_FULL
    assert refused.retry_after == pytest.approx(0.002 + 0.004 + 0.001)


def test_expired_requests_give_up_their_places(machine: Driver) -> None:
    """If all requests in a full queue have expired when new requests arrive, the queue accepts the new ones."""
    machine.add(program("a", max_queue_depth=2), resident=False)
    old = [machine.request(deadline=1.0) for _ in range(2)]
    machine.arrive(*old)
    machine.now = 1.0
    new = [machine.request() for _ in range(2)]

    machine.arrive(*new)

    assert [machine.outcome(request) for request in old] == [Outcome.EXPIRED] * 2
    assert [machine.outcome(request) for request in new] == [None] * 2


# --- deadlines and cancelling -----------------------------------------------------------------------------


def test_tick_expires_what_is_due(machine: Driver) -> None:
    """The next wake-up is at the earliest deadline in the queue. A tick at this time ends only the request with this deadline."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    late, soon, never = machine.request(deadline=5.0), machine.request(deadline=3.0), machine.request()
    machine.arrive(late, soon, never)

    assert machine.scheduler.next_wakeup() == 3.0
    assert machine.tick(at=3.0) == [Finish(soon.id, Outcome.EXPIRED)]
    assert machine.scheduler.next_wakeup() == 5.0


def test_deadlines_are_kept_after_most_requests_left(machine: Driver) -> None:
    """Of 200 requests, 150 are cancelled. Each of the others still ends exactly at its own deadline."""
    machine.add(program("a"), resident=False)
    requests = {1.0 + number * 37 % 200: machine.request() for number in range(200)}
    requests = {deadline: request._replace(deadline=deadline) for deadline, request in requests.items()}
    machine.arrive(*requests.values())
    remaining = dict([*requests.items()][::4])
    machine.cancel(*(request for deadline, request in requests.items() if deadline not in remaining))
    machine.arrive(machine.request())

    for deadline, request in sorted(remaining.items()):
        assert machine.scheduler.next_wakeup() == deadline
        assert machine.tick(at=deadline) == [Finish(request.id, Outcome.EXPIRED)]


def test_no_wakeup_without_deadlines(machine: Driver) -> None:
    """The scheduler needs no wake-up for executing requests, or for waiting ones without a deadline."""
    machine.add(program("a"))
    machine.arrive(machine.request(deadline=9.0))
    machine.arrive(machine.request(), machine.request(deadline=float("inf")))

    assert machine.scheduler.next_wakeup() is None


def test_request_that_expires_while_it_executes_is_answered(machine: Driver) -> None:
    """A request whose deadline passes during its execution is answered."""
    machine.add(program("a"))
    request = machine.request(deadline=machine.now + 0.0005)
    machine.arrive(request)

    machine.finish()

    assert machine.outcome(request) is Outcome.ANSWERED


def test_expired_at_the_moment_of_dispatch(machine: Driver) -> None:
    """A request whose deadline is the end of the running execution expires, and does not execute."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    due, alive = machine.request(deadline=machine.now + 0.001), machine.request()
    machine.arrive(due, alive)

    [second] = executions(machine.finish(seconds=0.001))

    assert second.requests == (alive.id,)
    assert machine.outcome(due) is Outcome.EXPIRED


def test_cancelled_while_queued(machine: Driver) -> None:
    """A cancelled waiting request ends at once, and the others keep their order."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    requests = machine.requests_of(5)
    machine.arrive(*requests)

    assert machine.cancel(requests[2]) == [Finish(requests[2].id, Outcome.CANCELLED)]

    [second] = executions(machine.finish())
    assert second.requests == ids([*requests[:2], *requests[3:]])


def test_cancel_of_anything_but_a_queued_request_is_ignored(machine: Driver) -> None:
    """Cancelling an executing, finished or unknown request does nothing, and the executing one is answered."""
    machine.add(program("a"))
    done, running = machine.request(), machine.request()
    machine.arrive(done)
    machine.finish()
    machine.arrive(running)

    assert machine.cancel(done, running) == []
    assert machine.send(RequestsCancelled((12345,))) == []
    machine.finish()
    assert machine.outcome(running) is Outcome.ANSWERED


def test_deadline_that_is_no_number_expires(machine: Driver) -> None:
    """A deadline of NaN, which compares with no time, counts as expired."""
    machine.add(program("a"))
    request = machine.request(deadline=float("nan"))

    assert machine.arrive(request) == [Finish(request.id, Outcome.EXPIRED)]


def test_answered_requests_do_not_pile_up_in_the_deadlines(machine: Driver) -> None:
    """10,000 answered requests with late deadlines leave almost nothing in the heap of deadlines."""
    machine.add(program("a"))
    for _ in range(10_000):
        machine.scheduler.handle(RequestsArrived((Request(1, "a", 0, 1, deadline=1e9),)), 1.0)
        [running] = machine.scheduler._running.values()
        machine.scheduler.handle(ExecutionFinished(running.execute.number, 0.001), 1.0)

    assert len(machine.scheduler._queues.deadlines) < 100


# --- order ------------------------------------------------------------------------------------------------


def test_requests_of_several_lengths_share_an_execution_where_that_costs_less(machine: Driver) -> None:
    """If all variants of a padded model cost the same, requests of two lengths share an execution of the longer variant."""
    costs = {(variant, size): 0.001 for variant in (0, 1) for size in (1, 8)}
    machine.add(program(costs=costs, padded=True))
    machine.arrive(machine.request(variant=1))
    requests = [machine.request(variant=variant) for variant in (0, 1, 0, 1)]
    machine.arrive(*requests)

    [shared] = executions(machine.finish())
    assert (shared.variant, shared.size, shared.rows) == (1, 8, 4)
    assert shared.requests == ids([requests[0], requests[2], requests[1], requests[3]])
    assert executions(machine.finish()) == []


def test_variants_of_a_model_pass_each_other_in_their_own_order(machine: Driver) -> None:
    """The first waiting request decides the variant of an execution.

    Later requests of the same variant join this execution, ahead of an earlier request of another variant.
    """
    costs = {(variant, size): 0.001 for variant in (0, 1) for size in (1, 8)}
    machine.add(program("a", costs))
    machine.arrive(machine.request(variant=1))
    requests = [machine.request(variant=variant) for variant in (0, 1, 0, 1)]
    machine.arrive(*requests)

    [_, second, third] = machine.finish_all()

    assert (second.variant, second.requests) == (0, ids([requests[0], requests[2]]))
    assert (third.variant, third.requests) == (1, ids([requests[1], requests[3]]))


def test_committed_requests_go_first(machine: Driver) -> None:
    """The sub-calls of two runs execute before older requests of their own model and of other models."""
    machine.add(program("a", {(0, 1): 0.001}), program("b", {(0, 1): 0.001}))
    machine.arrive(machine.request("a"))
    old_a, old_b = machine.request("a"), machine.request("b")
    first, second = machine.request("b", run=1), machine.request("b", run=2)
    machine.arrive(old_a, old_b, first, second)

    order = [execution.requests[0] for execution in machine.finish_all()[1:]]

    assert tuple(order) == ids([first, second, old_a, old_b])

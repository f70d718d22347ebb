"""The scheduler's estimates, statistics, histories and errors."""

from __future__ import annotations

from math import inf

import pytest

from rsrv.scheduler import invariants
from rsrv.scheduler.events import (
    CallerError,
    Event,
    ExecutionFinished,
    Finish,
    InvariantError,
    ModelAdded,
    Outcome,
    Pause,
    Program,
    Reason,
    Request,
    RequestsArrived,
    Tick,
    WeightsLoaded,
)
from rsrv.scheduler.history import MAX_RECORDS
from rsrv.scheduler.scheduler import Scheduler
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, executions, program

# --- estimates --------------------------------------------------------------------------------------------


def test_backlog_counts_what_runs_and_what_waits(machine: Driver) -> None:
    """The backlog has the rest of the running execution, 3 ms of 4 ms, and the time of 33 waiting rows, 4 ms + 1 ms."""
    machine.add(program("a"))
    machine.arrive(*machine.requests_of(32))
    machine.arrive(*machine.requests_of(33))
    began = machine.now

    backlog = machine.scheduler.backlog_seconds

    assert [backlog(began), backlog(began + 0.001)] == pytest.approx([0.009, 0.008])
    assert backlog(began + 1.0) == pytest.approx(0.005)


def test_backlog_at_depth_two_counts_executions_one_after_another() -> None:
    """Two executions of 1 ms are launched together. The backlog counts the second one from the end of the first one."""
    machine = Driver(SchedulerSettings(depth=2))
    machine.add(program("a", {(0, 1): 0.001}))
    machine.arrive(*machine.requests_of(2))
    began = machine.now
    backlog = [machine.scheduler.backlog_seconds(began), machine.scheduler.backlog_seconds(began + 0.0005)]
    machine.finish()
    backlog.append(machine.scheduler.backlog_seconds(machine.now + 0.0004))

    assert backlog == pytest.approx([0.002, 0.0015, 0.0006])


def test_the_latest_arrival_of_a_model_is_known(machine: Driver) -> None:
    """The scheduler knows the time of a model's latest request.

    For a model without requests, or an unknown one, it is -inf.
    """
    machine.add(program("a"), program("b"))
    machine.arrive(*machine.requests_of(2, "a"))
    machine.finish_all()
    machine.now += 1.0
    machine.arrive(*machine.requests_of(1, "a"))

    assert [machine.scheduler.last_arrival(model) for model in ("a", "b", "c")] == [machine.now, -inf, -inf]


def test_backlog_of_nothing_is_nothing(machine: Driver) -> None:
    """When all requests have ended, the backlog is exactly 0, without a rounding error."""
    machine.add(program("a", {(0, 1): 0.1, (0, 3): 0.17}), program("b"))
    machine.arrive(*machine.requests_of(50), *machine.requests_of(40, "b"))
    machine.finish_all()

    assert machine.scheduler.backlog_seconds(machine.now) == 0.0


def test_a_device_is_free_for_others_while_requests_wait_for_their_weights(machine: Driver) -> None:
    """While requests wait only for their model's weights, the device counts as idle for other models.

    While an execution is overdue, the device does not count as idle.
    """
    machine.add(program("a"), program("b"))
    machine.add(program("cold"), resident=False)
    until_idle = machine.scheduler.seconds_until_idle
    assert until_idle(machine.now) is None

    machine.arrive(*machine.requests_of(3, "cold"))
    assert machine.scheduler.backlog_seconds(machine.now) > 0
    assert until_idle(machine.now) is None
    machine.arrive(machine.request("b"))
    assert until_idle(machine.now) == pytest.approx(machine.scheduler.backlog_seconds(machine.now))
    late = until_idle(machine.now + 1.0)
    assert late is not None
    assert late > 0.99


def test_cost_follows_what_executions_took(machine: Driver) -> None:
    """The cost was 1 ms by the warm-up.

    After a sample of 2 ms, it is 1 + 0.2 * (2 - 1) = 1.2 ms. A failed execution has no effect.
    """
    machine.add(program("a", {(0, 1): 0.001}))
    machine.arrive(*machine.requests_of(2))
    machine.finish(seconds=0.002)
    machine.finish(seconds=9.0, error="device fault")

    machine.arrive(*machine.requests_of(1))

    assert machine.scheduler.backlog_seconds(machine.now) == pytest.approx(0.0012)


def test_learned_cost_changes_the_plan(machine: Driver) -> None:
    """Size 32 is slower than its warm-up said. After enough samples, requests of one row are executed one by one."""
    machine.add(program("a", {(0, 1): 0.001, (0, 32): 0.004}))
    sizes = set()
    for _ in range(30):
        machine.arrive(*machine.requests_of(8))
        [*running] = machine.executing.values()
        sizes.add(running[0].size)
        while machine.executing:
            [execution] = machine.executing.values()
            machine.finish(seconds=0.001 if execution.size == 1 else 0.020)
        last = running[0].size

    assert sizes == {1, 32}
    assert last == 1


# --- the view from outside ---------------------------------------------------------------------------------


def test_snapshot_counts(machine: Driver) -> None:
    """A snapshot counts 33 rows that run at sizes 32 and 1, and an expired, a refused, an executing and a waiting request."""
    machine.add(program("a", max_queue_depth=34), program("b"))
    machine.arrive(machine.request("b"))
    machine.arrive(*machine.requests_of(33), machine.request(deadline=machine.now + 0.0005))
    machine.arrive(machine.request("nobody"), machine.request())
    machine.tick(at=machine.now + 0.0005)
    machine.finish_all()
    machine.arrive(machine.request(), machine.request())

    snapshot = machine.scheduler.snapshot()
    a = snapshot.models["a"]

    assert a.sizes == {(0, 32): 1, (0, 1): 2}
    assert (a.dispatches, a.useful_rows, a.padded_rows) == (3, 34, 0)
    assert a.device_seconds == pytest.approx(0.005)
    assert (a.queued, a.executing) == (1, 1)
    assert a.outcomes == {
        Outcome.ANSWERED: 33,
        Outcome.REFUSED: 1,
        Outcome.EXPIRED: 1,
        Outcome.SHED: 0,
        Outcome.CANCELLED: 0,
        Outcome.FAILED: 0,
    }
    assert a.refused == {Reason.QUEUE_FULL: 1}
    assert a.costs == pytest.approx({(0, 1): 0.001, (0, 32): 0.004})
    assert (a.residency, a.loads) == ("resident", 0)
    assert snapshot.refused == {Reason.QUEUE_FULL: 1, Reason.UNKNOWN_MODEL: 1}
    assert (snapshot.arrived, snapshot.queued, snapshot.executing, snapshot.running) == (39, 1, 1, 1)


def test_snapshot_is_detached(machine: Driver) -> None:
    """A snapshot does not change when later events happen."""
    machine.add(program("a"))
    before = machine.scheduler.snapshot()
    machine.arrive(machine.request())
    machine.finish()

    assert before.models["a"].dispatches == 0
    assert before.models["a"].sizes == {}


def lines_of(machine: Driver) -> list[str]:
    return [str(record) for record in machine.scheduler.history("a")]


def test_history_of_a_short_life(machine: Driver) -> None:
    """The history of a model has its loads, their failures, and its removal. When the model is gone, so is its history."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request())
    machine.fail_load("a", "no such file")
    machine.arrive(machine.request())
    machine.tick(1.0)
    machine.arrive(machine.request())
    machine.load("a", seconds=0.5)
    machine.arrive(machine.request())
    machine.remove("a")

    assert lines_of(machine) == [
        "t=0.000000 added why=sizes [(0, 1), (0, 32)]",
        "t=0.000000 arrived requests=1 ids=[1]",
        "t=0.000000 weights queued why=demand",
        "t=0.000000 weights loading why=demand bytes=100",
        "t=0.000000 load failed why=no such file",
        "t=0.000000 weights absent why=not loaded bytes=100",
        "t=0.000000 weights backoff why=back off seconds=1.000000",
        "t=0.000000 refused not_loaded requests=1 ids=[2]",
        "t=1.000000 weights absent why=end of back-off",
        "t=1.000000 arrived requests=1 ids=[3]",
        "t=1.000000 weights queued why=demand",
        "t=1.000000 weights loading why=demand bytes=100",
        "t=1.500000 weights resident why=loaded seconds=0.500000",
        "t=1.500000 execute dispatch=1 variant=0 size=1 rows=1 requests=1 ids=[3]",
        "t=1.500000 arrived requests=1 ids=[4]",
        "t=1.500000 removed",
        "t=1.500000 refused unloaded requests=1 ids=[4]",
        "t=1.500000 weights evicting why=release",
    ]
    machine.finish()
    assert machine.scheduler.history("a") == []


def test_history_of_a_busy_model(machine: Driver) -> None:
    """The history of a model has arrivals, refusals, executions and their ends, with times, sizes and ids."""
    machine.add(program("a"))
    machine.now = 0.5
    machine.arrive(machine.request(rows=20), machine.request(deadline=0.25), machine.request(rows=99))
    machine.finish(seconds=0.004)

    assert lines_of(machine) == [
        "t=0.000000 added why=sizes [(0, 1), (0, 32)]",
        "t=0.000000 weights resident why=adopt bytes=100",
        "t=0.500000 expired on arrival requests=1 ids=[2]",
        "t=0.500000 refused too_many_rows requests=1 ids=[3]",
        "t=0.500000 arrived requests=1 ids=[1]",
        "t=0.500000 execute dispatch=1 variant=0 size=32 rows=20 requests=1 ids=[1]",
        "t=0.504000 answered dispatch=1 seconds=0.004000 size=32 rows=20 requests=1",
    ]


def test_history_is_bounded() -> None:
    """Old records of a history are dropped, except changes of the weights' state. Long lists of ids are cut."""
    machine = Driver()
    machine.add(program("a"))
    for _ in range(MAX_RECORDS):
        machine.pause(Pause.HOLD, "a")
        machine.pause(None, "a")
    machine.arrive(*machine.requests_of(20))

    lines = lines_of(machine)
    assert len(lines) == MAX_RECORDS + 1
    assert lines[0] == "t=0.000000 weights resident why=adopt bytes=100"
    assert lines[-2:] == [
        f"t=0.000000 arrived requests=20 ids={[*range(1, 17)]}",
        f"t=0.000000 execute dispatch=1 variant=0 size=32 rows=20 requests=20 ids={[*range(1, 17)]}",
    ]


# --- broken callers, broken machines -----------------------------------------------------------------------


def test_broken_callers_are_told_and_change_nothing(machine: Driver) -> None:
    """An event that contradicts earlier events raises an error, and changes nothing in the scheduler."""
    machine.add(program("a"))
    running, waiting = machine.request(), machine.request()
    machine.arrive(running)
    machine.arrive(waiting)
    before = (machine.scheduler.snapshot(), machine.scheduler.history("a"))
    fresh = machine.request()

    contradictions: list[tuple[Event, str]] = [
        (RequestsArrived((fresh, running)), "in use already"),
        (RequestsArrived((fresh, waiting)), "in use already"),
        (RequestsArrived((fresh, fresh)), "twice"),
        (RequestsArrived((Request(99, "a", 0, -1),)), "-1 rows"),
        (ExecutionFinished(7, 0.1), "execution 7 is not in flight"),
        (ModelAdded(program("a")), "added already"),
        (ModelAdded(program("b", {})), "no compiled size"),
        (ModelAdded(program("b", max_queue_depth=0)), "max_queue_depth"),
        (ModelAdded(program("b", max_batch_rows=0)), "max_batch_rows"),
        (ModelAdded(program("b", weight_bytes=-1)), "weight_bytes"),
        (ModelAdded(Program("b", {(0, 1): 1.0}, True, 1, weight=0.0)), "weight must be above 0"),
        (WeightsLoaded("a", 2, 0.1), "epoch 2"),
    ]
    for event, problem in contradictions:
        with pytest.raises(CallerError, match=problem):
            machine.scheduler.handle(event, machine.now)
    with pytest.raises(CallerError, match="no model 'b'"):
        machine.remove("b")
    with pytest.raises(CallerError, match="backwards"):
        machine.scheduler.handle(Tick(), machine.now - 1.0)

    assert (machine.scheduler.snapshot(), machine.scheduler.history("a")) == before
    machine.finish_all()
    assert machine.outcome(waiting) is Outcome.ANSWERED


def test_an_id_may_be_used_again_after_its_end(machine: Driver) -> None:
    """An id must be unique only among the requests in flight."""
    machine.add(program("a"))
    for _ in range(2):
        out = machine.scheduler.handle(RequestsArrived((Request(1, "a", 0, 1),)), 0.0)
        [execution] = executions(out)
        out = machine.scheduler.handle(ExecutionFinished(execution.number, 0.001), 0.0)

        assert out == [Finish(1, Outcome.ANSWERED)]


def test_broken_invariant_tells_the_history(machine: Driver) -> None:
    """If a counter is wrong, the check of the invariants raises an error with the model's history."""
    machine.add(program("a"))
    machine.arrive(machine.request())
    machine.scheduler._models["a"].queued += 1

    with pytest.raises(InvariantError, match="1 requests are counted as queued, but 0 wait") as caught:
        invariants.check(machine.scheduler)

    machine.scheduler._models["a"].queued -= 1
    assert caught.value.model == "a"
    assert "execute dispatch=1" in str(caught.value)
    assert isinstance(caught.value, AssertionError)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"discipline": "lifo"}, "must be one of"),
        ({"depth": 0}, "depth"),
    ],
)
def test_settings_are_checked(wrong: dict[str, object], problem: str) -> None:
    """A setting out of range is refused by name."""
    with pytest.raises(ValueError, match=problem):
        Scheduler(SchedulerSettings(**wrong))  # type: ignore[arg-type]

"""Models that an operator pauses: their waiting and later requests."""

from __future__ import annotations

import pytest

from rsrv.scheduler.events import (
    CallerError,
    EvictWeights,
    Execute,
    LoadWeights,
    Outcome,
    Pause,
    Paused,
    Pinned,
    Prefetch,
    Reason,
    WarmUp,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.driver import Driver, every_discipline, executions, ids, program

COST = {(0, 1): 0.010}
SINGLE = {(0, 1): 0.001}


def paused(driver: Driver, model: str = "a") -> Pause | None:
    return driver.scheduler.snapshot().models[model].paused


# --- hold ------------------------------------------------------------------------------------------------


def test_a_held_model_does_not_execute_until_it_goes_on(machine: Driver) -> None:
    """Requests of a held model wait, while other models are served. When it continues, they execute in their order."""
    machine.add(program("a", SINGLE), program("b", SINGLE))
    machine.pause(Pause.HOLD, "a")
    first, second = machine.request("a"), machine.request("a")
    machine.arrive(first)
    machine.arrive(second, machine.request("b"))
    machine.finish_all()
    assert machine.waiting.keys() == {first.id, second.id}
    assert paused(machine) is Pause.HOLD
    assert machine.scheduler.next_wakeup() is None

    machine.pause(None, "a")
    started = machine.finish_all()

    assert [execution.requests for execution in started] == [(first.id,), (second.id,)]
    assert paused(machine) is None


def test_what_executes_when_a_model_is_held_finishes(machine: Driver) -> None:
    """If a model is held, its executing request is answered, and the next one waits."""
    machine.add(program("a", SINGLE))
    first, second = machine.request(), machine.request()
    machine.arrive(first, second)
    machine.pause(Pause.HOLD, "a")
    machine.finish_all()

    assert machine.outcome(first) is Outcome.ANSWERED
    assert machine.outcome(second) is None


def test_a_held_model_is_not_launched_ahead() -> None:
    """A held model is not launched ahead: the second place on the device stays for other models."""
    driver = Driver(SchedulerSettings(depth=2, launch_ahead_ms=1000.0))
    driver.add(program("a", SINGLE), program("b", SINGLE))
    driver.pause(Pause.HOLD, "a")
    driver.arrive(*driver.requests_of(2, "a"), driver.request("b"))

    assert [execution.model for execution in driver.executing.values()] == ["b"]


def test_the_queue_of_a_held_model_has_its_limit(machine: Driver) -> None:
    """The queue limit of a held model applies: if two requests may wait, the third one is refused."""
    machine.add(program("a", max_queue_depth=2, paused=Pause.HOLD))
    requests = machine.requests_of(3)
    machine.arrive(*requests)

    assert [machine.outcome(request) for request in requests] == [None, None, Reason.QUEUE_FULL]


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_deadlines_and_cancellations_hold_while_a_model_does(discipline: str) -> None:
    """Requests of a held model expire at their deadlines, for which the scheduler requests a wake-up. They can be cancelled."""
    driver = Driver(SchedulerSettings(discipline=discipline))
    driver.add(program("a", paused=Pause.HOLD))
    due, cancelled, patient = driver.request(deadline=1.0), driver.request(), driver.request()
    driver.arrive(due, cancelled, patient)
    driver.cancel(cancelled)
    assert driver.scheduler.next_wakeup() == 1.0
    driver.tick(1.0)

    assert driver.outcome(due) is Outcome.EXPIRED
    assert driver.outcome(cancelled) is Outcome.CANCELLED
    assert driver.waiting.keys() == {patient.id}


def test_what_is_held_is_shed_and_leaves_the_costs_as_they_were() -> None:
    """Under `edf`, a request of a held model is shed as soon as it would be late even if the model continued at once.

    The model's measured costs do not change.
    """
    driver = Driver(SchedulerSettings(discipline="edf"))
    driver.add(program("a", SINGLE))
    driver.arrive(driver.request())
    driver.finish(seconds=0.002)
    before = driver.scheduler.snapshot().models["a"].costs
    driver.pause(Pause.HOLD, "a")
    request = driver.request(deadline=driver.now + 1.0)
    driver.arrive(request)
    wakeup = driver.scheduler.next_wakeup()
    assert wakeup is not None
    driver.tick(wakeup)

    assert driver.outcome(request) is Outcome.SHED
    assert driver.scheduler.snapshot().models["a"].costs == before


def test_the_weights_of_a_held_model_are_not_loaded_for_it(machine: Driver) -> None:
    """The weights of a held model are not loaded for its requests before it continues."""
    machine.add(program("a"), resident=False)
    machine.pause(Pause.HOLD, "a")
    request = machine.request()
    assert machine.arrive(request) == []

    assert machine.pause(None, "a") == [LoadWeights("a", 1)]
    machine.settle()
    assert machine.outcome(request) is Outcome.ANSWERED


def test_no_load_comes_for_a_held_model_whose_deadline_it_cost() -> None:
    """Under `edf`, a request is shed because the load of its model takes too long.

    Usually the model is then loaded for later requests. If it is held, it is not loaded.
    """
    device = Device(SchedulerSettings(discipline="edf"))
    device.model(program("a", COST), load=1.0, resident=False)
    device.pause(Pause.HOLD, "a")
    request = device.request("a", deadline=0.5)
    device.arrive(request)
    device.run(2.0)

    assert device.outcome(request) is Outcome.SHED
    assert not device.loads


def test_a_load_under_way_ends_while_the_model_is_held(machine: Driver) -> None:
    """If a model is held during its load, the load ends normally. Its requests execute when it continues."""
    machine.add(program("a"), resident=False)
    machine.arrive(machine.request())
    machine.pause(Pause.HOLD, "a")
    assert machine.load("a") == []

    assert [type(instruction) for instruction in machine.pause(None, "a")] == [Execute]


def test_a_load_for_a_held_model_is_given_up_for_another(machine: Driver) -> None:
    """A load of a held model is abandoned if another model needs the link. When the model continues, it is loaded again."""
    machine.add(program("a"), program("b"), resident=False)
    request = machine.request("a")
    machine.arrive(request)
    machine.pause(Pause.HOLD, "a")
    machine.arrive(machine.request("b"))
    assert machine.abandoning == {"a"}
    machine.abandon_load("a")
    assert machine.loading.keys() == {"b"}

    machine.pause(None, "a")
    machine.settle()
    assert machine.outcome(request) is Outcome.ANSWERED


def test_a_held_model_is_evicted_as_an_idle_one() -> None:
    """The weights of a held model are evicted for another model, as if it were idle. They are loaded when it continues."""
    driver = Driver(SchedulerSettings(weight_budget_bytes=100))
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.pause(Pause.HOLD, "a")
    held = driver.request("a", run=7)
    driver.arrive(held)
    assert driver.arrive(driver.request("b")) == [EvictWeights("a", 1), LoadWeights("b", 2)]
    driver.settle()
    assert driver.resident == {"b"}

    assert driver.pause(None, "a") == [EvictWeights("b", 2), LoadWeights("a", 3)]
    driver.settle()
    assert driver.outcome(held) is Outcome.ANSWERED


def test_memory_that_ran_out_for_a_held_model_is_not_emptied_for_it(machine: Driver) -> None:
    """If the load of a held model finds no memory, nothing is evicted. The load is retried when the model continues."""
    machine.add(program("a"), resident=False)
    machine.add(program("b"))
    machine.arrive(machine.request("a"))
    machine.pause(Pause.HOLD, "a")
    machine.fail_load("a", out_of_memory=True)
    assert machine.resident == {"b"}
    assert not machine.loading

    machine.pause(None, "a")
    machine.settle()
    assert not machine.waiting


def test_what_is_tried_again_for_want_of_memory_is_not_when_the_model_is_held(machine: Driver) -> None:
    """If a model is held while the retry of its load waits for executions, the load is not retried until the model continues."""
    machine.add(program("a"), resident=False)
    machine.add(program("b"))
    machine.arrive(machine.request("a"))
    machine.arrive(machine.request("b"))
    machine.fail_load("a", out_of_memory=True)
    machine.pause(Pause.HOLD, "a")
    machine.finish_all()
    assert not machine.loading

    machine.pause(None, "a")
    machine.settle()
    assert not machine.waiting


def test_a_model_that_was_held_has_another_two_tries(machine: Driver) -> None:
    """A load finds no memory, and its model is held before the retry.

    When the model continues, it is loaded. If this load also finds no memory, it is retried.
    """
    machine.add(program("a"), resident=False)
    machine.add(program("b"))
    request = machine.request("a")
    machine.arrive(request)
    machine.arrive(machine.request("b"))
    machine.fail_load("a", out_of_memory=True)
    machine.pause(Pause.HOLD, "a")
    machine.finish_all()
    machine.pause(None, "a")
    machine.fail_load("a", out_of_memory=True)
    assert machine.outcome(request) is None
    machine.settle()

    assert machine.outcome(request) is Outcome.ANSWERED


def test_an_execution_that_began_before_has_its_second_try(machine: Driver) -> None:
    """An execution that finds no memory is retried although its model is held.

    Waiting requests of the model are not executed.
    """
    machine.add(program("a", SINGLE))
    first, second = machine.request(), machine.request()
    machine.arrive(first)
    machine.arrive(second)
    machine.pause(Pause.HOLD, "a")
    machine.finish(out_of_memory=True)
    machine.finish()

    assert machine.outcome(first) is Outcome.ANSWERED
    assert machine.outcome(second) is None


def test_calls_of_runs_wait_while_a_model_is_held(machine: Driver) -> None:
    """While a model is held, sub-calls to this model wait, including the committed one of a run."""
    machine.add(program("a", SINGLE), program("b", SINGLE))
    machine.pause(Pause.HOLD, "a")
    calls = [machine.request("a", run=5), machine.request("a", run=5), machine.request("b", run=5)]
    machine.arrive(*calls)
    machine.finish_all()
    assert machine.waiting.keys() == {calls[0].id, calls[1].id}

    machine.pause(None, "a")
    machine.finish_all()
    assert all(machine.outcome(call) is Outcome.ANSWERED for call in calls)


def test_what_is_held_is_no_backlog(machine: Driver) -> None:
    """Requests of a held model are not a part of the backlog."""
    machine.add(program("a", SINGLE))
    machine.pause(Pause.HOLD, "a")
    machine.arrive(*machine.requests_of(10))
    assert machine.scheduler.backlog_seconds(machine.now) == 0.0

    machine.pause(None, "a")
    assert machine.scheduler.backlog_seconds(machine.now) == pytest.approx(0.010)


@every_discipline
def test_a_change_of_discipline_leaves_what_is_held_alone(discipline: str) -> None:
    """After a change of discipline, the requests of a held model still wait."""
    driver = Driver()
    driver.add(program("a", SINGLE), program("b", SINGLE))
    driver.pause(Pause.HOLD, "a")
    held = driver.requests_of(2, "a")
    driver.arrive(*held, *driver.requests_of(2, "b"))
    driver.change(discipline=discipline)
    driver.finish_all()
    assert driver.waiting.keys() == set(ids(held))

    driver.pause(None, "a")
    assert driver.finish_all()[-1].requests == (held[1].id,)


# --- its share of the device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", [1.0, 60.0])
def test_a_model_that_was_held_claims_nothing_of_that_time(hold: float) -> None:
    """After one of two models with equal weights was held for a second or a minute, both get equal shares at once."""
    device = Device()
    for name in "ab":
        device.model(program(name, COST))
    device.saturate("ab")
    device.run(1.0)
    device.pause(Pause.HOLD, "a")
    device.run(1.0 + hold)
    device.pause(None, "a")
    before = dict(device.got)
    device.run(2.0 + hold)

    got = {name: device.got[name] - before[name] for name in "ab"}
    assert got["a"] == pytest.approx(0.5, abs=0.03)
    assert got["b"] == pytest.approx(0.5, abs=0.03)


def test_a_model_that_was_held_gets_what_it_was_owed_before() -> None:
    """A model waits during a long execution of another model, and is held just before it would execute.

    When the model continues, it executes before the other models.
    """
    device = Device(SchedulerSettings(), validate_every=1)
    device.model(program("long", {(0, 1): 1.0}))
    device.model(program("a", COST))
    device.model(program("b", COST))
    device.arrive(device.request("long"))
    device.arrive(*device.requests_of(100, "a"))
    device.run(0.5)
    # By this time, `a` has waited for half a second. While `a` is held, the discipline does not rank it.
    device.pause(Pause.HOLD, "a")
    device.run(1.0)
    device.saturate("b")
    device.run(5.0)
    before = device.got["b"]
    device.pause(None, "a")
    device.run(5.2)

    assert device.got["b"] - before <= 0.02


def test_a_model_that_was_held_claims_what_it_missed_before_for_want_of_its_weights() -> None:
    """A model waits for its weights for three seconds and is then held.

    When it continues, it gets the device time that it missed in these three seconds before the other model executes again.
    """
    device = Device(SchedulerSettings(weight_budget_bytes=100), validate_every=50)
    device.model(program("b", COST), load=1.0)
    device.model(program("a", COST), load=1.0, resident=False)
    device.saturate("ab")
    device.run(3.0)
    assert not device.loads
    device.pause(Pause.HOLD, "a")
    device.run(10.0)
    device.change(weight_budget_bytes=200)
    device.pause(None, "a")
    device.run(11.0)
    before = device.got["a"]
    device.run(13.0)

    assert device.got["a"] - before >= 1.9


def test_holding_and_letting_go_drops_no_debt() -> None:
    """A model that is held and continued again and again gets no more than its share."""
    device = Device(validate_every=5)
    for name in "ab":
        device.model(program(name, COST))
    device.saturate("ab")
    for step in range(400):
        device.run(0.005 * step)
        device.pause(Pause.HOLD if step % 2 else None, "a")

    assert device.got["a"] <= device.got["b"] + 0.03


# --- drain -----------------------------------------------------------------------------------------------


def test_a_model_that_drains_executes_what_waits_and_refuses_what_comes(machine: Driver) -> None:
    """A draining model answers the requests from before the pause, even if its weights must be loaded.

    Later ones are refused.
    """
    machine.add(program("a", SINGLE), resident=False)
    before = machine.requests_of(3)
    machine.arrive(*before)
    machine.pause(Pause.DRAIN, "a")
    after = machine.request()
    machine.arrive(after)
    machine.settle()

    assert machine.outcome(after) is Reason.PAUSED
    assert all(machine.outcome(request) is Outcome.ANSWERED for request in before)
    assert machine.scheduler.snapshot().models["a"].refused == {Reason.PAUSED: 1}


def test_what_was_accepted_goes_on_while_a_model_drains(machine: Driver) -> None:
    """A draining model executes the next step of a generation, which was accepted before. A rejecting model refuses it."""
    machine.add(program("a", SINGLE))
    machine.pause(Pause.DRAIN, "a")
    step, other = machine.request(accepted=True), machine.request()
    machine.arrive(step, other)
    machine.finish_all()
    machine.pause(Pause.REJECT, "a")
    last = machine.request(accepted=True)
    machine.arrive(last)

    assert machine.outcome(step) is Outcome.ANSWERED
    assert machine.outcome(other) is machine.outcome(last) is Reason.PAUSED


def test_runs_that_are_under_way_call_a_model_that_drains(machine: Driver) -> None:
    """A draining model executes the calls of runs in progress. Calls of later runs are refused, so that it can end."""
    machine.add(program("a", SINGLE))
    run, waits, late = machine.run_of(), machine.run_of(), machine.run_of()
    machine.change(meta_concurrency=1)
    machine.ask(run, waits)
    machine.pause(Pause.DRAIN, "a")
    calls = [machine.request(run=run.id), machine.request(run=run.id)]
    stranger = machine.request()
    machine.arrive(*calls, stranger)
    machine.finish_all()
    machine.end(run)
    machine.ask(late)
    machine.end(waits)
    others = [machine.request(run=waits.id), machine.request(run=late.id)]
    machine.arrive(*others)

    assert [machine.outcome(call) for call in calls] == [Outcome.ANSWERED] * 2
    assert {machine.outcome(request) for request in (stranger, *others)} == {Reason.PAUSED}


def test_a_model_that_was_held_drains(machine: Driver) -> None:
    """If a held model is told to drain, it executes its waiting requests and refuses later ones."""
    machine.add(program("a", SINGLE))
    machine.pause(Pause.HOLD, "a")
    held, late = machine.request(), machine.request()
    machine.arrive(held)
    machine.pause(Pause.DRAIN, "a")
    machine.arrive(late)
    machine.finish_all()

    assert (machine.outcome(held), machine.outcome(late)) == (Outcome.ANSWERED, Reason.PAUSED)


# --- reject ----------------------------------------------------------------------------------------------


def test_a_model_that_rejects_refuses_all_that_does_not_execute(machine: Driver) -> None:
    """A rejecting model refuses waiting and new requests and sub-calls. Executing requests are answered."""
    machine.add(program("a", SINGLE))
    first, second, call = machine.request(), machine.request(), machine.request(run=3)
    machine.arrive(first)
    machine.arrive(second, call)
    machine.pause(Pause.REJECT, "a")
    late, late_call = machine.request(), machine.request(run=3)
    machine.arrive(late, late_call)
    machine.finish_all()

    assert machine.outcome(first) is Outcome.ANSWERED
    assert {machine.outcome(request) for request in (second, call, late, late_call)} == {Reason.PAUSED}


def test_a_held_model_that_rejects_refuses_what_it_held(machine: Driver) -> None:
    """If a held model is told to reject, it refuses its waiting requests. It serves new ones when it continues."""
    machine.add(program("a", SINGLE, paused=Pause.HOLD))
    held = machine.request()
    machine.arrive(held)
    machine.pause(Pause.REJECT, "a")
    assert machine.outcome(held) is Reason.PAUSED
    machine.pause(None, "a")
    request = machine.request()
    machine.arrive(request)
    machine.finish_all()

    assert machine.outcome(request) is Outcome.ANSWERED


# --- all of them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Pause))
def test_a_warm_up_does_not_care_for_a_pause(mode: Pause) -> None:
    """A model that is paused from the start is loaded and warmed up."""
    driver = Driver()
    driver.add(program("a", paused=mode), resident=False, warm_up=True)
    assert paused(driver) is mode

    assert driver.load("a") == [WarmUp("a")]
    driver.warm_up_ends("a")


@pytest.mark.parametrize("mode", list(Pause))
def test_a_pause_leaves_pinning_and_prefetching_alone(mode: Pause) -> None:
    """Pinned and prefetched weights of a paused model are loaded."""
    driver = Driver()
    driver.add(program("a", paused=mode), program("b", paused=mode), resident=False)
    driver.send(Pinned("a", True))
    driver.send(Prefetch("b"))
    driver.settle()

    assert driver.resident == {"a", "b"}


def test_requests_end_for_what_else_is_wrong_with_them_first(machine: Driver) -> None:
    """If a request to a paused model is invalid or late, it ends for this reason, and not because of the pause."""
    machine.add(program("a", paused=Pause.REJECT))
    wrong = [machine.request(variant=9), machine.request(rows=33), machine.request(deadline=0.0)]
    machine.arrive(*wrong)

    assert [machine.outcome(request) for request in wrong] == [
        Reason.UNKNOWN_VARIANT,
        Reason.TOO_MANY_ROWS,
        Outcome.EXPIRED,
    ]


def test_a_paused_model_can_be_removed(machine: Driver) -> None:
    """When a held model is removed, its requests are refused as usual. If it is added again, it is not paused."""
    machine.add(program("a", paused=Pause.HOLD))
    held = machine.request()
    machine.arrive(held)
    machine.remove("a")
    assert machine.outcome(held) is Reason.UNLOADED

    machine.add(program("a"))
    assert executions(machine.arrive(machine.request()))


def test_pausing_is_in_the_history(machine: Driver) -> None:
    """Each change of a pause is one record of the history."""
    machine.add(program("a"))
    for mode in (Pause.HOLD, Pause.HOLD, Pause.DRAIN, None):
        machine.pause(mode, "a")

    assert [record.what for record in machine.scheduler.history("a")][2:] == [
        "paused: hold",
        "paused: drain",
        "goes on",
    ]


def test_pauses_of_unknown_models_are_refused(machine: Driver) -> None:
    """A pause that names an unknown model is refused, and does not pause the other models."""
    machine.add(program("a"))
    with pytest.raises(CallerError, match="there is no model 'b'"):
        machine.scheduler.handle(Paused(("a", "b"), Pause.HOLD), 0.0)

    assert paused(machine) is None

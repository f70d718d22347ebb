"""Lack of device memory, compactions, and loads that no request needs any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rsrv.scheduler.events import (
    AbandonLoad,
    Compact,
    EvictWeights,
    Execute,
    Finish,
    GiveUp,
    LoadAbandoned,
    LoadFailed,
    LoadWeights,
    Outcome,
    Pinned,
    Prefetch,
    Reason,
    WarmUp,
    WeightsLoaded,
)
from rsrv.scheduler.settings import SchedulerSettings
from tests.unit.scheduler.driver import Driver, executions, program


def driver_of(*, budget: int | None = None, depth: int = 1) -> Driver:
    return Driver(SchedulerSettings(weight_budget_bytes=budget, depth=depth, launch_ahead_ms=1000.0))


# --- executions --------------------------------------------------------------------------------------------


def test_an_execution_without_memory_is_tried_again_alone() -> None:
    """If an execution finds no memory, all unpinned idle weights are evicted. The execution is retried with the same requests."""
    driver = driver_of()
    driver.add(program("a"), program("b"), program("c", pinned=True))
    request = driver.request("a")
    driver.arrive(request)

    out = driver.finish(out_of_memory=True)

    assert out == [EvictWeights("b", 2), Execute(2, "a", 0, 1, 1, (request.id,), again=True)]
    assert driver.finish() == [Finish(request.id, Outcome.ANSWERED)]
    assert not driver.loading


def test_the_second_time_its_requests_fail_and_no_others() -> None:
    """If the retry of an execution also fails, only the requests of this execution fail.

    If a later execution of the model finds no memory, it is retried as well.
    """
    driver = driver_of()
    driver.add(program("a"), program("b"))
    first, other = driver.request("a"), driver.request("b")
    driver.arrive(first)
    driver.arrive(other)
    driver.finish(out_of_memory=True)
    driver.finish(out_of_memory=True)

    assert driver.outcome(first) is Outcome.FAILED
    assert driver.ended[first.id].error == "no memory"
    driver.settle()
    assert driver.outcome(other) is Outcome.ANSWERED
    later = driver.request("a")
    driver.arrive(later)
    (again,) = executions(driver.finish(out_of_memory=True))
    assert again.again
    driver.finish()
    assert driver.outcome(later) is Outcome.ANSWERED


def test_the_second_try_has_the_device_to_itself() -> None:
    """While an execution is retried, nothing else executes or loads. Afterwards, the other models load and execute."""
    driver = driver_of(depth=2)
    driver.add(program("a"), program("b"), program("c", pinned=True))
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b", rows=32), driver.request("c", rows=32))
    number = min(driver.executing)
    driver.finish(number, out_of_memory=True)
    while not any(execution.again for execution in driver.executing.values()):
        driver.finish()

    assert len(driver.executing) == 1
    assert not driver.loading
    driver.finish()
    driver.settle()
    assert {finish.outcome for finish in driver.ended.values()} == {Outcome.ANSWERED}


def test_two_executions_without_memory_are_tried_again_one_after_the_other() -> None:
    """If two executions find no memory, each is retried alone, in their order."""
    driver = driver_of(depth=2)
    driver.add(program("a"), program("b"))
    first, second = driver.request("a"), driver.request("b")
    driver.arrive(first)
    driver.arrive(second)
    assert len(driver.executing) == 2
    assert driver.finish(out_of_memory=True) == []

    (execution,) = executions(driver.finish(out_of_memory=True))
    assert execution.requests == (first.id,)
    (two,) = executions(driver.finish())
    assert two.requests == (second.id,)
    driver.finish()
    assert {finish.outcome for finish in driver.ended.values()} == {Outcome.ANSWERED}


def test_nothing_starts_before_the_second_try() -> None:
    """While a retry waits for another execution and a load to end, no other execution and no load starts."""
    driver = driver_of(depth=2)
    driver.add(program("a"), program("b"))
    driver.add(program("c"), program("d"), resident=False)
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b"))
    driver.arrive(driver.request("c"))
    driver.finish(out_of_memory=True)
    driver.arrive(driver.request("a"), driver.request("d"))
    assert [execution.model for execution in driver.executing.values()] == ["b"]
    assert driver.finish()
    assert not driver.executing

    (again,) = executions(driver.load("c"))

    assert again.again
    assert again.model == "a"


def test_requests_of_a_second_try_are_not_cancelled_but_answered() -> None:
    """Requests that wait for their retry count as executing: they are not cancelled, and do not expire."""
    driver = driver_of(depth=2)
    driver.add(program("a"), program("b"))
    request = driver.request("a", deadline=0.5)
    driver.arrive(request)
    driver.arrive(driver.request("b"))
    driver.finish(min(driver.executing), out_of_memory=True)
    assert driver.cancel(request) == []
    assert driver.scheduler.snapshot().executing == 2
    driver.tick(1.0)
    driver.finish_all()

    assert driver.outcome(request) is Outcome.ANSWERED


def test_a_model_removed_before_its_second_try_still_gets_it() -> None:
    """If a model is removed before its retry, its weights stay until the retry has ended."""
    driver = driver_of(depth=2)
    driver.add(program("a"), program("b"))
    request = driver.request("a")
    driver.arrive(request)
    driver.arrive(driver.request("b"))
    driver.finish(min(driver.executing), out_of_memory=True)
    driver.remove("a")
    assert driver.scheduler.knows("a")
    driver.finish_all()

    assert driver.outcome(request) is Outcome.ANSWERED
    assert not driver.scheduler.knows("a")


def test_the_discipline_charges_both_tries_once() -> None:
    """A model is charged for the device time of an execution and of its retry. Each answered request counts once."""
    driver = driver_of()
    driver.add(program("a"))
    driver.arrive(driver.request("a"))
    driver.finish(seconds=0.5, out_of_memory=True)
    driver.finish(seconds=0.25)

    model = driver.scheduler.snapshot().models["a"]
    assert model.device_seconds == 0.75
    assert model.outcomes[Outcome.ANSWERED] == 1


# --- loads -------------------------------------------------------------------------------------------------


def test_a_load_without_memory_is_tried_again_on_an_empty_device() -> None:
    """If a load finds no memory, all weights that are neither pinned nor in use are evicted. Then this load is retried first."""
    driver = driver_of()
    driver.add(program("a"), program("p", pinned=True))
    driver.add(program("b"), program("c"), resident=False)
    request = driver.request("b")
    driver.arrive(request, driver.request("c"))
    assert driver.loading.keys() == {"b"}

    out = driver.fail_load("b", out_of_memory=True)

    assert out == [EvictWeights("a", 1), LoadWeights("b", 4)]
    driver.load("b")
    driver.finish_all()
    assert driver.outcome(request) is Outcome.ANSWERED


def test_the_second_time_requests_for_the_load_fail_and_no_others() -> None:
    """If the retry of a load also fails, only the requests that waited for this load fail.

    A load of the model after the back-off may be retried again.
    """
    driver = driver_of()
    driver.add(program("a"), program("b"), resident=False)
    first, other = driver.request("a"), driver.request("b")
    driver.arrive(first, other)
    driver.fail_load("a", "full", out_of_memory=True)
    driver.fail_load("a", "full", out_of_memory=True)

    assert driver.outcome(first) is Outcome.FAILED
    assert driver.ended[first.id].error == "full"
    assert driver.given_up == []
    driver.load("b")
    driver.finish_all()
    assert driver.outcome(other) is Outcome.ANSWERED
    driver.tick(driver.now + 1.0)
    driver.arrive(driver.request("a"))
    driver.fail_load("a", out_of_memory=True)
    assert driver.loading.keys() == {"a"}


def test_a_model_that_never_finds_memory_does_not_evict_all_others_each_time() -> None:
    """Requests of a model that never finds memory are refused for 1 s, 2 s, and so on up to a minute.

    Other models stay on the device.
    """
    driver = driver_of()
    driver.add(program("a"), program("b"))
    waiting_for(driver, "large")
    rests = []
    for _ in range(8):
        driver.arrive(driver.request("large"))
        for _ in range(2):
            driver.fail_load("large", out_of_memory=True)
        for name in "ab":
            driver.arrive(driver.request(name))
            driver.settle()
        refused = driver.request("large")
        (finish,) = driver.arrive(refused)
        assert isinstance(finish, Finish)
        assert driver.outcome(refused) is Reason.NO_MEMORY
        assert finish.retry_after is not None
        assert driver.resident == {"a", "b"}
        rests.append(round(finish.retry_after))
        driver.tick(driver.now + finish.retry_after)

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_model_that_found_memory_after_all_has_short_back_offs_again() -> None:
    """After a load of a model has succeeded, here because of an operator's prefetch, the model's next back-off is short again."""
    driver = driver_of()
    waiting_for(driver, "a")
    for _ in range(2):
        driver.arrive(driver.request("a"))
        for _ in range(2):
            driver.fail_load("a", out_of_memory=True)
        driver.send(Prefetch("a"))
        request = driver.request("a")
        driver.arrive(request)
        driver.load("a")
        driver.finish_all()
        assert driver.outcome(request) is Outcome.ANSWERED
        driver.evict("a")
    driver.arrive(driver.request("a"))
    for _ in range(2):
        driver.fail_load("a", out_of_memory=True)
    (finish,) = driver.arrive(driver.request("a"))

    assert isinstance(finish, Finish)
    assert finish.retry_after == 1.0


def no_memory_for(driver: Driver, name: str) -> None:
    for _ in range(2):
        driver.fail_load(name, out_of_memory=True)
    assert not driver.loading


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_pinned_model_that_found_no_memory_is_tried_again_by_itself(on_demand: bool) -> None:
    """A pinned model that finds no memory is loaded again after 1 s, 2 s, and so on up to a minute, until it succeeds."""
    driver = driver_of()
    driver.change(on_demand=on_demand)
    driver.add(program("a", pinned=True), resident=False)
    rests = []
    for _ in range(8):
        no_memory_for(driver, "a")
        wakeup = driver.scheduler.next_wakeup()
        assert wakeup is not None
        rests.append(round(wakeup - driver.now))
        driver.tick(wakeup)
        assert driver.loading.keys() == {"a"}
    request = driver.request("a")
    driver.arrive(request)
    driver.load("a")
    driver.finish_all()

    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    assert driver.outcome(request) is Outcome.ANSWERED
    assert driver.scheduler.next_wakeup() is None


@pytest.mark.parametrize("on_demand", [True, False])
@pytest.mark.parametrize("how", ["removed", "evicted"])
def test_a_pinned_model_is_tried_again_when_another_leaves(how: str, on_demand: bool) -> None:
    """A pinned model in back-off is loaded at once when another model leaves the device."""
    driver = driver_of()
    driver.change(on_demand=on_demand)
    driver.add(program("a", pinned=True), resident=False)
    no_memory_for(driver, "a")
    driver.add(program("b"))

    out = driver.remove("b") if how == "removed" else driver.evict("b")

    assert out == [EvictWeights("b", 3), LoadWeights("a", 4)]


def test_an_unpinned_model_is_not_tried_again_by_itself() -> None:
    """A model that was unpinned or removed during its back-off is not loaded again."""
    driver = driver_of()
    for name in "ab":
        driver.add(program(name, pinned=True), resident=False)
        no_memory_for(driver, name)
    driver.send(Pinned("a", False))
    driver.remove("b")

    assert driver.scheduler.next_wakeup() is None
    driver.tick(100.0)
    assert not driver.loading


def relieving(driver: Driver) -> dict[str, Callable[[], object]]:
    """Return an operator's commands that free memory and so end the back-off of `large`, by name."""
    return {
        "removed": lambda: driver.remove("other"),
        "unpinned": lambda: driver.send(Pinned("other", False)),
        "evicted": lambda: driver.evict("idle"),
        "compacted": lambda: (driver.send(Compact()), driver.load("idle")),
    }


@pytest.mark.parametrize("how", ["removed", "unpinned", "evicted", "compacted"])
def test_an_operator_who_makes_room_ends_a_back_off(how: str) -> None:
    """After an operator has freed memory, a request causes a load again.

    If this load fails, the next back-off is twice as long.
    """
    driver = driver_of()
    driver.add(program("other", pinned=True))
    waiting_for(driver, "large", "idle")
    driver.arrive(driver.request("large"))
    no_memory_for(driver, "large")
    driver.arrive(driver.request("idle"))
    driver.settle()
    refused = driver.request("large")
    driver.arrive(refused)
    assert driver.outcome(refused) is Reason.NO_MEMORY

    relieving(driver)[how]()

    request = driver.request("large")
    driver.arrive(request)
    assert driver.outcome(request) is None
    assert driver.loading.keys() == {"large"}
    no_memory_for(driver, "large")
    (finish,) = driver.arrive(driver.request("large"))
    assert isinstance(finish, Finish)
    assert finish.retry_after == 2.0


@pytest.mark.parametrize("wish", [Prefetch("large"), Pinned("large", True)])
def test_requests_wait_for_what_is_to_be_tried_again(wish: Prefetch | Pinned) -> None:
    """If an operator prefetches or pins a model during its back-off, its requests wait for the load, even if the link is busy."""
    driver = driver_of()
    waiting_for(driver, "large", "other")
    driver.arrive(driver.request("large"))
    no_memory_for(driver, "large")
    driver.arrive(driver.request("other"))
    driver.send(wish)
    request = driver.request("large")
    driver.arrive(request)
    driver.settle()

    assert driver.outcome(request) is Outcome.ANSWERED


def test_weights_that_leave_after_a_warm_up_end_no_back_off() -> None:
    """`large` found no memory and is in back-off. Then `new` is loaded and evicted.

    This eviction does not end the back-off, because it frees only memory that was already free when `large` was loaded.
    """
    driver = driver_of()
    driver.change(on_demand=False)
    driver.add(program("large", pinned=True), resident=False)
    no_memory_for(driver, "large")
    driver.add(program("new"), resident=False, warm_up=True)
    driver.load("new")

    assert driver.warm_up_ends("new") == [EvictWeights("new", 3)]


def test_the_second_load_waits_for_what_executes() -> None:
    """The retry of a load waits for the executing models, so that all of them can be evicted."""
    driver = driver_of()
    driver.add(program("a"))
    driver.add(program("b"), resident=False)
    driver.arrive(driver.request("a"), driver.request("b"))
    driver.fail_load("b", out_of_memory=True)
    assert not driver.loading
    assert driver.resident == {"a"}

    assert driver.finish()[1:] == [EvictWeights("a", 1), LoadWeights("b", 3)]


def test_a_load_for_a_warm_up_has_two_tries() -> None:
    """If the retry of a load for a warm-up fails, the load is given up."""
    driver = driver_of()
    driver.add(program("a"), resident=False, warm_up=True)
    assert driver.fail_load("a", out_of_memory=True) == [LoadWeights("a", 2)]

    assert driver.fail_load("a", "full", out_of_memory=True) == [GiveUp("a", "full")]
    assert not driver.loading


def test_the_second_load_is_not_in_vain() -> None:
    """The retry of a load is not abandoned when its client leaves, because other weights have been evicted for it."""
    driver = driver_of()
    driver.add(program("a"), program("b"), resident=False)
    request = driver.request("a")
    driver.arrive(request, driver.request("b"))
    driver.fail_load("a", out_of_memory=True)
    driver.cancel(request)

    assert driver.abandoning == set()
    assert driver.loading.keys() == {"a"}


# --- compaction --------------------------------------------------------------------------------------------


def test_what_was_there_comes_back_after_a_compaction() -> None:
    """A compaction evicts all weights that are not pinned.

    They are loaded again one after another, the latest used ones first.
    """
    driver = driver_of(budget=400)
    driver.add(program("a"), program("b"), program("c", pinned=True))
    driver.arrive(driver.request("a"))
    driver.finish_all()

    out = driver.send(Compact())

    assert out == [EvictWeights("a", 1), EvictWeights("b", 2), LoadWeights("a", 4)]
    assert LoadWeights("b", 5) in driver.load("a")
    assert driver.load("b") == []
    assert driver.resident == {"a", "b", "c"}


def test_a_second_compaction_forgets_none_of_the_first() -> None:
    """If a second compaction begins while weights return after the first one, all weights of both are loaded again."""
    driver = driver_of()
    driver.add(program("a"), program("b"), program("c"))
    driver.send(Compact())
    driver.load("a")
    driver.send(Compact())
    while driver.loading:
        driver.load(next(iter(driver.loading)))

    assert driver.resident == {"a", "b", "c"}


def test_those_with_work_come_back_first() -> None:
    """After a compaction, models with waiting requests are loaded first."""
    driver = driver_of()
    driver.add(program("a"), program("b"), program("c"))
    driver.arrive(driver.request("a"))
    driver.send(Compact())
    driver.arrive(driver.request("c"))
    assert driver.resident == {"a", "b", "c"}
    driver.finish()

    assert driver.loading.keys() == {"c"}


def test_no_weights_are_evicted_for_restored_ones() -> None:
    """After a compaction, no weights are evicted for weights that are loaded again."""
    driver = driver_of(budget=200)
    driver.add(program("a"), program("b"))
    driver.add(program("c"), resident=False)
    driver.send(Compact())
    driver.arrive(driver.request("c"))
    driver.settle()

    assert driver.resident == {"a", "c"}


def test_a_compaction_waits_for_what_is_under_way_and_nothing_starts_meanwhile() -> None:
    """A compaction waits for the execution, the load and the warm-up in progress, and nothing starts meanwhile.

    Then all weights are evicted at once.
    """
    driver = driver_of(depth=2)
    driver.add(program("a"))
    driver.add(program("w"), resident=False, warm_up=True)
    driver.load("w")
    driver.add(program("b"), program("c"), resident=False)
    driver.arrive(driver.request("a"))
    driver.arrive(driver.request("b"))
    assert (len(driver.executing), len(driver.loading), len(driver.warming)) == (1, 1, 1)
    driver.send(Compact())
    driver.arrive(driver.request("a"), driver.request("c"))
    driver.finish()
    driver.load("b")
    assert not driver.executing
    assert not driver.loading
    assert driver.resident == {"a", "b", "w"}

    driver.warm_up_ends("w")

    assert driver.resident == set()
    assert driver.loading


def test_a_compaction_of_an_empty_device_does_nothing() -> None:
    """A compaction does nothing if there are no weights, or only pinned ones."""
    driver = driver_of()
    assert driver.send(Compact()) == []
    driver.add(program("a", pinned=True))
    assert driver.send(Compact()) == []
    driver.arrive(driver.request("a"))
    assert driver.executing


# --- loads in vain -----------------------------------------------------------------------------------------


def waiting_for(driver: Driver, *names: str) -> None:
    driver.add(*(program(name) for name in names), resident=False)


def test_a_useless_load_ends_when_another_needs_the_link() -> None:
    """A load without requests continues until another model needs the link. Then it is abandoned."""
    driver = driver_of()
    waiting_for(driver, "a", "b")
    request = driver.request("a")
    driver.arrive(request)
    assert driver.cancel(request) == [Finish(request.id, Outcome.CANCELLED)]

    assert driver.arrive(driver.request("b")) == [AbandonLoad("a", 1)]
    assert driver.abandon_load("a") == [LoadWeights("b", 2)]
    assert driver.scheduler.snapshot().weight_bytes == 100


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_a_load_ends_when_its_last_request_does(how: str) -> None:
    """While another model waits for the link, a load is abandoned as soon as its last request has ended."""
    driver = driver_of()
    waiting_for(driver, "a", "b")
    first, last = driver.request("a"), driver.request("a", deadline=1.0)
    driver.arrive(first, last)
    driver.arrive(driver.request("b"))
    driver.cancel(first)
    assert driver.abandoning == set()

    driver.cancel(last) if how == "cancelled" else driver.tick(1.0)

    assert driver.abandoning == {"a"}


def test_an_abandoned_load_may_end_well() -> None:
    """An abandoned load may still succeed. Its weights are resident, and the next load starts."""
    driver = driver_of()
    waiting_for(driver, "a", "b")
    request = driver.request("a")
    driver.arrive(request)
    driver.cancel(request)
    driver.arrive(driver.request("b"))

    assert driver.load("a") == [LoadWeights("b", 2)]
    assert driver.resident == {"a"}


def test_an_abandoned_load_may_fail() -> None:
    """If an abandoned load fails, no request fails, because none waits for it."""
    for out_of_memory in (False, True):
        driver = driver_of()
        waiting_for(driver, "a", "b")
        request = driver.request("a")
        driver.arrive(request)
        driver.cancel(request)
        other = driver.request("b")
        driver.arrive(other)
        driver.fail_load("a", out_of_memory=out_of_memory)
        driver.settle()
        assert driver.outcome(other) is Outcome.ANSWERED


def test_a_load_that_is_being_abandoned_is_asked_for_again() -> None:
    """The load of model `a` is abandoned for model `b`. Meanwhile, another request for `a` arrives.

    The request waits until `b` is loaded. Then `a` is loaded again.
    """
    driver = driver_of()
    waiting_for(driver, "a", "b")
    gone = driver.request("a")
    driver.arrive(gone)
    driver.cancel(gone)
    driver.arrive(driver.request("b"))
    late = driver.request("a")
    driver.arrive(late)
    driver.abandon_load("a")
    assert driver.loading.keys() == {"b"}
    driver.load("b")
    driver.load("a")
    driver.finish_all()

    assert driver.outcome(late) is Outcome.ANSWERED


def test_a_load_after_an_abandoned_one_is_not_abandoned() -> None:
    """If the latest load of a model was abandoned, its next load is not, so that impatient clients cannot prevent loads forever.

    After a load of the model has succeeded, a later one may be abandoned again.
    """
    driver = driver_of(budget=100)
    waiting_for(driver, "a", "b")
    driver.arrive(gone := driver.request("a"))
    driver.cancel(gone)
    driver.arrive(first := driver.request("b"))
    driver.abandon_load("a")
    driver.cancel(first)
    driver.arrive(again := driver.request("a"))
    assert driver.abandoning == {"b"}
    driver.abandon_load("b")
    assert driver.loading.keys() == {"a"}
    driver.cancel(again)
    driver.arrive(driver.request("b"))
    assert driver.abandoning == set()
    driver.load("a")
    driver.load("b")
    driver.finish_all()

    driver.arrive(once_more := driver.request("a"))
    driver.cancel(once_more)
    driver.arrive(driver.request("b"))
    assert driver.abandoning == {"a"}


def test_ends_of_loads_that_are_over_change_nothing() -> None:
    """Late messages about a load that has ended do not change the state of the weights."""
    driver = driver_of()
    waiting_for(driver, "a")
    request = driver.request("a")
    driver.arrive(request)
    driver.load("a")
    driver.finish_all()
    before = driver.scheduler.snapshot()
    for late in (
        WeightsLoaded("a", 1, 0.1),
        LoadFailed("a", 1, "late"),
        LoadFailed("a", 1, "late", out_of_memory=True),
        LoadAbandoned("a", 1),
    ):
        assert driver.send(late) == []

    assert driver.scheduler.snapshot() == before


# --- warm-ups ----------------------------------------------------------------------------------------------


def test_a_warm_up_without_memory_is_tried_again_alone() -> None:
    """If a warm-up finds no memory, all other weights are evicted, and it is retried alone."""
    driver = driver_of()
    driver.add(program("a"))
    driver.add(program("b"), resident=False, warm_up=True)
    driver.load("b")

    assert driver.warm_up_ends("b", out_of_memory=True) == [EvictWeights("a", 1), WarmUp("b", again=True)]
    assert driver.arrive(driver.request("a")) == []
    assert driver.warm_up_ends("b") == [LoadWeights("a", 3)]


def test_a_warm_up_is_not_tried_a_third_time() -> None:
    """A warm-up that finds no memory is retried only once. Then its model can be removed."""
    driver = driver_of()
    driver.add(program("a", pinned=True), resident=False, warm_up=True)
    driver.load("a")
    assert driver.warm_up_ends("a", out_of_memory=True) == [WarmUp("a", again=True)]
    assert driver.warm_up_ends("a", out_of_memory=True) == []

    assert driver.remove("a") == [EvictWeights("a", 1)]


def test_a_model_removed_before_its_second_warm_up_leaves_after_it() -> None:
    """A model that is removed before the retry of its warm-up leaves after the retry."""
    driver = driver_of()
    driver.add(program("a"))
    driver.add(program("b"), resident=False, warm_up=True)
    driver.load("b")
    driver.arrive(driver.request("a"))
    driver.warm_up_ends("b", out_of_memory=True)
    driver.remove("b")
    driver.finish()
    assert driver.warming == {"b"}
    driver.warm_up_ends("b")

    assert not driver.scheduler.knows("b")


# --- more of loads -----------------------------------------------------------------------------------------


def test_a_load_after_a_second_try_that_went_well_has_two_tries_again() -> None:
    """A retry of a load succeeds. If a later load of the model finds no memory, it is retried as well."""
    driver = driver_of(budget=100)
    waiting_for(driver, "a", "b")
    for name in "ab":
        driver.arrive(driver.request(name))
        driver.fail_load(name, out_of_memory=True)
        driver.load(name)
        driver.finish_all()
    request = driver.request("a")
    driver.arrive(request)
    driver.fail_load("a", out_of_memory=True)
    driver.load("a")
    driver.finish_all()

    assert driver.outcome(request) is Outcome.ANSWERED


def test_a_load_for_a_warm_up_is_not_in_vain() -> None:
    """A load for a warm-up is not abandoned for another model, although no request waits for it."""
    driver = driver_of()
    driver.add(program("a"), resident=False, warm_up=True)
    waiting_for(driver, "b")
    driver.arrive(driver.request("b"))

    assert driver.loading.keys() == {"a"}
    assert driver.abandoning == set()


def test_weights_loaded_for_no_request_count_as_used_at_their_load() -> None:
    """Weights that were loaded without a request count as used at the end of their load, so they are not evicted first."""
    driver = driver_of(budget=200)
    driver.add(program("a"))
    waiting_for(driver, "b", "c")
    driver.tick(1.0)
    driver.arrive(driver.request("a"))
    driver.finish()
    gone = driver.request("b")
    driver.arrive(gone)
    driver.cancel(gone)
    driver.load("b", 1.0)

    assert driver.arrive(driver.request("c"))[0] == EvictWeights("a", 1)


def test_no_memory_for_a_model_that_is_gone_evicts_no_weights() -> None:
    """If a load finds no memory after its model was removed, no weights are evicted."""
    driver = driver_of()
    driver.add(program("a"))
    waiting_for(driver, "b")
    driver.arrive(driver.request("b"))
    driver.remove("b")

    assert driver.fail_load("b", out_of_memory=True) == []
    assert driver.resident == {"a"}
    assert not driver.scheduler.knows("b")


def test_another_warm_up_does_not_end_a_second_try() -> None:
    """A model with resident weights may warm up during the retry of another model's warm-up.

    A load waits until the retry has ended. The end of the other warm-up does not start it.
    """
    driver = driver_of()
    driver.add(program("a"))
    driver.add(program("b"), resident=False, warm_up=True)
    driver.load("b")
    driver.warm_up_ends("b", out_of_memory=True)
    driver.add(program("c"), warm_up=True)
    driver.arrive(driver.request("a"))
    assert driver.warm_up_ends("c") == []

    assert driver.warm_up_ends("b") == [LoadWeights("a", 4)]

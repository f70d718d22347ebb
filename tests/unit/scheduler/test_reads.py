"""Weights that are only on disk: they are read into host memory before their load. Other loads do not wait for the read."""

from __future__ import annotations

from rsrv.scheduler.events import (
    AbandonLoad,
    CopyChanged,
    EvictWeights,
    LoadWeights,
    ModelAdded,
    Outcome,
    Pinned,
    Prefetch,
    ReadWeights,
    Reason,
)
from rsrv.scheduler.settings import SchedulerSettings
from rsrv.scheduler.weight_states import WeightState
from tests.unit.scheduler.driver import Driver, every_discipline, executions, program


def machine_of(disk: str, host: str = "", *, budget: int = 1000, discipline: str = "fifo") -> Driver:
    """Return a driver with absent models of 100 bytes. The weights of `disk` are on disk, those of `host` in host memory."""
    machine = Driver(SchedulerSettings(discipline=discipline, weight_budget_bytes=budget))
    for name in disk + host:
        machine.add(program(name), resident=False, on_disk=name in disk)
    return machine


def state(machine: Driver, model: str) -> WeightState:
    return machine.scheduler.snapshot().models[model].weights


def test_a_slow_read_delays_no_load_from_host_memory() -> None:
    """While the weights of the first model in line are read, others load and execute. After the read, it is loaded."""
    machine = machine_of("a", "bc")

    assert machine.arrive(machine.request("a")) == [ReadWeights("a", 1)]
    assert machine.arrive(machine.request("b")) == [LoadWeights("b", 2)]
    assert len(executions(machine.load("b", seconds=0.01))) == 1
    assert machine.arrive(machine.request("c")) == [LoadWeights("c", 3)]
    machine.load("c")
    assert machine.read("a", seconds=60.0) == [LoadWeights("a", 4)]
    machine.load("a")
    machine.finish_all()

    assert {finish.outcome for finish in machine.ended.values()} == {Outcome.ANSWERED}


def test_weights_are_evicted_for_a_load_and_not_for_the_read_before_it() -> None:
    """While the weights of a model are read, no other model is evicted for them. Evictions begin with the load."""
    machine = machine_of("a", "b", budget=100)
    machine.arrive(machine.request("b"))
    machine.load("b")
    machine.finish_all()
    machine.tick(10.0)

    assert machine.arrive(machine.request("a")) == [ReadWeights("a", 2)]
    assert len(executions(machine.arrive(machine.request("b")))) == 1
    machine.finish_all()
    assert machine.read("a", seconds=5.0) == [EvictWeights("b", 1), LoadWeights("a", 3)]


def test_one_read_runs_at_a_time_in_the_order_of_loads() -> None:
    """Only one read runs at a time. After the read in progress, pinned models are read first.

    Models with requests follow in the order of their ranks, and then prefetched models.
    """
    machine = machine_of("abcde")
    for model in "ab":
        machine.send(Prefetch(model))
    machine.arrive(machine.request("d"))
    machine.arrive(machine.request("c", priority=1))
    machine.send(Pinned("e", True))
    order = []
    while machine.reading:
        (model,) = machine.reading
        order.append(model)
        machine.read(model, seconds=1.0)

    assert order == ["a", "e", "c", "d", "b"]


def test_a_read_that_nothing_needs_any_more_makes_way_for_another() -> None:
    """A read that no request needs is abandoned when another model waits for the disk.

    The next read of the same model is not abandoned.
    """
    machine = machine_of("abc")
    request, again = machine.request("a"), machine.request("a")
    machine.arrive(request)
    machine.cancel(request)
    assert state(machine, "a") is WeightState.READING

    assert machine.arrive(machine.request("b")) == [AbandonLoad("a", 1)]
    assert machine.abandon_load("a") == [ReadWeights("b", 2)]
    assert state(machine, "a") is WeightState.ABSENT
    machine.read("b")
    machine.arrive(again)
    machine.cancel(again)
    assert machine.arrive(machine.request("c")) == []
    assert machine.read("a") == [ReadWeights("c", 5)]
    assert state(machine, "a") is WeightState.ABSENT


def test_a_read_of_weights_that_return_makes_way_for_a_request() -> None:
    """A read that only restores weights of an earlier runtime is abandoned when a request needs the disk."""
    machine = machine_of("b")
    assert machine.send(ModelAdded(program("a"), restore=0, on_disk=True)) == [ReadWeights("a", 1)]

    assert machine.arrive(machine.request("b")) == [AbandonLoad("a", 1)]
    assert machine.abandon_load("a") == [ReadWeights("b", 2)]
    machine.read("b")
    assert state(machine, "a") is WeightState.READING


def test_a_read_that_nothing_needs_any_more_makes_way_for_weights_that_return() -> None:
    """A read that no request needs any more is abandoned when weights of an earlier runtime are restored from the disk."""
    machine = machine_of("a")
    request = machine.request("a")
    machine.arrive(request)
    machine.cancel(request)

    assert machine.send(ModelAdded(program("b"), restore=0, on_disk=True)) == [AbandonLoad("a", 1)]
    assert machine.abandon_load("a") == [ReadWeights("b", 2)]


def test_reads_for_warm_ups_take_turns_with_those_for_requests() -> None:
    """Reads for warm-ups take turns with reads for requests, so a request waits for one new model at most."""
    machine = machine_of("a")
    for name in "uvw":
        machine.add(program(name), resident=False, on_disk=True, warm_up=True)
    machine.arrive(machine.request("a"))
    order = []
    while machine.reading:
        (model,) = machine.reading
        order.append(model)
        machine.read(model)

    assert order.index("a") <= 1


def test_a_model_that_is_removed_during_its_read_leaves_when_that_ends() -> None:
    """If a model is removed during its read, its requests end and the read is abandoned. Then the next model is read."""
    machine = machine_of("ab")
    request = machine.request("a")
    machine.arrive(request, machine.request("b"))

    assert AbandonLoad("a", 1) in machine.remove("a")
    assert machine.outcome(request) is Reason.UNLOADED
    assert machine.scheduler.knows("a")
    assert machine.abandon_load("a") == [ReadWeights("b", 2)]
    assert not machine.scheduler.knows("a")


def test_a_read_that_fails_backs_off_with_its_reason() -> None:
    """If a read fails, waiting requests fail with the reason, and new ones are refused until the back-off ends."""
    machine = machine_of("a")
    first, second = machine.request(), machine.request()
    machine.arrive(first)
    machine.fail_load("a", "the disk is gone")
    machine.arrive(second)

    assert machine.ended[first.id].error == "the disk is gone"
    assert machine.ended[second.id].reason is Reason.NOT_LOADED
    assert state(machine, "a") is WeightState.BACKOFF
    machine.tick(2.0)
    assert machine.arrive(machine.request()) == [ReadWeights("a", 2)]


def test_a_pinned_model_whose_read_fails_is_read_again_by_itself() -> None:
    """If the read of a pinned model fails, it is retried at the end of the back-off, without a request."""
    machine = machine_of("a")
    assert machine.send(Pinned("a", True)) == [ReadWeights("a", 1)]
    machine.fail_load("a")

    assert machine.given_up == ["a"]
    assert machine.tick(2.0) == [ReadWeights("a", 2)]


def test_a_deadline_that_a_read_cannot_meet_sheds_its_request() -> None:
    """Under `edf`, a request is shed if the read and the load of its model would take too long.

    The scheduler knows the duration of a read after the first one. A read that has begun continues for later requests.
    """
    machine = machine_of("a", discipline="edf")
    machine.arrive(machine.request())
    machine.read("a", seconds=10.0)
    machine.load("a", seconds=1.0)
    machine.finish_all()
    machine.evict("a")
    machine.send(CopyChanged("a", False))
    late, on_time = (machine.request(deadline=machine.now + seconds) for seconds in (10.5, 12.0))
    machine.arrive(late)
    assert machine.outcome(late) is Outcome.SHED
    assert state(machine, "a") is WeightState.READING
    machine.arrive(on_time)
    assert machine.outcome(on_time) is None
    assert machine.scheduler.load_seconds("a") == 1.0

    machine.tick(machine.now + 9.0)
    assert machine.outcome(on_time) is None
    in_time = machine.request(deadline=machine.now + 2.5)
    machine.arrive(in_time)
    assert machine.outcome(in_time) is None
    assert machine.read("a") == [LoadWeights("a", 4)]


def test_a_copy_that_goes_before_the_load_is_read_again() -> None:
    """If the host copy of a model is dropped while the model waits for the link, the weights are read again before the load."""
    machine = machine_of("", "ab")
    machine.arrive(machine.request("a"), machine.request("b"))

    assert machine.send(CopyChanged("b", False)) == [ReadWeights("b", 2)]
    machine.load("a")
    assert machine.send(CopyChanged("b", True)) == []
    assert machine.read("b") == [LoadWeights("b", 3)]


@every_discipline
def test_what_weights_wait_for_has_words(discipline: str) -> None:
    """`obstacle` says that weights are being read, or wait for another read. The history has a record of each change."""
    machine = machine_of("ab", discipline=discipline)
    machine.arrive(machine.request("a"))
    machine.arrive(machine.request("b"))

    def obstacle(model: str) -> str:
        return machine.scheduler.obstacle(model, machine.now)

    assert obstacle("a") == "read from disk (demand)"
    assert obstacle("b") == "queued (demand): waits for the read of a from disk"
    machine.read("a", seconds=2.0)
    records = machine.scheduler.history("a")
    assert [(what, details["why"]) for _, what, details in records if what.startswith("weights")] == [
        ("weights queued", "demand"),
        ("weights reading", "demand"),
        ("weights absent", "end of read"),
        ("weights queued", "demand"),
        ("weights loading", "demand"),
    ]

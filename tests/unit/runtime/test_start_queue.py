"""Order of the starts that wait for the build thread; the tests set the clock."""

from collections.abc import Iterator
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from rsrv.runtime.start_queue import BuildStep, Demand, StartQueue, Urgency

R, P, E, C = Urgency.REQUESTED, Urgency.PREWARMED, Urgency.EAGER, Urgency.CLEAN_UP


def put(
    queue: StartQueue,
    name: str,
    demand: Demand,
    *,
    reads: bool = False,
    seconds: float = 0.0,
    now: float = 0.0,
) -> None:
    queue.put(BuildStep(name, name, demand, lambda: None, reads, seconds), now)


def names(queue: StartQueue, now: float = 0.0) -> Iterator[str]:
    """Take the waiting steps in their order, and yield their names."""
    while (step := queue.pop(now)) is not None:
        yield step.name


def test_models_that_requests_wait_for_start_before_those_of_operators_and_of_the_server() -> None:
    """Models with waiting requests start first, then those of operators, then the server's.

    Equal ones start in the order of arrival.
    """
    queue = StartQueue()
    for name, urgency in (("sweep", C), ("eager", E), ("warm", P), ("late", E), ("asked", R)):
        put(queue, name, Demand(urgency))
    assert list(names(queue)) == ["asked", "warm", "eager", "late", "sweep"]


def test_the_earliest_deadline_goes_first_unless_it_has_passed() -> None:
    """The step with the earliest deadline is taken first.

    A deadline that has passed has no effect, because it cannot be met.
    """
    queue = StartQueue()
    for name, deadline in (("patient", inf), ("soon", 5.0), ("passed", 1.0), ("sooner", 4.0)):
        put(queue, name, Demand(R, deadline))
    assert list(names(queue, now=2.0)) == ["sooner", "soon", "patient", "passed"]


def test_a_model_that_is_read_is_built_before_other_bundles_are_read() -> None:
    """A model whose bundle was read is built before other bundles are read, so that it serves soon.

    A step with a deadline is taken before this build.
    """
    queue = StartQueue()
    put(queue, "bundle", Demand(R), reads=True)
    put(queue, "urgent", Demand(R, 9.0), reads=True)
    put(queue, "model", Demand(R))
    assert list(names(queue)) == ["urgent", "model", "bundle"]


def test_no_short_build_waits_for_a_long_one_that_came_before_it() -> None:
    """Shorter builds are taken before longer ones, and bundles are read before the first long build.

    A step that requests wait for is taken before all of these.
    """
    queue = StartQueue()
    for name, seconds in (("minutes", 90.0), ("seconds", 30.0), ("stored", 0.0)):
        put(queue, name, Demand(E), seconds=seconds)
    put(queue, "bundle", Demand(E), reads=True)
    put(queue, "asked", Demand(R), seconds=60.0)
    put(queue, "instant", Demand(E), seconds=0.01, now=0.5)
    order = ["asked", "stored", "instant", "bundle", "seconds", "minutes"]
    assert [step.name for step in queue.order(1.0)] == order
    assert list(names(queue, now=1.0)) == order


def passing(queue: StartQueue, demand: Demand, *, seconds: float = 0.0, now: float = 0.0) -> int:
    """Put a new step each second until the step `long` is taken, and return how many new steps were taken before it."""
    for number in range(100):
        put(queue, f"new {number}", demand, seconds=seconds, now=now + number)
        step = queue.pop(now + number)
        assert step is not None
        if step.name == "long":
            break
    return number


def test_a_long_build_lets_others_pass_for_as_long_as_it_takes() -> None:
    """If a shorter build arrives each second, a long build waits no longer than the long build itself takes."""
    queue = StartQueue()
    put(queue, "long", Demand(E), seconds=40.0)
    assert passing(queue, Demand(E), seconds=5.0) == 35


def test_equal_starts_take_turns_by_building_time_over_weight() -> None:
    """Of equal steps, the model with the least building time comes first. The time is divided by the model's weight."""
    queue = StartQueue()
    for name, seconds, weight in (("a", 4.0, 1.0), ("b", 1.0, 1.0), ("c", 6.0, 3.0), ("d", 2.0, 1.0)):
        queue.charge(name, seconds, 0.0)
        put(queue, name, Demand(R, weight=weight))
    queue.charge("b", 2.0, 0.0)  # The step of `b` is already in the queue.
    assert list(names(queue)) == ["c", "d", "b", "a"]


def test_a_model_that_was_built_for_long_is_not_passed_for_ever() -> None:
    """If a new model arrives each second, a waiting model waits as long as it was built before.

    If this build ended a minute ago, the model waits half as long.
    """
    for later, seconds in ((0.0, 40.0), (60.0, 20.0)):
        queue = StartQueue()
        queue.charge("long", 40.0, 0.0)
        put(queue, "long", Demand(R), now=later)
        assert passing(queue, Demand(R), now=later) == seconds


def test_a_start_that_waits_follows_its_demand() -> None:
    """A waiting step becomes urgent when requests for its model arrive, and loses its urgency when they have ended."""
    queue = StartQueue()
    for name in "abcd":
        put(queue, name, Demand(E))
    queue.change("a", Demand(R, 3.0), 0.0)
    queue.change("c", Demand(R, 7.0), 0.0)
    queue.change("b", Demand(R, 5.0), 0.0)
    queue.change("b", Demand(P), 0.0)
    queue.change("a", Demand(E), 0.0)
    queue.change("gone", Demand(R), 0.0)
    assert list(names(queue)) == ["c", "b", "a", "d"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "change", "drop", "pop", "charge", "wait"]),
            st.sampled_from("abcd"),
            st.sampled_from(Urgency),
            st.sampled_from([1.0, 3.0, 5.0, inf]),
        ),
        max_size=40,
    )
)
def test_each_step_is_taken_once_and_none_overtakes_one_that_is_more_urgent(
    operations: list[tuple[str, str, Urgency, float]],
) -> None:
    """Whatever happens, each step is taken once, before all less urgent steps.

    The test compares the queue with a dictionary.
    """
    queue, model, now = StartQueue(), dict[str, Demand](), 0.0
    for operation, name, urgency, number in operations:
        demand = Demand(urgency, number)
        match operation:
            case "put":
                put(queue, name, demand, now=now)
                model[name] = demand
            case "change":
                queue.change(name, demand, now)
                if name in model:
                    model[name] = demand
            case "drop":
                assert queue.drop(name) == (model.pop(name, None) is not None)
            case "charge":
                queue.charge(name, min(number, 5.0), now)
            case "wait":
                now += 1.0
            case _:
                step = queue.pop(now)
                if step is None:
                    assert not model
                    continue
                taken = model.pop(step.name)
                assert step.demand == taken
                rank = taken.urgency, taken.deadline if taken.deadline > now else inf
                for other in model.values():
                    assert rank <= (other.urgency, other.deadline if other.deadline > now else inf)
    assert sorted(names(queue, now)) == sorted(model)
